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
    "kill": "SIGKILL of the rank",
    "stop": "SIGSTOP of the rank",
    "loop": "endless loop in the rank",
    "node": "SIGKILL of the node",
    "term": "SIGTERM to the rank",
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


def draw_faults(seed: int, *, num_faults: int, num_steps: int, interval: int, num_ranks: int) -> list[Fault]:
    """Faults at random points of a run, in the order in which it comes by them.

    Each is later than the one before: a run that goes on from a checkpoint passes all steps after it again.
    """
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(2, num_steps), num_faults))
    return [_draw(dice, step, interval=interval, num_steps=num_steps, num_ranks=num_ranks) for step in steps]


def _draw(dice: random.Random, step: int, *, interval: int, num_steps: int, num_ranks: int) -> Fault:
    kind = dice.choices(list(KINDS), weights=[5, 2, 1, 2, 2])[0]
    moment = dice.choice(list(MOMENTS))
    if kind == "loop":
        moment = "forward"  # where data would be waited for
    rank = dice.randrange(num_ranks)
    if moment in ("save", "latest"):
        # The first save from this step on. The last step has one too, and nothing comes after it.
        step = min(-(-step // interval) * interval, num_steps - num_steps % interval)
    if moment == "latest":
        rank = 0  # who moves it
    return Fault(kind=kind, moment=moment, step=step, rank=rank)


def encode(faults: Sequence[Fault], marks: str) -> str:
    return json.dumps({"marks": marks, "faults": [asdict(fault) for fault in faults]})


def decode(text: str) -> tuple[list[Fault], str]:
    found = json.loads(text)
    return [Fault(**each) for each in found["faults"]], found["marks"]
