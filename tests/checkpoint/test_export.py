"""`mics checkpoint`: to Hugging Face and back, what is inside, and whether it is whole."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mics
from mics.checkpoint.command import parse_size
from mics.checkpoint.exporting import plan_export, write_export
from mics.checkpoint.importing import import_safetensors
from mics.checkpoint.opening import open_checkpoint
from mics.checkpoint.records import StoredFile
from mics.cli import main
from mics.errors import CheckpointError, SettingsError
from tests import toys
from tests.checkpoint.runs import same
from tests.checkpoint.test_foreign import Allocations, _wide
from tests.ranks import RankPool, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# -- Hugging Face ---------------------------------------------------------------------------------------


def _llama() -> nn.Module:
    from tests.test_huggingface import _llama

    return _llama()


def _gpt2() -> Any:
    from tests.test_huggingface import _gpt2

    return _gpt2()


def _through_mics(build: Any, source: str, saved: str) -> tuple[dict[str, Tensor], Any]:
    """A folder of transformers loaded into shards, and saved as a checkpoint."""
    torch.manual_seed(7)
    model = mics.shard(build(), partition_size=2)
    mics.load(source, model)
    mics.save(saved, model)
    return mics.full_state_dict(model), _logits(model)


def _logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.arange(5)[None]).logits


@pytest.mark.parametrize(
    "build", [pytest.param(_llama, id="llama", marks=pytest.mark.full), pytest.param(_gpt2, id="tied-gpt2")]
)
def test_there_and_back(build: Any, tmp_path: Path) -> None:
    """bf16 in several files into fp32 masters on two ranks, out again, and the logits are equal."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    original = build()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.bfloat16())
    rounded = build().to(torch.bfloat16)
    rounded.load_state_dict(original.state_dict())
    rounded.save_pretrained(tmp_path / "hub", max_shard_size="2KB")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    saved = tmp_path / "saved"
    state, logits = run_ranks(2, _through_mics, build, str(tmp_path / "hub"), str(saved))[0]
    assert same(state, dict(original.state_dict()))
    torch.testing.assert_close(logits, _logits(original), rtol=1e-5, atol=1e-5)

    hub = str(tmp_path / "hub")
    for dtype, expected in (("keep", torch.float32), ("bf16", torch.bfloat16)):
        out = str(tmp_path / dtype)
        args = ["checkpoint", "export", str(saved), out, "--shard-size", "3KB", "--config", hub]
        assert main([*args, "--dtype", dtype]) == 0
        assert transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == expected
        again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert same(dict(again.state_dict()), dict(original.state_dict()))
        assert torch.equal(_logits(again), _logits(original))


def test_a_checkpoint_of_the_base_model(tmp_path: Path) -> None:
    """GPT2Model saves wte.weight; GPT2LMHeadModel calls it transformer.wte.weight."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    original = _gpt2()
    original.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in open_checkpoint(tmp_path).tensors
    torch.manual_seed(1)
    model = mics.shard(_gpt2(), partition_size=1)
    mics.load(tmp_path, model)
    assert same(mics.full_state_dict(model), dict(original.state_dict()))


# -- the files ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of mics with tied weights, buffers, odd sizes and optimizer state."""
    torch.manual_seed(0)
    model = mics.shard(toys.Language(), partition_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*toys.language_batch(0, 0, 0)).backward()
    optimizer.step()
    mics.save(tmp_path / "run", model, optimizer, {"epoch": 1}, step=5)
    torch.save(mics.full_state_dict(model), tmp_path / "expected.pt")
    return tmp_path / "run"


def test_the_files_are_safetensors(saved: Path, tmp_path: Path) -> None:
    """The library reads them; tied names are written once; the map names the file of each tensor."""
    assert main(["checkpoint", "export", str(saved), str(tmp_path / "out"), "--shard-size", "1kB"]) == 0
    expected = torch.load(tmp_path / "expected.pt")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118
                found[name] = opened.get_tensor(name)
                assert index["weight_map"][name] == file.name
    assert expected.keys() - found.keys() == {"head.weight"}
    assert all(same(found[name], expected[name]) for name in found)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.pt", "out", "run"]


def test_formats_of_all_widths(tmp_path: Path) -> None:
    """Numbers that are not floating-point stay what they are, whatever the format asked for."""
    values = {
        "a": torch.tensor([True, False, True]),
        "b": torch.randn(3, 5),
        "c": torch.tensor(7),
        "d": torch.randn(2, dtype=torch.float64),
        "e": torch.arange(3, dtype=torch.int16),
        "f": torch.randn(5).to(torch.float8_e4m3fn),
        "g": torch.empty(0, 4),
    }
    (tmp_path / "in").mkdir()
    save_file(values, tmp_path / "in" / "model.safetensors")
    index = open_checkpoint(tmp_path / "in")
    for dtype in (None, torch.bfloat16):
        out = tmp_path / str(dtype)
        write_export(plan_export(tmp_path / "in", index, dtype=dtype, shard_nbytes=10**9), out)
        found = load_file(out / "model-00001-of-00001.safetensors")
        stored = [each for each in open_checkpoint(out).tensors.values() if each.chunks]
        assert all(each.chunks[0].position % each.dtype.itemsize == 0 for each in stored)
        for name, value in values.items():
            kept = value if dtype is None or not value.is_floating_point() else value.to(dtype)
            assert found[name].dtype == kept.dtype and found[name].shape == kept.shape
            assert found[name].reshape(-1).tolist() == kept.reshape(-1).tolist()


def test_stock_checkpoints_are_exported_too(tmp_path: Path) -> None:
    """The model, without the optimizer and what else is beside it."""
    weight = torch.randn(3, 2)
    state = {
        "weight": weight,
        "optimizer": {"state": {"weight": {"exp_avg": torch.ones(3, 2)}}},
        "train_state": {"step": torch.tensor(3)},
    }
    for form in (state, {"app": {"model": {"weight": weight}, "optim": state["optimizer"]}}):
        folder = tmp_path / "-".join(form)
        dcp.save(form, checkpoint_id=folder, no_dist=True)
        assert main(["checkpoint", "export", str(folder), str(tmp_path / f"{folder.name}.out")]) == 0
        found = load_file(tmp_path / f"{folder.name}.out" / "model-00001-of-00001.safetensors")
        assert same(found, {"weight": weight})


def _normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model(torch.randn(7, 3))  # moves the running averages and their count
    return model


def _buffers_through_all(root: str) -> dict[str, dict[str, Tensor]]:
    """From DCP into mics, saved, and the same from safetensors."""
    found = {}
    for name in ("stock", "hub"):
        model = mics.shard(_normed(1), partition_size=2)
        mics.load(f"{root}/{name}", model)
        mics.save(f"{root}/{name}.mics", model)
        found[name] = mics.full_state_dict(model, rank0_only=False)
    return found


def test_buffers_go_all_ways(tmp_path: Path) -> None:
    """Running averages and a count that is a whole number, on every rank."""
    expected = dict(_normed(0).state_dict())
    dcp.save({"model": expected}, checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "hub").mkdir()
    save_file(expected, tmp_path / "hub" / "model.safetensors")
    for of_rank in run_ranks(2, _buffers_through_all, str(tmp_path)):
        assert all(same(found, expected) for found in of_rank.values())
    for name in ("stock.mics", "hub.mics"):
        state = {"model": {key: torch.zeros_like(value) for key, value in expected.items()}}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert same(state["model"], expected)
        out = tmp_path / f"{name}.out"
        assert main(["checkpoint", "export", str(tmp_path / name), str(out), "--dtype", "keep"]) == 0
        assert same(load_file(out / "model-00001-of-00001.safetensors"), expected)


def test_import_is_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With digests; mics.load and DCP's own tools read it."""
    torch.manual_seed(0)
    expected = dict(toys.Language().state_dict())
    del expected["head.weight"]  # as transformers leave out what is tied
    (tmp_path / "hub").mkdir()
    save_file({name: value.bfloat16() for name, value in expected.items()}, tmp_path / "hub/x.safetensors")
    out = str(tmp_path / "out")
    assert main(["checkpoint", "import", str(tmp_path / "hub"), out]) == 0
    assert main(["checkpoint", "verify", out]) == 0
    assert "every block is what was written" in capsys.readouterr().out
    torch.manual_seed(1)
    model = mics.shard(toys.Language(), partition_size=1)
    mics.load(out, model)
    found = mics.full_state_dict(model)
    assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in expected.items())
    state = {"model": {"norm.bias": torch.empty(toys.DIM, dtype=torch.bfloat16)}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert torch.equal(state["model"]["norm.bias"], expected["norm.bias"].bfloat16())


def _both_ways_metered(folder: Path, block_nbytes: int) -> tuple[int, int, int]:
    """Import and export with blocks and items that are as small, against the model, as in earnest.

    The largest tensor allocated each way, and the peak of what Python allocates for the export.
    """
    with (
        patch("mics.checkpoint.formats.dcp_writing.ITEM_NBYTES", block_nbytes),
        patch("mics.checkpoint.reading.BLOCK_NBYTES", block_nbytes),
        patch(
            "mics.checkpoint.formats.safetensors_files.StoredFile",
            partial(StoredFile, block_nbytes=block_nbytes),
        ),
    ):
        index = open_checkpoint(folder / "hub")
        with Allocations() as there:
            import_safetensors(folder / "hub", index, folder / "mics")
        with Allocations() as back:
            write_export(plan_export(folder / "hub", index, shard_nbytes=10**9), folder / "out")
    return there.largest, back.largest, back.python


def test_neither_way_needs_memory(tmp_path: Path) -> None:
    """Blocks and items, however large the model."""
    size = 1 << 14
    (tmp_path / "hub").mkdir()
    save_file(dict(_wide().state_dict()), tmp_path / "hub" / "model.safetensors")
    layer = max(tensor.nbytes for tensor in open_checkpoint(tmp_path / "hub").tensors.values())
    with RankPool() as pool:  # of its own: counting what Python allocates slows a process down to its end
        ((there, back, python),) = pool.run(1, _both_ways_metered, tmp_path, size)
    assert max(there, back) <= size < layer / 8
    assert 0 < python < 16 * size + 200_000
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert same(found, load_file(tmp_path / "hub" / "model.safetensors"))


# -- show and verify ------------------------------------------------------------------------------------


def test_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, ranks, parameters, sizes by kind, files; every tensor if asked for."""
    assert main(["checkpoint", "show", str(saved)]) == 0
    text = capsys.readouterr().out
    num_parameters = sum(p.numel() for p in toys.Language().parameters())
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["step"][-1] == "5"
    assert lines["ranks"][-1] == "1"
    assert lines["parameters"][-1] == f"{num_parameters:,}"
    assert lines["model"][1] == "20"
    assert "__0_0.distcp" in text and "rank-0.json" in text
    assert "embedding.weight" not in text
    assert main(["checkpoint", "show", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "optimizer.state.embedding.weight.exp_avg" in text
    assert "tied to model.embedding.weight" in text


def test_show_what_others_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is not read of it."""
    state = {"model": {"a": torch.ones(3, 2)}, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "hub").mkdir()
    save_file({"a": torch.ones(3, 2)}, tmp_path / "hub" / "model.safetensors")
    for name in ("stock", "hub"):
        assert main(["checkpoint", "show", str(tmp_path / name), "--tensors"]) == 0
        assert main(["checkpoint", "verify", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert "3 x 2" in text and "no digests" in text
        assert ("settings" in text) == (name == "stock")


def test_verify_names_what_is_torn(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One byte that changed, a file that is shorter, a file that is gone."""
    folder = saved / "step-5"
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.truncate(folder / "rank-0.json", 5)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "__0_0.distcp" in first and "digest differs" in first
    assert "rank-0.json" in second and "found 5" in second
    (folder / "rank-0.json").unlink()
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "No such file" in capsys.readouterr().err


def test_verify_looks_into_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint that has no digests."""
    dcp.save({"a": torch.ones(3, 2)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    (file,) = (tmp_path / "stock").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    assert main(["checkpoint", "verify", str(tmp_path / "stock")]) == 1
    assert "a: expected an archive of torch.save" in capsys.readouterr().err


# -- mistakes -------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 for what was asked wrongly, 1 for what cannot be read; nothing is left behind."""
    here, out = str(saved), str(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for args, code, message in [
        (["show", str(tmp_path / "gone")], 1, "found no such folder"),
        (["show", str(tmp_path / "empty")], 1, "found an empty folder"),
        (["export", here, here], 2, "expected a folder that is not there yet"),
        (["export", here, out, "--shard-size", "big"], 2, "expected a size such as 5GB"),
        (["export", here, out, "--config", str(tmp_path / "empty")], 2, "no config.json there"),
        (["import", here, out], 2, "expected a folder of safetensors"),
    ]:
        assert main(["checkpoint", *args]) == code
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "export", here, out, "--dtype", "fp7"])
    assert caught.value.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "expected.pt", "run"]


def test_help_is_that_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """What may be left out shows its type, and that it is unset."""
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "export", "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert "--config PATH" in shown and "(default: unset)" in shown and "None" not in shown


def test_a_torn_source_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    """An export that cannot be finished has no name."""
    file = saved / "step-5" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    index = open_checkpoint(saved / "step-5")
    with pytest.raises(CheckpointError, match="digest differs"):
        write_export(plan_export(saved / "step-5", index, shard_nbytes=10**9), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.pt", "run"]


def test_sizes() -> None:
    """As people write them."""
    found = [parse_size(text) for text in ("5GB", "500 mb", "2GiB", "1.5kB", "123")]
    assert found == [5 * 10**9, 500 * 10**6, 2 * 2**30, 1500, 123]
    for text in ("", "GB", "-1GB", "5XB", "iB", "0"):
        with pytest.raises(SettingsError):
            parse_size(text)
