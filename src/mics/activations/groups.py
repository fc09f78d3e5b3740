"""What units save in a forward, group by group, and what that lets expect of the next forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

from mics.activations.saved import Saved


@dataclass
class GroupBytes:
    """What a group saved."""

    stay: int = 0
    pass_by: int = 0  # on the device until the next unit has ended
    leave: int = 0  # for the host: once, whoever else saves it


@dataclass(frozen=True, kw_only=True)
class ExpectedBytes:
    """Of a forward."""

    on_device: int  # at once, at the most
    stays: int  # of it, for good
    on_host: int

    @classmethod
    def by(cls, groups: Sequence[GroupBytes]) -> ExpectedBytes:
        """What a unit sends away is on the device until the next one has ended."""
        most = staying = passing = 0
        for group in groups:
            staying += group.stay
            most = max(most, staying + passing + group.pass_by)
            passing = group.pass_by
        return cls(on_device=most, stays=staying, on_host=sum(group.leave for group in groups))


@dataclass(eq=False)
class Pass:
    """One forward of the model. Several that come before a backward count as one."""

    first_place: int
    sizes: list[GroupBytes] = field(default_factory=list)  # of its groups
    groups: list[ref[Group]] = field(default_factory=list)
    is_reached: bool = False  # by a backward

    def is_alive(self) -> bool:
        """Whether a backward can still come."""
        return any(group() is not None for group in self.groups)


@dataclass(eq=False)
class Group:
    """What one forward of a unit saved. It lives as long as anything of it does."""

    forward: int  # number of the passes that count as one
    place: int  # among the groups of them
    part_of: Pass
    sizes: GroupBytes = field(default_factory=GroupBytes)
    members: list[ref[Saved]] = field(default_factory=list)
    is_wanted: bool = False  # the backward has come to it, or it was prefetched
    is_reached: bool = False


@dataclass
class CurrentForward:
    """Passes that count as one, since the last backward."""

    number: int
    passes: list[Pass] = field(default_factory=lambda: [Pass(0)])
    num_groups: int = 0
    saved_nbytes: int = 0
    offloaded_nbytes: int = 0
    num_left: int = 0  # groups of which something left
    least_nbytes: float = math.inf  # of what left of one of them
    is_reached: bool = False  # by a backward, which may have come through an earlier forward

    def add_pass(self) -> None:
        """It goes on. Through passes whose results are gone nobody will go back."""
        alive = [each for each in self.passes if each.is_alive()]
        self.passes = [*alive, Pass(self.num_groups)]

    def add_group(self) -> Group:
        group = Group(self.number, self.num_groups, self.passes[-1])
        self.num_groups += 1
        group.part_of.groups.append(ref(group))
        group.part_of.sizes.append(group.sizes)
        return group

    def place_of(self, group: Group, num_expected: int) -> int:
        """There are more groups behind a pass that nobody goes back through, its result still held."""
        return (group.place - self.passes[0].first_place) % num_expected

    def sizes_reached(self) -> list[GroupBytes]:
        """Of passes that a backward went through: one that was dropped says nothing about a step."""
        return [sizes for each in self.passes if each.is_reached for sizes in each.sizes]


@dataclass
class LastForward:
    """The last one that a backward went through: what is expected of the next."""

    num_units: int
    sizes: list[GroupBytes] = field(default_factory=list)
    num_groups: int = 0
    peak: int = 0  # bytes on the device at once

    def begin(self) -> None:
        """A forward begins; before the first one has ended, every unit is expected to save something."""
        if not self.sizes:
            self.num_groups = self.num_units

    def pass_over(self) -> None:
        """A unit was called that no backward will come to."""
        if not self.sizes:
            self.num_groups = max(1, self.num_groups - 1)

    def see(self, sizes: list[GroupBytes], peak: int) -> None:
        """A forward is over; no ``sizes``: a backward went only through what one of long before saved."""
        if sizes:
            self.sizes, self.peak, self.num_groups = sizes, peak, len(sizes)
