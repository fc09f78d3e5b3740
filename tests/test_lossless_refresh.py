"""New parameters go to the replicas as moves: the same bits in fewer bytes, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.engine import engine_of, units_of
from mics.sharding.unit import State
from tests import toys
from tests.ranks import run_expecting_error, run_ranks

_DIM = 96
_ALL_STAY = mics.Prefetch(units=1, stay_nbytes=1 << 30)
_SOME_STAY = mics.Prefetch(units=1, stay_nbytes=90_000)
Happening = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_DIM, _DIM), nn.Linear(_DIM, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[3].up.weight = self.blocks[2].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def _train(
    refresh: str | None,
    happens: Happening = _nothing,
    *,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 8,
    accumulation: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-5,
    device: str = "cpu",
    announced: bool = True,
    axis: str = "replication",
    audit_interval: int = 1,
    **settings: Any,
) -> tuple[list[Tensor], dict[str, Tensor], Any, list[int]]:
    """Losses, parameters, optimizer state, and bytes of each step's gathers along an axis of the mesh."""
    torch.manual_seed(0)
    model = mics.shard(
        _Model().to(device),
        precision=mics.Precision(param_dtype=dtype),
        compression=mics.Compression(refresh=refresh),  # type: ignore[arg-type]
        audit_interval=audit_interval,
        **settings,
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizers = [optimizer(trained[:3], lr=lr), optimizer(trained[3:], lr=lr)]  # type: ignore[call-arg]
    losses, nbytes = [], []
    for step in range(steps):
        micros = range(accumulation)
        for micro in mics.microsteps(model, micros) if announced else micros:
            x, y = toys.floats(step, micro, dist.get_rank(), dim=_DIM, batch=4)
            loss = (model(x.to(device, dtype)) - y.to(device)).square().mean() / accumulation
            loss.backward()
            losses.append(loss.detach().cpu())
        for each in optimizers:
            each.step()
            each.zero_grad()
        nbytes.append(_sent_nbytes(model, axis))
        happens(model, optimizers[1], step)
    mics.audit_replicas(model)
    whole = mics.full_state_dict(model, rank0_only=False)
    state = [mics.full_optimizer_state_dict(model, each, rank0_only=False) for each in optimizers]
    return losses, whole, state, [late - early for early, late in pairwise(nbytes)]


def _sent_nbytes(model: nn.Module, axis: str) -> int:
    return mics.traffic(model).nbytes.get((axis, "all_gather"), 0)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _compare(happens: Happening = _nothing, **settings: Any) -> tuple[bool, list[float]]:
    """Whether all is equal, and the bytes of each step's new values with moves over those without."""
    *moved, by_moves = _train("lossless", happens, **settings)
    *plain, as_they_are = _train(None, happens, **settings)
    return _equal(moved, plain), [
        one / max(1, other) for one, other in zip(by_moves, as_they_are, strict=True)
    ]


def _check(found: list[tuple[bool, list[float]]], *, at_most: float) -> None:
    assert all(equal for equal, _ in found)
    assert all(shares[-1] <= at_most for _, shares in found), found


@pytest.mark.parametrize(
    ("partition_size", "settings"),
    [
        (1, {}),
        (2, {"accumulation": 2}),
        (2, {"dtype": torch.float16}),
        pytest.param(2, {"prefetch": 0}, marks=pytest.mark.full),
        pytest.param(2, {"low_memory": True}, marks=pytest.mark.full),
        pytest.param(2, {"optimizer": torch.optim.SGD, "lr": 0.001}, marks=pytest.mark.full),
    ],
)
def test_same_bits_in_fewer_bytes(partition_size: int, settings: dict[str, Any]) -> None:
    """Over partition sizes, accumulation, formats and optimizers; frozen and tied parameters among them."""
    options = {"partition_size": partition_size, **settings}
    _check(run_ranks(4, _compare, kwargs=options), at_most=0.75)


@pytest.mark.long
def test_same_bits_after_two_hundred_steps() -> None:
    """A rate that rises, falls and jumps: rooms grow and shrink, and some steps do not fit."""
    _check(run_ranks(4, _compare, _wander, kwargs={"partition_size": 2, "steps": 200}), at_most=1.0)


def _wander(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-6 * (1 + step % 50) ** (2 if step % 7 else 1)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"partition_size": 4}, {"optimizer_sharding": "partition"}])
def test_nothing_to_send(settings: dict[str, Any]) -> None:
    """One replica, or masters that every replica has."""
    _check(run_ranks(4, _compare, kwargs={"partition_size": 2, **settings}), at_most=1.0)


def _jump(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Moves that no room was made for."""
    optimizer.param_groups[0]["lr"] = 0.5 if step == 4 else 1e-5


def _edit(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in (3, 5):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5 if step == 3 else -1.0)


def _write(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 4:
        with mics.summon_full_params(model, write=True):
            model.blocks[0].up.weight.fill_(float("-0.0"))
        assert all(value.isfinite().all() for _, value in mics.iter_full_params(model))


def _write_past_us(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A forward that changes ``weight.data`` a little, on each rank in its own way: nobody is told."""

    def change(module: nn.Module, args: Any) -> None:
        module.weight.data.mul_(1 + (1 + dist.get_rank()) / 64)  # type: ignore[operator, union-attr]

    if step == 2:
        model.hooks = [block.down.register_forward_pre_hook(change) for block in model.blocks]
    if step == 5:
        for hook in model.hooks:
            hook.remove()


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The first to look whether moves fitted."""
    optimizer.param_groups[0]["lr"] *= 2
    with torch.inference_mode():
        model(torch.zeros(1, _DIM, dtype=torch.bfloat16, device=next(model.parameters()).device))


@pytest.mark.parametrize(
    "happens", [_jump, _evaluate, *(pytest.param(each, marks=pytest.mark.full) for each in (_edit, _write))]
)
def test_values_that_leap(happens: Happening) -> None:
    """A learning rate that jumps, evaluations, edits, and whole parameters written."""
    found = run_ranks(4, _compare, happens, kwargs={"partition_size": 2})
    _check(found, at_most=1.1)
    if happens is _jump:
        assert all(max(shares) > 1.1 for _, shares in found), "moves that did not fit, and values after them"


@pytest.mark.parametrize(
    ("happens", "settings"),
    [
        (_nothing, {"accumulation": 2}),
        (_jump, {}),
        (_evaluate, {}),
        (_edit, {}),
        *(pytest.param(each, {}, marks=pytest.mark.full) for each in (_write, _write_past_us)),
        pytest.param(_jump, {"announced": False, "accumulation": 2}, marks=pytest.mark.full),
        pytest.param(_nothing, {"prefetch": mics.Prefetch(units=3)}, marks=pytest.mark.full),
        pytest.param(_nothing, {"low_memory": True}, marks=pytest.mark.full),
        pytest.param(_wander, {"steps": 200}, marks=pytest.mark.long),
    ],
)
def test_moves_that_wait_for_their_turn(happens: Happening, settings: dict[str, Any]) -> None:
    """Where gathers and moves share the network: partition groups over nodes, with replicas."""
    options = {"partition_size": 2, "audit_interval": 0, **settings}
    found = run_ranks(4, _compare, happens, ranks_per_node=1, kwargs=options)
    _check(found, at_most=1.1)
    if happens is _jump and not settings:
        assert all(max(shares) < 1.45 for _, shares in found), "what does not fit is sent once, as it is"


def _one_looks(refresh: Literal["lossless"] | None) -> list[dict[str, Tensor]]:
    """Whole parameters after each step, and after one rank has looked at its part of a gradient."""
    torch.manual_seed(0)
    model = mics.shard(
        _Model(),
        partition_size=2,
        precision=mics.Precision(param_dtype=torch.bfloat16),
        compression=mics.Compression(refresh=refresh),
    )
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-5)
    found = []
    for step in range(4):
        x, y = toys.floats(step, 0, dist.get_rank(), dim=_DIM, batch=4)
        (model(x.bfloat16()) - y).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            assert model.blocks[0].down.weight.grad.to_local().isfinite().all()
        found.append(mics.full_state_dict(model, rank0_only=False))
        optimizer.zero_grad()
    return found


def _both_look() -> bool:
    return _equal(_one_looks("lossless"), _one_looks(None))


def test_one_rank_looks_at_gradients_while_moves_wait() -> None:
    """They are summed by then, so nobody else must come: moves stay where they are."""
    assert run_ranks(4, _both_look, ranks_per_node=1) == [True] * 4


def _sent_in_turn() -> list[float]:
    """Of the bytes of a step's moves: those sent by the end of the step, of a forward, of a backward."""
    model = mics.shard(
        _Model(),
        partition_size=2,
        precision=mics.Precision(param_dtype=torch.bfloat16),
        prefetch=1,
        audit_interval=0,
    )
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-5)
    for step in range(6):
        x, y = toys.floats(step, 0, dist.get_rank(), dim=_DIM, batch=4)
        output = model.blocks[0](x.bfloat16()) if step == 5 else model(x.bfloat16())
        if step == 5:
            forward = _sent_nbytes(model, "replication")
        (output - y).square().mean().backward()
        if step == 5:
            backward = _sent_nbytes(model, "replication")
            break
        before = _sent_nbytes(model, "replication")
        optimizer.step()
        optimizer.zero_grad()
        after = _sent_nbytes(model, "replication")
    return [after - before, forward - before, backward - before]


def test_moves_wait_until_their_unit_is_gathered() -> None:
    """The first unit's go with the step, others before their gather, the rest before gradients do."""
    for step, forward, backward in run_ranks(4, _sent_in_turn, ranks_per_node=1):
        assert 0 < step < forward < backward, (step, forward, backward)
        assert step < 0.5 * backward
    for step, _, backward in run_ranks(4, _sent_in_turn, ranks_per_node=2):
        assert step == backward > 0, "inside a node gathers do not wait for moves"


def test_weights_that_a_forward_changes() -> None:
    """Where it computes with the memory that moves are of."""
    found = run_ranks(2, _compare, _write_past_us, kwargs={"partition_size": 1, "audit_interval": 0})
    _check(found, at_most=1.0)


@pytest.mark.parametrize(
    ("happens", "settings"),
    [
        (_nothing, {"accumulation": 2}),
        (_jump, {}),
        (_write_past_us, {}),
        (_jump, {"prefetch": _SOME_STAY, "lr": 1e-4}),
        *(pytest.param(each, {}, marks=pytest.mark.full) for each in (_evaluate, _edit, _write)),
        *(
            pytest.param(each, {"prefetch": _SOME_STAY}, marks=pytest.mark.full)
            for each in (_nothing, _evaluate, _edit, _write, _write_past_us)
        ),
        pytest.param(_nothing, {"dtype": torch.float16, "announced": False}, marks=pytest.mark.full),
        pytest.param(_wander, {"steps": 200}, marks=pytest.mark.long),
    ],
)
def test_units_that_stay_over_a_step(happens: Happening, settings: dict[str, Any]) -> None:
    """Where there are no replicas, and partition groups span nodes: moved, not gathered anew, to the bit."""
    options = {"partition_size": 4, "prefetch": _ALL_STAY, "audit_interval": 0, **settings}
    found = run_ranks(4, _compare, happens, ranks_per_node=2, kwargs={"axis": "partition", **options})
    assert all(equal for equal, _ in found)
    if happens is _nothing and settings.get("announced", True) and "prefetch" not in settings:
        # The frozen weight is gathered as it is, and values of which two optimizers have parts.
        assert all(shares[-1] < 0.75 for _, shares in found), found
    if happens is _jump and "prefetch" not in settings:
        assert all(shares[5] > 1.2 * shares[4] for _, shares in found), "gathers after moves that did not fit"


def _gathers_anew() -> list[int]:
    """Bytes that units took in each step, of two optimizers, where every third gathers."""
    options: dict[str, Any] = {"partition_size": 4, "prefetch": _ALL_STAY, "audit_interval": 6, "steps": 10}
    return _train("lossless", axis="partition", **options)[3]


def test_now_and_then_they_are_gathered_anew() -> None:
    """Else a bit that flips in a copy would stay for ever."""
    for found in run_ranks(4, _gathers_anew, ranks_per_node=2):
        anew = [step for step, nbytes in enumerate(found) if step > 2 and nbytes > 0.75 * max(found[3:])]
        assert anew == [4, 7], found


def _resume(folder: str) -> list[bool]:
    """Save with moves, go on without, and the other way round."""
    found = []
    for first, second in (("lossless", None), (None, "lossless")):

        def happens(
            model: nn.Module, optimizer: torch.optim.Optimizer, step: int, to: str = str(first)
        ) -> None:
            if step == 3:
                mics.save(f"{folder}/{to}", model)
            if step == 6:
                mics.load(f"{folder}/{to}", model)

        one, other = _train(first, happens, partition_size=2), _train(second, happens, partition_size=2)
        found.append(_equal(one[:3], other[:3]))
    return found


@pytest.mark.full
def test_a_loaded_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(4, _resume, str(tmp_path)) == [[True, True]] * 4


def _one_cannot() -> bool:
    with patch("mics.config.moves_work", lambda device: dist.get_rank() != 1):
        model = mics.shard(_Model(), partition_size=1, precision=mics.Precision(param_dtype=torch.bfloat16))
    return engine_of(model).step.moved is None


def test_values_are_sent_where_one_rank_cannot_make_moves() -> None:
    """As one whose machine has no C compiler for Triton."""
    assert run_ranks(2, _one_cannot) == [True, True]


class _WithNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.ParameterList([nn.Parameter(torch.empty(0))])
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + self.nothing[0].sum()


def _train_with_nothing(compression: mics.Compression, partition_size: int) -> bool:
    model = _WithNothing()
    precision = mics.Precision(param_dtype=torch.bfloat16)
    mics.shard(
        model,
        partition_size=partition_size,
        units=[model.nothing, model.up],
        precision=precision,
        compression=compression,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mics.audit_replicas(model)
    return True


@pytest.mark.parametrize(
    ("compression", "partition_size"),
    [
        (mics.Compression(), 1),
        (mics.Compression(hop2="int8"), 1),
        (mics.Compression(hop2="bf16"), 1),
        (mics.Compression(inter_gather="int8", inter_reduce="int8"), 2),
    ],
)
def test_a_unit_without_elements(compression: mics.Compression, partition_size: int) -> None:
    assert all(run_ranks(2, _train_with_nothing, compression, partition_size, ranks_per_node=1))


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(mics.SettingsError, match=r'refresh: expected "lossless" or None, found \'int3\''):
        mics.Compression(refresh="int3")  # type: ignore[arg-type]
    error = run_expecting_error(2, _with, "lossless")
    assert "compression: expected a mics.Compression or None, found 'lossless'" in str(error)


def _with(compression: Any) -> None:
    mics.shard(nn.Linear(4, 4), compression=compression)


def _emulated(partition_size: int) -> list[bool]:
    """Of each unit, after each of a few steps: whether its values are such as weights have."""
    with mics.emulate("p4d.24xlarge:2"):
        torch.manual_seed(0)
        model = mics.shard(
            _Model(),
            partition_size=partition_size,
            prefetch=mics.Prefetch(units=1, stay_nbytes=1 << 30),
            precision=mics.Precision(param_dtype=torch.bfloat16),
            compression=mics.Compression(refresh="lossless"),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for step in range(5):
            x, y = toys.floats(step, 0, 0, dim=_DIM, batch=4)
            (model(x.bfloat16()) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values = [unit.arrived_params() for unit in units_of(model)]
            for unit in units_of(model):
                if unit.state is State.GATHERING:
                    unit.gathered_at.wait()
                    values.append(unit.whole.flat)
            found += [bool(each.isfinite().all()) and float(each.abs().max()) < 1 for each in values]
        assert engine_of(model).step.moved is not None
        term = mics.memory_report(model, show=False)["moves"]
        assert term.measured and term.predicted is None and term.about.endswith(": no prediction")
        return found


@pytest.mark.parametrize("partition_size", [8, 16])
def test_an_emulated_rank_keeps_its_values(partition_size: int) -> None:
    """Moves of imagined ranks are not those of the values here, which they would soon make NaN."""
    assert all(_emulated(partition_size))


@pytest.mark.gpu
@pytest.mark.parametrize(("partition_size", "ranks_per_node"), [(1, 2), (2, 2), (2, 1)])
def test_same_bits_under_nccl(partition_size: int, ranks_per_node: int) -> None:
    """Groups inside nodes, and over nodes, where moves wait for their turn."""
    options = {"partition_size": partition_size, "device": "cuda", "accumulation": 2}
    for happens, at_most in ((_jump, 1.1), (_nothing, 0.75 if ranks_per_node == 2 else 1.1)):
        found = run_ranks(4, _compare, happens, backend="nccl", ranks_per_node=ranks_per_node, kwargs=options)
        _check(found, at_most=at_most)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [_ALL_STAY, _SOME_STAY], ids=["all", "some"])
@pytest.mark.parametrize("happens", [_nothing, _jump, _evaluate])
def test_units_that_stay_over_a_step_under_nccl(happens: Happening, prefetch: mics.Prefetch) -> None:
    options = {"partition_size": 4, "prefetch": prefetch, "audit_interval": 0, "device": "cuda"}
    found = run_ranks(
        4, _compare, happens, backend="nccl", ranks_per_node=2, kwargs={"axis": "partition", **options}
    )
    assert all(equal for equal, _ in found)
