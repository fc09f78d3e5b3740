"""Folders of safetensors that other programs load, written from a sharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import toys
from tests.ranks import run_ranks
from tests.test_huggingface import _gpt2, _llama

pytest.importorskip("safetensors")


def _exported(build: Any, folder: str, dtype: torch.dtype | None, size: int | str) -> dict[str, Tensor]:
    import mics
    from mics.integrations.weights import export_safetensors

    torch.manual_seed(5)
    model = build()
    if hasattr(model, "config"):  # as of weights that were quantized once
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    mics.shard(model, partition_size=2)
    export_safetensors(model, folder, max_shard_size=size, dtype=dtype)
    export_safetensors(model, folder, max_shard_size=size, dtype=dtype)  # in place of the first
    return mics.full_state_dict(model)


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert {name: file for file, tensors in found.items() for name in tensors} == index["weight_map"]
    tensors = {name: value for each in found.values() for name, value in each.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    return tensors


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("build", [_gpt2, _llama])
def test_from_pretrained_loads_it(tmp_path: Path, build: Any, dtype: torch.dtype | None) -> None:
    """In several files, with the config and the format that was asked for."""
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = tmp_path / "model"
    state = run_ranks(4, _exported, build, str(folder), dtype, "1KB")[0]
    assert len(list(folder.glob("*.safetensors"))) > 2 and not list(tmp_path.glob(".*"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(build()) and loaded.dtype == (dtype or torch.float32)
    found = loaded.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value.to(dtype or value.dtype)) for name, value in state.items())


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """Buffers too, which keep their format if they are integers; no config."""
    folder = tmp_path / "model"
    state = run_ranks(2, _exported, toys.Convolutional, str(folder), torch.float16, 500)[0]
    found = _read(folder)
    expected = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    assert set(found) == set(expected) and "scale" in found and not (folder / "config.json").exists()
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _refusals(folder: str) -> None:
    import mics
    from mics.integrations.weights import export_safetensors

    model = mics.shard(nn.Linear(3, 3), partition_size=2)
    for size in ("5 apples", 0, True, "0GB", None):
        with pytest.raises(mics.SettingsError, match="max_shard_size: expected a number of bytes"):
            export_safetensors(model, folder, max_shard_size=size)
    with pytest.raises(mics.SettingsError, match="dtype: expected a floating-point format"):
        export_safetensors(model, folder, dtype=torch.int8)
    with pytest.raises(mics.CheckpointError, match=r"expected a new folder.*choose another name"):
        export_safetensors(model, folder)


def test_what_is_refused(tmp_path: Path) -> None:
    """On all ranks alike; a folder of something else is left alone."""
    (tmp_path / "notes.txt").write_text("keep")
    run_ranks(2, _refusals, str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_sizes() -> None:
    from mics.integrations.weights import _nbytes

    assert [_nbytes(size) for size in (7, "5GB", "1.5 MB", "2GiB", "10kb", "8B")] == [
        7,
        5 * 10**9,
        1_500_000,
        2 << 30,
        10_000,
        8,
    ]
