"""The replica audit: all ranks of a replication group must hold equal parameters, bit for bit.

Nothing in a step would show that one of them does not: a broken memory cell, a faulty kernel or an edit that
some ranks did not make trains on, each replica with a model of its own. So now and then every rank makes a
digest of each unit's ``param_shard`` (what gathers read), and the replicas compare.

When: at a boundary, where gradients are first needed. The parameters of the step before have arrived there
on all replicas, and none has changed them yet. Digests are made where the caller stands, while hop 2 is on
its way; they travel on the lane of the replicas; the host looks at them one boundary later and never waits.

What is left out: units that somebody has edited since the last refresh and whose edit stands in
``param_shard`` (it reaches the other replicas with the next gather), and module buffers, which may differ
between forwards (running statistics; see buffers.py).

See "The replica audit" in docs/design.md for why no flipped bit goes unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.lanes import Ticket
from mics.comm.world import MeshCollectives
from mics.engine import engines_of
from mics.errors import ReplicaError
from mics.sharding.refresh import refresh_together
from mics.sharding.unit import Unit
from mics.utils.digests import digests

_MAX_NAMED = 8  # units that an error names


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What ``mics.audit_replicas`` compared, and found equal."""

    step: int
    """Optimizer steps done."""
    ranks: tuple[int, ...]
    """This rank's replication group."""
    num_units: int
    nbytes: int
    """Bytes of parameters on this rank that the digests cover."""


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Digests on their way between the replicas."""

    step: int
    mine: Tensor  # int64 [2 x units], on the device: a digest each, then whether the unit was edited
    found: Tensor  # int64 [R x 2 x units], on the device; a lane writes it
    ticket: Ticket


class ReplicaAudit:
    """Compares the parameters of one model with those of its replicas, every ``interval`` optimizer steps."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        mesh: MeshCollectives,
        ranks: Sequence[int],
        interval: int,
        device: torch.device,
    ) -> None:
        self._units = list(units)
        self._world = mesh.world
        self._replicas = mesh.groups.replication
        self._ranks = tuple(ranks)
        self._interval = interval
        self._device = device
        self._num_steps = 0  # optimizer steps done
        self._last = 0  # of which so many at the latest audit
        self._pending: _Exchange | None = None
        on_gpu = device.type == "cuda"
        self._arrived = torch.cuda.Event() if on_gpu else None
        numel = 2 * len(self._units) * len(self._ranks) if self._compares else 0
        pin = on_gpu and numel > 0
        self._host = torch.zeros(numel, dtype=torch.int64, device="cpu", pin_memory=pin)

    @property
    def _compares(self) -> bool:
        return len(self._ranks) > 1 and bool(self._units)

    def __del__(self) -> None:
        """Let the computation wait for what a lane still writes: others get that memory next."""
        if self._device.type == "cuda" and self._pending is not None:
            with suppress(Exception):  # the interpreter may be on its way out
                self._pending.ticket.wait()

    def count_step(self) -> None:
        """An optimizer has updated parameters."""
        self._num_steps += 1

    def at_boundary(self) -> ReplicaError | None:
        """What the last audit found, if it found anything; begins another if it is due. Nobody waits here."""
        if not self._compares or self._interval == 0:
            return None
        difference = None
        if self._pending is not None and self._pending.step < self._num_steps:
            difference = self._conclude()
        if self._num_steps - self._last >= self._interval:
            self._last = self._num_steps
            self._begin()
        return difference

    def found_by(self, rank: int) -> ReplicaError:
        """For ranks whose own replicas are equal."""
        return ReplicaError(
            "replicas differ: expected the ranks of every replication group to hold equal parameters, "
            f"found those of rank {rank}'s group to differ (this rank's do not); the error on that "
            "rank says which ranks and units, and what to do"
        )

    @torch.no_grad()
    def now(self) -> AuditReport:
        """Compare at once, and wait for the answer. All ranks of the world must call it."""
        if self._compares:
            before = self._conclude()
            self._refresh_edited()
            self._begin()
            self._raise_together(before or self._conclude())
        nbytes = sum(unit.param_shard.numel() * unit.param_shard.element_size() for unit in self._units)
        return AuditReport(
            step=self._num_steps, ranks=tuple(sorted(self._ranks)), num_units=len(self._units), nbytes=nbytes
        )

    def _raise_together(self, difference: ReplicaError | None) -> None:
        """A difference in one replication group is an error in all: they would wait for its ranks."""
        finder = 0.0 if difference is None else 1.0 + self._world.position
        flag = torch.tensor(finder, dtype=torch.float32, device=self._device)
        self._world.all_reduce(flag, "whether replicas differ (mics.audit_replicas)", maximum=True)
        if difference is not None:
            raise difference
        if flag.item():
            raise self.found_by(int(flag.item()) - 1)

    def _begin(self) -> None:
        edited = [unit.holds_edit() for unit in self._units]
        mine = torch.zeros(2 * len(self._units), dtype=torch.int64, device=self._device)
        mine[: len(self._units)] = digests([unit.arrived_params() for unit in self._units])
        for flag, is_edited in zip(mine[len(self._units) :].unbind(), edited, strict=True):
            if is_edited:
                flag.fill_(1)
        found = mine.new_empty(len(self._ranks) * mine.numel())

        def bring() -> None:
            self._host.copy_(found, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()

        ticket = self._replicas.all_gather(found, mine, "the replica audit", then=bring)
        self._pending = _Exchange(self._num_steps, mine, found, ticket)

    def _conclude(self) -> ReplicaError | None:
        """The audit under way, if there is one, is over: how the replicas differ, if they do."""
        exchange, self._pending = self._pending, None
        if exchange is None:
            return None
        exchange.ticket.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
        members = self._host.view(len(self._ranks), 2, -1).tolist()
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for number, unit in enumerate(self._units):
            if not any(edited[number] for _, edited in members):
                ranks = odd_ones([digest[number] for digest, _ in members], self._ranks)
                by_ranks.setdefault(ranks, []).append(unit.spec.label)
        by_ranks.pop((), None)
        return _difference(by_ranks, self._ranks, exchange.step) if by_ranks else None

    def _refresh_edited(self) -> None:
        """Carry edits to all replicas, as the next gather would: those of any rank, for all do the same."""
        changed = [float(unit.masters_changed()) for unit in self._units]
        edited = torch.tensor(changed, dtype=torch.float32, device=self._device)
        self._world.all_reduce(edited, "which units were edited (mics.audit_replicas)", maximum=True)
        for unit, is_edited in zip(self._units, edited.tolist(), strict=True):
            if is_edited:
                refresh_together([unit])


def odd_ones(values: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose value is not that of more than half of them; all of them if there is no such value."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return tuple(ranks)
    return tuple(rank for rank, other in zip(ranks, values, strict=True) if other != value)


def _difference(
    by_ranks: dict[tuple[int, ...], list[str]], group: tuple[int, ...], step: int
) -> ReplicaError:
    found = []
    for ranks, labels in by_ranks.items():
        more = f" and {len(labels) - _MAX_NAMED} more units" if len(labels) > _MAX_NAMED else ""
        units = ", ".join(labels[:_MAX_NAMED]) + more
        if ranks == group:
            found.append(f"{units} different among {_names(ranks)}, with no majority")
        else:
            found.append(f"{units} different on {_names(ranks)}")
    return ReplicaError(
        f"replicas differ: expected {_names(sorted(group))} to hold equal parameters after optimizer step "
        f"{step}, found {'; '.join(found)}. Either parameters were edited on some ranks only, or through "
        ".data (edit them on all ranks alike under torch.no_grad(), or in mics.summon_full_params(model, "
        "write=True)), or the memory or arithmetic of a device is faulty: take that rank's out. What was "
        "trained since the last audit is not to be trusted: go on from a checkpoint of before",
        ranks=tuple(sorted({rank for ranks in by_ranks for rank in ranks})),
        units=tuple(label for labels in by_ranks.values() for label in labels),
        step=step,
    )


def _names(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def audit_replicas(model: nn.Module) -> AuditReport:
    """Compare the parameters of all replicas now: a report if they are equal, else ``mics.ReplicaError``.

    The ranks of a replication group must hold equal parameters, bit for bit; ``mics.shard`` has that checked
    from time to time, and this checks it at once, for example after loading a checkpoint. Edits since the
    last forward are carried to all replicas first. Module buffers are not compared.

    All ranks must call it, between optimizer steps. Three small collectives; the host waits for the answer.
    """
    checks = [check for engine in engines_of(model) for check in engine.step.checks]
    first, *rest = [check.now() for check in checks if isinstance(check, ReplicaAudit)]
    return replace(
        first,
        num_units=first.num_units + sum(report.num_units for report in rest),
        nbytes=first.nbytes + sum(report.nbytes for report in rest),
    )
