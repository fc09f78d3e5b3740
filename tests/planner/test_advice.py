"""What `mics plan` prints as advice is code: it runs, and trains as plain torch does."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import mics
from mics.cli import main
from mics.comm.quantized import Quantized
from mics.cost.clusters import PRESETS, Cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape, shape_of_config
from mics.engine import engine_of
from mics.layout.compression import LOSSLESS, UNCOMPRESSED
from mics.models import GPT, GPTConfig
from mics.planner.advice import advice, launch
from mics.planner.search import Choice, Request, search
from mics.planner.systems import predict_quickly
from mics.sharding.spec import UnitSpec
from tests import pairwise
from tests.ranks import run_ranks

_SHAPE: Final = GPTConfig(num_layers=3, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8)
_POLICIES: Final = {
    "kept": Keeping(checkpoint=False),
    "checkpoint": Keeping(checkpoint=True),
    "offload": Keeping(checkpoint=True, offload=True),
}
_INT8: Final = mics.Compression(hop2="int8", inter_gather="int8", inter_reduce="int8")
_NUM_STEPS: Final = 3


def _choice(setting: Setting) -> Choice:
    return Choice(prediction=predict_quickly(setting), memory=setting.memory(), limited_by="compute")


def _setting(cluster: Cluster, **other: Any) -> Setting:
    return Setting(cluster=cluster, micro_batch=2, accumulation=2, **other)


def _batches(rank: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(32, (_NUM_STEPS, 2, 2, 9), generator=generator)
    return [[(rows[:, :-1], rows[:, 1:]) for rows in step] for step in tokens]


def _run(code: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Execute it on the calling rank: the parameters afterwards, and what was built."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": GPT(_SHAPE), "steps": _batches(dist.get_rank())}
    exec(compile(code, "advice", "exec"), names)
    model = names["model"]
    engine = engine_of(model)
    activations = engine.activations
    built = {
        "partition size": engine.topology.partition_size,
        "over replicas": engine.units[0].share.masters_over_replicas,
        "units of a block": sum(
            unit.spec.layout.numel >= 256 for unit in engine.units if "blocks.0" in unit.spec.name
        ),
        "recomputed": 0 if activations is None else len(activations.recomputed),
        "offloads": activations is not None and activations.offloader is not None,
        "wire": engine.units[0].spec.reduce_dtype.itemsize,
        "format": str(engine.units[0].spec.param_dtype),
        "rounds": _rounds(engine.units[0].spec),
    }
    return mics.full_state_dict(model, rank0_only=False), built


def _rounds(spec: UnitSpec) -> tuple[bool, bool]:
    """Between replicas, and between nodes of the partition group, where both do."""
    between_nodes = {isinstance(codec, Quantized) for codec in (spec.gather, spec.hop_1)}
    assert len(between_nodes) == 1
    return isinstance(spec.hop_2, Quantized), between_nodes.pop()


def _train_alone(num_ranks: int) -> dict[str, torch.Tensor]:
    """The same in plain torch: all ranks' batches in one process."""
    torch.manual_seed(0)
    model = GPT(_SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    every = [_batches(rank) for rank in range(num_ranks)]
    for step in range(_NUM_STEPS):
        pairs = [pair for rank in range(num_ranks) for pair in every[rank][step]]
        for tokens, targets in pairs:
            (model(tokens, targets) / len(pairs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pairwise.parametrize(
    strength=1,
    full_strength=2,
    activations=list(_POLICIES),
    parts=[1, 3],
    partition_size=[1, 2, 4],
    wire=[4, 2],
    over_replicas=[True, False],
    prefetch=[None, 1],
    compression=[LOSSLESS, _INT8, UNCOMPRESSED],
)
def test_advice_runs_and_trains_as_plain_torch(
    activations: str,
    parts: int,
    partition_size: int,
    wire: int,
    over_replicas: bool,
    prefetch: int | None,
    compression: mics.Compression,
) -> None:
    """On two nodes of two ranks. Nothing is filled in: the model is that of mics.models."""
    cluster = replace(PRESETS["p4d.24xlarge"], num_nodes=2, ranks_per_node=2)
    setting = _setting(
        cluster,
        model=shape_of_config("gpt", _SHAPE).split(parts),
        partition_size=partition_size,
        activations=_POLICIES[activations],
        wire_nbytes=wire,
        over_replicas=over_replicas,
        prefetch=prefetch,
        compression=compression,
    )
    code = advice(_choice(setting))
    found = run_ranks(4, _run, code, ranks_per_node=2)
    expected = _train_alone(4)
    for parameters, built in found:
        assert built == {
            "partition size": partition_size,
            "over replicas": over_replicas,
            "units of a block": parts,
            "recomputed": 0 if activations == "kept" else 3,
            "offloads": activations == "offload",
            "wire": wire,
            "format": "torch.float32",  # on a CPU; on GPUs bfloat16
            "rounds": (
                compression.is_lossy and partition_size < 4,
                compression.is_lossy and partition_size == 4,
            ),
        }
        near = 7e-3 if compression.is_lossy else 1e-5 if wire == 4 else 5e-3
        for name, value in parameters.items():
            assert (value - expected[name]).abs().max() < near, name


@pytest.mark.parametrize(
    ("partition_size", "kept", "left_out"),
    [
        (16, ("inter_gather", "inter_reduce"), ("hop2", "replica_reduce_dtype")),  # one replica
        (8, ("hop2",), ("inter_gather", "inter_reduce")),  # every group on one node
    ],
)
def test_formats_in_which_nothing_is_sent_are_left_out(
    partition_size: int, kept: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    """What it prints changes what happens."""
    setting = _setting(
        replace(PRESETS["p4d.24xlarge"], num_nodes=2),
        model=shape_of_config("gpt", _SHAPE),
        partition_size=partition_size,
        activations=Keeping(checkpoint=False),
        wire_nbytes=2,
        compression=replace(_INT8, hop2_error_feedback=False),
    )
    code = advice(_choice(setting))
    assert [name for name in kept if name not in code] == []
    assert [name for name in left_out if name in code] == []
    alone = replace(setting, cluster=replace(setting.cluster, num_nodes=1), partition_size=8)
    for compression in (_INT8, UNCOMPRESSED):
        assert "Compression" not in (code := advice(_choice(replace(alone, compression=compression))))
        assert "compression" not in code


@pytest.mark.parametrize("wire", [2, 4])
def test_a_gpu_without_bfloat16_gets_float16_and_a_scaler(wire: int) -> None:
    """V100: the code names no format that it lacks, and runs."""
    setting = _setting(
        replace(PRESETS["p3dn.24xlarge"], num_nodes=1, ranks_per_node=2),
        model=shape_of_config("gpt", _SHAPE),
        partition_size=2,
        activations=Keeping(checkpoint=False),
        wire_nbytes=wire,
    )
    code = advice(_choice(setting))
    assert "torch.bfloat16" not in code and "scaler.step(optimizer)" in code
    assert "# A V100 has no bfloat16: train in float16, with a GradScaler." in code
    for parameters, built in run_ranks(2, _run, code):
        assert built["format"] == "torch.float16" and built["wire"] == wire
        assert all(value.isfinite().all() for value in parameters.values())


_TRAIN: Final = f"""
import torch
import torch.distributed as dist

from mics.models import GPT, GPTConfig
from tests.planner.test_advice import _batches

dist.init_process_group("gloo")
torch.manual_seed(0)
model, steps = GPT({_SHAPE!r}), _batches(dist.get_rank())
"""
_TOLD: Final = """
norm = sum(float(p.norm()) ** 2 for p in mics.full_state_dict(model, rank0_only=False).values()) ** 0.5
print(f"rank {dist.get_rank()}: {norm:.4f}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.long  # the printed code runs in the tests above
def test_the_printed_line_starts_the_printed_code(tmp_path: Path) -> None:
    """Both as they stand: the line in a shell, the code as train.py after a model and data."""
    setting = _setting(
        replace(PRESETS["p4d.24xlarge"], num_nodes=1, ranks_per_node=2),
        model=shape_of_config("gpt", _SHAPE),
        partition_size=2,
        activations=Keeping(checkpoint=True),
    )
    code = advice(_choice(setting))
    (tmp_path / "train.py").write_text(_TRAIN + code + _TOLD)
    line = code.splitlines()[0].removeprefix("# ")
    assert line == "MICS_CLUSTER=p4d.24xlarge torchrun --standalone --nproc-per-node 2 train.py"
    root = Path(__file__).resolve().parents[2]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env={**os.environ, **path, "PYTHONPATH": f"{root / 'src'}:{root}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    norm = sum(float(value.norm()) ** 2 for value in _train_alone(2).values()) ** 0.5
    assert sorted(found.stdout.splitlines()) == [f"rank {rank}: {norm:.4f}" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("model", "cluster", "rows", "wire"),
    [
        ("gpt-1.3b", "p4d.24xlarge", 6, 4),
        ("gpt-13b", "p4d.24xlarge", 4, 2),
        ("gpt-6.7b", "p3dn.24xlarge", 3, 4),
        ("gpt-20b", "p3dn.24xlarge", 8, 2),
    ],
)
def test_every_choice_of_a_search_divides_and_parses(model: str, cluster: str, rows: int, wire: int) -> None:
    """Groups fill the world, the batch is the one that was asked for, and the launch line has every GPU."""
    machine = replace(PRESETS[cluster], num_nodes=4)
    request = Request(
        model=named_shape(model), cluster=machine, global_batch=rows * machine.world_size, wire_nbytes=wire
    )
    choices = search(request).choices
    assert choices
    for choice in choices:
        code, setting = advice(choice), choice.setting
        ast.parse(code)
        assert max(map(len, code.splitlines())) <= 100
        assert machine.world_size % setting.partition_size == 0
        assert setting.micro_batch * setting.accumulation * machine.world_size == request.global_batch
        words = shlex.split(" ".join(line.rstrip("\\") for line in launch(setting)))
        nodes, ranks = (int(words[words.index(flag) + 1]) for flag in ("--nnodes", "--nproc-per-node"))
        assert nodes * ranks == machine.world_size
        assert words[0] == f"MICS_CLUSTER={cluster}"


def test_plan_prints_it_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal in one piece, in the JSON, and on the page."""
    page = tmp_path / "plan.html"
    arguments = ["plan", "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:2", "--global-batch", "32"]
    assert main([*arguments, "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    code = json.loads(capsys.readouterr().out)["advice"]
    ast.parse(code)
    assert code in re.sub(r" +\n", "\n", printed)
    assert "<pre><code># MICS_CLUSTER=p4d.24xlarge torchrun --nnodes 2 " in page.read_text()
