"""Inputs of blocks go to host memory and come back: beside the computation, or in its way as elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from mics.cost.auto import horizon_for
from mics.cost.shapes import UnitShape
from mics.planner.simulate import Program, Task
from mics.planner.step_costs import StepCosts


class HostCopies:
    """Issues the copies of one setting, as `offload.py` orders them.

    None where nothing is offloaded or the host's speed is not known.
    """

    def __init__(self, program: Program, units: Sequence[UnitShape], costs: StepCosts) -> None:
        self._program = program
        self._units = units
        blocks: list[list[int]] = []  # units of each; a block saves its input once
        for index, unit in enumerate(self._units):
            if unit.kind == "block" and (unit.input_numel or not blocks):
                blocks.append([])
            if unit.kind == "block":
                blocks[-1].append(index)
        self._first = {block[0]: number for number, block in enumerate(blocks)}
        self._last = {block[-1]: number for number, block in enumerate(blocks)}
        self._seconds = [costs.host_seconds(self._units[block[0]]) for block in blocks]  # one way
        computes = [sum(costs.backward_seconds(self._units[i]) for i in block) for block in blocks]
        self._ahead = max(map(horizon_for, self._seconds, computes), default=1)
        self._away: dict[int, Task] = {}
        self._back: dict[int, Task] = {}

    def forward(self, index: int, before: Task | None) -> list[Task]:
        """Unit ``index`` is about to begin behind ``before``: what it must wait for, too."""
        block = self._first.get(index)
        if block is None:
            return []
        if block == 0:
            self._away, self._back = {}, {}
        # The last ones stay: backward needs them at once.
        if self._seconds[block] and block < len(self._seconds) - self._ahead:
            self._away[block] = self._program.copy(
                "to host", f"input of {self._units[index].name}", self._seconds[block], [before]
            )
        return [self._away[block - 2]] if block - 2 in self._away else []  # its memory is given up by now

    def backward(self, index: int, before: Task | None) -> list[Task]:
        """The same for the backward of unit ``index``; what comes after it is prefetched."""
        block = self._last.get(index)
        if block is None:
            return []
        for wanted in range(block, block - self._ahead - 1, -1):
            if wanted in self._away and wanted not in self._back:
                self._back[wanted] = self._program.copy(
                    "from host", self._away[wanted].name, self._seconds[wanted], [before, self._away[wanted]]
                )
        return [self._back[block]] if block in self._back else []


class BlockingCopies(HostCopies):
    """As `torch.autograd.graph.save_on_cpu` copies: both ways on the stream that computes, no prefetch."""

    def forward(self, index: int, before: Task | None) -> list[Task]:
        return self._copy("to host", index, self._first.get(index), before)

    def backward(self, index: int, before: Task | None) -> list[Task]:
        return self._copy("from host", index, self._last.get(index), before)

    def _copy(self, link: str, index: int, block: int | None, before: Task | None) -> list[Task]:
        if block is None or not self._seconds[block]:
            return []
        name = f"input of {self._units[index].name}"
        return [self._program.copy(link, name, self._seconds[block], [before])]
