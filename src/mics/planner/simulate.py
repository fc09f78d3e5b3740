"""A step as tasks on streams and links, played through in order of time.

A stream does its tasks one after the other, in the order in which they were issued. A link carries one
transfer at a time, first come, first served. A task begins when its stream is free, what it waits for is
done, and its links are free. Overlap, contention and what stays exposed come out of that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from mics.cost.collectives import Cost
from mics.utils.intervals import Busy

LINKS = ("intra", "inter", "to host", "from host")
_MOST_ROUNDS: Final = 12
_SETTLED: Final = 1e-3  # of the whole time


@dataclass(eq=False, slots=True)
class Task:
    """Something that takes time: computing (``seconds``), or a transfer (``links``: seconds on each)."""

    stream: str
    name: str
    seconds: float = 0.0
    links: tuple[tuple[str, float], ...] = ()
    after: list[Task] = field(default_factory=list)
    number: int = 0  # in the order of issuing
    start: float = -1.0
    end: float = -1.0
    # While it is played:
    followers: list[Task] = field(default_factory=list)
    num_waiting: int = 0
    ready: float = 0.0


class Program:
    """Tasks in the order in which a host issues them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._links: dict[int, tuple[tuple[str, float], ...]] = {}  # by cost: units are alike
        self._costs: list[Cost] = []  # alive, so that each keeps its id

    def compute(self, name: str, seconds: float, after: Sequence[Task | None] = ()) -> Task:
        """On the stream that computes."""
        return self._add(Task("compute", name, seconds, (), [task for task in after if task is not None]))

    def transfer(self, stream: str, name: str, cost: Cost, after: Sequence[Task | None] = ()) -> Task:
        """A collective on a stream of its own."""
        links = self._links.get(id(cost))
        if links is None:
            both = (("intra", cost.intra_seconds), ("inter", cost.inter_seconds))
            links = tuple((link, seconds) for link, seconds in both if seconds > 0)
            self._links[id(cost)] = links
            self._costs.append(cost)
        found = [task for task in after if task is not None]
        return self._add(Task(stream, name, cost.seconds, links, found))

    def beside(self, stream: str, name: str, seconds: float, after: Sequence[Task | None] = ()) -> Task:
        """A kernel on a collective's stream, beside the computation."""
        return self._add(Task(stream, name, seconds, (), [task for task in after if task is not None]))

    def copy(self, link: str, name: str, seconds: float, after: Sequence[Task | None] = ()) -> Task:
        """To the host or from it, each on a stream of its own."""
        found = [task for task in after if task is not None]
        return self._add(Task(link, name, seconds, ((link, seconds),), found))

    def _add(self, task: Task) -> Task:
        task.number = len(self.tasks)
        self.tasks.append(task)
        return task


def play(
    program: Program, slowdowns: Mapping[str, float] | None = None, *, link_slowdown: float = 1.0
) -> float:
    """Give every task its times; the moment at which the last one ends.

    ``slowdowns``: how many times as long computation takes while a link is busy. ``link_slowdown``: the same
    of a transfer while the other link is. What is beside what is known once all is played, so tasks are then
    made longer and played again.
    """
    end = _play(program)
    if link_slowdown > 1:
        end = _play_with_slow_links(program, link_slowdown)
    slow = {link: slowdown - 1 for link, slowdown in (slowdowns or {}).items() if slowdown > 1}
    if not slow:
        return end
    busy = {link: _busy(program, link) for link in slow}
    for task in program.tasks:
        if task.stream == "compute":
            task.seconds += sum(slow[link] * busy[link].within(task.start, task.end) for link in slow)
    return _play(program)


def _busy(program: Program, link: str) -> Busy:
    return Busy(
        (task.start, task.start + seconds)
        for task in program.tasks
        for name, seconds in task.links
        if name == link
    )


def _play_with_slow_links(program: Program, slowdown: float) -> float:
    """Two links that are busy at once are both slower, for as long as they are.

    A transfer that is longer meets more of the other link's: that is played until it changes nothing.
    """
    transfers = [(task, task.links) for task in program.tasks if task.links]
    others = {"intra": "inter", "inter": "intra"}
    lost = 1 - 1 / slowdown  # of the time in which both are busy
    ends = [max(task.end for task in program.tasks)]
    for _ in range(_MOST_ROUNDS):
        busy = {other: _busy(program, other) for other in others}
        for task, alone in transfers:
            task.links = tuple(
                (link, seconds + lost * busy[others[link]].within(task.start, task.start + now))
                if link in others
                else (link, seconds)
                for (link, seconds), (_, now) in zip(alone, task.links, strict=True)
            )
            task.seconds = max(seconds for _, seconds in task.links)
        ends.append(_play(program))
        if abs(ends[-1] - ends[-2]) <= _SETTLED * ends[-1]:
            break
    return ends[-1]


def _play(program: Program) -> float:
    tasks = program.tasks
    for task in tasks:
        task.followers, task.ready = [], 0.0
    queues: dict[str, deque[Task]] = defaultdict(deque)
    for task in tasks:
        queues[task.stream].append(task)
        task.num_waiting = len(task.after)
        for before in task.after:
            before.followers.append(task)
    stream_free = dict.fromkeys(queues, 0.0)
    link_free = dict.fromkeys(LINKS, 0.0)
    # First tasks of streams that wait for nothing but time, by the moment at which they could begin.
    # Among equals, whoever asked first.
    heap: list[tuple[float, float, int, Task]] = []
    for queue in queues.values():
        if queue[0].num_waiting == 0:
            heappush(heap, (0.0, 0.0, queue[0].number, queue[0]))
    end_of_all = 0.0
    while heap:
        begin, asked, number, task = heappop(heap)
        start = begin
        for link, _ in task.links:
            start = max(start, link_free[link])
        if start > begin and heap and heap[0][:3] < (start, asked, number):
            # Its link is taken, and others may want it before it is free: they ask in their turn.
            heappush(heap, (start, asked, number, task))
            continue
        end = start + task.seconds
        task.start, task.end = start, end
        for link, seconds in task.links:
            link_free[link] = start + seconds
        stream = task.stream
        stream_free[stream] = end
        end_of_all = max(end_of_all, end)
        queue = queues[stream]
        queue.popleft()
        if queue and queue[0].num_waiting == 0:
            following = queue[0]
            moment = max(end, following.ready)
            heappush(heap, (moment, moment, following.number, following))
        for later in task.followers:
            later.ready = max(later.ready, end)
            later.num_waiting -= 1
            if later.num_waiting == 0 and later.stream != stream and queues[later.stream][0] is later:
                moment = max(stream_free[later.stream], later.ready)
                heappush(heap, (moment, moment, later.number, later))
            elif later.num_waiting == 0 and later.stream == stream and queue and queue[0] is later:
                moment = max(end, later.ready)
                heappush(heap, (moment, moment, later.number, later))
    return end_of_all
