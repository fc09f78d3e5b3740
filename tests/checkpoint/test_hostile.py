"""Files that nobody should trust: every one of them is our error, with its name, and nothing has changed."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mics
from mics.checkpoint.foreign import open_checkpoint
from mics.errors import CheckpointError
from tests.checkpoint.hostile import (
    Trained,
    alter_own,
    index_of,
    loads_or_refuses,
    refuses,
    save,
    save_stock,
    sign,
    sign_own,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ours") / "c")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock(tmp_path_factory.mktemp("stock") / "c")


@pytest.fixture(scope="module")
def target() -> Trained:
    return trained(seed=1)


def _copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "c")
    return tmp_path / "c"


def test_what_is_altered_here_loads_unaltered(ours: Path, stock: Path) -> None:
    """Else nothing below would show anything."""
    target = trained(seed=1)
    assert loads_or_refuses(ours, target, {"counter": target[2]})
    assert loads_or_refuses(stock, target)


# -- an index with a digest that fits --------------------------------------------------------------------


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """The last of ``path`` in place of what is there."""
    *keys, last, value = path

    def change(index: dict[str, Any]) -> None:
        for key in keys:
            index = index[key]
        index[last] = value

    return change


_WEIGHT = ("tensors", "model.weight")
_FILE = ("files", "__0_0.distcp")


@pytest.mark.parametrize(
    "change",
    [
        _set("format", [1]),
        _set("tensors", [1]),
        _set("tensors", "model.weight", None),
        _set(*_WEIGHT, "dtype", 7),
        _set(*_WEIGHT, "dtype", "quint8"),
        _set(*_WEIGHT, "dtype", "load"),
        _set(*_WEIGHT, "dtype", "int32"),
        _set(*_WEIGHT, "shape", "23"),
        _set(*_WEIGHT, "shape", [2.0, 3]),
        _set(*_WEIGHT, "shape", [True, 3]),
        _set(*_WEIGHT, "shape", [10**4000, 3]),
        _set(*_WEIGHT, "shape", [1] * 100_000),
        _set(*_WEIGHT, "whole", "yes"),
        _set(*_WEIGHT, "chunks", []),
        _set(*_WEIGHT, "chunks", [[[0, 0], [2, 3], "nowhere", 0]]),
        _set(*_WEIGHT, "chunks", [[[0, 0], [2, 3], "__0_0.distcp", -1]]),
        _set(*_WEIGHT, "chunks", [[[0, 0], [2, 3], "__0_0.distcp", None]]),
        _set(*_WEIGHT, "chunks", [[[0, 0], [1, 3], "__0_0.distcp", 0]] * 2),
        _set(*_WEIGHT, "chunks", [[[0, 1], [2, 3], "__0_0.distcp", 0]]),
        _set("tensors", "x" * 100_000, {}),
        _set("files", None),
        _set(*_FILE, "nbytes", -5),
        _set(*_FILE, "nbytes", 1e9),
        _set(*_FILE, "block_nbytes", 1 << 60),
        _set(*_FILE, "block_nbytes", 0),
        _set(*_FILE, "digest", ["crc32"]),
        _set(*_FILE, "digest", "md5"),
        _set(*_FILE, "digests", "abc"),
        _set(*_FILE, "digests", [7]),
        _set("aliases", {"model.other": "model.nothing"}),
        _set("aliases", {"model.other": ["model.weight"]}),
        _set("about", 3),
        _set("param_groups", 3),
        _set("param_groups", [3]),
        _set("param_groups", [{"params": 3}]),
        _set("param_groups", [{"params": [[]]}]),
        _set("param_groups", 0, "lr", "fast"),
        _set("param_groups", 0, "lr", {"$tensor": ["float32", [2], "AAAAAAAAAAA="]}),
        _set("param_groups", 0, "betas", {"$tuple": [0.9]}),
        _set("param_groups", 0, "amsgrad", 1),
        _set("param_groups", 0, "lr", {"$evil": 1}),
        _set("param_groups", 0, "lr", {"$tensor": ["float32", [1 << 61], ""]}),
        _set("param_groups", 0, "lr", {"$tensor": 5}),
        _set("module_state", []),
        _set("module_state", {"$set": [[1]]}),
    ],
)
def test_a_signed_index_of_wrong_types(
    ours: Path, tmp_path: Path, target: Trained, change: Callable[[dict[str, Any]], None]
) -> None:
    """Each is found before anything is overwritten."""
    folder = _copy(ours, tmp_path)
    index = index_of(folder)
    change(index)
    sign(folder, index)
    refuses(folder, r"mics\.json|/c: |__0_0\.distcp", target)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"null", b"7", b'{"format":1,"format":1}', b"\xff\xfe", b"NaN"]
)
def test_an_index_that_is_no_index(ours: Path, tmp_path: Path, target: Trained, text: bytes) -> None:
    """Nested deeper than a stack, not even JSON, or a key that stands twice."""
    import hashlib

    folder = _copy(ours, tmp_path)
    (folder / "mics.json").write_bytes(text)
    (folder / "mics.json.sha256").write_text(hashlib.sha256(text).hexdigest())
    refuses(folder, r"mics\.json: expected", target)


@pytest.mark.parametrize("digest", [b"\xff" * 64, b"", b"0" * 5000])
def test_a_digest_that_is_none(ours: Path, tmp_path: Path, target: Trained, digest: bytes) -> None:
    """Bytes that are no text, nothing, or too much."""
    folder = _copy(ours, tmp_path)
    (folder / "mics.json.sha256").write_bytes(digest)
    refuses(folder, r"mics\.json", target)


def test_state_that_the_optimizer_needs_is_missing(ours: Path, tmp_path: Path, target: Trained) -> None:
    """A strict load tells at once, not a step later."""
    folder = _copy(ours, tmp_path)
    index = index_of(folder)
    del index["tensors"]["optimizer.state.weight.exp_avg"]
    sign(folder, index)
    refuses(folder, r"weight: expected the state of AdamW \(step, exp_avg, exp_avg_sq\), found", target)
    step = index["tensors"]["optimizer.state.bias.step"]
    index = index_of(ours)
    index["tensors"]["optimizer.state.weight.exp_avg"] = step
    sign(folder, index)
    refuses(folder, r"weight: .* with another exp_avg", target)


def test_optimizer_state_larger_than_any(ours: Path, tmp_path: Path, target: Trained) -> None:
    """A sparse file costs nothing; memory for what it claims to hold would."""
    folder = _copy(ours, tmp_path)
    index = index_of(folder)
    nbytes = 1 << 40
    with (folder / "__0_0.distcp").open("ab") as file:
        file.truncate(nbytes)
    entry = index["files"]["__0_0.distcp"]
    entry.update(nbytes=nbytes, block_nbytes=64 << 20, digests=["0"] * (nbytes >> 26))
    huge = {
        "dtype": "uint8",
        "shape": [nbytes],
        "whole": True,
        "chunks": [[[0], [nbytes], "__0_0.distcp", 0]],
    }
    index["tensors"]["optimizer.state.weight.step"] = huge
    sign(folder, index)
    refuses(folder, r"weight\.step: expected at most a few values", target)


# -- files that are no files ------------------------------------------------------------------------------

_NAMES = ["mics.json", "mics.json.sha256", "rank-0.json", "__0_0.distcp"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop", "huge"])
@pytest.mark.parametrize("name", _NAMES)
def test_something_else_in_place_of_a_file(
    ours: Path, tmp_path: Path, target: Trained, name: str, kind: str
) -> None:
    """A FIFO is not waited for, a device not read, and a sparse file of a terabyte not either."""
    folder = _copy(ours, tmp_path)
    (folder / ".metadata").unlink()  # else it would be a checkpoint of DCP without our index
    _replace(folder / name, kind)
    refuses(folder, name.replace(".", r"\."), target)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "huge"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.safetensors", "latest"])
def test_something_else_in_place_of_a_file_of_others(
    stock: Path, tmp_path: Path, target: Trained, name: str, kind: str
) -> None:
    """The same for what others write, and for the name of the latest."""
    folder = tmp_path / "c" if name in ("latest", "model.safetensors") else _copy(stock, tmp_path)
    folder.mkdir(exist_ok=True)
    _replace(folder / name, kind)
    refuses(folder, name.replace(".", r"\."), target)


def _replace(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "device":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file)
        case "huge":
            with file.open("wb") as stream:
                stream.truncate(1 << 40)


# -- what a rank has to itself ---------------------------------------------------------------------------


def _numpy(**changed: Any) -> Callable[[dict[str, Any]], None]:
    def change(own: dict[str, Any]) -> None:
        own["random"]["numpy"]["state"].update(changed)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _numpy(pos=700),
        _numpy(pos=-1),
        _numpy(pos=1 << 40),
        _numpy(pos=1.5),
        _numpy(key=[1, 2]),
        _numpy(key={"$array": ["<u4", [1], "AAAAAA=="]}),
        _set("random", 3),
        _set("random", {}),
        _set("random", "numpy", None),
        _set("random", "numpy", "bit_generator", "PCG64"),
        _set("random", "numpy", "gauss", "x"),
        _set("random", "torch", {"$tensor": ["uint8", [3], "AAAA"]}),
        _set("random", "torch", {"$tensor": ["float32", [1264], ""]}),
        _set("random", "torch", "state"),
        _set("random", "python", {"$tuple": [3, {"$tuple": [1, 2]}, None]}),
        _set("random", "python", {"$tuple": [2, {"$tuple": []}, None]}),
        _set("random", "python", 5),
        _set("extra_state", 5),
        _set("extra_state", {}),
        _set("extra_state", {"$array": ["O", [1], "AAAAAAAAAAA="]}),
        _set("extra_state", {"$array": [["<f4", "<f8"], [1], ""]}),
        _set("extra_state", {"$dict": [[{"$set": []}, 1]]}),
        _set("extra_state", {"$dict": [[k * (2**61 - 1), 0] for k in range(10, 30_000)]}),
        _set("extra_state", {"$bytes": 5}),
        _set("extra_state", {"counter": {"$tuple": {}}}),
    ],
)
def test_a_bad_state_of_a_rank(
    ours: Path, tmp_path: Path, target: Trained, change: Callable[[dict[str, Any]], None]
) -> None:
    """Random state is tried on generators of its own first: numpy's could end the process."""
    folder = _copy(ours, tmp_path)
    alter_own(folder, change)
    refuses(folder, r"/c/rank-0\.json: |/c: expected extra_state", target)
    torch.rand(3)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"", b"\xff", b'{"a":' * 900 + b"1" + b"}" * 900])
def test_a_state_of_a_rank_that_is_none(ours: Path, tmp_path: Path, target: Trained, content: bytes) -> None:
    """No JSON, other JSON, or deeper than a stack."""
    folder = _copy(ours, tmp_path)
    sign_own(folder, content)
    refuses(folder, r"/c/rank-0\.json: |/c: expected extra_state", target)


def test_an_object_that_does_not_take_its_state(ours: Path, tmp_path: Path) -> None:
    """Its error is ours, so that a training program goes back to the checkpoint before."""
    folder = _copy(ours, tmp_path)
    alter_own(folder, _set("extra_state", {"counter": 7}))
    model, optimizer, counter = trained(seed=1)
    with pytest.raises(
        CheckpointError, match=r"rank-0\.json: extra_state 'counter': expected a state that Counter"
    ):
        mics.load(folder, model, optimizer, {"counter": counter})


# -- the index of torch.distributed.checkpoint ------------------------------------------------------------


def _weight(metadata: Any) -> tuple[Any, Any]:
    """What is said of model.weight, and where it is."""
    ((_, info),) = [item for item in metadata.storage_data.items() if item[0].fqn == "model.weight"]
    return metadata.state_dict_metadata["model.weight"], info


def _laughs() -> list[Any]:
    """Lists of the same list twice: as text, longer than any memory."""
    value: list[Any] = ["ha"]
    for _ in range(200):
        value = [value, value]
    return value


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _no_length(metadata: Any) -> None:
    _weight(metadata)[1].length = 0


def _another_dtype(metadata: Any) -> None:
    _weight(metadata)[0].properties.dtype = torch.int32


def _half(metadata: Any) -> None:
    _weight(metadata)[0].properties.dtype = torch.float16


def _another_chunk(metadata: Any) -> None:
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([1, 3]))] * 2


def _chunk_outside(metadata: Any) -> None:
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([2, 4]))]


def _swapped(metadata: Any) -> None:
    _weight(metadata)[1].offset = 10**9


def _said(field: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(_weight(metadata)[1], field, value)


def _whole(field: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, field, value())


def _part(field: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda metadata: setattr(_weight(metadata)[0], field, value())


@pytest.mark.parametrize(
    "change",
    [
        _no_length,
        _another_dtype,
        _half,
        _another_chunk,
        _chunk_outside,
        _swapped,
        _said("offset", -1),
        _said("offset", 1.5),
        _said("offset", 1 << 70),
        _said("length", "long"),
        _said("relative_path", _itself()),
        _said("relative_path", "\0"),
        _said("relative_path", "x" * 5000),
        _said("relative_path", "."),
        _said("transform_descriptors", _laughs()),
        _whole("state_dict_metadata", _laughs),
        _whole("state_dict_metadata", dict),
        _whole("storage_data", _itself),
        _whole("storage_data", lambda: {1: 2}),
        _part("size", _laughs),
        _part("chunks", _itself),
        _part("chunks", _laughs),
        _part("properties", _laughs),
    ],
)
def test_an_index_of_dcp_that_does_not_fit(
    stock: Path, tmp_path: Path, target: Trained, change: Callable[[Any], None]
) -> None:
    """Parts of no length, formats and places that are not the archive's, values that hold themselves."""
    folder = _copy(stock, tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"\.metadata|__0_0\.distcp|/c: expected a checkpoint of this model", target)


@pytest.mark.parametrize("field", ["planner_data", "storage_meta"])
def test_what_is_not_needed_is_not_looked_into(stock: Path, tmp_path: Path, field: str) -> None:
    """A list that holds itself, where only a hint would be."""
    folder = _copy(stock, tmp_path)
    for value in (_itself(), _laughs(), {"model.weight": (_laughs(), _itself())}):
        metadata = dcp.FileSystemReader(stock).read_metadata()
        setattr(metadata, field, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert loads_or_refuses(folder, trained(seed=1))


def test_pickles_that_take_for_ever(stock: Path, tmp_path: Path, target: Trained) -> None:
    """Names that are lists, numbers chosen to have one hash, and one list of parts for many tensors."""
    folder = _copy(stock, tmp_path)
    numbers = [(k * (2**61 - 1)).to_bytes(10, "little") for k in range(16, 99)]
    for content in (
        pickle.dumps(_laughs())[:-1] + b"\x8c\x01x\x93.",
        b"}(" + b"".join(b"\x8a\x0a" + number + b"N" for number in numbers) + b"u.",
        pickle.dumps([]) + b"trailing",
    ):
        (folder / ".metadata").write_bytes(content)
        refuses(folder, r"\.metadata: ", target)
    metadata = dcp.FileSystemReader(stock).read_metadata()
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([0, 3]))] * 3_000
    metadata.state_dict_metadata.update({f"model.{n}": entry for n in range(3_000)})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"\.metadata: expected each part of a tensor to be described once", target)


# -- archives of torch.save ------------------------------------------------------------------------------


def _archive(value: Any = None, **changed: bytes) -> dict[str, bytes]:
    stream = io.BytesIO()
    torch.save(torch.ones(2) if value is None else value, stream)
    with zipfile.ZipFile(stream) as source:
        found = {record.filename: source.read(record) for record in source.infolist()}
    return found | {f"archive/{name}": content for name, content in changed.items()}


def _zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as target:
        for name, content in records.items():
            target.writestr(name, content)
    return stream.getvalue()


def _patched(content: bytes, offset: int, value: bytes) -> bytes:
    """The same field of every entry of the central directory, changed."""
    found = bytearray(content)
    at = found.find(b"PK\1\2")
    while at >= 0:
        found[at + offset : at + offset + len(value)] = value
        at = found.find(b"PK\1\2", at + 4)
    return bytes(found)


def _endless() -> bytes:
    """A parameter whose tensor is itself."""
    return b"\x80\x02ctorch._utils\n_rebuild_parameter\n]q\x00Rq\x01h\x00h\x01a0h\x01."


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        b"PK",
        _zipped(_archive(), zipfile.ZIP_DEFLATED),
        _zipped(_archive(torch.zeros(1 << 16)), zipfile.ZIP_DEFLATED),
        _patched(_zipped(_archive()), 24, (0xFFFF0000).to_bytes(4, "little")),  # sizes
        _patched(_zipped(_archive()), 20, (0xFFFF0000).to_bytes(4, "little")),
        _patched(_zipped(_archive()), 8, b"\1\0"),  # encrypted
        _patched(_zipped(_archive()), 42, (0xFFFFFF).to_bytes(4, "little")),  # elsewhere
        _patched(_zipped(_archive()), 42, (1).to_bytes(4, "little")),
        _zipped(_archive(byteorder=b"big")),
        _zipped({**_archive(), "archive/data/1": b"x"}),
        _zipped({**_archive(), "other/data.pkl": b"x"}),
        _zipped({name: content for name, content in _archive().items() if not name.endswith("data.pkl")}),
        _zipped({**_archive(), "archive/data.pkl": _endless()}),
        _zipped({**_archive(), "archive/data.pkl": b"." * (2 << 20)}),
        _zipped({**_archive(), "archive/data.pkl": pickle.dumps(_laughs())}),
        _zipped({f"archive/{n}": b"" for n in range(30_000)}),
    ],
    ids=lambda archive: str(len(archive)),
)
def test_archives_that_lie(stock: Path, tmp_path: Path, target: Trained, archive: bytes) -> None:
    """Compressed, encrypted, of other sizes or places than they say, twice, or in themselves."""
    folder = _copy(stock, tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    ((key, info),) = [item for item in metadata.storage_data.items() if item[0].fqn == "model.bias"]
    file = folder / info.relative_path
    metadata.storage_data[key] = type(info)(info.relative_path, file.stat().st_size, len(archive))
    with file.open("ab") as stream:
        stream.write(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"__0_0\.distcp: model\.bias: ", target)


# -- whatever else ----------------------------------------------------------------------------------------

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
_fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    folder = tmp_path / "c"
    shutil.copytree(ours, folder, dirs_exist_ok=True)
    sign(folder, _mutated(data, index_of(ours)))
    loads_or_refuses(folder, target)


@_fuzz
@given(data=st.data())
def test_any_state_of_a_rank(ours: Path, tmp_path: Path, target: Trained, data: st.DataObject) -> None:
    """The same for its random state and extra state."""
    folder = tmp_path / "c"
    shutil.copytree(ours, folder, dirs_exist_ok=True)
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
    folder = tmp_path / "c"
    shutil.copytree(stock, folder, dirs_exist_ok=True)
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
