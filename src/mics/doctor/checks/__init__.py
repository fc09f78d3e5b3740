"""From facts to findings. Each check takes the survey and returns its lines; none where it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mics.doctor.checks.devices import compute_results, compute_speed, gpu_memory, gpus, nccl_and_driver
from mics.doctor.checks.machines import (
    clocks,
    cores,
    host_memory,
    limits,
    ranks_per_node,
    restarts,
    settings,
    shared_memory,
    start,
    versions,
)
from mics.doctor.checks.networks import adapters, bandwidth, collectives, doors, interfaces, pairs
from mics.doctor.checks.storage import data, folder, folder_space, folder_speed
from mics.doctor.checks.who import answers
from mics.doctor.findings import Finding
from mics.doctor.survey import Survey

CHECKS: Final[tuple[Callable[[Survey], list[Finding]], ...]] = (
    answers,
    settings,
    versions,
    clocks,
    start,
    ranks_per_node,
    restarts,
    cores,
    host_memory,
    shared_memory,
    limits,
    gpus,
    gpu_memory,
    nccl_and_driver,
    interfaces,
    doors,
    adapters,
    compute_results,
    compute_speed,
    collectives,
    bandwidth,
    pairs,
    folder,
    folder_speed,
    folder_space,
    data,
)


def judge(survey: Survey) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(survey)]
