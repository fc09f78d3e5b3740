"""Checkpoints of torch.distributed.checkpoint and safetensors load into shards, and ours into FSDP2."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import tracemalloc
import zipfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mics
from mics.checkpoint.opening import open_checkpoint
from mics.checkpoint.records import StoredFile
from mics.errors import CheckpointError
from tests import tiers, toys
from tests.checkpoint import fsdp_runs
from tests.checkpoint.fsdp_runs import FORMS, no_pickles
from tests.checkpoint.runs import same, trained_and_saved
from tests.checkpoint.test_pickle_data import Evil
from tests.ranks import RankPool, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# -- FSDP2 and DCP --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "partition_size"), [(2, 4, 2), pytest.param(4, 2, 2, marks=pytest.mark.full)]
)
def test_fsdp_loads_into_mics(tmp_path: Path, saved_by: int, loaded_by: int, partition_size: int) -> None:
    """All forms, onto more ranks and onto fewer; no pickle is loaded, and training goes on."""
    root = str(tmp_path)
    expected = run_ranks(saved_by, fsdp_runs.saved_by_fsdp, root)[0]
    for found in run_ranks(loaded_by, fsdp_runs.loaded_from_stock, root, list(FORMS), partition_size):
        for form in FORMS:
            assert same(found[form]["model"], expected["model"]), form
            assert same(found[form]["optimizer"], expected["optimizer"]) == (form != "bare"), form


@pytest.fixture(scope="module")
def of_mics(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("mics") / "saved")
    return path, run_ranks(4, trained_and_saved, path, 2)[0]


@pytest.mark.parametrize(
    ("world", "form"), tiers.first([(4, "flat"), (2, "nested"), (2, "flat"), (4, "nested")])
)
def test_mics_loads_into_fsdp(of_mics: tuple[str, dict[str, Any]], world: int, form: str) -> None:
    """Through dcp.load and set_state_dict: parameters, optimizer state and settings."""
    path, expected = of_mics
    for found in run_ranks(world, fsdp_runs.loaded_by_stock, path, form):
        for what in ("model", "optimizer", "lr"):
            assert same(found[what], expected[what]), what


def test_tools_of_dcp_read_ours(of_mics: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """dcp_to_torch_save makes an ordinary file of it, which a plain model and its optimizer load."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path, expected = of_mics
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    state = torch.load(tmp_path / "plain.pt", weights_only=True)
    model = toys.Language()
    model.load_state_dict(state["model"])
    assert same(dict(model.state_dict()), expected["model"])
    assert model.head.weight is model.embedding.weight
    assert same(state["optimizer"]["state"], expected["optimizer"])
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == expected["lr"]


def _in_memory() -> tuple[Any, Any, Any, Any]:
    """State dicts of FSDP2 into mics and back, without a file."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    theirs, optimizer = fsdp_runs.build_fsdp()
    model = mics.shard(toys.Language(), partition_size=2)
    model.load_state_dict(get_model_state_dict(theirs))  # with DTensors
    into_mics = mics.full_state_dict(model, rank0_only=False)
    before = fsdp_runs.everything_fsdp(theirs, optimizer)["model"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    full = mics.full_state_dict(model)  # the first rank alone has it
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(theirs, full, options=options)
    into_fsdp = fsdp_runs.everything_fsdp(theirs, optimizer)["model"]
    return before, into_mics, mics.full_state_dict(model, rank0_only=False), into_fsdp


def test_state_dicts_in_memory() -> None:
    """DTensors load into mics, and full_state_dict into FSDP2."""
    for before, into_mics, doubled, into_fsdp in run_ranks(4, _in_memory):
        assert same(before, into_mics)
        assert same(doubled, into_fsdp)
        assert not same(before, doubled)


def test_settings_that_are_pickled_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and the optimizer keeps its own."""
    plain = toys.Language()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.5)
    plain(*toys.language_batch(0, 0, 0)).backward()
    theirs.step()
    _save_stock({"model": plain, "optimizer": theirs}, tmp_path / "stock")
    model = mics.shard(toys.Language(), partition_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    with caplog.at_level(logging.WARNING, logger="mics"):
        mics.load(tmp_path / "stock", model, optimizer)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mics"]
    assert "settings" in line and "pickled" in line
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert same(mics.full_state_dict(model), dict(plain.state_dict()))
    state = mics.full_optimizer_state_dict(model, optimizer)
    assert torch.equal(state["norm.bias"]["exp_avg"], theirs.state[plain.norm.bias]["exp_avg"])


def _save_stock(objects: dict[str, Any], folder: Path) -> None:
    """What a script of one process saves."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(objects["model"], objects["optimizer"])
    rest = {name: value for name, value in objects.items() if name not in ("model", "optimizer")}
    dcp.save({"model": model, "optimizer": optimizer, **rest}, checkpoint_id=folder, no_dist=True)


def test_any_prefix(tmp_path: Path) -> None:
    """The model is found by its names, wherever it was in what was saved."""
    state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
    for number, form in enumerate([{"net": {"module": state}}, {"model": {"inner": state}}, state]):
        dcp.save(form, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert same(_load_linear(tmp_path / str(number)), state)


# -- pickles that bite ----------------------------------------------------------------------------------


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A small checkpoint of DCP: a.weight [2, 3] and a buffer."""
    state = {"model": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def _load_linear(folder: Path) -> dict[str, Tensor]:
    model = mics.shard(nn.Linear(3, 2), partition_size=1)
    with no_pickles():
        mics.load(folder, model)
    return mics.full_state_dict(model)


def test_pickles_are_not_loaded(stock: Path) -> None:
    """What guards these tests does raise when one is, and mics.load does not."""
    with no_pickles(), pytest.raises(AssertionError, match="a pickle was loaded"):
        dcp.FileSystemReader(stock).read_metadata()
    assert torch.equal(_load_linear(stock)["weight"], torch.arange(6.0).view(2, 3))


def test_an_evil_index_is_not_run(stock: Path, tmp_path: Path) -> None:
    """As the whole of it: an error. Somewhere inside: passed over."""
    marker = tmp_path / "ran"
    metadata = dcp.FileSystemReader(stock).read_metadata()
    (stock / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(CheckpointError, match=r"expected torch.distributed.checkpoint.metadata.Metadata"):
        _load_linear(stock)
    metadata.planner_data = [Evil(marker)]
    content = pickle.dumps(metadata)
    (stock / ".metadata").write_bytes(content)
    assert torch.equal(_load_linear(stock)["bias"], torch.ones(2))
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the test would not have noticed"


def test_an_evil_value_is_passed_over(tmp_path: Path) -> None:
    """An item that is not a tensor is a pickle: not read, and said to be so."""
    marker = tmp_path / "ran"
    state = {"model": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "evil": Evil(marker)}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert "evil" in open_checkpoint(tmp_path / "stock").about["not_read"]
    _load_linear(tmp_path / "stock")
    assert not marker.exists()


def _replace_item(folder: Path, name: str, archive: bytes) -> None:
    """Let the index say that ``archive`` is the item of a tensor."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    info = metadata.storage_data[index]
    file = folder / info.relative_path
    metadata.storage_data[index] = type(info)(info.relative_path, file.stat().st_size, len(archive))
    with file.open("ab") as stream:
        stream.write(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_evil_item_is_not_run(stock: Path, tmp_path: Path) -> None:
    """An archive whose description is a command."""
    marker = tmp_path / "ran"
    good, bad = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(2), good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for record in source.infolist():
            evil = record.filename.endswith("data.pkl")
            content = pickle.dumps(Evil(marker), 2) if evil else source.read(record)
            target.writestr(record.filename, content)
    _replace_item(stock, "model.bias", bad.getvalue())
    with pytest.raises(CheckpointError, match=r"model.bias: expected a plain tensor, found posix.system"):
        _load_linear(stock)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"model.bias: expected a tensor of shape \(2,\), found \(3,\)"),
        (torch.ones(4)[::2], r"model.bias: expected values one after the other, found strides \(2,\)"),
        (torch.ones(4)[2:], r"model.bias: expected values one after the other"),
        ({"a": torch.ones(2)}, r"model.bias: expected a plain tensor, found dict"),
        (torch.ones(2, dtype=torch.int8), r"model.bias: expected values in torch.float32, found torch.int8"),
    ],
)
def test_an_item_that_is_not_what_the_index_says(stock: Path, value: Any, message: str) -> None:
    """The tensor is named."""
    archive = io.BytesIO()
    torch.save(value, archive)
    _replace_item(stock, "model.bias", archive.getvalue())
    with pytest.raises(CheckpointError, match=message):
        _load_linear(stock)


@pytest.mark.parametrize("length", [0, 100, 1500])
def test_a_torn_file_of_dcp(stock: Path, length: int) -> None:
    """Cut anywhere."""
    (file,) = stock.glob("*.distcp")
    os.truncate(file, length)
    with pytest.raises(CheckpointError, match=file.name):
        _load_linear(stock)


def test_files_outside_the_folder_are_refused(stock: Path) -> None:
    """An index cannot point to a file elsewhere."""
    metadata = dcp.FileSystemReader(stock).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"expected a file of this folder, found '../elsewhere'"):
        _load_linear(stock)


# -- safetensors ----------------------------------------------------------------------------------------


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(
        {"weight": torch.arange(6.0).view(2, 3).to(torch.bfloat16), "bias": torch.ones(2).half()},
        tmp_path / "model" / "model.safetensors",
    )
    return tmp_path / "model"


def test_safetensors_load_in_master_precision(tensors: Path) -> None:
    """bf16 and fp16 become fp32 masters."""
    found = _load_linear(tensors)
    assert found["weight"].dtype == torch.float32
    assert torch.equal(found["weight"], torch.arange(6.0).view(2, 3))
    assert torch.equal(found["bias"], torch.ones(2))


@pytest.mark.parametrize("length", [0, 4, 40, -1])
def test_torn_safetensors(tensors: Path, length: int) -> None:
    """Cut in the length, the header or the values: the file is named."""
    file = tensors / "model.safetensors"
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected .* torn"):
        _load_linear(tensors)


def _header(*, name: str = "weight", more: dict[str, Any] | None = None, **changed: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changed}
    return json.dumps({name: entry, **(more or {})}, separators=(",", ":")).encode()


def test_headers_that_make_no_sense(tensors: Path) -> None:
    """No JSON, no object, an unknown format, sizes and places that do not fit: the file is named."""
    file = tensors / "model.safetensors"
    for header, message in [
        (b"hello", "expected value"),
        (b"null", "invalid type: null"),
        (b"[]", "invalid type: sequence"),
        (b"[" * 100_000, "invalid type: sequence"),
        (b'{"weight":' * 100_000, "recursion limit|invalid"),
        (b'{"weight":7}', "invalid type: integer"),
        (_header(dtype="F3"), "unknown variant"),
        (_header(dtype="F4", shape=[6, 8]), "expected one of F64, .* found F4"),
        (_header(shape=[2, 4]), "shape and data offsets|shape, data type"),
        (_header(shape=[2, -3]), "invalid value"),
        (_header(shape=[1 << 62, 1 << 62]), "overflow"),
        (_header(shape=[1] * 65 + [6]), "expected at most 64 sizes"),
        (_header(data_offsets=[8, 32]), "invalid offset"),
        (_header(more={"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "invalid offset"),
        (_header(shape=[2], data_offsets=[0, 8]), "not fully covered"),
        (_header(shape=[2, 30], data_offsets=[0, 240]), "not fully covered"),
        (_header(name="a." * 1000), "expected a name of at most 1,024"),
        (_header(name="\x1b[2J"), "expected a name of at most"),
        (_header()[:-1] + b"," + _header(shape=[3, 2])[1:], "the key 'weight' twice"),
    ]:
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*({message})"):
            open_checkpoint(tensors)
    good = _header()
    file.write_bytes(len(good).to_bytes(8, "little") + good + bytes(24))
    assert open_checkpoint(tensors).tensors["weight"].shape == (2, 3)
    with file.open("ab") as stream:
        stream.write(b"trailing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*not fully covered"):
        open_checkpoint(tensors)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_numbers_of_another_kind(tensors: Path, dtype: torch.dtype) -> None:
    """Only floats become floats; those of 8 bits mean nothing without scales."""
    values = {"weight": torch.ones(2, 3).to(dtype), "bias": torch.ones(2)}
    save_file(values, tensors / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"weight: expected values that .* can hold, found {dtype}"):
        _load_linear(tensors)


def test_a_shard_is_missing(tensors: Path) -> None:
    """A file that the map names, or a tensor that is not in it."""
    shutil.move(tensors / "model.safetensors", tensors / "model-00001-of-00002.safetensors")
    text = '{"weight_map": {"bias": "model-00001-of-00002.safetensors", "weight": "%s"}}'
    (tensors / "model.safetensors.index.json").write_text(text % "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: .* No such file"):
        open_checkpoint(tensors)
    text = text.replace("bias", "gain") % "model-00001-of-00002.safetensors"
    (tensors / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"expected gain in model-00001-of-00002.safetensors"):
        open_checkpoint(tensors)


def test_another_model(tensors: Path) -> None:
    """Names and shapes that differ are listed."""
    with pytest.raises(CheckpointError, match=r"weight: expected shape \(4, 3\), found \(2, 3\)"):
        mics.load(tensors, mics.shard(nn.Linear(3, 4), partition_size=1))
    with pytest.raises(CheckpointError, match=r"1.weight: expected a parameter of this name, found none"):
        mics.load(tensors, mics.shard(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), partition_size=1))


# -- memory ---------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation allocates, and the peak of what Python does, in bytes.

    What Python does is counted until the process ends: in Python 3.11 the end of tracing is not safe while
    another thread allocates, and the backend has some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.python = 0

    def __enter__(self) -> Allocations:
        tracemalloc.start()
        tracemalloc.clear_traces()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.python = tracemalloc.get_traced_memory()[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x) for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _has_storage(x)}
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if _has_storage(each) and _storage(each) not in given:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


BLOCK = 1 << 14
WIDE = 300


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4)))


def _load_metered(folder: str) -> tuple[int, int, dict[str, Tensor]]:
    """With blocks that are as small, against the model, as they are in earnest."""
    small = partial(StoredFile, block_nbytes=BLOCK)
    model = mics.shard(_wide(), partition_size=4)
    with (
        patch("mics.checkpoint.formats.safetensors_files.StoredFile", small),
        patch("mics.checkpoint.reading.BLOCK_NBYTES", BLOCK),
        Allocations() as meter,
    ):
        mics.load(folder, model)
    return meter.largest, meter.python, mics.full_state_dict(model, rank0_only=False)


def _copy_metered() -> tuple[int, int, int]:
    """What would be found if a rank read the file as it is usually done."""
    model = _wide()
    with Allocations() as meter:
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        content = bytes(1_000_000)
    return meter.largest, meter.python, len(content) * bool(copies)


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    """Nor a layer of it: besides its shards a rank allocates a few blocks."""
    with RankPool() as pool:  # of their own: what Python allocates is counted to the end
        for dtype in (torch.float32, torch.bfloat16):
            values = {name: value.to(dtype) for name, value in _wide().state_dict().items()}
            save_file(values, tmp_path / "model.safetensors")
            layer = WIDE * WIDE * dtype.itemsize
            for largest, python, found in pool.run(4, _load_metered, str(tmp_path)):
                assert largest <= BLOCK < layer / 8
                assert python < 16 * BLOCK + 200_000 < 4 * layer
                assert all(torch.equal(found[name], value.float()) for name, value in values.items())
        (seen, python, content), *_ = pool.run(1, _copy_metered)
        assert seen == WIDE * WIDE * 4 and python > content > 0
