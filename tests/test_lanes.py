"""Lanes: order, overlap, and errors that come out where they are waited for."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from mics.comm.lanes import InlineLane, Lane, Lanes, ThreadLane


@pytest.mark.parametrize("lane", [InlineLane(), ThreadLane("test")])
def test_jobs_run_in_order_and_after_their_tickets(lane: Lane) -> None:
    done: list[int] = []
    other = ThreadLane("other")
    slow = other.submit(lambda: (time.sleep(0.05), done.append(0))[0])
    lane.submit(lambda: done.append(1), after=[slow])
    lane.submit(lambda: done.append(2)).wait()
    assert done == [0, 1, 2]


def test_a_thread_lane_works_beside_the_caller() -> None:
    go, lane = threading.Event(), ThreadLane("test")
    ticket = lane.submit(lambda: (go.wait(5), None)[1])
    go.set()  # would never be reached if the job ran here
    ticket.wait()


def test_an_error_is_raised_by_whoever_waits_and_stops_the_lane() -> None:
    """A collective after a failed one would wait for ranks that never come."""
    ran: list[int] = []
    lane = ThreadLane("test")

    def fail() -> None:
        raise ValueError("rank 3 is gone")

    first = lane.submit(fail)
    second = lane.submit(lambda: ran.append(1))
    for ticket in (first, second, first):
        with pytest.raises(ValueError, match="rank 3 is gone"):
            ticket.wait()
    assert not ran
    dependent = ThreadLane("next").submit(lambda: ran.append(2), after=[first])
    with pytest.raises(ValueError, match="rank 3 is gone"):
        dependent.wait()


def test_gradients_are_off_in_a_lane() -> None:
    found: list[bool] = []
    ThreadLane("test").submit(lambda: found.append(torch.is_grad_enabled())).wait()
    assert found == [False]


def test_threads_end_with_their_lanes() -> None:
    lanes = Lanes(torch.device("cpu"), overlap=True)
    lanes.lane("a lane of its own").submit(lambda: None).wait()
    lanes.drain()
    name = "mics-a lane of its own"
    assert any(thread.name == name for thread in threading.enumerate())
    del lanes
    gc.collect()
    deadline = time.monotonic() + 5
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_overlap_everything_is_inline() -> None:
    lanes = Lanes(torch.device("cpu"), overlap=False)
    assert isinstance(lanes.lane("gather"), InlineLane)


@pytest.mark.gpu
def test_a_stream_lane_orders_by_events() -> None:
    """The job waits for what the caller issued, the caller for the job, and the host for nobody."""
    lanes = Lanes(torch.device("cuda"), overlap=True)
    value = torch.zeros(1, device="cuda")
    lane = lanes.lane("gather")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        value += 1
        ticket = lane.submit(lambda: value.mul_(10))
        ticket.wait()
        value += 3
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert value.item() == 13
