"""The thread that makes batches ahead: in order, no further than asked, and it ends."""

from __future__ import annotations

import threading
import time

import pytest

from mics.data.prefetching import Prefetcher


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mics-data"]


def test_items_come_in_order_and_ahead_of_use() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return 10 * number

    feed = Prefetcher(make, first=3, last=9, depth=2)
    assert feed.get(3)[0] == 30
    deadline = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [3, 4, 5, 6]  # one taken, two ready, one that waits for room
    assert [feed.get(number)[0] for number in range(4, 10)] == [10 * number for number in range(4, 10)]
    feed.close()
    assert made == list(range(3, 10))
    assert _threads() == []


def test_waiting_is_measured() -> None:
    def make(number: int) -> int:
        time.sleep(0.1)
        return number

    feed = Prefetcher(make, first=1, last=2)
    assert 0.05 < feed.get(1)[1] < 5
    time.sleep(0.5)
    assert feed.get(2)[1] < 0.05
    feed.close()


def test_an_error_is_raised_where_the_item_is_asked_for() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("a shard is gone")
        return number

    feed = Prefetcher(make, first=1, last=5)
    assert feed.get(1)[0] == 1
    with pytest.raises(ValueError, match="a shard is gone"):
        feed.get(2)
    assert _threads() == []


def test_a_feed_that_nobody_reads_ends() -> None:
    feed = Prefetcher(lambda number: number, first=1, last=10**9)
    feed.close()
    assert _threads() == []
    Prefetcher(lambda number: number, first=5, last=4).close()
