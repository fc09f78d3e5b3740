"""A model that is too deep to run, from two runs of fewer of its blocks at their true width.

What a block adds is the slope between the two depths: ``time(L) = a + b L``, and so for bytes. Memory is that
of the deeper run, and what the missing blocks would hold by the planner's arithmetic: few blocks have less to
gather ahead, and a slope would take that for what every block holds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

from mics.bench.job import Job
from mics.bench.plan import Outcome, Run
from mics.bench.systems.with_mics import INT4, INT8, prefetch_of_whole
from mics.bench.timeline import Exposure
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import shape_of_config
from mics.errors import SettingsError
from mics.layout.compression import LOSSLESS, UNCOMPRESSED
from mics.planner.systems import SYSTEMS as SIMULATED

_FLAT: Final = "--layers: expected {} blocks to take longer than {}, found no difference; raise it or --steps"

_DIVIDED_AS: Final = {
    "mics-partition": "mics",
    "mics-host": "mics",
    "mics-uncompressed": "mics",
    "mics-int8": "mics",
    "mics-int4": "mics",
    "hsdp-kept": "hsdp",
    "zero2-reduce": "zero2",
    "deepspeed-zero2": "zero2",
    "megatron-fsdp-bf16": "megatron-fsdp",
    "deepspeed-zero3": "zero3",
    "deepspeed-mics": "mics-published",
}
"""Systems that the planner knows by another name."""
_COMPRESSED: Final = {"mics-uncompressed": UNCOMPRESSED, "mics-int8": INT8, "mics-int4": INT4}
"""Those that send other formats than ``mics``."""


def two_depths(job: Job, layers: int) -> tuple[Job, Job]:
    """The job with half of ``layers`` blocks and with all of them."""
    whole = job.model.num_layers
    if layers < 2 or layers % 2 or layers >= whole:
        raise SettingsError(
            f"--layers: expected an even number from 2, below the model's {whole} blocks, found {layers}; "
            "leave it out to run the whole model"
        )
    shallow, deep = (
        replace(job, model=replace(job.model, num_layers=number), whole_layers=whole)
        for number in (layers // 2, layers)
    )
    return shallow, deep


def too_few(run: Run) -> str:
    """Why a run of half the blocks says nothing of the whole model: mics keeps them. Empty: it does."""
    found, least = run.job.model.num_layers, least_blocks(run)
    if found >= least:
        return ""
    enough = 2 * least < (run.job.whole_layers or 0)
    expected = f"at least {2 * least} to scale from" if enough else "it unset"
    return (
        f"--layers: expected {expected}, because {run.system} keeps all of so shallow a model gathered, "
        f"found {2 * found}"
    )


def least_blocks(run: Run) -> int:
    """Of the shallower model, for each further block to add as many bytes. 0: whole, or not of mics.

    As many as mics gathers ahead. With one replica each adds the same from the second on: only a single one
    is never gathered again.
    """
    job, cluster = run.job, run.cluster
    if job.whole_layers is None or cluster is None or _DIVIDED_AS.get(run.system, run.system) != "mics":
        return 0
    prefetch = prefetch_of_whole(job, cluster, _COMPRESSED.get(run.system, LOSSLESS))
    ahead = prefetch.units
    if prefetch.nbytes is not None:
        one_more = replace(job.model, num_layers=job.model.num_layers + 1)
        block = (one_more.num_parameters - job.model.num_parameters) * job.param.itemsize
        ahead = min(ahead, prefetch.nbytes // block)
    return min(ahead, 2) if job.partition_size == cluster.world_size else ahead


def missing_nbytes(run: Run) -> int | None:
    """How much more the whole model needs at its peak; None: the planner does not know the system."""
    job, cluster = run.job, run.cluster
    system = SIMULATED.get(_DIVIDED_AS.get(run.system, run.system))
    if job.whole_layers is None or cluster is None or system is None:
        return None
    whole = Setting(
        model=shape_of_config("whole", replace(job.model, num_layers=job.whole_layers)),
        cluster=cluster,
        partition_size=job.partition_size,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        activations=Keeping(checkpoint=job.checkpoint, offload=job.offload),
        wire_nbytes=job.reduce.itemsize,
        over_replicas=run.system != "mics-partition",
        state_on_host=run.system == "mics-host",
        compression=_COMPRESSED.get(run.system, LOSSLESS),
    )
    whole = replace(whole, prefetch=whole.depth)
    shorter = replace(whole, model=whole.model.with_blocks(job.model.num_layers))
    return max(0, round(system.need(whole).peak - system.need(shorter).peak))


def with_whole_models(
    runs: Sequence[Run], outcomes: Sequence[Outcome]
) -> tuple[tuple[Run, ...], list[Outcome]]:
    """The whole models that runs of two depths come to, then the runs, the shallower ones first."""
    wholes, shallow, deep = [], [], []
    waiting: dict[tuple[object, ...], deque[tuple[Run, Outcome]]] = {}
    for run, outcome in zip(runs, outcomes, strict=True):
        layers = run.job.whole_layers
        if layers is None:
            return tuple(runs), list(outcomes)
        its = waiting.setdefault((run.system, run.cluster, whole_of(run.job)), deque())
        if not its or its[0][0].job.model.num_layers == run.job.model.num_layers:
            its.append((run, outcome))  # its deeper one comes later
            continue
        first, its_outcome = its.popleft()
        depths = (first.job.model.num_layers, run.job.model.num_layers)
        whole = replace(run, job=whole_of(run.job), scaled_from=depths)
        missing, few = missing_nbytes(run), too_few(first)
        scaled = _scaled(its_outcome, outcome, depths, layers, missing=missing, few=few)
        wholes.append((whole, scaled))
        shallow.append((first, its_outcome))
        deep.append((run, outcome))
    found = [*wholes, *shallow, *deep]
    return tuple(run for run, _ in found), [outcome for _, outcome in found]


def whole_of(job: Job) -> Job:
    """The job with all of its blocks."""
    layers = job.whole_layers or job.model.num_layers
    return replace(job, model=replace(job.model, num_layers=layers), whole_layers=None)


def along(depths: tuple[int, int], layers: int, shallow: float, deep: float) -> float:
    """The line through two depths, at a third; nothing is less than nothing."""
    slope = (deep - shallow) / (depths[1] - depths[0])
    return max(0.0, deep + (layers - depths[1]) * slope)


def _scaled(
    shallow: Outcome, deep: Outcome, depths: tuple[int, int], layers: int, *, missing: int | None, few: str
) -> Outcome:
    for error in (shallow.error, deep.error, few):
        if error:
            return replace(deep, error=error)

    def at(first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else along(depths, layers, first, second)

    def whole_number(name: str) -> int | None:
        found = at(getattr(shallow, name), getattr(deep, name))
        return None if found is None else round(found)

    def memory(name: str) -> int | None:
        found: int | None = getattr(deep, name)
        return whole_number(name) if found is None or missing is None else found + missing

    # The fastest with the fastest, the slowest with the slowest.
    pairs = zip(sorted(shallow.step_seconds), sorted(deep.step_seconds), strict=True)
    step_seconds = [along(depths, layers, *pair) for pair in pairs]
    if statistics.median(step_seconds) <= statistics.median(deep.step_seconds):
        return replace(deep, error=_FLAT.format(depths[1], depths[0]))
    return replace(
        deep,
        step_seconds=step_seconds,
        host_seconds=at(shallow.host_seconds, deep.host_seconds),
        peak_allocated_nbytes=memory("peak_allocated_nbytes"),
        peak_reserved_nbytes=memory("peak_reserved_nbytes"),
        uplink_nbytes=whole_number("uplink_nbytes"),
        exposure=_exposure(shallow.exposure, deep.exposure, depths, layers),
    )


def _exposure(
    shallow: Exposure | None, deep: Exposure | None, depths: tuple[int, int], layers: int
) -> Exposure | None:
    if shallow is None or deep is None:
        return None
    values: dict[str, float | dict[str, float]] = {}
    for item in fields(Exposure):
        first, second = getattr(shallow, item.name), getattr(deep, item.name)
        if isinstance(second, dict):
            values[item.name] = {
                key: along(depths, layers, first.get(key, 0.0), found) for key, found in second.items()
            }
        else:
            values[item.name] = along(depths, layers, first, second)
    return Exposure(**values)  # type: ignore[arg-type]
