"""Another GPU's clock, and whole models from two depths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mics
from mics.bench.clock import GpuClock, StepWork, Term, measure_clock, measure_clocks
from mics.bench.config import BenchConfig, Training
from mics.bench.depths import along, missing_nbytes, too_few, two_depths, with_whole_models
from mics.bench.job import Job
from mics.bench.measure import measure
from mics.bench.plan import Outcome, Run, RunPlan, interleave
from mics.bench.provenance import caveats, computed_by, emulated_title
from mics.bench.summary import summarise, verdict
from mics.bench.systems import Batch, System
from mics.bench.systems.with_mics import prefetch_of_whole
from mics.bench.table import cells
from mics.bench.timeline import Exposure, Segment, Timeline
from mics.cost.clusters import Cluster, Link, find_cluster
from mics.errors import SettingsError
from mics.layout.compression import LOSSLESS
from mics.models import GPT, GPTConfig
from mics.models.gpt import Block

JOB = Job(
    model=GPTConfig(num_layers=12, num_heads=2, hidden_size=32, vocab_size=64, seq_len=16, rotary=False),
    partition_size=2,
    micro_batch=1,
    accumulation=2,
    checkpoint=True,
    param_dtype="float32",
    reduce_dtype="float32",
    device="cpu",
)
SLOW = Cluster(
    name="slow",
    num_nodes=2,
    ranks_per_node=2,
    intra=Link(bandwidth=1e9, latency=1e-6),
    inter=Link(bandwidth=1e7, latency=1e-6),
    gpu="a100",
)
NBYTES = 4 * 10**5


def _clock(factor: float) -> GpuClock:
    return GpuClock(gpu="a100", terms=(Term(name="matrices", here=1.0, there=factor),))


def _run(clock: GpuClock | None = None, job: Job = JOB, record: bool = False) -> Run:
    return Run(number=0, system="mics", job=job, world_size=4, cluster=SLOW, clock=clock, record=record)


class _Sleeper:
    """Computes for a while, then sends something that takes a while."""

    same_start = True
    compute_seconds = 0.05

    def step(self, batches: Sequence[Batch]) -> Tensor:
        time.sleep(self.compute_seconds)
        dist.all_reduce(torch.ones(NBYTES // 4))
        return torch.zeros(())

    def close(self) -> None:
        """Nothing to let go of."""


def _measured(factor: float, folder: Path) -> Outcome:
    plan = RunPlan(runs=(), num_warmup_steps=0, num_steps=3, folder=str(folder))
    system = System(name="mics", build=lambda job: _Sleeper())
    return measure(_run(_clock(factor)), plan, systems={"mics": system})


def _priced(dilation: float) -> float:
    with mics.emulate(SLOW, dilation=dilation) as emulation:
        assert emulation.cluster is SLOW  # the engine decides as on the cluster itself
        emulation.clear()
        dist.all_reduce(torch.ones(NBYTES // 4))
        (found,) = emulation.collectives()
        return found.times.end - found.times.start


def test_links_follow_the_clock() -> None:
    """A device that is four times as fast gets links that are four times as fast, bandwidth and latency."""
    assert _priced(4.0) == pytest.approx(_priced(1.0) / 4, rel=1e-6)
    with pytest.raises(SettingsError, match="dilation: expected a number above 0, found 0"):
        mics.emulate(SLOW, dilation=0)


def test_times_are_those_of_the_gpu_named(tmp_path: Path) -> None:
    """Computing takes F times what it took here, communicating what the cluster says: the ratio is kept."""
    sent = _priced(1.0)
    for factor in (0.5, 4.0):
        outcome = _measured(factor, tmp_path)
        assert outcome.error is None
        assert min(outcome.step_seconds) == pytest.approx(factor * _Sleeper.compute_seconds + sent, rel=0.4)


def test_a_timeline_is_dilated_too() -> None:
    lanes = {"compute": [Segment(name="mm", start=1.0, end=2.0)], "intra": []}
    found = Timeline(seconds=3.0, lanes=lanes).dilated(2.0)
    assert (found.seconds, found.lanes["compute"][0].start, found.busy("compute")) == (6.0, 2.0, [(2.0, 4.0)])


def test_a_clock_is_of_the_models_own_work() -> None:
    """Three kinds of work, each timed here; deeper models weigh the head less; a table knows the GPU."""
    clock = measure_clock(StepWork.of(JOB, "v100"), JOB)
    assert [term.name for term in clock.terms] == ["matrices", "attention", "the rest"]
    assert all(term.here >= 0 and term.there >= 0 for term in clock.terms)
    assert clock.terms[0].here > 0 and clock.terms[1].here > 0
    factors = [term.factor for term in clock.terms]
    assert min(factors) <= clock.factor <= max(factors)
    assert clock.peak_tflops == 125
    said = " ".join(clock.lines())
    assert "Times are those of a V100" in said and "matrices" in said and "host" in said
    shallow = two_depths(JOB, 4)[0]
    assert StepWork.of(shallow, "v100") == StepWork.of(JOB, "v100")


@pytest.mark.full
def test_clocks_are_measured_in_a_process_of_their_own() -> None:
    """Equal work once, so that every system has the same clock."""
    first, second = measure_clocks([(JOB, "a100"), (replace(JOB, partition_size=4), "a100")])
    assert first is second and first.gpu == "a100"


def test_tables_say_whose_clock_it_is() -> None:
    clock = _clock(2.5)
    assert "compute of an A100 by the clock of this CPU" in emulated_title([SLOW], "cpu", [clock])
    assert "an A100 by the clock of this CPU" in computed_by(_run(clock))
    assert caveats([SLOW], "cpu", [clock, clock]) == clock.lines()
    assert "links are 2.5 times faster" in clock.lines()[0]
    said = " ".join(_clock(0.5).lines())  # a CPU is slower than any of them
    assert "links are 2 times slower" in said and "delays count 2 times shorter" in said
    (row,) = summarise([_run(clock)], [Outcome(number=0, step_seconds=[1.0])], peak_tflops=989.0)
    assert row.peak_tflops == 312


def test_plans_carry_clocks_and_depths(tmp_path: Path) -> None:
    runs = (_run(_clock(2.0)), replace(_run(job=two_depths(JOB, 4)[1]), scaled_from=(2, 4)))
    plan = RunPlan(runs=runs, num_warmup_steps=1, num_steps=2, folder=str(tmp_path))
    plan.write(tmp_path / "plan.json")
    assert RunPlan.read(tmp_path / "plan.json") == plan


def test_a_v100_trains_in_float16() -> None:
    """It has no bfloat16; and no clock on links that are real."""
    assert Training(as_gpu="v100")._param_dtype("cuda") == "float16"
    assert Training(as_gpu="a100")._param_dtype("cuda") == "bfloat16"
    assert Training(as_gpu="v100")._param_dtype("cpu") == "float32"
    with pytest.raises(SettingsError, match="--param-dtype: expected float16 or float32"):
        Training(as_gpu="v100", param_dtype="bfloat16")._param_dtype("cuda")
    with pytest.raises(SettingsError, match="--reduce-dtype: expected float16 or float32, which v100 has"):
        Training(model="gpt-tiny", as_gpu="v100", reduce_dtype="bfloat16", device="cpu").job(8, 8)
    assert Training(as_gpu="v100", reduce_dtype="float16")._param_dtype("cuda") == "float16"
    with pytest.raises(SettingsError, match="--as-gpu: expected --on emulated"):
        BenchConfig(on="ranks", training=Training(as_gpu="a100")).check()


@pytest.mark.parametrize("system", ["mics", "hsdp", "ddp"])
def test_float16_has_a_scaler(system: str, tmp_path: Path) -> None:
    """Every system's loop scales the loss; a job in another format has none."""
    small = replace(JOB, model=replace(JOB.model, num_layers=2), param_dtype="float16", checkpoint=False)
    assert small.scales_loss and not JOB.scales_loss
    plan = RunPlan(runs=(), num_warmup_steps=1, num_steps=1, folder=str(tmp_path))
    outcome = measure(replace(_run(job=small), system=system), plan)
    assert outcome.error is None
    assert all(2 < loss < 8 for loss in outcome.losses)


def test_two_depths_of_one_model() -> None:
    shallow, deep = two_depths(JOB, 8)
    assert (shallow.model.num_layers, deep.model.num_layers, deep.whole_layers) == (4, 8, 12)
    for layers in (0, 3, 12, 20):
        with pytest.raises(
            SettingsError, match="--layers: expected an even number from 2, below the model's 12"
        ):
            two_depths(JOB, layers)
    assert Training(model="gpt-tiny", layers=2, device="cpu").jobs(2, 4)[1].model.num_layers == 2
    assert len(Training(model="gpt-tiny", device="cpu").jobs(2, 4)) == 1


def _outcome(run: Run, base: float, slope: float) -> Outcome:
    seconds = base + slope * run.job.model.num_layers
    computed = base + min(slope, 0.25) * run.job.model.num_layers
    exposure = Exposure(
        compute_seconds=computed,
        idle_seconds=0.5,
        link_seconds={"intra": seconds, "inter": seconds},
        exposed_seconds={"intra": 0.0, "inter": seconds - computed},
        link_nbytes={"intra": 0.0, "inter": 100.0 * run.job.model.num_layers},
    )
    return Outcome(
        number=run.number,
        step_seconds=[seconds, 1.1 * seconds],
        tokens_per_step=8,
        peak_allocated_nbytes=1000 + 10 * run.job.model.num_layers,
        exposure=exposure,
    )


def test_the_whole_model_is_on_the_line_through_two_depths() -> None:
    """Times and bytes; memory by arithmetic. The two that ran are beside it, and who ran what is said."""
    jobs = two_depths(JOB, 8)
    runs = interleave(["mics", "hsdp"], [(job, SLOW) for job in jobs], repeats=2, record=True)
    outcomes = [_outcome(run, 2.0, 0.25 if run.system == "mics" else 0.5) for run in runs]
    rows = summarise(*with_whole_models(runs, outcomes), peak_tflops=None)
    whole = [row for row in rows if row.run.scaled_from]
    assert rows[:2] == whole and len(rows) == 6
    assert [row.run.job for row in whole] == [JOB, JOB]
    assert whole[0].step_seconds[1] == pytest.approx(2.0 + 12 * 0.25)
    assert whole[1].step_seconds[1:] == pytest.approx((2.0 + 12 * 0.5, 1.1 * 8.0))
    good = whole[0].good[0]
    missing = missing_nbytes(next(run for run in runs if run.job is jobs[1]))
    assert missing is not None and missing > 0
    assert good.peak_allocated_nbytes == 1000 + 80 + missing
    assert good.exposure is not None
    assert (good.exposure.idle_seconds, good.exposure.link_nbytes) == (0.5, {"intra": 0.0, "inter": 1200.0})
    heads, lines = cells(rows)
    at = heads.index("blocks")
    assert [line[at] for line in lines][::2] == [
        "12, scaled from 4 and 8 of 12 blocks",
        "4 of 12 blocks",
        "8 of 12 blocks",
    ]
    said = verdict(rows)
    assert sum("has the shortest step" in line for line in said) == 3
    assert any("12, scaled from 4 and 8 of 12 blocks" in line for line in said)
    assert sum("TFLOP/s count" in line for line in said) == 1


def test_missing_blocks_hold_states_and_activations() -> None:
    """Of every block the same; of a system that the planner does not know, nothing is said."""
    cluster = find_cluster("p4d.24xlarge:2")
    jobs = two_depths(replace(JOB, partition_size=8), 8)
    runs = interleave(["hsdp", "ddp"], [(job, cluster) for job in jobs], repeats=1, record=False)
    four, eight = (missing_nbytes(run) for run in runs if run.system == "hsdp")
    assert four == 2 * eight > 0
    assert {missing_nbytes(run) for run in runs if run.system == "ddp"} == {None}
    (whole, *_), found = with_whole_models(runs, [_outcome(run, 2.0, 0.25) for run in runs])
    ddp = next(outcome for outcome, run in zip(found, (whole, *_), strict=True) if run.system == "ddp")
    assert ddp.peak_allocated_nbytes == 1000 + 120


def test_depths_that_cannot_be_scaled_say_so() -> None:
    """Noise may hide what a block takes, and one of the two may not run."""
    jobs = two_depths(JOB, 8)
    runs = interleave(["mics"], [(job, SLOW) for job in jobs], repeats=1, record=False)
    _, (flat, *_) = with_whole_models(runs, [_outcome(run, 2.0, 0.0) for run in runs])
    told = "--layers: expected 8 blocks to take longer than 4, found no difference; raise it or --steps"
    assert flat.error == told
    _, (broken, *_) = with_whole_models(runs, [Outcome(number=0, error="gone"), _outcome(runs[1], 2.0, 1.0)])
    assert broken.error == "gone"
    whole = interleave(["mics"], [(JOB, SLOW)], repeats=1, record=False)
    assert with_whole_models(whole, [_outcome(whole[0], 1.0, 1.0)])[0] == whole
    assert along((4, 8), 12, 10.0, 1.0) == 0.0


def test_some_blocks_are_gathered_as_all_would_be() -> None:
    """The depth is that of the whole model, and what stays is the same share of the blocks that there are."""
    cluster = find_cluster("p4d.24xlarge:2")
    with mics.emulate(cluster):
        model = replace(JOB.model, hidden_size=64, seq_len=64)
        shallow, deep = two_depths(replace(JOB, model=model), 8)
        first, second = (prefetch_of_whole(job, cluster, LOSSLESS) for job in (shallow, deep))
    assert first.units == second.units
    assert first.stay_nbytes <= second.stay_nbytes


def _gathered_nbytes(layers: int, *, ahead: int, size: int) -> int:
    """Of one step of two micro-steps, as the third step has it."""
    with mics.emulate(SLOW):
        model = GPT(replace(JOB.model, num_layers=layers))
        mics.shard(
            model,
            partition_size=size,
            units=[Block],
            prefetch=mics.Prefetch(units=ahead),
            activations=mics.Activations(checkpoint="unit"),
        )
        tokens = torch.zeros(1, 16, dtype=torch.long)
        found = []
        for _ in range(3):
            for batch in mics.microsteps(model, [tokens, tokens]):
                model(batch).float().mean().backward()
            mics.clip_grad_norm_(model, 1.0)
            model.zero_grad()
            nbytes = mics.traffic(model).nbytes
            found.append(
                sum(
                    each
                    for (group, kind), each in nbytes.items()
                    if group == "partition" and "gather" in kind
                )
            )
    return found[2] - found[1]


@pytest.mark.parametrize(("ahead", "size"), [(3, 2), (4, 2), (3, SLOW.world_size)])
def test_blocks_gathered_ahead_are_never_gathered_again(ahead: int, size: int) -> None:
    """From as many blocks as are gathered ahead on, each block adds the same bytes. Of fewer, less.

    With one replica it is two, however many are gathered ahead.
    """
    least = ahead if size < SLOW.world_size else 2
    nbytes = [_gathered_nbytes(layers, ahead=ahead, size=size) for layers in range(least - 1, least + 4)]
    first, *others = (after - before for before, after in pairwise(nbytes))
    assert len(set(others)) == 1 and first < others[0]


def test_too_few_blocks_are_not_scaled() -> None:
    """Half of them must be as many as mics gathers ahead, with one replica two. Others gather each again."""
    model = replace(JOB.model, num_layers=24, hidden_size=512, num_heads=4, seq_len=512)
    job = replace(JOB, model=model, micro_batch=8, partition_size=4, accumulation=4)
    cluster = replace(SLOW, num_nodes=4, inter=Link(bandwidth=1e9, latency=1e-6))

    def runs(system: str, layers: int) -> Sequence[Run]:
        return interleave(
            [system], [(each, cluster) for each in two_depths(job, layers)], repeats=1, record=False
        )

    ahead = prefetch_of_whole(two_depths(job, 4)[0], cluster, LOSSLESS).units
    assert ahead > 2
    assert [too_few(run) for run in runs("mics", 2 * ahead)] == ["", ""]
    assert [too_few(run) for run in runs("fsdp2", 4)] == ["", ""]
    alone = replace(job, partition_size=cluster.world_size)  # one replica
    one, two, four = (
        interleave(["mics"], [(two_depths(alone, layers)[0], cluster)], repeats=1, record=False)[0]
        for layers in (2, 4, 8)
    )
    assert prefetch_of_whole(two.job, cluster, LOSSLESS).units > 2
    assert too_few(two) == too_few(four) == "" and "expected at least 4" in too_few(one)
    assert too_few(interleave(["mics"], [(job, cluster)], repeats=1, record=False)[0]) == ""
    for system in ("mics", "mics-partition", "mics-int8"):
        few = runs(system, 4)
        whole, *ran = with_whole_models(few, [_outcome(run, 2.0, 0.25) for run in few])[1]
        expected = f"--layers: expected at least {2 * ahead} to scale from, because {system}"
        assert whole.error is not None and whole.error.startswith(expected) and "found 4" in whole.error
        assert [outcome.error for outcome in ran] == [None, None]
    job = replace(job, model=replace(model, num_layers=6))
    assert "expected it unset" in too_few(runs("mics", 4)[0])


def test_a_few_blocks_run(tmp_path: Path) -> None:
    """From jobs to a row of the whole model, on an emulated cluster."""
    jobs = two_depths(JOB, 8)
    runs = interleave(["mics"], [(job, SLOW) for job in jobs], repeats=1, record=True)
    plan = RunPlan(runs=runs, num_warmup_steps=1, num_steps=2, folder=str(tmp_path))
    outcomes = [measure(run, plan) for run in runs]
    assert [outcome.error for outcome in outcomes] == [None, None]
    row, shallow, deep = summarise(*with_whole_models(runs, outcomes), peak_tflops=None)
    assert deep.step_seconds[0] > 0 and shallow.run.blocks == "4 of 12 blocks"
    assert row.error is None or "found no difference" in row.error
    assert len(list(tmp_path.glob("*-blocks.trace.json"))) == 2
