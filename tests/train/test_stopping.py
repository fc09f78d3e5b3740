"""Leaving in order: ranks that are in different steps end after the same one, and none waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mics.train.stopping import Stopping


class Rank(Stopping):
    """A rank of this process: its thread is run by hand, and its signals come from the test."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        super().__init__(rank=rank, num_ranks=num_ranks, step=0, store=store)

    def signal(self) -> None:
        self._note_signals(bytes([signal.SIGTERM]))

    def poll(self) -> None:
        self._answer()


def test_all_end_after_the_furthest_step() -> None:
    """One rank is a step ahead when another is asked to leave: that step is the last for both."""
    store = dist.HashStore()
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    assert [rank.may_begin(1) for rank in ranks] == [True, True]
    assert ranks[1].may_begin(2)
    ranks[0].signal()
    ranks[0].signal()  # the launcher's, right behind the scheduler's: the same request
    with ThreadPoolExecutor(1) as others:
        ranks[0].poll()
        waiting = others.submit(ranks[0].may_begin, 2)
        time.sleep(0.1)
        assert not waiting.done(), "it must not decide before the others have spoken"
        ranks[1].poll()
        ranks[0].poll()
        assert waiting.result(timeout=5) is True
    assert [rank.may_begin(3) for rank in ranks] == [False, False]


SCRIPT = """
import os, sys, time
import pytest
import torch.distributed as dist
from mics.train.stopping import Stopping
import mics.train.stopping as stopping
stopping._ANSWER_SECONDS, stopping._REPEAT_SECONDS = float(sys.argv[1]), 0.5
with Stopping(rank=0, num_ranks=2, step=0, store=dist.HashStore()):
    print("ready", flush=True)
    time.sleep(60)  # a main thread that is busy
"""


def _start(answer_seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(answer_seconds)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.full
def test_a_rank_that_does_not_answer_and_a_second_signal_end_it_at_once() -> None:
    """Without a checkpoint, and it says why; also where the main thread never looks."""
    with _start(0.5) as lonely, _start(60.0) as hurried:
        for process in (lonely, hurried):
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(1.0)
        os.kill(hurried.pid, signal.SIGTERM)
        _, said = lonely.communicate(timeout=10)
        assert lonely.returncode == 1
        assert "rank 0 got SIGTERM; leaving without a checkpoint: ranks [1] did not answer" in said
        _, said = hurried.communicate(timeout=10)
        assert hurried.returncode == 1
        assert "asked a second time" in said
