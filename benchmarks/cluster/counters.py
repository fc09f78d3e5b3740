"""What crossed this host's uplink, read by a rank at a moment it chooses.

    before = uplink_nbytes()
    train_one_step()
    dist.barrier()
    sent = uplink_nbytes().sent_nbytes - before.sent_nbytes

The interface counts whole Ethernet frames, headers, acknowledgements and retransmissions included, as a
network card would. Ranks of one host share the uplink, so all of them read the same numbers: let one rank of
each host report, and put a barrier before each reading, or the others are still sending. What is sent between
the ranks of one host stays on its loopback and is in neither number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

UPLINK_VARIABLE = "MICS_UPLINK_DEV"
"""Set in every process of the cluster: the name of its host's uplink interface."""


class Traffic(NamedTuple):
    """Bytes that crossed one host's uplink since the host came up."""

    sent_nbytes: int
    received_nbytes: int


def statistics_files(device: str) -> tuple[Path, Path]:
    """Where the caller's network namespace shows the bytes ``device`` has sent and received."""
    folder = Path("/sys/class/net") / device / "statistics"
    return folder / "tx_bytes", folder / "rx_bytes"


def uplink_nbytes() -> Traffic:
    """Bytes sent and received over this host's uplink so far; two small reads, no system-wide effect."""
    device = os.environ.get(UPLINK_VARIABLE)
    if device is None:
        raise RuntimeError(
            f"expected {UPLINK_VARIABLE} in the environment, found none: this process is not on a namespace "
            "cluster. Start it with `python -m benchmarks.cluster run ... -- script.py`."
        )
    sent, received = (int(file.read_text()) for file in statistics_files(device))
    return Traffic(sent_nbytes=sent, received_nbytes=received)


def uplink_nbytes_of(work: Callable[[], object]) -> Traffic:
    """Bytes over this host's uplink while all ranks do ``work``, which must leave nothing under way.

    All ranks call it; those of one host find the same. Two barriers are in the numbers: a few hundred bytes.
    """
    dist.barrier()
    before = uplink_nbytes()
    dist.barrier()  # nobody sends before all have read
    work()
    dist.barrier()
    after = uplink_nbytes()
    dist.barrier()
    return Traffic(
        sent_nbytes=after.sent_nbytes - before.sent_nbytes,
        received_nbytes=after.received_nbytes - before.received_nbytes,
    )
