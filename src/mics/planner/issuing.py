"""The tasks of a step in the order in which a system's host issues them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mics.cost.collectives import Kind
from mics.cost.memory import NUM_STAGED
from mics.cost.setting import Setting
from mics.cost.shapes import UnitShape
from mics.cost.stages import Stage
from mics.layout.order import staying_units
from mics.planner.host_copies import BlockingCopies, HostCopies
from mics.planner.simulate import Program, Task
from mics.planner.step_costs import StepCosts


@dataclass(frozen=True, kw_only=True)
class Style:
    """What tells systems apart that gather, compute and reduce unit by unit."""

    overlaps: bool = True
    keeps_around_turn: bool = False  # units that are needed again soon stay
    spreads_masters: bool = False  # hop 2 is a reduce-scatter, and new parameters follow
    hides_boundary: bool = False  # hop 2 runs unit by unit under the last backward
    copies_gathered: bool = False  # parameters, from where they arrive to where they are needed
    copies_gradients: bool = True  # from where autograd leaves them to where they are reduced
    hop_1_nbytes: int | None = None  # of a gradient on its way in hop 1, where that cannot be chosen
    num_pieces: int = 1  # collectives for one unit
    host_seconds: float = 0.0  # for each of them, nothing else going on
    keeps_parameters: bool = False  # whole on every rank: nothing is gathered until the step has new ones
    buckets: bool = False  # small units wait until there are as many elements as in the largest
    joins_owners: bool = False  # hop 1 is an all-reduce, of which each rank takes its part
    blocking_copies: bool = False  # to the host and back, in the way of the computation


class Issuer:
    """Issues the steps of one setting in one style."""

    def __init__(self, program: Program, setting: Setting, style: Style) -> None:
        self.program, self.setting, self.style = program, setting, style
        self.units = setting.model.units
        self.costs = StepCosts(setting)
        self.depth = setting.depth if style.overlaps else 0
        self.computed: list[Task] = []  # in the order of the computation
        self.refreshed: dict[int, Task] = {}
        self.kept: set[int] = set()
        self.old: dict[int, Task] = {}  # units whose values the optimizer has made old, until they are moved
        self.staying = staying_units(
            [index for index, unit in enumerate(self.units) if unit.numel],
            {index: unit.gathered_nbytes(setting.param_nbytes) for index, unit in enumerate(self.units)},
            setting.stay_nbytes if style.keeps_around_turn else 0,
        )
        self.alone = setting.partition_size == 1
        self.spreads_masters = style.spreads_masters and setting.over_replicas
        self.bucket_numel = setting.model.largest_numel if style.buckets else 0
        self.in_bucket = 0  # elements that wait for more
        copies = BlockingCopies if style.blocking_copies else HostCopies
        self.host_copies = copies(program, self.units, self.costs)

    def micro_step(self, *, last: bool) -> None:
        order = [(i, False) for i in range(len(self.units))]
        order += [(i, True) for i in reversed(range(len(self.units)))]
        reduced: list[Task] = []
        turn = len(self.units)
        for position, (index, is_backward) in enumerate(order):
            unit = self.units[index]
            gathered = None if self.alone else self._gather(index, unit, is_backward)
            costs = self.costs
            seconds = costs.backward_seconds(unit) if is_backward else costs.forward_seconds(unit)
            seconds += self._copy_seconds(unit, gathered, is_backward=is_backward)
            name = ("backward " if is_backward else "forward ") + unit.name
            copied = self.host_copies.backward if is_backward else self.host_copies.forward
            before = copied(index, self.computed[-1] if self.computed else None)
            task = self.program.compute(name, seconds, [gathered, self.refreshed.get(index), *before])
            self.computed.append(task)
            if self.style.keeps_around_turn:
                self._keep(position, index, turn, last=last)
            if is_backward:
                done = self._reduce(unit, task, is_first=index == 0)
                if last and self.style.hides_boundary:
                    done = self._hop2(unit, done)
                reduced.append(done)
                if not self.style.overlaps or (self.style.buckets and index == 0):  # the last bucket
                    self.computed.append(self.program.compute("wait", 0.0, [done]))
        self.refreshed = {}
        if last:
            self._boundary(reduced)

    def _keep(self, position: int, index: int, turn: int, *, last: bool) -> None:
        ahead = self.depth + 1
        # `low_memory`, which goes with offload: only what the backward begins with stays at the turn.
        at_turn = 1 if self.setting.division.low_memory else ahead
        if position < turn <= position + at_turn:
            self.kept.add(index)
        if not last and position >= 2 * turn - ahead:
            self.kept.add(index)
        if index in self.staying and not (last and position >= turn):
            self.kept.add(index)

    def _gather(self, index: int, unit: UnitShape, is_backward: bool) -> Task | None:
        if self.style.keeps_parameters or unit.numel == 0:
            return None
        if index in self.kept or (is_backward and unit.kind == "embedding"):
            self.kept.discard(index)
            return None
        window = self.computed[-1 - self.depth] if len(self.computed) > self.depth else None
        if index in self.old:
            return self._move_old(unit, [window, self.old.pop(index)])
        found: Task | None = None
        style = self.style
        for _ in range(style.num_pieces):
            if style.host_seconds:
                window = self.program.compute("host", style.host_seconds)
            after = [window, self.refreshed.get(index)]
            nbytes = unit.gathered_nbytes(self.setting.param_nbytes) / style.num_pieces
            share = 1.0 if unit.in_float8 else self.setting.shares.gather
            for stage in self.costs.moves(Kind.ALL_GATHER, nbytes, share):
                found = self._transfer(f"gather {stage.link}", f"gather {unit.name}", stage, [*after, found])
        return found

    def _copy_seconds(self, unit: UnitShape, gathered: Task | None, *, is_backward: bool) -> float:
        """Of gathered parameters and full gradients: read and written once more.

        Beside matrix products a copy takes what it takes alone, on whatever stream it runs.
        """
        param_nbytes, nbytes = self.setting.param_nbytes, 0
        if self.style.copies_gathered and gathered is not None:
            nbytes += 2 * param_nbytes
        if self.style.copies_gradients and is_backward:
            nbytes += param_nbytes + (self.style.hop_1_nbytes or self.setting.wire_nbytes)
        return nbytes * unit.numel / self.setting.device.memory_bandwidth

    def _reduce(self, unit: UnitShape, task: Task, *, is_first: bool) -> Task:
        """``is_first``: of the model, so that its backward is the last."""
        self.in_bucket += unit.numel
        if self.alone or self.in_bucket == 0 or (self.in_bucket < self.bucket_numel and not is_first):
            return task
        done = task
        wire_nbytes = self.style.hop_1_nbytes or self.setting.wire_nbytes
        share = self.setting.compression.inter_reduce_nbytes(wire_nbytes) / wire_nbytes
        nbytes = wire_nbytes * self.in_bucket / self.style.num_pieces
        self.in_bucket = 0
        kind = Kind.ALL_REDUCE if self.style.joins_owners else Kind.REDUCE_SCATTER
        for _ in range(self.style.num_pieces):
            for stage in self.costs.moves(kind, nbytes, share):
                done = self._transfer(f"reduce {stage.link}", f"reduce {unit.name}", stage, [done])
        return done

    def _hop2(self, unit: UnitShape, after: Task) -> Task:
        setting = self.setting
        if setting.num_replicas == 1 or unit.numel == 0:
            return after
        done = after
        for stage in self.costs.hop_2(unit, whole=not self.spreads_masters):
            done = self._transfer(_between_replicas(stage), f"hop 2 of {unit.name}", stage, [done])
        return done

    def _transfer(self, stream: str, name: str, stage: Stage, after: Sequence[Task | None]) -> Task:
        """A collective, between the kernels that encode what leaves and read what came."""
        program = self.program
        if stage.encode_seconds:
            after = [program.beside(stream, f"encode {name}", stage.encode_seconds, after)]
        found = program.transfer(stream, name, stage.cost, after)
        if stage.decode_seconds:
            found = program.beside(stream, f"decode {name}", stage.decode_seconds, [found])
        return found

    def _boundary(self, reduced: Sequence[Task]) -> None:
        setting, style = self.setting, self.style
        after = list(reduced)
        if not style.hides_boundary:
            after = [self._hop2(unit, after[-1]) for unit in reversed(self.units)] or after
        owners = setting.partition_size * (setting.num_replicas if self.spreads_masters else 1)
        if setting.state_on_host:
            self._update_from_host(after, owners)
            return
        seconds = setting.device.update_seconds(setting.model.num_parameters / owners)
        update = self.program.compute("optimizer", seconds, after)
        self.computed.append(update)
        if style.keeps_parameters and not self.alone:
            self._refresh_all(update)
        for index, unit in enumerate(self.units):
            self._refresh(index, unit, update)
        if setting.moves_old:
            moved = [index for index in sorted(self.staying) if not self.units[index].in_float8]
            if len(moved) < sum(unit.numel > 0 for unit in self.units):
                self.old = dict.fromkeys(moved, update)  # in turn with gathers
            else:
                self.refreshed = {index: self._move_old(self.units[index], [update]) for index in moved}
                self.kept.update(moved)

    def _update_from_host(self, after: Sequence[Task], owners: int) -> None:
        """Unit by unit: its state comes from the host, and goes back while the next is updated."""
        backward = self.computed[-1]
        stored: list[Task] = []
        for index, unit in enumerate(self.units):
            if not unit.numel:
                continue
            copy_seconds = self.costs.state_seconds(unit)
            # The first ones come beside hop 2; the others to the memory that one before has left.
            room = backward if len(stored) < NUM_STAGED else stored[-NUM_STAGED]
            came = self.program.copy("from host", f"state of {unit.name}", copy_seconds, [room])
            seconds = self.setting.device.update_seconds(unit.numel / owners)
            update = self.program.compute("optimizer", seconds, [*after, came])
            self.computed.append(update)
            self._refresh(index, unit, update)
            stored.append(self.program.copy("to host", f"state of {unit.name}", copy_seconds, [update]))
        self.computed.append(self.program.compute("wait", 0.0, stored[-1:]))  # its memory is used next

    def _refresh(self, index: int, unit: UnitShape, update: Task) -> None:
        """New parameters of a unit for the other replicas."""
        setting = self.setting
        if unit.numel and self.spreads_masters and setting.num_replicas > 1:
            found = update
            for stage in self.costs.refresh(unit):
                found = self._transfer(_between_replicas(stage), f"new {unit.name}", stage, [found])
            self.refreshed[index] = found

    def _move_old(self, unit: UnitShape, after: Sequence[Task | None]) -> Task:
        """New parameters of a unit that stays, from node to node as moves: it is not gathered again."""
        for stage in self.costs.move_old(unit):
            found = self._transfer(f"gather {stage.link}", f"moves of {unit.name}", stage, after)
            after = [found]
        return found

    def _refresh_all(self, update: Task) -> None:
        """New parameters, bucket by bucket; the next forward begins with the last of them."""
        left, found = self.setting.model.num_parameters, update
        while left:
            numel = min(left, self.bucket_numel or left)
            left -= numel
            for stage in self.costs.moves(Kind.ALL_GATHER, self.setting.param_nbytes * numel):
                found = self.program.transfer(f"gather {stage.link}", "new parameters", stage.cost, [found])
        self.computed.append(self.program.compute("wait", 0.0, [found]))


def _between_replicas(stage: Stage) -> str:
    """The stream."""
    return f"replicas {stage.link}".strip()
