"""Gradients and parameters that are rounded on their way: sums, bytes, replicas, what is lost and kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.cli import main
from mics.comm import GroupCollectives, TrafficCounter
from mics.comm.codec import Codec
from mics.comm.quantized import Quantized, codec_of
from mics.comm.two_stage import TwoStageCollectives
from tests import toys
from tests.ranks import run_expecting_error, run_ranks

_DIM = 72  # units of several blocks of 64, and a part of one


def _group(group: dist.ProcessGroup | None = None, axis: str = "replication") -> GroupCollectives:
    return GroupCollectives(group or dist.group.WORLD, axis=axis, counter=TrafficCounter(), liveness=None)


def _rows(numel: int) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]


def _decoded(codec: Codec, values: Tensor, count: int) -> Tensor:
    """What arrives of ``values`` that go to so many members."""
    rows = values.view(count, -1)
    wires = torch.empty(count, codec.wire_nbytes(rows.shape[1], rows.dtype), dtype=torch.uint8)
    codec.encode(wires, rows)
    found = torch.empty_like(rows)
    codec.decode(found, wires)
    return found.view(-1)


def _reduced(format: str) -> bool:
    """Each member's chunk is rounded once, where it leaves, and added in float32."""
    codec, rank = codec_of(format), dist.get_rank()
    rows = _rows(4 * 200)
    own = rows[rank].clone()
    chunk = own.view(4, -1)[rank]
    _group().reduce_together([(chunk, own)], "a test", codec)
    expected = torch.zeros(200)
    for row in rows:
        expected += _decoded(codec, row, 4).view(4, -1)[rank]
    summed = rows[rank].clone()
    _group().all_reduce_together([summed], "a test", codec)
    every = [torch.empty_like(summed) for _ in range(4)]
    dist.all_gather(every, summed)
    return (
        torch.equal(chunk, expected)
        and all(torch.equal(each, summed) for each in every)
        and torch.equal(summed.view(4, -1)[rank], expected.bfloat16().float())
    )


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_sums_are_made_of_decoded_values(format: str) -> None:
    assert all(run_ranks(4, _reduced, format))


def _staged() -> bool:
    """Two nodes of two: between nodes values are rounded, and once; inside a node they are not."""
    rank, codec = dist.get_rank(), Quantized(8)
    intra = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    inter = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    both = TwoStageCollectives(
        axis="partition", intra=_group(intra, "intra"), inter=_group(inter, "inter"), counter=TrafficCounter()
    )
    rows, place = _rows(4 * 200), both.position
    buffer = rows[rank].clone()
    chunk = buffer.view(4, -1)[place]
    for _, action in both.reduce_stages([(chunk, buffer)], "a test", codec):
        action()
    nodes = [(rows[0] + rows[1]).view(2, 2, -1), (rows[2] + rows[3]).view(2, 2, -1)]
    local, node = divmod(place, 2)
    expected = sum(_decoded(codec, each[local].reshape(-1), 2).view(2, -1)[node] for each in nodes)
    out, shard = torch.empty(4 * 200), _rows(200)[rank]
    for _, action in both.gather_stages([(out, shard)], "a test", codec):
        action()
    order = [0, 2, 1, 3]  # of chunks
    found = torch.cat([_decoded(codec, _rows(200)[each], 1) for each in order])
    return torch.equal(chunk, expected) and torch.equal(out, found)


def test_two_stages_round_between_nodes_alone() -> None:
    assert all(run_ranks(4, _staged))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(_DIM, _DIM), nn.Linear(_DIM, _DIM), nn.LayerNorm(_DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(3)))
    model[1].up.weight.requires_grad_(False)
    return model


def _batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return toys.floats(step, micro, rank, dim=_DIM, batch=4)


Happening = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def _train(
    compression: mics.Compression | None,
    happens: Happening | None = None,
    *,
    first: int = 0,
    steps: int = 12,
    accumulation: int = 2,
    load: str | None = None,
    announced: bool = True,
    device: str = "cpu",
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor], dict[tuple[str, str], int]]:
    """Losses, whole parameters, and bytes by axis and kind."""
    dtype = settings.get("precision", mics.Precision()).param_dtype
    model = mics.shard(_model().to(device), compression=compression, audit_interval=1, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if load is not None:
        mics.load(load, model, optimizer)
    losses = []
    for step in range(first, steps):
        micros = range(accumulation)
        for micro in mics.microsteps(model, micros) if announced else micros:
            x, y = (each.to(device) for each in _batch(step, micro, dist.get_rank()))
            loss = (model(x if dtype is None else x.to(dtype)) - y).square().mean() / accumulation
            loss.backward()
            losses.append(loss.item())
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if happens is not None:
            happens(model, optimizer, step)
    mics.audit_replicas(model)
    mics.memory_report(model, show=False)
    whole = {name: value.cpu() for name, value in mics.full_state_dict(model, rank0_only=False).items()}
    return losses, whole, dict(mics.traffic(model).nbytes)


def _beside(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far apart two models are, of how far training has moved the second."""
    start = _model().state_dict()
    names = [name for name in start if not torch.equal(start[name], other[name])]
    apart = torch.cat([(one[name] - other[name]).flatten() for name in names]).norm()
    moved = torch.cat([(other[name] - start[name]).flatten() for name in names]).norm()
    return (apart / moved).item()


@pytest.mark.parametrize(
    ("compression", "settings", "share", "apart"),
    [
        ({"hop2": "int8"}, {"partition_size": 2}, 0.2656, 0.05),
        pytest.param({"hop2": "int4"}, {"partition_size": 2}, 0.1334, 0.4, marks=pytest.mark.full),
        pytest.param({"hop2": "bf16"}, {"partition_size": 2}, 0.5, 0.03, marks=pytest.mark.full),
        pytest.param(
            {"hop2": "int8", "hop2_error_feedback": False},
            {"partition_size": 2, "announced": False},
            0.2656,
            0.1,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"hop2": "int8"}, {"partition_size": 2, "low_memory": True}, 0.2656, 0.05, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_gradients_between_replicas(
    compression: dict[str, Any], settings: dict[str, Any], share: float, apart: float
) -> None:
    """Close to float32 in a fraction of the bytes. Replicas stay equal: the audit sees it."""
    exact = run_ranks(4, _train, None, kwargs=settings, ranks_per_node=2)
    found = run_ranks(
        4, _train, mics.Compression(refresh=None, **compression), kwargs=settings, ranks_per_node=2
    )
    for (_, there, sent), (_, expected, whole) in zip(found, exact, strict=True):
        assert 0 < _beside(there, expected) < apart
        key = "replication", "reduce_scatter"
        assert sent[key] / whole[key] == pytest.approx(share, rel=0.03)
        assert {other: n for other, n in sent.items() if other != key} == {
            other: n for other, n in whole.items() if other != key
        }


@pytest.mark.parametrize(
    ("hop2", "ranks", "ranks_per_node", "settings"),
    [
        ("int8", 4, 2, {"partition_size": 1}),
        ("int4", 4, 2, {"partition_size": 1, "optimizer_sharding": "partition"}),
        pytest.param("int8", 6, 3, {"partition_size": 1, "announced": False}, marks=pytest.mark.full),
        pytest.param("int8", 8, 4, {"partition_size": 2, "low_memory": True}, marks=pytest.mark.full),
        pytest.param(
            "bf16", 8, 4, {"partition_size": 2, "optimizer_sharding": "partition"}, marks=pytest.mark.full
        ),
    ],
)
def test_replicas_on_a_node_are_added_up_before_rounding(
    hop2: str, ranks: int, ranks_per_node: int, settings: dict[str, Any]
) -> None:
    """Exact inside nodes, rounded once between them: as many bytes leave a node as if it had one replica."""
    compression = mics.Compression(refresh=None, hop2=hop2)  # type: ignore[arg-type]
    kwargs = {"kwargs": settings, "ranks_per_node": ranks_per_node}
    exact = run_ranks(ranks, _train, None, **kwargs)  # type: ignore[arg-type]
    found = run_ranks(ranks, _train, compression, **kwargs)  # type: ignore[arg-type]
    replicas, num_nodes = ranks // settings["partition_size"], ranks // ranks_per_node
    whole = settings.get("optimizer_sharding") == "partition"
    share = {"int8": 0.2656, "int4": 0.1334, "bf16": 0.5}[hop2]
    between, inside = (num_nodes - 1) / replicas, (replicas - num_nodes) / replicas
    for (_, there, sent), (_, expected, before) in zip(found, exact, strict=True):
        assert 0 < _beside(there, expected) < 0.4
        kind, times = ("all_reduce", 2) if whole else ("reduce_scatter", 1)
        nbytes = before["replication", kind] * replicas / (replicas - 1) / times
        assert sent["inter", "reduce_scatter"] == pytest.approx(between * share * nbytes, rel=0.03)
        assert sent["intra", "reduce_scatter"] == pytest.approx(inside * nbytes)
        if whole:  # audits are sent in two stages too
            assert sent["inter", "all_gather"] == pytest.approx(between * nbytes / 2, rel=0.1)
            by_link = sent["inter", "all_gather"] + sent["intra", "all_gather"]
            assert sent["replication", "all_gather"] == by_link
        else:
            assert sent["replication", "all_gather"] == before["replication", "all_gather"]
        assert {key: n for key, n in sent.items() if key[0] == "partition"} == {
            key: n for key, n in before.items() if key[0] == "partition"
        }


def _whole_on(rank: int | None, partition_size: int) -> dict[str, Tensor]:
    """Parameters that the replicas of all nodes hold together, on all ranks or on one."""
    precision, compression = mics.Precision(param_dtype=torch.bfloat16), mics.Compression(hop2="int8")
    model = mics.shard(_model(), partition_size=partition_size, precision=precision, compression=compression)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.add_(number)
    return {name: value.clone() for name, value in mics.iter_full_params(model, rank=rank)}


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "partition_size", "receiver"),
    [
        pytest.param(4, 2, 1, None, marks=pytest.mark.full),
        (4, 2, 1, 1),
        pytest.param(6, 3, 1, 5, marks=pytest.mark.full),
        pytest.param(8, 4, 2, 6, marks=pytest.mark.full),
    ],
)
def test_values_of_replicas_in_two_stages_come_together(
    ranks: int, ranks_per_node: int, partition_size: int, receiver: int | None
) -> None:
    found = run_ranks(ranks, _whole_on, receiver, partition_size, ranks_per_node=ranks_per_node)
    start = _model().state_dict()
    for each in found if receiver is None else [found[receiver]]:
        for number, (name, param) in enumerate(_model().named_parameters()):
            assert torch.equal(each[name], start[name] + number) or not param.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_between_nodes_of_a_partition_group(dtype: torch.dtype) -> None:
    """Parameters and gradients are rounded from node to node alone, so fewer bytes cross there."""
    settings: dict[str, Any] = {"partition_size": 4, "precision": mics.Precision(param_dtype=dtype)}
    compression = mics.Compression(inter_gather="int8", inter_reduce="int8")
    exact = run_ranks(4, _train, None, kwargs=settings, ranks_per_node=2)
    found = run_ranks(4, _train, compression, kwargs=settings, ranks_per_node=2)
    narrow = {"all_gather": 1.031 / dtype.itemsize, "reduce_scatter": 1.031 / 4}
    for (_, there, sent), (_, expected, whole) in zip(found, exact, strict=True):
        assert 0 < _beside(there, expected) < 0.2
        for kind, share in narrow.items():
            assert share <= sent["inter", kind] / whole["inter", kind] < 1.15 * share  # of small units, too
            assert sent["intra", kind] == whole["intra", kind]
            assert sent["partition", kind] == sent["inter", kind] + sent["intra", kind]


def _evaluate_twice() -> bool:
    """What modules compute with is the same on all ranks; what is read and saved is not rounded."""
    plain, rounded = (
        mics.shard(_model(), partition_size=4, compression=mics.Compression(inter_gather=format))  # type: ignore[arg-type]
        for format in (None, "int8")
    )
    x = torch.ones(2, _DIM)
    with torch.no_grad():
        one, other = plain(x), rounded(x)
    every = [torch.empty_like(other) for _ in range(4)]
    dist.all_gather(every, other)
    whole = mics.full_state_dict(rounded, rank0_only=False)
    same = all(torch.equal(whole[name], value) for name, value in _model().state_dict().items())
    with mics.summon_full_params(rounded, write=True):
        pass
    again = mics.full_state_dict(rounded, rank0_only=False)
    return (
        same
        and all(torch.equal(again[name], value) for name, value in whole.items())
        and all(torch.equal(each, other) for each in every)
        and 0 < (one - other).abs().max() < 0.05
    )


def test_parameters_themselves_are_not_rounded() -> None:
    assert all(run_ranks(4, _evaluate_twice, ranks_per_node=2))


def _largest(refresh: str | None) -> tuple[list[float], float]:
    """Losses, and the largest number that modules compute with, of units that stay over a step."""
    compression = mics.Compression(refresh=refresh, inter_gather="int8")  # type: ignore[arg-type]
    staying = mics.Prefetch(units=1, stay_nbytes=1 << 30)
    largest = 0.0

    def look(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        nonlocal largest
        with torch.inference_mode():
            largest = max(largest, model(torch.ones(2, _DIM, dtype=torch.bfloat16)).abs().max().item())

    precision = mics.Precision(param_dtype=torch.bfloat16)
    losses = _train(compression, look, partition_size=4, prefetch=staying, precision=precision, steps=8)[0]
    return losses, largest


def test_what_a_gather_rounded_is_not_moved() -> None:
    """Nobody knows how far a rounded value moved: with and without lossless refreshes the run is the same."""
    found, expected = (run_ranks(4, _largest, each, ranks_per_node=2) for each in ("lossless", None))
    assert found == expected


def _in_inference_mode(folder: str) -> bool:
    """What an evaluation allocates first, and a save inside one, is used by training later."""
    model = mics.shard(
        _model(),
        partition_size=2,
        prefetch=0,
        compression=mics.Compression(hop2="int8", inter_gather="int8", inter_reduce="int8"),
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        with torch.inference_mode():
            model(torch.ones(2, _DIM))
            mics.memory_report(model, show=False)
            mics.save(folder, model, optimizer)
        x, y = _batch(step, 0, dist.get_rank())
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return True


def test_evaluations_come_first(tmp_path: Path) -> None:
    assert all(run_ranks(4, _in_inference_mode, str(tmp_path / "saved"), ranks_per_node=1))


def _saves(folder: str) -> Happening:
    def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 3:
            mics.save(folder, model, optimizer)

    return save


def _interrupted(folder: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A run that saves after four steps, and what is left of its losses."""
    losses, whole, _ = _train(mics.Compression(hop2="int4"), _saves(folder), steps=8, **settings)
    return losses[8:], whole


def _resumed(folder: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    return _train(mics.Compression(hop2="int4"), first=4, steps=8, load=folder, **settings)[:2]


@pytest.mark.parametrize(
    ("optimizer_sharding", "partition_size"),
    [
        ("world", 1),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("world", 2), ("partition", 1))),
    ],
)
def test_resumes_to_the_bit(
    tmp_path: Path, optimizer_sharding: str, partition_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what rounding had lost; a run without that is another one. On two ranks it resumes, too."""
    folder, settings = str(tmp_path / "saved"), {"optimizer_sharding": optimizer_sharding}
    on_nodes: dict[str, Any] = {
        "ranks_per_node": 2,
        "kwargs": {"partition_size": partition_size, **settings},
    }
    whole_run = run_ranks(4, _interrupted, folder, **on_nodes)
    assert main(["checkpoint", "show", folder]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^lost in rounding +\d+ .* bfloat16 *$", shown, re.MULTILINE), shown
    assert "\nother" not in shown
    resumed = run_ranks(4, _resumed, folder, **on_nodes)
    for (losses, there), (expected, then) in zip(resumed, whole_run, strict=True):
        assert losses == expected
        assert all(torch.equal(there[name], value) for name, value in then.items())
    forgetful = run_ranks(4, _without_errors, folder, **on_nodes)
    assert forgetful[0][0] != whole_run[0][0]
    on_two = run_ranks(2, _resumed, folder, kwargs={"partition_size": 1, **settings})
    assert _beside(on_two[0][1], whole_run[0][1]) < 0.5


def _grown(folder: str) -> bool:
    """A part that is sharded later has an engine, and errors, of its own."""
    compression = mics.Compression(hop2="int4")
    model = mics.shard(_model(), partition_size=1, compression=compression)
    assert isinstance(model, nn.Sequential)
    model.append(mics.shard(_Block(), partition_size=1, compression=compression))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(3):
        if step == 2:
            mics.save(folder, model, optimizer)
        x, y = _batch(step, 0, dist.get_rank())
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    went_on = mics.full_state_dict(model, rank0_only=False)
    mics.load(folder, model, optimizer)
    x, y = _batch(2, 0, dist.get_rank())
    (model(x) - y).square().mean().backward()
    optimizer.step()
    again = mics.full_state_dict(model, rank0_only=False)
    return all(torch.equal(again[name], value) for name, value in went_on.items())


@pytest.mark.full
def test_a_model_that_grew_resumes_to_the_bit(tmp_path: Path) -> None:
    assert all(run_ranks(2, _grown, str(tmp_path / "saved")))


def _without_errors(folder: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    compression = mics.Compression(hop2="int4", hop2_error_feedback=False)
    return _train(compression, first=4, steps=8, load=folder, **settings)[:2]


def _overflows() -> bool:
    """A step whose gradients overflow is left out on all ranks, and leaves nothing behind."""
    model = mics.shard(_model(), partition_size=2, compression=mics.Compression(hop2="int8"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = mics.full_state_dict(model, rank0_only=False)
    scales = []
    for step in range(3):
        x, y = _batch(step, 0, dist.get_rank())
        loss = (model(x) - y).square().mean()
        if step == 1 and dist.get_rank() == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = mics.full_state_dict(model, rank0_only=False)
        changed = any(not torch.equal(after[name], value) for name, value in before.items())
        if changed != (step != 1) or not all(value.isfinite().all() for value in after.values()):
            return False
        before = after
    return scales == [2.0, 1.0, 1.0]


def test_an_overflow_leaves_nothing_behind() -> None:
    assert all(run_ranks(4, _overflows))


class _Two(nn.Module):
    """Small gradients beside a large one, which rounding to 8 bits loses without feedback."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.zeros(256))
        self.register_buffer("given", torch.full((256,), 0.003))
        self.given[::64] = 1.0

    def forward(self, uses_b: bool) -> Tensor:
        return (self.given * self.a).sum() + ((self.given * self.b).sum() if uses_b else 0)


def _sometimes_without(how: str, **settings: Any) -> list[float]:
    """How far 100 steps move an element, of which every second has no gradient for one parameter."""
    model = mics.shard(_Two(), compression=mics.Compression(hop2="int8"), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(100):
        is_even = step % 2 == 0
        if how == "frozen":
            model.b.requires_grad_(is_even)
        for _ in range(2) if how == "cleared" else mics.microsteps(model, range(2)):
            (model(is_even if how == "unused" else True) / 2).backward()
        if how == "cleared" and not is_even:
            model.b.grad = None
        mics.clip_grad_norm_(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return [value[1].item() for value in mics.full_state_dict(model, rank0_only=False).values()][:2]


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("unused", {"partition_size": 2}),
        pytest.param("frozen", {"partition_size": 1}, marks=pytest.mark.full),
        pytest.param(
            "cleared", {"partition_size": 2, "optimizer_sharding": "partition"}, marks=pytest.mark.full
        ),
        ("unused", {"partition_size": 1, "optimizer_sharding": "partition"}),
    ],
)
def test_what_was_lost_waits_for_a_gradient(how: str, settings: dict[str, Any]) -> None:
    """Of a parameter that is unused, frozen, or cleared before replicas exchange its gradient."""
    for a, b in run_ranks(4, _sometimes_without, how, ranks_per_node=2, kwargs=settings):
        assert a == pytest.approx(-0.3, abs=0.01) and b == pytest.approx(-0.15, abs=0.01)


def _left_out(how: str) -> list[float]:
    """Losses of a run with one step of huge gradients, which a gradient scaler leaves out."""
    model = mics.shard(_model(), partition_size=1, compression=mics.Compression(hop2="int8"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=how == "on the device")
    losses = []
    for step in range(12):
        x, y = _batch(0, 0, dist.get_rank())
        loss = (model(x) - y).square().mean()
        is_huge = step == 4 and how != "never"
        (loss * 1e12 if is_huge else loss).backward()
        if how == "on the device":
            optimizer.found_inf = torch.tensor(float(is_huge))
        else:
            mics.clip_grad_norm_(model, 1e9)  # looks at them
        if how == "on the device" or step != 4:
            optimizer.step()
        optimizer.zero_grad(set_to_none=how != "on the host, zeroed")
        losses.append(loss.item())
    return losses


def test_nothing_is_kept_of_a_step_that_is_left_out() -> None:
    expected = run_ranks(2, _left_out, "never")
    for how in ("on the host", "on the host, zeroed", "on the device"):
        for losses, without in zip(run_ranks(2, _left_out, how), expected, strict=True):
            assert losses == pytest.approx(without, rel=1e-3)


def _left_out_and_saved(folder: str, *, zeroed: bool = False, rolls_back: bool = False) -> bool:
    """Whether a run that goes on equals one that loads, where a step of huge gradients was left out."""
    model = mics.shard(_model(), partition_size=1, compression=mics.Compression(hop2="int4"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def backward(factor: float = 1.0) -> None:
        x, y = _batch(0, 0, dist.get_rank())
        ((model(x) - y).square().mean() * factor).backward()
        mics.clip_grad_norm_(model, 1e9)  # looks at them

    def go_on() -> dict[str, Tensor]:
        for _ in range(2):
            backward()
            optimizer.step()
            optimizer.zero_grad()
        return mics.full_state_dict(model, rank0_only=False)

    go_on()
    if not rolls_back:
        backward(1e12)
        optimizer.zero_grad(set_to_none=not zeroed)
    mics.save(folder, model, optimizer)
    expected = go_on()
    if rolls_back:
        backward(1e12)
    mics.load(folder, model, optimizer)
    optimizer.zero_grad(set_to_none=not zeroed)
    found = go_on()
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"zeroed": True}, marks=pytest.mark.full), {"rolls_back": True}], ids=str
)
def test_checkpoints_have_nothing_of_a_step_that_is_left_out(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    """Nor does a step that is left out take away what a checkpoint brought."""
    assert all(run_ranks(2, _left_out_and_saved, str(tmp_path / "saved"), kwargs=settings))


class _Beside(nn.Module):
    """A block of 64 values is of both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(88))

    def forward(self, x: float, uses_b: bool) -> Tensor:
        return x * self.a.sum() + (self.b.sum() if uses_b else 0)


def _nan_beside_unused() -> bool:
    """Whether nothing of a step that overflowed is left, and which of six steps were left out."""
    model = mics.shard(_Beside(), partition_size=1, compression=mics.Compression(hop2="int8"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scales = []
    for step in range(6):
        is_bad = step == 2 and dist.get_rank() == 0
        scaler.scale(model(float("nan") if is_bad else 0.5, uses_b=step in (0, 5))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    whole = mics.full_state_dict(model, rank0_only=False)
    return all(value.isfinite().all() for value in whole.values()) and scales == [2.0] * 2 + [1.0] * 4


def test_a_nan_is_not_kept_for_a_parameter_without_a_gradient() -> None:
    assert all(run_ranks(2, _nan_beside_unused))


def test_refuses_what_it_does_not_know() -> None:
    for field, found in [("hop2", "int3"), ("inter_gather", "int4"), ("inter_reduce", 8)]:
        with pytest.raises(mics.SettingsError, match=rf"Compression.{field}: expected .* found {found!r}"):
            mics.Compression(**{field: found})
    with pytest.raises(mics.SettingsError, match=r"hop2_error_feedback: expected True or False, found 'no'"):
        mics.Compression(hop2_error_feedback="no")  # type: ignore[arg-type]


def _shard_twice_narrow() -> None:
    mics.shard(
        _model(),
        precision=mics.Precision(replica_reduce_dtype=torch.bfloat16),
        compression=mics.Compression(hop2="int8"),
    )


def test_refuses_two_formats_of_one_hop() -> None:
    for found in run_expecting_error(2, _shard_twice_narrow):
        assert "expected one format of gradients between replicas, found two" in found.message


@pytest.mark.gpu
@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_under_nccl(partition_size: int) -> None:
    """Rounded as on CPU ranks; replicas and ranks of a group stay equal. At 1 two replicas share a node."""
    compression = mics.Compression(hop2="int8", inter_gather="int8", inter_reduce="int8")
    settings: dict[str, Any] = {"partition_size": partition_size, "device": "cuda"}
    exact, found = (
        run_ranks(4, _train, each, backend="nccl", ranks_per_node=2, kwargs=settings)
        for each in (None, compression)
    )
    assert all(0 < _beside(one[1], other[1]) < 0.3 for one, other in zip(found, exact, strict=True))
