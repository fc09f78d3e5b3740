"""``mics.profile``: the arithmetic on lists of marks, then real ranks whose times are known."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import mics
from mics.comm.lanes import INLINE, Work
from mics.cost.clusters import find_cluster
from mics.diagnostics import step_times as parts
from mics.diagnostics.step_times import step_ends, step_times, stretches
from mics.diagnostics.tape import Done, HostClock, Moment, Point, Reading, Tape
from mics.engine import engine_of
from mics.models import GPT, GPTConfig
from tests.ranks import run_expecting_error, run_ranks

SMALL = GPTConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=2, seq_len=16)
GATHER = Work("gather", "all-gather", "unit 'a'")
HOP_1 = Work("reduce", "reduce-scatter", "unit 'a'")
HOP_2 = Work("replicas", "reduce-scatter", "unit 'a'")
REFRESH = Work("replicas", "all-gather", "new values of unit 'a'")


def test_a_step_is_cut_at_its_marks() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(1.0, Moment.FORWARD),  # a second of data before it
        Point(1.0, Moment.ENTER, ""),
        Point(1.5, Moment.ENTER, "a"),
        Point(1.5, Moment.WAIT, collective=0),
        Point(2.0, Moment.WAIT_OVER, collective=0),
        Point(4.0, Moment.LEAVE, "a"),
        Point(4.5, Moment.LEAVE, ""),
        Point(5.0, Moment.BACKWARD),
        Point(5.0, Moment.ENTER_BACKWARD, "a"),
        Point(6.0, Moment.RECOMPUTE),
        Point(7.0, Moment.RECOMPUTE_OVER),
        Point(9.0, Moment.LEAVE_BACKWARD, "a"),
        Point(10.0, Moment.BACKWARD_OVER),
        Point(11.0, Moment.OPTIMIZER),  # a second of clipping before it
        Point(13.0, Moment.STEP_OVER),
    ]
    found = step_times(stretches(points, [Done(GATHER, 0.5, 2.0)]), step_ends(points))
    assert found.seconds == pytest.approx(13.0)
    assert found.kinds == pytest.approx(
        {
            parts.DATA: 1.0,
            parts.FORWARD: 3.5,
            parts.GATHER: 0.5,
            parts.RECOMPUTATION: 1.0,
            parts.BACKWARD: 4.0,
            parts.OPTIMIZER: 3.0,
        }
    )
    assert found.modules["a"].computation == pytest.approx(
        {parts.FORWARD: 2.0, parts.RECOMPUTATION: 1.0, parts.BACKWARD: 3.0}
    )
    assert found.modules["a"].exposed == pytest.approx({parts.GATHER: 0.5})
    assert found.own == pytest.approx(12.5)


def test_a_wait_is_shared_by_what_comes_before() -> None:
    """Hop 2 had to wait for hop 1, which was still under way when the computation came."""
    works = [Done(HOP_1, 1.0, 6.0), Done(HOP_2, 6.0, 9.0, after=(0,))]
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(0.0, Moment.FORWARD),
        Point(4.0, Moment.WAIT, collective=1),
        Point(10.0, Moment.WAIT_OVER),
        Point(11.0, Moment.STEP_OVER),
    ]
    found = step_times(stretches(points, works), step_ends(points))
    assert found.kinds == pytest.approx({parts.FORWARD: 5.0, parts.HOP_1: 2.0, parts.HOP_2: 4.0})


def test_work_that_never_began_is_waited_for_itself() -> None:
    works = [Done(REFRESH, float("inf"), float("inf"))]
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(1.0, Moment.WAIT, collective=0),
        Point(3.0, Moment.WAIT_OVER),
        Point(4.0, Moment.FORWARD),
        Point(5.0, Moment.STEP_OVER),
    ]
    found = step_times(stretches(points, works), step_ends(points))
    assert found.kinds == pytest.approx({parts.DATA: 2.0, parts.REFRESH: 2.0, parts.FORWARD: 1.0})


def test_between_micro_batches_it_is_the_users_time() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(0.0, Moment.FORWARD),
        Point(1.0, Moment.BACKWARD),
        Point(2.0, Moment.BACKWARD_OVER),
        Point(5.0, Moment.FORWARD),  # three seconds of data
        Point(6.0, Moment.BACKWARD),
        Point(7.0, Moment.BACKWARD_OVER),
        Point(8.0, Moment.OPTIMIZER),  # one of clipping
        Point(9.0, Moment.STEP_OVER),
    ]
    found = step_times(stretches(points, []), step_ends(points))
    assert found.kinds == pytest.approx(
        {parts.FORWARD: 2.0, parts.BACKWARD: 2.0, parts.DATA: 3.0, parts.OPTIMIZER: 2.0}
    )


def test_a_gpu_that_keeps_up_with_the_host_waits_for_it() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER, lag=1e-6),
        Point(1.0, Moment.FORWARD, lag=1e-6),
        Point(2.0, Moment.ENTER, "a", lag=1e-6),
        Point(3.0, Moment.LEAVE, "a", lag=1e-6),
        Point(4.0, Moment.BACKWARD, lag=0.5),  # the host is ahead again
        Point(5.0, Moment.STEP_OVER, lag=0.5),
    ]
    found = step_times(stretches(points, []), step_ends(points))
    assert found.kinds == pytest.approx(
        {parts.DATA: 1.0, parts.HOST: 2.0, parts.FORWARD: 1.0, parts.BACKWARD: 1.0}
    )


def test_a_slow_host_does_not_hide_what_follows() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER, lag=0.0),
        Point(0.0, Moment.FORWARD, lag=0.0),
        Point(1.0, Moment.BACKWARD, lag=0.0),
        Point(2.0, Moment.BACKWARD_OVER, lag=0.0),  # of a micro-batch
        Point(4.0, Moment.FORWARD, lag=0.0),
        Point(5.0, Moment.BACKWARD, lag=0.0),
        Point(6.0, Moment.BACKWARD_OVER, lag=0.5),
        Point(7.0, Moment.OPTIMIZER, lag=0.5),
        Point(8.0, Moment.STEP_OVER, lag=0.5),
    ]
    found = step_times(stretches(points, []), step_ends(points))
    assert found.kinds == pytest.approx(
        {parts.HOST: 3.0, parts.DATA: 2.0, parts.BACKWARD: 1.0, parts.OPTIMIZER: 2.0}
    )


def test_between_forwards_without_gradients_it_is_the_users_time() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(0.0, Moment.EVALUATION),
        Point(0.0, Moment.ENTER, ""),
        Point(1.0, Moment.LEAVE, ""),
        Point(4.0, Moment.EVALUATION),  # three seconds of data
        Point(4.0, Moment.ENTER, ""),
        Point(5.0, Moment.LEAVE, ""),
        Point(6.0, Moment.FORWARD),  # one more
        Point(6.0, Moment.ENTER, ""),
        Point(7.0, Moment.LEAVE, ""),
        Point(8.0, Moment.BACKWARD),  # the loss
        Point(9.0, Moment.BACKWARD_OVER),
        Point(9.0, Moment.OPTIMIZER),
        Point(10.0, Moment.STEP_OVER),
    ]
    found = step_times(stretches(points, []), step_ends(points))
    assert found.kinds == pytest.approx(
        {parts.FORWARD: 4.0, parts.DATA: 4.0, parts.BACKWARD: 1.0, parts.OPTIMIZER: 1.0}
    )


class _Clock:
    def __init__(self, *readings: float) -> None:
        self._readings = list(readings)

    def mark(self) -> float:
        return self._readings.pop(0)

    def read(self, mark: float) -> Reading:
        return Reading(mark, 0.0)


def test_marks_of_several_streams_come_in_their_order() -> None:
    tape = Tape(_Clock(0.0, 5.0, 3.0, 6.0))
    for moment in (Moment.STEP_OVER, Moment.FORWARD, Moment.BACKWARD, Moment.STEP_OVER):
        tape.note(moment)
    points, _ = tape.read()
    found = step_times(stretches(points, []), step_ends(points))
    assert sum(found.kinds.values()) == pytest.approx(found.seconds)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_ends_a_wait() -> None:
    tape = Tape(HostClock())
    with pytest.raises(KeyboardInterrupt):
        tape.follow(INLINE, GATHER).submit(_interrupt)
    assert [point.moment for point in tape.read()[0]] == [Moment.WAIT, Moment.WAIT_OVER]


def test_a_second_optimizer_ends_no_step() -> None:
    points = [
        Point(0.0, Moment.STEP_OVER),
        Point(1.0, Moment.FORWARD),
        Point(2.0, Moment.STEP_OVER),
        Point(3.0, Moment.STEP_OVER),
        Point(4.0, Moment.FORWARD),
        Point(5.0, Moment.STEP_OVER),
    ]
    assert step_ends(points) == [0.0, 2.0, 5.0]


def _train(
    options: dict[str, Any],
    profiled: bool,
    num_steps: int = 5,
    slow_rank: int = -1,
    naps: tuple[float, float] = (0.0, 0.0),
) -> tuple[Any, list[float], dict[str, Any]]:
    """The report, losses, and what is left of the profile in the engine."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = mics.shard(GPT(SMALL), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    profile = mics.profile(model, steps=2, warmup=2, folder=None, show=False) if profiled else None
    losses = []
    for step in range(num_steps):
        time.sleep(naps[0])  # a slow loader
        generator = torch.Generator().manual_seed(17 * step + rank)
        batches = [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(2)]
        for tokens in mics.microsteps(model, batches):
            loss = model(tokens, tokens) / 2
            if rank == slow_rank:
                time.sleep(naps[1])  # between forward and backward: it computes for longer
            loss.backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine = engine_of(model)
    left = {
        "watch": engine.mesh.lanes.watch,
        "listeners": sum(map(len, engine.events.values())),
    }
    return (None if profile is None else profile.report), losses, left


@pytest.mark.parametrize(
    "options",
    [{"partition_size": 2}, pytest.param({"partition_size": 4, "prefetch": 0}, marks=pytest.mark.full)],
)
def test_it_changes_nothing_and_leaves_nothing(options: dict[str, Any]) -> None:
    options["activations"] = mics.Activations(checkpoint="unit")
    plain = run_ranks(4, _train, options, False, ranks_per_node=2)
    seen = run_ranks(4, _train, options, True, ranks_per_node=2)
    for (_, losses, left), (report, same_losses, same_left) in zip(plain, seen, strict=True):
        assert losses == same_losses
        assert left == same_left
        assert left["watch"] is None
        times = report.times
        assert sum(times.kinds.values()) == pytest.approx(times.seconds)
        assert {parts.FORWARD, parts.BACKWARD, parts.RECOMPUTATION, parts.OPTIMIZER} <= set(times.kinds)
        assert {"blocks.0", "blocks.1", "blocks.2"} <= set(times.modules)
        assert len(report.ranks) == 4
        assert "blocks.1" in str(report)


def test_the_slowest_rank_and_the_data_are_named() -> None:
    found = run_ranks(4, _train, {"partition_size": 2}, True, 4, 2, (0.2, 0.3), ranks_per_node=2)
    for rank, (report, _, _) in enumerate(found):
        assert report.slowest.rank == 2
        assert "rank 2 is the slowest" in str(report)
        assert "most of the difference in forward" in str(report)
        assert report.times.kinds[parts.DATA] > 0.19
        if rank != 2:  # they wait for it: in the node, or between replicas
            assert report.times.exposed > 0.3


def _train_norms() -> Any:
    model = mics.shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), partition_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = mics.profile(model, steps=1, warmup=1, folder=None, show=False)
    for _ in range(2):
        time.sleep(0.3 * (torch.distributed.get_rank() == 0))
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    return profile.report


def test_ranks_that_wait_for_buffers_are_not_slow() -> None:
    for rank, report in enumerate(run_ranks(2, _train_norms)):
        assert report.slowest.rank == 0
        assert rank == 0 or report.times.kinds[parts.AGREEMENT] > 0.2


@pytest.mark.full
def test_an_emulated_network_is_seen_as_the_emulator_clocks_it() -> None:
    cluster = find_cluster("p4d.24xlarge:2")
    slow = replace(
        cluster,
        inter=replace(cluster.inter, bandwidth=8e5),
        intra=replace(cluster.intra, bandwidth=8e6),
    )
    with mics.emulate(slow) as emulation:
        model = mics.shard(GPT(SMALL), partition_size=8, prefetch=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profile = mics.profile(model, steps=1, warmup=1, folder=None, show=False)
        for _ in range(2):
            emulation.clear()
            tokens = torch.zeros(2, 16, dtype=torch.int64)
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        blocked = sum(end - start for start, end in emulation.blocked())
        times = profile.report.times  # type: ignore[union-attr]
        assert blocked > 0.5
        # It also has the copying of collectives, which a busy machine makes longer.
        assert 0.97 * blocked < times.exposed < 1.1 * blocked


@pytest.mark.full
def test_the_first_step_waits_for_the_refresh_before_it() -> None:
    cluster = find_cluster("p4d.24xlarge:2")
    slow = replace(cluster, inter=replace(cluster.inter, bandwidth=4e5))
    with mics.emulate(slow):
        model = mics.shard(GPT(SMALL), partition_size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profile = mics.profile(model, steps=1, warmup=1, folder=None, show=False)
        for _ in range(2):
            tokens = torch.zeros(2, 16, dtype=torch.int64)
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = profile.report.times.kinds  # type: ignore[union-attr]
        assert kinds[parts.REFRESH] > 0.4
        assert kinds[parts.FORWARD] < 0.4


def _write_files(folder: str, partition_size: int = 2) -> None:
    torch.manual_seed(0)
    activations = mics.Activations(checkpoint="unit")
    model = mics.shard(GPT(SMALL), partition_size=partition_size, activations=activations)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = mics.profile(model, steps=2, warmup=0, folder=folder, show=False)
    for _ in range(2):
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert profile.report is not None


def test_files(tmp_path: Path) -> None:
    run_ranks(4, _write_files, str(tmp_path / "here"), ranks_per_node=2)
    events = json.loads((tmp_path / "here/rank-0.trace.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"computation", "all-gather", "reduce-scatter", "between replicas", "all ranks"} <= tracks
    slices = [event for event in events if event["ph"] == "X"]
    assert {"forward blocks.0", "recomputation blocks.0", "backward blocks.2"} <= {e["name"] for e in slices}
    assert all(event["dur"] >= 0 for event in slices)
    assert (tmp_path / "here/rank-0.png").stat().st_size > 10_000


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_ranks(2, _write_files, str(tmp_path / "file"))


def _save_beside(folder: str) -> list[int]:
    model = mics.shard(GPT(SMALL), partition_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        profile = mics.profile(model, steps=1, warmup=0, folder=None, show=False)
        saving = mics.save(f"{folder}/{number}", model, optimizer, wait=False)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        saving.wait()
    assert profile.report is not None
    return [times.rank for times in profile.report.ranks]


def test_a_save_in_the_background_has_messages_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(4, _save_beside, str(tmp_path)) == [[0, 1, 2, 3]] * 4


def test_a_picture_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr("mics.diagnostics.profiling.draw_profile", fail)
    with pytest.warns(UserWarning, match="failed to import"):
        _write_files(str(tmp_path), 1)
    assert (tmp_path / "rank-0.trace.json").exists()


class _WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return self.head(self.body(x)).sum()  # type: ignore[no-any-return]


def _train_head() -> set[str]:
    model = mics.shard(_WithHead())
    model.head = mics.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    profile = mics.profile(model, steps=1, warmup=1, folder=None, show=False)
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
    assert profile.report is not None
    return set(profile.report.times.modules)


def test_a_part_that_is_trained_alone() -> None:
    for modules in run_ranks(2, _train_head):
        assert {"head.0", "head.1"} <= modules


def _profile_badly(options: dict[str, Any]) -> None:
    model = mics.shard(GPT(SMALL))
    mics.profile(model, **options)


@pytest.mark.parametrize("options", [{"steps": 0}, {"warmup": -1}, {"steps": 1.5}])
def test_bad_input(options: dict[str, Any]) -> None:
    for error in run_expecting_error(2, _profile_badly, options):
        assert error.is_a("SettingsError")
        assert "profile: expected" in error.message


def _profile_at_odds() -> None:
    model = mics.shard(GPT(SMALL))
    mics.profile(model, steps=1 + torch.distributed.get_rank())


def test_ranks_must_agree() -> None:
    for error in run_expecting_error(2, _profile_at_odds):
        assert error.is_a("SettingsError")
        assert "expected all ranks to call it" in error.message


def _profile_twice() -> None:
    model = mics.shard(GPT(SMALL))
    first = mics.profile(model, warmup=0)
    with pytest.raises(mics.SettingsError, match="profile"):
        mics.profile(model)
    first.stop()
    assert first.finished
    mics.profile(model, warmup=0).stop()
    assert engine_of(model).mesh.lanes.watch is None
    second = mics.profile(model, warmup=2)
    with pytest.raises(mics.SettingsError, match="profile"):
        mics.profile(mics.shard(GPT(SMALL)))  # models share lanes
    second.stop()


def _drop_profiled() -> None:
    kept = mics.shard(GPT(SMALL))
    model = mics.shard(GPT(SMALL))
    stopped = mics.profile(model, warmup=2)
    stopped.stop()
    mics.profile(model, warmup=0)
    assert engine_of(kept).mesh.lanes.watch is not None
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert engine_of(kept).mesh.lanes.watch is None
    mics.profile(kept).stop()


def test_a_model_that_is_gone_is_not_recorded() -> None:
    run_ranks(2, _drop_profiled)


def test_one_at_a_time() -> None:
    run_ranks(2, _profile_twice)
