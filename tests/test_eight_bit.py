"""8-bit Adam of torchao and of bitsandbytes on shards: the state of one process, to the bit."""

from __future__ import annotations

import io
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mics
from mics.errors import CheckpointError
from mics.fsdp.state_dict import get_optimizer_state_dict
from tests import toys
from tests.compare import assert_trains_like_plain
from tests.ranks import run_ranks
from tests.reference import Outcome, Recipe, Sharding, State, plain_state

LIBRARIES = ["torchao", "bitsandbytes"]
NARROW = {"torchao": ["up.weight", "table"], "bitsandbytes": ["up.weight", "table", "down.weight"]}
"""Parameters of `Wide` that have 8-bit state."""


class Wide(nn.Module):
    """Matrices of whole blocks and not, smaller and larger than pieces, beside small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.full((5,), 0.1))  # what follows would begin at 8 elements
        self.up = nn.Linear(64, 80)  # 20 blocks, and on each of 4 ranks fewer than 4,096 elements
        self.down = nn.Linear(80, 67)  # 20 blocks and 240 elements: 8 bits in bitsandbytes alone
        self.table = nn.Parameter(torch.linspace(-1, 1, 4352))  # 17 blocks in one dimension
        self.head = nn.Linear(67, 7)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scale = 1 + self.table.view(-1, 64).mean(0) * self.start.sum()
        return nn.functional.mse_loss(self.head(self.down(self.up(x * scale).relu()).relu()), target)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = toys.seeded(step, micro, rank)
    return torch.randn(2, 64, generator=generator), torch.randn(2, 7, generator=generator)


def make(library: str, model: nn.Module, kind: str = "AdamW8bit", **options: Any) -> torch.optim.Optimizer:
    """An optimizer of a library, without the compiler, which takes long for each shape."""
    torch.compiler.set_stance("force_eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = getattr(import_module(f"{library}.optim"), kind)(groups, lr=1e-2, **options)
    return made


@pytest.mark.parametrize("library", LIBRARIES)
def test_trains_as_in_one_process(library: str) -> None:
    """Losses, parameters, codes and scales are equal: shards are cut between blocks."""
    pytest.importorskip(library)
    recipe = Recipe(build=Wide, batch=batch, optimizer=partial(make, library), num_steps=3, accumulation=2)
    shardings = [
        Sharding(partition_size=1),
        Sharding(partition_size=2),
        Sharding(partition_size=2, optimizer_sharding="partition"),
        Sharding(partition_size=4),
    ]
    for outcome in assert_trains_like_plain(recipe, shardings=shardings):
        _check_narrow(library, outcome)


def _check_narrow(library: str, outcome: Outcome) -> None:
    """Large parameters have codes of a byte, and a scale for each 256 elements; small ones have floats."""
    codes, scales = ("exp_avg.codes", "exp_avg.scale") if library == "torchao" else ("state1", "absmax1")
    wide = "exp_avg" if library == "torchao" else "state1"
    state = outcome.optimizer_state
    for name, entries in state.items():
        if name in NARROW[library]:
            assert entries[codes].dtype is torch.uint8
            assert len(entries[scales]) == -(-entries[codes].numel() // 256)
            assert entries[codes].unique().numel() > 16
        else:
            assert entries[wide].dtype is torch.float32
            assert scales not in entries
    assert state.keys() == outcome.parameters.keys()


# ---------------------------------------------------------------------------------------------
# Checkpoints, whole state, memory
# ---------------------------------------------------------------------------------------------


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """On all ranks the same: 1, 2 and 4 equal gradients have one mean, to the bit."""
    losses = []
    for step in steps:
        loss = model(*batch(step, 0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain(library: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Wide()
    return model, make(library, model)


def _sharded(library: str, partition_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mics.shard(Wide(), partition_size=partition_size)
    return model, make(library, model)


def _begin(libraries: list[str], folder: str) -> list[tuple[list[float], Any]]:
    """Three steps, and a checkpoint of them."""
    found = []
    for library in libraries:
        model, optimizer = _sharded(library, 4)
        losses = _steps(model, optimizer, range(3))
        mics.save(f"{folder}/{library}", model, optimizer)
        term = mics.memory_report(model, show=False)["optimizer state"]
        found.append((losses, term))
        with pytest.raises(mics.MicsError, match=r"mics\.save"):
            torch.save(optimizer.state_dict(), io.BytesIO())
        with pytest.raises(mics.SettingsError, match="get_optimizer_state_dict: optimizers: expected"):
            get_optimizer_state_dict(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # this rank's own
        _steps(model, optimizer, range(3, 4))
    return found


def _go_on(libraries: list[str], folder: str) -> list[tuple[list[float], State, State]]:
    """Three more from there, by another partition size."""
    found = []
    for library in libraries:
        model, optimizer = _sharded(library, 1)
        mics.load(f"{folder}/{library}", model, optimizer)
        losses = _steps(model, optimizer, range(3, 6))
        whole = {n: plain_state(s) for n, s in mics.full_optimizer_state_dict(model, optimizer).items()}
        found.append((losses, mics.full_state_dict(model), whole))
    for library in libraries:
        _load_whole(library)
    if len(libraries) > 1:
        model, optimizer = _sharded("torchao", 2)
        with pytest.raises(CheckpointError, match=r"expected the state of AdamW8bit .*codes.*found .*state1"):
            mics.load(f"{folder}/bitsandbytes", model, optimizer)
    return found


def _load_whole(library: str) -> None:
    """``optimizer.state_dict()`` of one process goes on here."""
    plain, plain_optimizer = _plain(library)
    _steps(plain, plain_optimizer, range(2))
    model, optimizer = _sharded(library, 2)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(_read_again(plain_optimizer))
    expected = _steps(plain, plain_optimizer, range(2, 4))
    assert _steps(model, optimizer, range(2, 4)) == expected
    wrong = _read_again(plain_optimizer)
    state = wrong["state"][0]  # of up.weight
    if library == "torchao":
        state["exp_avg"] = plain_optimizer.state[plain.table]["exp_avg"]
    else:
        state["__bnb_optimizer_quant_state__"]["state1"] = plain_optimizer.state[plain.table]["state1"]
    optimizer.load_state_dict(wrong)
    with pytest.raises(mics.SettingsError, match="expected the piece of it that this rank has"):
        _steps(model, optimizer, range(4, 5))


def _read_again(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state by way of a file: torchao's cannot be copied."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_checkpoint_of_four_ranks_on_two(tmp_path: Path) -> None:
    """Goes on as one process that was never interrupted, to the bit; the state takes a byte a moment."""
    libraries = [library for library in LIBRARIES if find_spec(library) is not None]
    if not libraries:
        pytest.skip("neither torchao nor bitsandbytes is installed")
    began = run_ranks(4, _begin, libraries, str(tmp_path))
    ended = run_ranks(2, _go_on, libraries, str(tmp_path))[0]
    for number, library in enumerate(libraries):
        model, optimizer = _plain(library)
        losses = _steps(model, optimizer, range(6))
        assert began[0][number][0] + ended[number][0] == losses
        names = {param: name for name, param in model.named_parameters()}
        state = {names[param]: plain_state(found) for param, found in optimizer.state.items()}
        torch.testing.assert_close(ended[number][1], dict(model.state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(ended[number][2], state, rtol=0, atol=0)
        terms = [rank[number][1] for rank in began]
        assert "8-bit Adam" in terms[0].about
        numels = {name: p.numel() for name, p in model.named_parameters()}
        narrow = [numels[name] for name in NARROW[library]]
        exact = 8 * (sum(numels.values()) - sum(narrow)) + sum(2 * n + 8 * -(-n // 256) for n in narrow)
        assert sum(term.predicted for term in terms) == pytest.approx(exact, abs=16)
        tables = 2 * 4 * 256  # what codes stand for; none on a rank with floats alone
        assert sum(term.measured for term in terms) - exact in range(0, 5 * tables, tables)


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "kind", "options", "problem"),
    [
        ("torchao", "AdamW8bit", {"block_size": 512}, "block_size: expected a divisor of 256, found 512"),
        ("torchao", "AdamW4bit", {}, "AdamW4bit cannot train a sharded model"),
        ("torchao", "AdamWFp8", {}, "AdamWFp8 cannot train a sharded model"),
        ("bitsandbytes", "AdamW8bit", {"min_8bit_size": 256}, "min_8bit_size: expected 4096 or more"),
        ("bitsandbytes", "AdamW8bit", {"is_paged": True}, "is_paged: expected False"),
        ("bitsandbytes", "LAMB8bit", {}, "expected Adam or AdamW, found 'lamb'"),
        ("bitsandbytes", "Lion8bit", {}, "Lion8bit cannot train a sharded model"),
    ],
)
def test_refused(library: str, kind: str, options: dict[str, Any], problem: str) -> None:
    """Before the first step."""
    pytest.importorskip(library)
    model = mics.shard(Wide())
    optimizer = make(library, model, kind, **options)
    model(*batch(0, 0, 0)).backward()
    before = mics.full_state_dict(model)
    with pytest.raises(mics.SettingsError, match=problem):
        optimizer.step()
    torch.testing.assert_close(mics.full_state_dict(model), before, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------


def _on_gpu(library: str, partition_size: int | None) -> tuple[list[float], set[torch.dtype], set[str]]:
    """Losses of ten steps on one batch; dtypes and devices of the optimizer's state. None: without mics."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model: nn.Module = Wide().cuda()
    if partition_size is not None:
        precision = mics.Precision(param_dtype=torch.float32)
        mics.shard(model, partition_size=partition_size, precision=precision)
    optimizer = make(library, model)
    given = [each.cuda() for each in batch(0, 0, 0)]
    losses = []
    for _ in range(10):
        loss = model(*given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    entries = [value for state in optimizer.state.values() for value in state.values()]
    kept = [getattr(value, "codes", value) for value in entries if isinstance(value, Tensor) and value.dim()]
    return losses, {each.dtype for each in kept}, {each.device.type for each in kept}


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
def test_as_without_mics_under_nccl(library: str) -> None:
    """State in 8 bits on the device, in shards of ranks; losses of one process with the same kernels.

    Not those of another optimizer: bitsandbytes' kernels for GPUs train this model otherwise than its CPU's.
    """
    pytest.importorskip(library)
    ((plain, _, _),) = run_ranks(1, _on_gpu, library, None, backend="nccl")
    assert plain[-1] < 0.2 * plain[0]
    for partition_size in (1, 2):
        found = run_ranks(2, _on_gpu, library, partition_size, backend="nccl")
        for losses, _, devices in found:
            assert losses == pytest.approx(plain, rel=1e-3)
            assert devices == {"cuda"}
        assert any(torch.uint8 in dtypes for _, dtypes, _ in found)
