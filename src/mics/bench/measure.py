"""One run: build a system, train a few steps, and read everything off."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mics.bench.job import Job
from mics.bench.plan import Outcome, Run, RunPlan
from mics.bench.provenance import step_subtitle, step_title
from mics.bench.systems import SYSTEMS, System, SystemUnavailable
from mics.bench.systems.protocol import Batch, Trainer
from mics.bench.timeline import Exposure, exposure, record
from mics.bench.trace import write_trace
from mics.bench.uplink import sent_nbytes
from mics.emulator import Emulation, emulate


def measure(run: Run, plan: RunPlan, *, systems: Mapping[str, System] = SYSTEMS) -> Outcome:
    """Measure one run. All ranks call it; what a system raises becomes the outcome's error."""
    device = (
        torch.device("cuda", torch.cuda.current_device()) if run.job.device == "cuda" else torch.device("cpu")
    )
    _forget(device)
    try:
        dilation = 1.0 if run.clock is None else run.clock.factor
        around = (
            nullcontext()
            if run.cluster is None
            else emulate(run.cluster, imagined=run.job.imagined, dilation=dilation)
        )
        with around as emulation:
            return _measure(run, plan, systems[run.system], device, emulation)
    except SystemUnavailable as error:
        return Outcome(number=run.number, error=str(error))  # on all ranks alike, before any collective
    except Exception as error:
        if run.cluster is None and dist.get_world_size() > 1:
            raise  # the other ranks may be inside a collective: only a new start is safe
        text = " ".join(str(error).split())
        return Outcome(number=run.number, error=f"{type(error).__name__}: {text[:400]}")
    finally:
        _forget(device)


def _measure(
    run: Run, plan: RunPlan, system: System, device: torch.device, emulation: Emulation | None
) -> Outcome:
    job = run.job
    on_gpu = device.type == "cuda"
    # What the system before has not freed is not this one's. Free space beside it is: this one may use it,
    # and without it less would be reserved than is allocated.
    kept = torch.cuda.memory_allocated() if on_gpu else 0
    trainer = system.build(job)
    num_steps = plan.num_warmup_steps + plan.num_steps
    steps = iter(_batches(job, num_steps + 2, device))
    losses: list[Tensor] = [trainer.step(next(steps)) for _ in range(plan.num_warmup_steps)]
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    if run.cluster is None:
        dist.barrier()
    sent = sent_nbytes()
    timed = _time_on_device if on_gpu else _time_on_host
    step_seconds = timed(lambda: losses.append(trainer.step(next(steps))), plan.num_steps)
    if run.cluster is None:
        dist.barrier()
    sent_after = sent_nbytes()  # before the exchanges below
    outcome = Outcome(
        number=run.number,
        step_seconds=_slowest([_dilation(emulation) * seconds for seconds in step_seconds]),
        losses=_means(losses),
        same_start=trainer.same_start,
        tokens_per_step=job.micro_batch * job.accumulation * job.model.seq_len,
        peak_allocated_nbytes=torch.cuda.max_memory_allocated() - kept if on_gpu else None,
        peak_reserved_nbytes=torch.cuda.max_memory_reserved() - kept if on_gpu else None,
        num_alloc_retries=torch.cuda.memory_stats()["num_alloc_retries"] - retries if on_gpu else None,
        uplink_nbytes=_most(sent_after, sent, plan.num_steps),
    )
    if emulation is not None:
        batches = next(steps)
        if run.record:
            found = _look_inside(run, plan, system, trainer, batches, device, emulation)
            outcome = replace(outcome, exposure=found)
        if on_gpu:
            outcome = replace(outcome, host_seconds=_host_seconds(trainer, batches, emulation))
    trainer.close()
    return outcome


def _dilation(emulation: Emulation | None) -> float:
    """Seconds of the GPU whose time is shown in one of this device."""
    return 1.0 if emulation is None else emulation.dilation


def _look_inside(
    run: Run,
    plan: RunPlan,
    system: System,
    trainer: Trainer,
    batches: list[Batch],
    device: torch.device,
    emulation: Emulation,
) -> Exposure:
    """Where one step's time goes, with a trace and a picture of it."""
    from mics.bench.picture import draw_timeline  # matplotlib, which only these runs need

    timeline, collectives = record(
        lambda: trainer.step(batches),
        emulation,
        device,
        partition_size=system.partition_size(run.job, run.world_size),
    )
    timeline = timeline.dilated(emulation.dilation)
    found = exposure(timeline, collectives, emulation.cluster.ranks_per_node)
    name = run.row.replace("/", "_").replace(":", "x")
    title, subtitle = step_title(run, system), step_subtitle(run)
    write_trace(Path(plan.folder) / f"{name}.trace.json", timeline, title=title)
    draw_timeline(Path(plan.folder) / f"{name}.timeline.png", timeline, found, title=title, subtitle=subtitle)
    return found


def _host_seconds(trainer: Trainer, batches: list[Batch], emulation: Emulation) -> float:
    """Seconds the host needs to issue a step.

    With one short row a micro-step and collectives that take no time, the GPU is always ahead: nothing holds
    the host up, and what it issues is the same.
    """
    short = [(tokens[:1, :16].contiguous(), targets[:1, :16].contiguous()) for tokens, targets in batches]
    found = []
    with emulation.free():
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            trainer.step(short)
            found.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(found[1:])


def _time_on_device(step: Callable[[], None], count: int) -> list[float]:
    """Seconds between the starts of steps on the GPU, nothing waiting in between.

    After one that is not timed: it finds the links idle, and what the step before left for it to hide done.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    step()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]


def _time_on_host(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each step from a common start to this rank's end."""
    seconds = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _batches(job: Job, count: int, device: torch.device) -> list[list[Batch]]:
    """Micro-batches of ``count`` steps, this rank's own, the same for every system."""
    generator = torch.Generator().manual_seed(1000 * job.seed + dist.get_rank())
    shape = (count, job.accumulation, job.micro_batch, job.model.seq_len + 1)
    tokens = torch.randint(
        0, job.model.vocab_size, shape, generator=generator, dtype=torch.int64, device="cpu"
    ).to(device)
    return [[(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in step] for step in tokens]


def _slowest(seconds: list[float]) -> list[float]:
    """Each step's time on the rank that took the longest."""
    every: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return [max(of_step) for of_step in zip(*every, strict=True)]


def _means(losses: list[Tensor]) -> list[float]:
    """Each step's loss, mean over ranks."""
    stacked = torch.stack([loss.float().reshape(()) for loss in losses])
    dist.all_reduce(stacked)
    means: list[float] = (stacked / dist.get_world_size()).tolist()
    return means


def _most(after: int | None, before: int | None, num_steps: int) -> int | None:
    """Bytes per step through the uplink that carried the most."""
    if after is None or before is None:
        return None
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, after - before)
    return max(every) // num_steps


def _forget(device: torch.device) -> None:
    """Free what the run before has left, so that its memory is not counted here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
