"""Clocks of nodes against rank 0's, through the store.

Rank 0 asks all at once and notes when; each node answers with its own time; rank 0 notes when it has read the
answer. The node's time lies between the two notes, so each round bounds the offset from both sides, and the
bounds of all rounds meet. A slow network widens the bounds and makes nothing wrong.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Final

from mics.doctor.facts import ClockFacts
from mics.doctor.meeting import Meeting

_ROUNDS: Final = 3


def bounds(asked: float, answer: float, read: float) -> tuple[float, float]:
    """How far ahead the other clock is, at least and at most."""
    return answer - read, answer - asked


def ask_clocks(meeting: Meeting, leaders: Mapping[str, int], seconds: float) -> dict[str, ClockFacts]:
    """Of each node, by the rank that answers for it; rank 0 alone calls this."""
    low, high = dict.fromkeys(leaders, -math.inf), dict.fromkeys(leaders, math.inf)
    deadline = time.monotonic() + seconds
    for number in range(_ROUNDS):
        stage = f"clock{number}"
        asked = time.time()
        meeting.announce(stage, "")
        for node, rank in leaders.items():
            left = deadline - time.monotonic()
            data = meeting.collect(stage, [rank], left).get(rank) if left > 0 else None
            if data is None:
                continue
            at_least, at_most = bounds(asked, json.loads(data), time.time())
            low[node], high[node] = max(low[node], at_least), min(high[node], at_most)
    return {node: ClockFacts(low=low[node], high=high[node]) for node in leaders if high[node] < math.inf}


def answer_clocks(meeting: Meeting, seconds: float) -> None:
    """One rank of each node calls this."""
    for number in range(_ROUNDS):
        stage = f"clock{number}"
        meeting.hear(stage, seconds)
        meeting.tell(stage, json.dumps(time.time()))
