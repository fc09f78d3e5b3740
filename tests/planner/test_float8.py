"""Float8 gathers in predictions: bytes as the engine counts them, memory, advice that runs, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

import mics
from mics.cli import main
from mics.cost.clusters import PRESETS
from mics.cost.collectives import Kind
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape, shape_of_config
from mics.cost.step_bytes import step_bytes
from mics.models import GPT, GPTConfig
from mics.planner.advice import advice
from mics.planner.search import Choice
from mics.planner.step_costs import StepCosts
from mics.planner.systems import SYSTEMS, predict
from tests.ranks import run_ranks

_SHAPE: Final = GPTConfig(num_layers=3, num_heads=2, hidden_size=64, vocab_size=64, seq_len=16)


def _setting(*, float8: bool = False, **options: Any) -> Setting:
    fields: dict[str, Any] = {
        "model": named_shape("gpt-3.6b").with_float8(float8),
        "cluster": replace(PRESETS["dgx-h100"], num_nodes=4),
        "partition_size": 8,
        "micro_batch": 4,
        "accumulation": 2,
        "activations": Keeping(checkpoint=False),
    }
    return Setting(**fields | options)


def _count(emulated: bool, partition_size: int) -> dict[tuple[str, str], int]:
    """Bytes of one step, once all is settled."""
    torchao: Any = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = GPT(_SHAPE)
    if emulated:
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        torchao.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: "head" not in name
        )
    mics.shard(model, partition_size=partition_size, compression=None, prefetch=0, audit_interval=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[dict[tuple[str, str], int]] = []
    for _ in range(3):
        tokens = torch.randint(_SHAPE.vocab_size, (2, _SHAPE.seq_len + 1))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(dict(mics.traffic(model).nbytes))
    return {key: found[2][key] - found[1][key] for key in found[2]}


@pytest.mark.parametrize("partition_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_saves_the_bytes_that_the_engine_saves(partition_size: int) -> None:
    """In gathers and in new parameters, but for padding; parameters have 4 bytes on a CPU."""
    pytest.importorskip("torchao")
    plain, narrow = (
        run_ranks(4, _count, emulated, partition_size, ranks_per_node=2)[0] for emulated in (False, True)
    )
    cluster = replace(PRESETS["dgx-h100"], num_nodes=2, ranks_per_node=2)
    expected = [
        step_bytes(
            _setting(
                model=shape_of_config("gpt", _SHAPE).with_float8(on),
                cluster=cluster,
                partition_size=partition_size,
                accumulation=1,
                compression=mics.Compression(refresh=None),
            ),
            param_nbytes=4,
        )
        for on in (False, True)
    ]
    saved = plain["partition", "all_gather"] - narrow["partition", "all_gather"]
    assert saved == pytest.approx(expected[0].gathers - expected[1].gathers, rel=0.03)
    saved = plain.get(("replication", "all_gather"), 0) - narrow.get(("replication", "all_gather"), 0)
    assert saved == pytest.approx(expected[0].refresh - expected[1].refresh, rel=0.03)


def test_a_step_moves_and_holds_less() -> None:
    """Matrices of blocks take a byte; gradients and masters what they took."""
    plain, narrow = (_setting(float8=on) for on in (False, True))
    block, numel = narrow.model.units[2], narrow.model.units[2].numel
    assert block.kind == "block" and block.float8_numel == pytest.approx(numel, rel=0.01)
    assert block.gathered_nbytes(2) == pytest.approx(numel, rel=0.01)
    links = [predict(setting).link_seconds["intra"] for setting in (plain, narrow)]
    assert 0.6 < links[1] / links[0] < 0.8  # of 2 + 2 + 4 bytes an element in each micro-step, 2 less
    before, after = (setting.need().on_device() for setting in (plain, narrow))
    assert after["parameters"] < 0.65 * before["parameters"]
    assert after["gathered units"] < before["gathered units"]
    assert after["moves"] < 0.5 * before["moves"]
    for term in ("gradients", "masters", "optimizer state", "activations"):
        assert after[term] == before[term], term


def test_new_values_are_never_moves() -> None:
    """0.33 of 2 bytes is less than 1: refreshes take longer."""
    plain, narrow = (StepCosts(_setting(float8=on)) for on in (False, True))
    unit = _setting(float8=True).model.units[2]
    refreshed = [
        sum(stage.cost.inter_nbytes for stage in costs.refresh(each))
        for costs, each in ((plain, replace(unit, in_float8=False)), (narrow, unit))
    ]
    assert refreshed[1] / refreshed[0] == pytest.approx(1 / 0.66, rel=0.02)
    staged = _setting(float8=True, partition_size=32, compression=mics.Compression(inter_gather="int8"))
    names = {task.name for task in predict(staged).tasks}
    assert f"encode gather {staged.model.units[2].name}" not in names
    assert any(name.startswith("encode gather") for name in names), "the head is rounded"
    assert StepCosts(staged).moves(Kind.ALL_GATHER, unit.gathered_nbytes(2))


@pytest.mark.parametrize("system", ["hsdp", "fsdp2", "zero3", "zero2", "megatron-fsdp"])
def test_peers_that_can(system: str) -> None:
    """FSDP2 gathers in float8 too; DeepSpeed and Megatron-FSDP are asked for none."""
    can = system in ("hsdp", "fsdp2")
    models = [named_shape("gpt-20b").with_float8(on) for on in (False, True)]
    adapted = SYSTEMS[system].adapt(_setting(model=models[1]))
    assert any(unit.in_float8 for unit in adapted.model.units) is can
    plain, narrow = (
        SYSTEMS[system].need(_setting(model=model)).on_device()["gathered units"] for model in models
    )
    assert narrow < plain if can else narrow == plain


def test_advice_converts_the_model() -> None:
    """Before it is sharded."""
    setting = _setting(float8=True)
    code = advice(Choice(prediction=predict(setting), memory=setting.memory(), limited_by="compute"))
    assert code.index("convert_to_float8_training(") < code.index("mics.shard(model")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, with what is assumed beside it; GPUs without float8 and what cannot go with it are errors."""
    asked = ["plan", "--model", "gpt-1.3b", "--global-batch", "64", "--float8"]
    assert main([*asked, "--cluster", "dgx-h100:2", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["choices"][0]["float8"] is True
    assert "as fast as in bfloat16" in printed.err
    for more, problem in (
        (["--cluster", "p4d.24xlarge:2"], "--float8: expected GPUs of compute capability 8.9 or more, found"),
        (
            ["--cluster", "dgx-h100:2", "--optimizer-state", "host"],
            "expected device with --float8, found host",
        ),
        (["--cluster", "dgx-h100:2", "--write", "run.yaml"], "--write: expected a model that mics train"),
    ):
        assert main([*asked, *more]) == 2
        assert problem in capsys.readouterr().err
