"""What goes wrong in a run, as data that travels to the ranks through their environment."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

VARIABLE: Final = "MICS_TEST_FAULTS"
"""Where the ranks find the faults: a JSON object with the folder of marks and the list of faults."""

KINDS: Final = {
    "kill": "SIGKILL of rank",
    "stop": "SIGSTOP of rank",
    "loop": "endless loop in rank",
    "node": "SIGKILL of the node",
    "term": "SIGTERM to rank",
}
MOMENTS: Final = {
    "forward": "in forward",
    "backward": "in backward",
    "collective": "inside a collective",
    "save": "while its part is written",
    "latest": "while `latest` is moved",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It happens once, after those before it in the list."""

    kind: str
    moment: str
    step: int
    rank: int

    def describe(self) -> str:
        return (
            f"{KINDS[self.kind]} {self.rank}"
            if self.kind != "node"
            else f"SIGKILL of rank {self.rank}'s node"
        )


def draw_faults(
    seed: int, *, num_faults: int, num_steps: int, interval: int, num_ranks: int, kinds: Sequence[str]
) -> list[Fault]:
    """Faults at random points of a run, in the order in which it comes by them.

    Each is later than the one before by more than an interval: whatever checkpoint the run goes on from, it
    comes by the next one. Those in a save are at the steps that are saved.
    """
    dice = random.Random(seed)
    room = num_steps // num_faults
    faults = []
    for number in range(num_faults):
        kind = dice.choice(list(kinds))
        moment = "forward" if kind == "loop" else dice.choice(list(MOMENTS))  # it waits for data for ever
        step = dice.randrange(max(2, number * room + 1), (number + 1) * room)
        if moment in ("save", "latest"):
            step = min(-(-step // interval) * interval, (num_steps - 1) // interval * interval)
        if faults:
            step = max(step, faults[-1].step + (interval if moment in ("save", "latest") else 1))
        rank = 0 if moment == "latest" else dice.randrange(num_ranks)  # who moves it
        faults.append(Fault(kind=kind, moment=moment, step=step, rank=rank))
    return faults


def encode(faults: Sequence[Fault], marks: str) -> str:
    return json.dumps({"marks": marks, "faults": [asdict(fault) for fault in faults]})


def decode(text: str) -> tuple[list[Fault], str]:
    found = json.loads(text)
    return [Fault(**each) for each in found["faults"]], found["marks"]
