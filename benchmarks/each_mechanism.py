"""What each mechanism gains, alone: one GPU (or CPU) as rank 0 of an emulated cluster.

    python benchmarks/each_mechanism.py --partition-size 8 16 512

Each row of a table has one mechanism more than the one above it. The first has nothing beside the
computation, the one named "the default" is what `mics.shard` does when nothing is asked for. Then the default
with one thing taken away, and HSDP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mics
from mics.bench.job import Job
from mics.bench.measure import measure
from mics.bench.models import BENCH_MODELS
from mics.bench.plan import Outcome, Run, RunPlan
from mics.bench.systems import SYSTEMS, Batch, System
from mics.bench.systems.loop import Loop
from mics.bench.systems.with_mics import build_mics
from mics.cost.clusters import find_cluster
from mics.engine import Engine, engine_of

GIB = 2**30
DEFAULT = "units that stay: the default"


class AfterEachStep:
    """A trainer with something to do between steps."""

    def __init__(self, trainer: Loop, then: Callable[[Engine], None]) -> None:
        self.same_start = trainer.same_start
        self._trainer = trainer
        self._then = then

    def step(self, batches: Sequence[Batch]) -> Tensor:
        loss = self._trainer.step(batches)
        self._then(engine_of(self._trainer._model))
        return loss

    def close(self) -> None:
        self._trainer.close()


def waiting(job: Job, **settings: Any) -> AfterEachStep:
    """New parameters are there before the next step begins: they hide under nothing."""
    return AfterEachStep(build_mics(job, **settings), lambda engine: engine.mesh.lanes.drain())


def unannounced(model: Any, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Micro-steps of which none is known to be the last: hop 2 comes after all of them."""
    yield from batches


def ways(chosen: mics.Prefetch, *, spans_nodes: bool) -> Mapping[str, System]:
    """What is compared, in the table's order, where the default has ``chosen``."""
    ahead = mics.Prefetch(units=chosen.units)
    builds: dict[str, Callable[[Job], Any]] = {
        "nothing beside the computation": partial(waiting, microsteps=unannounced, prefetch=0),
        "gathers one unit ahead, hop 1 behind": partial(waiting, microsteps=unannounced, prefetch=1),
        f"{ahead.units} ahead, as the cost model says": partial(
            waiting, microsteps=unannounced, prefetch=ahead
        ),
        "hop 2 under the last backward": partial(waiting, prefetch=ahead),
        "new parameters under the next forward": partial(build_mics, prefetch=ahead),
        DEFAULT: build_mics,
        "the default without homes (low_memory)": partial(build_mics, low_memory=True),
    }
    if spans_nodes:
        for name, two_stage in (("one stage", False), ("two stages", True)):
            builds[f"the default, collectives in {name}"] = partial(build_mics, hierarchical=two_stage)
    builds["HSDP"] = SYSTEMS["hsdp"].build
    return {name: System(name=name, build=build) for name, build in builds.items()}


def table(args: argparse.Namespace, partition_size: int) -> None:
    """Measure all ways with one partition size, one after the other in this process."""
    cluster = find_cluster(args.cluster)
    model = BENCH_MODELS[args.model]
    on_gpu = torch.cuda.is_available()
    job = Job(
        model=model.config,
        partition_size=partition_size,
        micro_batch=model.micro_batch,
        accumulation=args.accumulation,
        checkpoint=model.checkpoint,
        param_dtype="bfloat16" if on_gpu else "float32",
        reduce_dtype="float32",
        device="cuda" if on_gpu else "cpu",
    )
    plan = RunPlan(runs=(), num_warmup_steps=args.warmup, num_steps=args.steps, folder=str(args.out))

    def outcome_of(system: System) -> Outcome:
        run = Run(
            number=0,
            system=system.name,
            job=job,
            world_size=cluster.world_size,
            cluster=cluster,
            record=True,
        )
        return measure(run, plan, systems={system.name: system})

    # Once before the table: what the default chooses is a setting of the other rows.
    chosen = [mics.Prefetch()]
    remember = System(
        name=DEFAULT,
        build=lambda job: AfterEachStep(
            build_mics(job), lambda engine: chosen.append(engine.residency.plans.prefetch)
        ),
    )
    outcome_of(remember)
    print(f"\n{cluster.world_size} ranks, partition size {partition_size}: {chosen[-1]}\n", flush=True)
    print("| | step ms | exposed intra ms | exposed inter ms | inter GB a node | peak GiB | reserved GiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    spans_nodes = partition_size > cluster.ranks_per_node
    for name, system in ways(chosen[-1], spans_nodes=spans_nodes).items():
        print(f"| {name} | {' | '.join(cells(outcome_of(system)))} |", flush=True)


def cells(found: Outcome) -> Iterator[str]:
    if found.error is not None:
        yield found.error
        return
    yield f"{1e3 * statistics.median(found.step_seconds):.0f}"
    assert found.exposure is not None
    for link in ("intra", "inter"):
        yield f"{1e3 * found.exposure.exposed_seconds[link]:.0f}"
    yield f"{found.exposure.link_nbytes['inter'] / 1e9:.2f}"
    for nbytes in (found.peak_allocated_nbytes, found.peak_reserved_nbytes):
        yield "" if nbytes is None else f"{nbytes / GIB:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cluster", default=str(Path(__file__).parent / "clusters" / "ordinary.yaml:64"))
    parser.add_argument("--partition-size", type=int, nargs="+", default=[8])
    parser.add_argument("--model", help="one of `mics bench --model`")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/each_mechanism"), help="for traces and pictures"
    )
    args = parser.parse_args()
    args.model = args.model or ("gpt-3.6b" if torch.cuda.is_available() else "gpt-tiny")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for partition_size in args.partition_size:
        table(args, partition_size)
        print(f"\n{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
