"""Whatever stands in headers, indices and metadata: a load is right, or our error and nothing has changed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mics.checkpoint.opening import open_checkpoint
from mics.errors import CheckpointError
from tests import tiers
from tests.checkpoint.hostile import (
    Trained,
    copied,
    index_of,
    loads_or_refuses,
    sign,
    sign_own,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "$tensor", "float32", "model.weight", 1 << 62, 1 << 64, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_fuzz = settings(
    max_examples=10 if tiers.quick else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    inside: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inside = list(enumerate(value))[:4]  # of long ones the first
    return [path, *(each for key, item in inside for each in _places_in(item, (*path, key)))]


def _mutated(data: st.DataObject, tree: Any) -> Any:
    """A tree with something else in one to three places."""
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(_places_in(tree)))
        if not path:
            return data.draw(_JUNK)
        inner = tree
        for key in path[:-1]:
            inner = inner[key]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            moved = inner.pop(path[-1])
            if data.draw(st.booleans()):
                inner[data.draw(st.text(max_size=8))] = moved
        else:
            inner[path[-1]] = data.draw(_JUNK)
    return tree


@_fuzz
@given(data=st.data())
def test_any_index(ours: Path, tmp_path: Path, target: Trained, data: st.DataObject) -> None:
    """Something else anywhere in an index that is signed: it loads, or nothing has changed."""
    folder = copied(ours, tmp_path)
    sign(folder, _mutated(data, index_of(ours)))
    loads_or_refuses(folder, target)


@_fuzz
@given(data=st.data())
def test_any_state_of_a_rank(ours: Path, tmp_path: Path, target: Trained, data: st.DataObject) -> None:
    """The same for its random state and extra state."""
    folder = copied(ours, tmp_path)
    own = json.loads((ours / "rank-0.json").read_bytes())
    sign_own(folder, json.dumps(_mutated(data, own)).encode())
    loads_or_refuses(folder, target)
    torch.rand(3)


@_fuzz
@given(data=st.data())
def test_any_header(tmp_path: Path, data: st.DataObject) -> None:
    """Of safetensors: altered as a tree or byte by byte, it is a header or our error."""
    header: Any = {
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
        "__metadata__": {"format": "pt"},
    }
    content = bytearray(json.dumps(_mutated(data, header)).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(content)] * 3 + [0, 1, len(content) + 1, (1 << 64) - 1]))
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content + bytes(32))
    try:
        index = open_checkpoint(tmp_path)
    except CheckpointError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "model.safetensors" in said
        return
    assert sum(tensor.nbytes for tensor in index.tensors.values()) == 32


@_fuzz
@given(data=st.data())
def test_any_metadata(stock: Path, tmp_path: Path, target: Trained, data: st.DataObject) -> None:
    """Of DCP: bytes altered anywhere, or a field of it something else."""
    folder = copied(stock, tmp_path)
    metadata = dcp.FileSystemReader(stock).read_metadata()
    if data.draw(st.booleans()):
        entry, info = data.draw(st.sampled_from(_entries(metadata)))
        thing = data.draw(st.sampled_from([each for each in (metadata, entry, info) if vars(each)]))
        setattr(thing, data.draw(st.sampled_from(sorted(vars(thing)))), data.draw(_JUNK))
    content = bytearray(pickle.dumps(metadata))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(content)
    loads_or_refuses(folder, target)


def _entries(metadata: Any) -> list[tuple[Any, Any]]:
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    return [(entry, places[name]) for name, entry in metadata.state_dict_metadata.items() if name in places]
