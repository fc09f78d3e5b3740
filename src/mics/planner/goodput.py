"""What is left of a long run when nodes fail: the usual arithmetic of checkpoints and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often nodes fail and what that costs, in seconds."""

    node_mtbf: float
    """Mean time between failures of one node."""
    checkpoint: float
    """Seconds training pauses per checkpoint."""
    restart: float
    """Seconds from a failure until training continues: detect it, start again, load."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds, and the share of them that is training."""

    interval: float
    """Between two checkpoints, that loses least."""
    mtbf: float
    """Of the whole cluster."""
    share: float


def goodput(faults: Faults, num_nodes: int) -> Goodput:
    """The best checkpoint interval (Young and Daly), and what is left.

    A failure costs a restart and, on average, half an interval of work that is done again; every interval
    costs a checkpoint.
    """
    mtbf = faults.node_mtbf / num_nodes
    interval = math.sqrt(2 * faults.checkpoint * mtbf) if faults.checkpoint else 0.0
    saving = faults.checkpoint / (interval + faults.checkpoint) if faults.checkpoint else 0.0
    lost = (faults.restart + (interval + faults.checkpoint) / 2) / mtbf
    return Goodput(interval=interval, mtbf=mtbf, share=max(0.0, 1 - saving) * max(0.0, 1 - lost))
