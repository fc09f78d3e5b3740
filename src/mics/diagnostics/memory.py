"""Where a rank's memory goes: every term by name, from the formula and from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from mics.activations.offload import Offloader
from mics.activations.policy import Applied
from mics.cost.memory import NUM_STAGED, Nest, homes
from mics.diagnostics.wire import expected_wire_nbytes
from mics.engine import Engine, engine_of
from mics.gradients.host_state import staged_nbytes
from mics.gradients.optimizer import expected_state_nbytes, optimizer_state_nbytes
from mics.schedule.sites import ScheduledSite
from mics.sharding.unit import Unit
from mics.utils.numbers import memory as memory_text


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """One kind of memory. Bytes; None: not known (yet)."""

    name: str
    where: Literal["device", "host"]
    about: str
    predicted: int | None
    measured: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What one rank holds. ``str()`` of it is a table."""

    rank: int
    terms: tuple[MemoryTerm, ...]
    allocated: int | None
    """Bytes that torch's allocator has handed out on the device now; None without a GPU."""
    peak: int | None
    """The most it had handed out since the peak was last reset."""

    def __getitem__(self, name: str) -> MemoryTerm:
        """The term with this name."""
        found = {term.name: term for term in self.terms}
        if name not in found:
            raise KeyError(f"expected one of {', '.join(found)}, found {name!r}")
        return found[name]

    def total(self, where: Literal["device", "host"]) -> int:
        """Measured bytes of all terms there."""
        return sum(term.measured or 0 for term in self.terms if term.where == where)

    def __str__(self) -> str:
        rows = [("", "predicted", "measured", "")]
        for where in ("device", "host"):
            terms = [term for term in self.terms if term.where == where]
            rows += [(term.name, _text(term.predicted), _text(term.measured), term.about) for term in terms]
            total = sum(term.measured or 0 for term in terms)
            rows.append((f"named terms on the {where}", "", _text(total), ""))
        if self.peak is not None and self.allocated is not None:
            beside = self.peak - self.total("device")
            about = "activations, logits, workspace: whatever is neither named above nor kept"
            rows.append(("allocated on the device now", "", _text(self.allocated), ""))
            rows.append(("at its peak", "", _text(self.peak), ""))
            rows.append(("beside the named terms", "", _text(beside), about))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {predicted:>{widths[1]}}  {measured:>{widths[2]}}  {about}".rstrip()
            for name, predicted, measured, about in rows
        ]
        return "\n".join([f"memory of rank {self.rank}", *lines])


def memory_report(model: nn.Module, *, show: bool = True) -> MemoryReport:
    """Every named term of this rank's memory, on the device and on the host. Rank 0 prints it.

    Predictions follow from the settings; those about activations need a step to have run, and an optimizer
    that has not stepped is taken to be AdamW.
    """
    engine = engine_of(model)
    engine.mesh.lanes.drain()  # what is under way would count in one place or the other
    on_gpu = engine.device.type == "cuda"
    report = MemoryReport(
        rank=engine.world.rank,
        terms=tuple(_terms(engine, model)),
        allocated=torch.cuda.memory_allocated(engine.device) if on_gpu else None,
        peak=torch.cuda.max_memory_allocated(engine.device) if on_gpu else None,
    )
    if show and engine.world.rank == 0:
        print(report, flush=True)
    return report


def _terms(engine: Engine, model: nn.Module) -> Iterator[MemoryTerm]:
    yield from _sharded_terms(engine)
    yield _gathered_term(engine, model)
    yield _on_device(
        "reduce buffers",
        "gradients of a whole unit, and this rank's chunk of the sum" + _meanwhile(engine),
        engine.hops.buffers.expected_nbytes(),
        _nbytes(t for buffer in engine.hops.buffers for t in (buffer.full, buffer.shard)),
    )
    yield _on_device(
        "wire",
        "chunks on their way between ranks",
        expected_wire_nbytes(engine.units, engine.mesh, engine.topology, rank=engine.world.rank),
        engine.mesh.staging_nbytes(),
    )
    if engine.step.moved is not None:
        # How far values move is known once they do.
        about = "how far new values are from old ones, in the room that earlier steps needed: no prediction"
        yield _on_device("moves", about, None, engine.step.moved.nbytes)
    buffers = list(model.buffers())
    whole = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    yield _on_device("buffers", "of modules, whole on every rank", whole, _nbytes(buffers))
    yield from _activation_terms(engine.activations)


def _sharded_terms(engine: Engine) -> Iterator[MemoryTerm]:
    """What is divided over ranks."""
    units = engine.units
    trainable = [unit for unit in units if unit.spec.trainable]
    size, replicas = engine.topology.partition_size, engine.topology.num_replicas
    over = size * (replicas if any(unit.share.masters_over_replicas for unit in units) else 1)
    stored = [unit for unit in units if not unit.spec.casts_masters]
    cleared = ", freed while cleared" if engine.hops.lends_memory else ""
    yield _on_device(
        "parameters",
        _share(size) if stored else "gathers cast the masters",
        sum(unit.spec.layout.numel * unit.spec.param_dtype.itemsize for unit in stored) / size,
        _nbytes(unit.param_shard for unit in stored),
    )
    gradients = [engine.shown.of(unit).shard for unit in trainable]
    yield _on_device(
        "gradients",
        f"{_share(size)}, accumulated over micro-steps{cleared}",
        sum(unit.spec.layout.numel * unit.spec.grad_dtype.itemsize for unit in trainable) / size,
        _nbytes(shard for shard in gradients if shard is not None),
    )
    keeping = [unit for unit in trainable if unit.spec.keeps_errors]
    if keeping:
        kept = [engine.shown.of(unit).errors for unit in keeping]
        yield _on_device(
            "lost in rounding",
            f"{_share(size)} of gradients between replicas, sent in later steps",
            sum(unit.spec.layout.chunk_numel * torch.bfloat16.itemsize for unit in keeping),
            _nbytes(errors for errors in kept if errors is not None),
        )
    params = {unit.param_shard.untyped_storage().data_ptr() for unit in stored}
    apart = [unit for unit in trainable if unit.master.untyped_storage().data_ptr() not in params]
    on_host = engine.step.host is not None
    yield _term(
        "masters",
        _share(over) if apart else "the parameters are their own masters",
        sum(unit.spec.layout.numel * unit.spec.master_dtype.itemsize for unit in apart) / over,
        _nbytes(unit.master for unit in apart),
        where="host" if on_host and apart else "device",
    )
    expected, kind = expected_state_nbytes(engine.step)
    yield _term(
        "optimizer state",
        f"{_share(over)}; predicted for {kind}",
        expected / over,
        optimizer_state_nbytes(engine.step),
        where="host" if on_host else "device",
    )
    if on_host:
        yield _on_device(
            "state on its way",
            "of two units at once, while an optimizer steps",
            max((staged_nbytes(unit) for unit in trainable), default=0) * NUM_STAGED,
            0,
        )


def _gathered_term(engine: Engine, model: nn.Module) -> MemoryTerm:
    low_memory = engine.hops.lends_memory
    gathered = [unit for unit in engine.units if unit.whole.is_own]
    held = _held(engine.autograd.sites)
    chain = [unit for unit in gathered if unit not in held]
    unread, alone = _in_backward(engine, chain)
    prefetch = engine.residency.plans.prefetch
    comes_and_goes = _meanwhile(engine) if prefetch.units else ", only meanwhile"
    staying = prefetch.stay_nbytes * bool(prefetch.units) * (not low_memory)
    return _on_device(
        "gathered units",
        f"at work, and {prefetch.units} ahead{comes_and_goes}{', and those that stay' if staying else ''}"
        if gathered
        else "nothing to gather",
        homes(
            tuple(unit.whole.nbytes for unit in chain),
            unread,
            prefetch.units,
            tuple(unit.whole.nbytes for unit in gathered if unit in held),
            staying,
            engine.residency.plans.batching,
            alone,
            _nests(model, engine, chain),
            prefetch.nbytes,
            low_memory,
        ),
        _nbytes(unit.whole.flat for unit in gathered),
    )


def _meanwhile(engine: Engine) -> str:
    return ", only meanwhile" if engine.hops.lends_memory else ""


def _activation_terms(applied: Applied | None) -> Iterator[MemoryTerm]:
    if applied is not None and applied.offloader is not None:
        yield from _offload_terms(applied.offloader)
    if applied is not None and applied.inputs is not None:
        yield _on_device(
            "saved activations",
            "inputs of units that are recomputed",
            applied.inputs.expected_nbytes(),
            applied.inputs.held_nbytes(),
        )


def _offload_terms(offloader: Offloader) -> Iterator[MemoryTerm]:
    expected = offloader.expected_nbytes()
    yield _on_device(
        "saved activations",
        "of units: those that stay, and those that are on their way",
        None if expected is None else expected.on_device,
        offloader.held_nbytes(),
    )
    yield MemoryTerm(
        name="offloaded activations",
        where="host",
        about="of units; kept from step to step",
        predicted=None if expected is None else expected.on_host,
        measured=offloader.pool.nbytes,
    )


def _on_device(name: str, about: str, predicted: float | None, measured: int) -> MemoryTerm:
    return _term(name, about, predicted, measured, where="device")


def _term(
    name: str, about: str, predicted: float | None, measured: int, *, where: Literal["device", "host"]
) -> MemoryTerm:
    whole = None if predicted is None else round(predicted)
    return MemoryTerm(name=name, where=where, about=about, predicted=whole, measured=measured)


def _held(sites: Sequence[ScheduledSite]) -> list[Unit]:
    """Units of the root, where there are others: gathered as long as those are at work."""
    others = [site for site in sites if site.name and site.units]
    return [unit for site in sites if others and not site.name for unit in site.units]


def _nests(model: nn.Module, engine: Engine, chain: Sequence[Unit]) -> tuple[Nest, ...]:
    """Positions in ``chain``, and which of them are inside others."""
    positions = {unit: position for position, unit in enumerate(chain)}
    units = {site.module: site.units for site in engine.autograd.sites}
    recomputed = frozenset() if engine.activations is None else engine.activations.recomputed
    seen: set[nn.Module] = set()

    def of(module: nn.Module) -> tuple[Nest, ...]:
        if module in seen:
            return ()
        seen.add(module)
        # Tied weights belong to several: here to the one around the others.
        here = [unit for unit in units.get(module, []) if unit in positions]
        own = tuple(positions.pop(unit) for unit in here)
        inside = tuple(nest for child in module.children() for nest in of(child))
        again = module in recomputed
        return (Nest(own, inside, again),) if own or again else inside

    return of(model)


def _in_backward(engine: Engine, chain: Sequence[Unit]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions in ``chain`` that no backward reads, and those whose backward nobody sees end.

    Nobody reads lookups, nor frozen units before the first that is trained. Where a backward ends shows when
    a gradient of the input has come, and the first trained unit's input is data.
    """
    positions = {unit: position for position, unit in enumerate(chain)}
    modules = {unit: site.module for site in reversed(engine.autograd.sites) for unit in site.units}
    unread, alone = [], []
    trained: set[nn.Module] = set()  # before this unit: its input needs a gradient, if they are not inside it
    for unit in engine.units:
        is_led_back = bool(trained.difference(modules[unit].modules()))
        trains = any(param.requires_grad for param in modules[unit].parameters())
        position = positions.get(unit)
        if position is not None and (_is_lookup(unit) or not (is_led_back or trains)):
            unread.append(position)
        elif position is not None and not is_led_back:
            alone.append(position)
        if unit.spec.trainable:
            trained.update(ref.places[0][0] for ref in unit.spec.refs)
    return tuple(unread), tuple(alone)


def _is_lookup(unit: Unit) -> bool:
    return all(isinstance(module, nn.Embedding) for ref in unit.spec.refs for module, _ in ref.places)


def _share(size: int) -> str:
    return f"this rank's 1/{size}" if size > 1 else "all of them"


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct memory behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer)


def _text(nbytes: int | None) -> str:
    return "-" if nbytes is None else memory_text(nbytes)
