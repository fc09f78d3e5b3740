"""What the ranks tell each other about a step. Of the engine only this and module buffers ask all ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from mics.comm.journal import SAME_CALLS
from mics.comm.lanes import Work
from mics.comm.world import MeshCollectives
from mics.errors import MicsError
from mics.gradients.shown import ShownGradients
from mics.layout.order import Plans, Prefetch
from mics.schedule.events import Progress
from mics.schedule.log import StepLog
from mics.sharding.unit import Unit

_NUM_NUMBERS: Final = 6  # that travel before the flags
_MIB: Final = 1 << 20  # few enough of them for a float32 to be exact
_NO_LIMIT: Final = 1 << 23  # MiB


class Check(Protocol):
    """What has a look at every optimizer step, and may find that training must not go on."""

    def at_boundary(self) -> Exception | None:
        """Gradients are there, and nobody has stepped: what was found, if anything. Nobody may wait here."""
        ...

    def count_step(self) -> None:
        """An optimizer has updated parameters."""
        ...

    def found_by(self, rank: int) -> Exception:
        """What ranks raise that found nothing themselves."""
        ...


class _Numbers:
    """Small numbers of all ranks: the highest of each, on the host."""

    def __init__(self, numel: int, all_reduce: Callable[..., None], device: torch.device) -> None:
        self.on_gpu = pin = device.type == "cuda"
        self.highest = torch.zeros(numel, dtype=torch.float32, device="cpu", pin_memory=pin)
        self._mine = torch.zeros_like(self.highest, pin_memory=pin)
        self._wire = torch.zeros(numel, dtype=torch.float32, device=device)
        self._arrived = torch.cuda.Event() if pin else None
        self._all_reduce = all_reduce
        self._pending = False

    def send(self, numbers: Sequence[float]) -> None:
        """Tell the others. On a GPU nobody waits."""
        self._mine.copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        self._wire.copy_(self._mine, non_blocking=True)
        self._all_reduce(self._wire, "the boundary's agreement (optimizer.step)", maximum=True)
        self.highest.copy_(self._wire, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._pending = True

    def wait(self) -> bool:
        """Until ``highest`` is what was sent last; whether anything was since the last time."""
        if self._pending and self._arrived is not None:
            self._arrived.synchronize()
        was_pending, self._pending = self._pending, False
        return was_pending


class Agreement:
    """One small all-reduce a boundary: did all ranks do the same, and which parameters did any rank use?

    A parameter that no rank used must keep ``grad`` None, so that the optimizer skips it as it would in
    one process. On a GPU nobody waits for the answer, except ranks that did not use a parameter themselves;
    the others look at it one boundary later.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shown: ShownGradients,
        *,
        mesh: MeshCollectives,
        device: torch.device,
        log: StepLog,
        plans: Plans,
        progress: Progress,
        checks: Sequence[Check],
        choose_prefetch: Callable[[Sequence[int], int], Prefetch] | None,
    ) -> None:
        self._units = list(units)
        self._shown = shown
        self._log = log
        self._plans = plans
        self._progress = progress
        self.checks = list(checks)
        self._choose_prefetch = choose_prefetch
        self._world = mesh.world
        self._lanes = mesh.lanes
        self._first = {}  # unit index -> position of its first parameter in the exchanged flags
        numel = _NUM_NUMBERS
        for unit in self._units:
            self._first[unit.spec.index] = numel
            numel += len(unit.spec.refs)
        # [digest, -digest, units ahead, -MiB ahead, -MiB that stay, whose check found something, a flag each]
        self._numbers = _Numbers(numel, self.all_reduce, device)
        self._liveness = mesh.liveness
        self._entries: list[int] = []  # of the log: what the digest of the latest exchange was made of
        self._num_exchanges = 0

    def all_reduce(self, number: Tensor, label: str, *, maximum: bool = False) -> None:
        """Sum (or maximum) of a number over all ranks, in place, whichever groups units live in."""
        here = self._lanes.here(Work("world", "all-reduce", label))
        here.submit(partial(self._world.all_reduce, number, label, maximum=maximum))

    def exchange(self, found: tuple[int, Exception] | None) -> None:
        """Send this rank's account of the steps since the last boundary, and raise what a check found.

        After telling the others: those whose own checks found nothing would go on and wait for this rank.
        """
        self.check()
        digest, self._entries = self._log.take()
        self._num_exchanges += 1
        flags = [float(used) for unit in self._units for used in self._shown.of(unit).used]
        finder = 0.0 if found is None else 1.0 + self._world.position + self._world.size * found[0]
        numbers = [float(digest), -float(digest), *self._settle_prefetch(), finder]
        self._numbers.send(numbers + flags)
        if found is not None:
            raise found[1]
        if not self._numbers.on_gpu:
            self.check()

    def _settle_prefetch(self) -> tuple[float, float, float]:
        """What this rank would look ahead, in units and in bytes, and let stay.

        Once the ranks have told each other: the most that any would look ahead, and the least that any has
        memory for. Ranks may see batches of different sizes, and must gather in the same order all the same.
        """
        if self._choose_prefetch is None or self._plans.is_final:
            return 0.0, 0.0, 0.0
        units, ahead, staying = (abs(int(number)) for number in self._numbers.highest[2:5].tolist())
        if units > 0:
            nbytes = None if ahead == _NO_LIMIT else max(1, ahead * _MIB)
            self._plans.look_ahead(Prefetch(units=units, nbytes=nbytes, stay_nbytes=staying * _MIB))
        chosen = self._choose_prefetch(self._plans.latest(), self._progress.rows)
        limit = _NO_LIMIT if chosen.nbytes is None else min(_NO_LIMIT, math.ceil(chosen.nbytes / _MIB))
        return float(chosen.units), -float(limit), -float(math.ceil(chosen.stay_nbytes / _MIB))

    def settle(self) -> None:
        """Wait for the answer, if this rank needs it to know what was used."""
        if not all(used for unit in self._units for used in self._shown.of(unit).used):
            self.check()

    def check(self) -> None:
        """Raise if the ranks did not all do the same in the same order, or if a check found something."""
        if not self._numbers.wait():
            return
        highest, lowest = self._numbers.highest[0].item(), -self._numbers.highest[1].item()
        if highest != lowest:
            raise MicsError(
                "ranks gathered or reduced different units, or in a different order, since the last "
                "optimizer step, so parameters and gradients are not to be trusted"
                f"{self._first_difference()}. {SAME_CALLS}"
            )
        finder = int(self._numbers.highest[5].item())
        if finder:
            number, rank = divmod(finder - 1, self._world.size)
            raise self.checks[number].found_by(rank)

    def _first_difference(self) -> str:
        """Where the ranks' logs part. All ranks come here or none, and tell each other through the store."""
        if self._liveness is None:
            return ""
        mine = json.dumps(self._entries)
        digest = hashlib.sha256(mine.encode()).hexdigest()[:16]
        key = f"log/{self._num_exchanges}"
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in self._liveness.exchange(key, digest).items():
            ranks_of.setdefault(theirs, []).append(rank)
        groups = [tuple(ranks) for ranks in ranks_of.values()]
        entries = self._liveness.exchange(f"{key}/entries", mine, [ranks[0] for ranks in groups])
        logs = {ranks: json.loads(entries.get(ranks[0], "[]")) for ranks in groups}
        found = self._log.first_difference(logs)
        return f": {found}" if found else ""

    def used(self, unit: Unit, index: int) -> bool:
        """Whether any rank got a gradient for this parameter (after :meth:`settle`)."""
        if self._shown.of(unit).used[index]:
            return True
        return bool(self._numbers.highest[self._first[unit.spec.index] + index].item())
