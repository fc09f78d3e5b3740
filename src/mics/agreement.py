"""What the ranks tell each other once a boundary."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from mics.audit import elsewhere
from mics.comm.journal import SAME_CALLS
from mics.comm.world import MeshCollectives
from mics.errors import MicsError, ReplicaError
from mics.plans import Prefetch
from mics.schedule import Schedule
from mics.unit import Unit

_NUM_NUMBERS: Final = 5  # that travel before the flags
_MIB: Final = 1 << 20  # few enough of them for a float32 to be exact


class Agreement:
    """One small all-reduce a boundary: did all ranks do the same, and which parameters did any rank use?

    A parameter that no rank used must keep ``grad`` None, so that the optimizer skips it as it would in
    one process. On a GPU nobody waits for the answer, except ranks that did not use a parameter themselves;
    the others look at it one boundary later.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        mesh: MeshCollectives,
        device: torch.device,
        choose_prefetch: Callable[[Sequence[int], int], Prefetch] | None,
    ) -> None:
        self.schedule: Schedule | None = None
        self._choose_prefetch = choose_prefetch
        self._units = list(units)
        self._world = mesh.world
        self._first = {}  # unit index -> position of its first parameter in the exchanged flags
        numel = _NUM_NUMBERS
        for unit in self._units:
            self._first[unit.spec.index] = numel
            numel += len(unit.gradients.used)
        pin = device.type == "cuda"
        # [digest, -digest, units ahead, -MiB that stay, who found replicas to differ, a flag a parameter]
        self._mine = torch.zeros(numel, dtype=torch.float32, device="cpu", pin_memory=pin)
        self._theirs = torch.zeros_like(self._mine, pin_memory=pin)  # the maximum over ranks, on the host
        self._wire = torch.zeros(numel, dtype=torch.float32, device=device)
        self._arrived = torch.cuda.Event() if pin else None
        self._pending = False
        self._liveness = mesh.liveness
        self._log: list[int] = []  # what the digest of the latest exchange was made of
        self._num_exchanges = 0

    def exchange(self, difference: ReplicaError | None) -> None:
        """Send this rank's account of the steps since the last boundary, and raise what its audit found.

        After telling the others: those whose own replicas are equal would go on and wait for this rank.
        """
        self.check()
        digest, self._log = (0, []) if self.schedule is None else self.schedule.log.take()
        self._num_exchanges += 1
        flags = [float(used) for unit in self._units for used in unit.gradients.used]
        finder = 0.0 if difference is None else 1.0 + self._world.position
        numbers = [float(digest), -float(digest), *self._settle_prefetch(), finder]
        self._mine.copy_(torch.tensor(numbers + flags, dtype=torch.float32, device="cpu"))
        self._wire.copy_(self._mine, non_blocking=True)
        self._world.all_reduce(self._wire, "the boundary's agreement (optimizer.step)", maximum=True)
        self._theirs.copy_(self._wire, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._pending = True
        if difference is not None:
            raise difference
        if self._arrived is None:
            self.check()

    def _settle_prefetch(self) -> tuple[float, float]:
        """What this rank would look ahead and let stay.

        Once the ranks have told each other: the most that any would look ahead, and the least that any has
        memory for. Ranks may see batches of different sizes, and must gather in the same order all the same.
        """
        schedule = self.schedule
        if schedule is None or self._choose_prefetch is None or schedule.plans.is_final:
            return 0.0, 0.0
        agreed, staying = int(self._theirs[2].item()), -int(self._theirs[3].item())
        if agreed > 0:
            schedule.plans.look_ahead(Prefetch(units=agreed, stay_nbytes=staying * _MIB))
        chosen = self._choose_prefetch(schedule.plans.latest(), schedule.rows)
        return float(chosen.units), -float(math.ceil(chosen.stay_nbytes / _MIB))

    def settle(self) -> None:
        """Wait for the answer, if this rank needs it to know what was used."""
        if not all(used for unit in self._units for used in unit.gradients.used):
            self.check()

    def check(self) -> None:
        """Raise if the ranks did not all do the same units in the same order, or if replicas differ."""
        if not self._pending:
            return
        self._pending = False
        if self._arrived is not None:
            self._arrived.synchronize()
        highest, lowest = self._theirs[0].item(), -self._theirs[1].item()
        if highest != lowest:
            raise MicsError(
                "ranks gathered or reduced different units, or in a different order, since the last "
                "optimizer step, so parameters and gradients are not to be trusted"
                f"{self._first_difference()}. {SAME_CALLS}"
            )
        finder = int(self._theirs[4].item())
        if finder:
            raise elsewhere(finder - 1)

    def _first_difference(self) -> str:
        """Where the ranks' logs part. All ranks come here or none, and tell each other through the store."""
        if self._liveness is None or self.schedule is None:
            return ""
        mine = json.dumps(self._log)
        digest = hashlib.sha256(mine.encode()).hexdigest()[:16]
        key = f"log/{self._num_exchanges}"
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in self._liveness.exchange(key, digest).items():
            ranks_of.setdefault(theirs, []).append(rank)
        groups = [tuple(ranks) for ranks in ranks_of.values()]
        entries = self._liveness.exchange(f"{key}/entries", mine, [ranks[0] for ranks in groups])
        logs = {ranks: json.loads(entries.get(ranks[0], "[]")) for ranks in groups}
        found = self.schedule.log.first_difference(logs)
        return f": {found}" if found else ""

    def used(self, unit: Unit, index: int) -> bool:
        """Whether any rank got a gradient for this parameter (after :meth:`settle`)."""
        if unit.gradients.used[index]:
            return True
        return bool(self._theirs[self._first[unit.spec.index] + index].item())
