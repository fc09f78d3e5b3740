"""Files that nobody should trust: every one of them is our error, with its name, and nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mics
from mics.errors import CheckpointError
from tests.checkpoint.hostile import (
    Trained,
    alter_own,
    copied,
    index_of,
    loads_or_refuses,
    refuses,
    sign,
    sign_own,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    folder = copied(ours, tmp_path)
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

    folder = copied(ours, tmp_path)
    (folder / "mics.json").write_bytes(text)
    (folder / "mics.json.sha256").write_text(hashlib.sha256(text).hexdigest())
    refuses(folder, r"mics\.json: expected", target)


@pytest.mark.parametrize("digest", [b"\xff" * 64, b"", b"0" * 5000])
def test_a_digest_that_is_none(ours: Path, tmp_path: Path, target: Trained, digest: bytes) -> None:
    """Bytes that are no text, nothing, or too much."""
    folder = copied(ours, tmp_path)
    (folder / "mics.json.sha256").write_bytes(digest)
    refuses(folder, r"mics\.json", target)


def test_state_that_the_optimizer_needs_is_missing(ours: Path, tmp_path: Path, target: Trained) -> None:
    """A strict load tells at once, not a step later."""
    folder = copied(ours, tmp_path)
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
    folder = copied(ours, tmp_path)
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
    folder = copied(ours, tmp_path)
    (folder / ".metadata").unlink()  # else it would be a checkpoint of DCP without our index
    _replace(folder / name, kind)
    refuses(folder, name.replace(".", r"\."), target)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "huge"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.safetensors", "latest"])
def test_something_else_in_place_of_a_file_of_others(
    stock: Path, tmp_path: Path, target: Trained, name: str, kind: str
) -> None:
    """The same for what others write, and for the name of the latest."""
    folder = tmp_path / "c" if name in ("latest", "model.safetensors") else copied(stock, tmp_path)
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
    folder = copied(ours, tmp_path)
    alter_own(folder, change)
    refuses(folder, r"/c/rank-0\.json: |/c: expected extra_state", target)
    torch.rand(3)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"", b"\xff", b'{"a":' * 900 + b"1" + b"}" * 900])
def test_a_state_of_a_rank_that_is_none(ours: Path, tmp_path: Path, target: Trained, content: bytes) -> None:
    """No JSON, other JSON, or deeper than a stack."""
    folder = copied(ours, tmp_path)
    sign_own(folder, content)
    refuses(folder, r"/c/rank-0\.json: |/c: expected extra_state", target)


def test_an_object_that_does_not_take_its_state(ours: Path, tmp_path: Path) -> None:
    """Its error is ours, so that a training program goes back to the checkpoint before."""
    folder = copied(ours, tmp_path)
    alter_own(folder, _set("extra_state", {"counter": 7}))
    model, optimizer, counter = trained(seed=1)
    with pytest.raises(
        CheckpointError, match=r"rank-0\.json: extra_state 'counter': expected a state that Counter"
    ):
        mics.load(folder, model, optimizer, {"counter": counter})
