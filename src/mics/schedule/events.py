"""What happens in a step, as values, and who hears of it.

``autograd.py`` tells what forward and backward do, ``gradients/step.py`` what the optimizer does.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mics.schedule.sites import SharedInputs
from mics.sharding.unit import Unit


class What(enum.Enum):
    """What happened. The first ones happen to the model, then to units, the last ones to modules."""

    FORWARD_CALLED = enum.auto()  # nothing has moved yet: whoever hears this may refuse
    FORWARD_BEGINS = enum.auto()
    BACKWARD_BEGINS = enum.auto()
    BACKWARD_ENDS = enum.auto()
    FAILED = enum.auto()  # a backward, or a forward that an interrupt ended
    NEEDED = enum.auto()  # somebody is about to compute with the unit, in the forward or the backward
    READ = enum.auto()  # for the first time without a call of its module: nobody will see when that is over
    UNUSED = enum.auto()  # nobody computes with it any more
    GRADIENTS_READY = enum.auto()  # backward has been through it
    ENDS_UNSEEN = enum.auto()  # it is in use only because nobody saw its backward end
    STEP_BEGINS = enum.auto()  # an optimizer is about to change the values of these units
    STEP_ENDS = enum.auto()  # it has changed them, on shards
    REFRESHED = enum.auto()  # replicas are on their way to agree on them
    MODULE_FORWARD_BEGINS = enum.auto()  # of a module that autograd.py follows, by its name
    MODULE_FORWARD_ENDS = enum.auto()
    MODULE_BACKWARD_BEGINS = enum.auto()
    MODULE_BACKWARD_ENDS = enum.auto()
    RECOMPUTATION_BEGINS = enum.auto()  # of the module whose backward has begun
    RECOMPUTATION_ENDS = enum.auto()


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, and to which unit or units."""

    what: What
    unit: Unit | None = None
    units: Sequence[Unit] = ()
    place: int | None = None
    """NEEDED: where its forward had it (``WholeParameters.place``); None: wherever it may be."""
    module: str = ""


Listener = Callable[[Event], None]


class Events(defaultdict[What, list[Listener]]):
    """Who hears of what, in the order in which they hear it."""

    def __init__(self) -> None:
        super().__init__(list)

    def tell(self, event: Event) -> None:
        """Let all hear who want to. One of them may end its own listening."""
        for hear in tuple(self[event.what]):
            hear(event)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A module's forward runs again, for the backward."""
        self.tell(Event(What.RECOMPUTATION_BEGINS))
        try:
            yield
        finally:
            self.tell(Event(What.RECOMPUTATION_ENDS))


@dataclass(eq=False)
class Progress:
    """What the parts of an engine know in common of the step under way."""

    suspended: bool = False  # while parameters are summoned
    depth: int = 0  # forwards under way, one inside another
    in_backward: bool = False
    more_to_come: bool = False  # another micro-step follows with these parameters
    announced: bool = False  # the micro-step under way is the last one before the optimizer
    num_steps: int = 0  # optimizer steps
    rows: int = 0  # the most rows that a unit's forward has multiplied its matrices with
    counts_rows: bool = True
    num_waiting: int = 0  # calls since the last optimizer step that no backward has come to yet
    waiting: Counter[int] = field(default_factory=Counter)  # the same by unit index
    shared_inputs: SharedInputs = field(default_factory=SharedInputs)

    def announce(self, *, last: bool | None) -> None:
        """The micro-step under way is the last before the optimizer, or others follow; None: not known."""
        self.more_to_come, self.announced = last is False, last is True

    def count_waiting(self, units: Iterable[Unit], change: int) -> None:
        """A call that needs ``units`` waits for its backward, or not any more."""
        self.num_waiting += change
        for unit in units:
            self.waiting[unit.spec.index] += change
