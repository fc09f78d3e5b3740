"""The order in which an optimizer step begins and ends, on shards.

``optimizer.py`` calls it around every step of ``torch.optim``: gradients are summed over the world, ranks
agree, the optimizer sees plain pieces and updates them, and the new values go to all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mics.errors import MicsError
from mics.gradients.agreement import Agreement, Check
from mics.gradients.hops import Hops
from mics.gradients.host_state import HostState
from mics.gradients.shown import ShownGradients
from mics.guard import plainly
from mics.layout.order import Plans
from mics.schedule.events import Event, Events, Progress, What
from mics.sharding.float8 import scale_together
from mics.sharding.refresh import MovedValues, refresh_together
from mics.sharding.unit import Unit


class Step:
    """Optimizer steps of one sharded model."""

    def __init__(
        self,
        units: Sequence[Unit],
        hops: Hops,
        shown: ShownGradients,
        *,
        agreement: Agreement,
        events: Events,
        plans: Plans,
        progress: Progress,
        host: HostState | None = None,
    ) -> None:
        """``host``: where optimizer state is, if it is not on the device."""
        self.units = list(units)
        self.host = host
        self.moved: MovedValues | None = None  # by what new values go to the replicas, if not as they are
        self.owner = shown.owner
        self._hops = hops
        self._shown = shown
        self._agreement = agreement
        self._events = events
        self._plans = plans
        self._progress = progress
        self._refreshed = False  # new values have gone to all replicas, unit by unit
        self._by_name = {
            held.name: (unit, index) for unit in hops.units for index, held in enumerate(unit.spec.refs)
        }
        events[What.BACKWARD_BEGINS].append(self._send_waiting)
        self.owner.gradients_needed.append(self.synchronize)
        self.owner.gradient_came.append(self._take_gradient)

    @property
    def checks(self) -> Sequence[Check]:
        """What has a look at every step."""
        return self._agreement.checks

    def synchronize(self) -> None:
        """Sum gradients over the world, and let the ranks agree. Called by whatever needs them first."""
        hops = self._hops
        hops.send_waiting()
        for unit in hops.units:
            self._adopt_assigned(unit)
        hops.reduce_left()
        # Beside hop 2, which is waited for next.
        found = self._ask_checks() if hops.fresh else None
        hops.settle()
        if hops.fresh:
            hops.fresh = False
            hops.num_changes += 1
            self._agreement.exchange(found)
            if self._shown.with_errors:
                self._agreement.settle()
                self._shown.keep_unused(self._agreement.used)

    def any_rank_used(self, unit: Unit, index: int) -> bool:
        """Whether a parameter got a gradient anywhere in the world, once synchronized."""
        self._agreement.settle()
        return self._agreement.used(unit, index)

    def begin(self, members: Sequence[tuple[Unit, int]], left_out: Tensor | None = None) -> None:
        """Show the optimizer plain pieces; no gradients for parameters that no rank used.

        ``left_out``: 1 on the device where the optimizer will change nothing.
        """
        if self._progress.suspended:
            raise MicsError(
                "optimizer.step() inside mics.summon_full_params: expected no step there, found one, whose "
                "new values would be overwritten or not be seen; leave the context first"
            )
        self._shown.guard_again()
        self.synchronize()
        indices: dict[Unit, list[int]] = {}
        for unit, index in members:
            indices.setdefault(unit, []).append(index)
        units = list(indices)
        self._events.tell(Event(What.STEP_BEGINS, units=units))
        for unit in units:
            unit.check_intact()
            self._shown.of(unit).drop_cleared()
            self._shown.of(unit).take(indices[unit], left_out)
        self._agreement.settle()
        for unit, index in members:
            self._shown.show_plain(unit, index, is_used=self._agreement.used(unit, index))

    def end(self, members: Sequence[tuple[Unit, int]]) -> None:
        """Guard the gradients again and bring the new values to all replicas."""
        self.guard_again()
        for check in self.checks:
            check.count_step()
        units = self.in_forward_order(members)
        self._events.tell(Event(What.STEP_ENDS, units=units))
        if not self._refreshed:
            scale_together(units)
            batches = list(self._hops.batches(units))
            if self.moved is not None:
                self.moved.send(batches)
            else:
                for batch in batches:
                    refresh_together(batch)
        self._refreshed = False
        self._events.tell(Event(What.REFRESHED, units=units))

    def update(self, members: Sequence[tuple[Unit, int]], update: Callable[[Unit], bool]) -> None:
        """Between begin and end: have each unit updated, and send its new values on their way.

        ``update`` says whether it has brought them to ``param_shard``.
        """
        for batch in self._hops.batches(self.in_forward_order(members)):
            refresh_together(batch, carried=[unit for unit in batch if update(unit)])
        self._refreshed = True
        self._shown.hide_plain()

    def guard_again(self) -> None:
        """Put guarded gradients back in place of what an optimizer was shown."""
        self._shown.guard_again()

    def in_forward_order(self, members: Iterable[tuple[Unit, int]]) -> list[Unit]:
        """Units as the last forward needed them: so do the next one's gathers."""
        units = {id(unit): unit for unit, _ in members}.values()
        order = {index: position for position, index in reversed(list(enumerate(self._plans.latest())))}
        return sorted(units, key=lambda unit: order.get(unit.spec.index, len(order)))

    def _send_waiting(self, event: Event) -> None:
        """New values that no forward needed go to the replicas before gradients do.

        Not when somebody looks at gradients: a rank may do that alone, where nothing is left to be summed.
        """
        if self.moved is not None:
            self.moved.send_waiting()

    def _adopt_assigned(self, unit: Unit) -> None:
        assigned = self._shown.adopt_assigned(unit, self._hops.finish)
        if assigned and not self._hops.fresh:
            # Unless it is news to the ranks that a parameter has a gradient, they have agreed already.
            self._hops.num_changes += 1
            self._agreement.settle()
            self._hops.fresh = not all(self._agreement.used(unit, index) for index in assigned)
        self._shown.of(unit).note_used(assigned)

    def _ask_checks(self) -> tuple[int, Exception] | None:
        """The first check that has found something, by its number."""
        found = [(number, check.at_boundary()) for number, check in enumerate(self.checks)]
        return next(((number, error) for number, error in found if error is not None), None)

    def _take_gradient(self, name: str, gradient: Tensor) -> None:
        """A backward has come to this rank's piece of a parameter, outside of any forward (a penalty)."""
        unit, index = self._by_name[name]
        self._hops.send_waiting()
        self._shown.guard_again()
        with plainly(), torch.no_grad():
            gradients = self._shown.of(unit)
            gradients.note_used(self._shown.adopt_assigned(unit, self._hops.finish))
            self._shown.leave_cleared(unit)
            gradients.add_local(index, gradient.to(unit.device))  # of a master in host memory
        self._shown.show(unit)
        self._hops.note_change()
