"""Initial values: from rank 0's model to everybody's shards, one site at a time.

A model on a real device brings its values. A model on ``meta`` has none: every rank makes them, site by site,
with the initialisers the modules carry, so that no rank ever holds the whole model.

Ranks that were seeded alike hold equal values already: they compare digests. Only where those differ does
rank 0 send its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Final

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm import Collectives
from mics.errors import SettingsError
from mics.layout.assign import Site
from mics.sharding.buffers import broadcast_together
from mics.sharding.float8 import plain_of
from mics.sharding.unit import Unit
from mics.utils.digests import digests

_SLICE_NUMEL: Final = 1 << 24  # of a digest: 128 MiB, for units of gigabytes


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave the modules as they were if what is inside fails while all parameters have their values."""
    sizes = [(plain_of(param), param.numel()) for param in model.parameters()]
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    except Exception:
        if all(param.numel() == numel for param, numel in sizes):
            for module, attributes, params, buffers in before:
                module.__dict__.clear()
                module.__dict__.update(attributes, _parameters=params, _buffers=buffers)
        raise


def place_buffers(model: nn.Module, device: torch.device, world: Collectives) -> None:
    """Bring all buffers to ``device`` with the values of rank 0. Runs before the units are made."""
    initialise = Initialisers(model)
    for module in model.modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None]
        from_meta = [name for name in names if _buffer(module, name).is_meta]
        for name in names:
            old = _buffer(module, name)
            new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
            repeats = any(n > 1 and stride == 0 for n, stride in zip(new.shape, new.stride(), strict=True))
            module._buffers[name] = new.contiguous() if repeats else new  # else it cannot be written
        if from_meta:
            _fill_buffers(initialise, module, from_meta)
    buffers = list(model.buffers())
    if buffers and world.size > 1:
        broadcast_together(buffers, world)


class InitialValues:
    """Full values of a site's parameters by id, made here if they are on meta.

    While sites are filled, modules hold the parameters of before: an initialiser of the whole model must not
    write to shards that are done.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._initialise = Initialisers(model)

    def of(self, site: Site) -> dict[int, Tensor]:
        """Rank 0's are used. A model that cannot be initialised fails on all ranks alike."""
        if site.params[0].param.is_meta:
            return self._made(site)
        return {id(ref.param): plain_of(ref.param).detach() for ref in site.params}

    def _made(self, site: Site) -> dict[int, Tensor]:
        """Run the modules' own initialisers on real memory for this site's parameters alone."""
        real = {id(ref.param): _unwritten(plain_of(ref.param), self._device) for ref in site.params}
        with _Holding(site, real):
            for module in self._initialise.around(site):
                self._initialise(module)
            missing = [ref.name for ref in site.params if _is_unwritten(real[id(ref.param)])]
        if missing:
            raise SettingsError(
                f"model on the meta device: expected an initialiser for every parameter, found none that "
                f"writes {', '.join(missing[:5])}; give the module that holds it a reset_parameters() "
                "method, give the model an _init_weights(module) method, or build the model on a real device"
            )
        return {key: param.detach() for key, param in real.items()}


def fill_unit(unit: Unit, values: dict[int, Tensor]) -> None:
    """Give ``unit`` the values that the first rank of its groups has."""
    dtype = unit.spec.master_dtype if unit.spec.param_dtype.is_floating_point else unit.spec.param_dtype
    flat = torch.zeros(unit.spec.layout.numel, dtype=dtype, device=unit.device)
    for slot, ref in zip(unit.spec.layout.slots, unit.spec.refs, strict=True):
        flat[slot.start : slot.stop].copy_(values[id(ref.param)].reshape(-1))
    members, label = unit.groups.members, unit.spec.label
    if not _is_equal(flat, members, f"digest of {label}"):
        members.broadcast(flat, label)
    unit.load(flat)


def _is_equal(flat: Tensor, members: Collectives, label: str) -> bool:
    """Whether all ``members`` hold the bits of ``flat``. One small collective, and the host waits for it."""
    if members.size == 1:
        return True
    digest = digests([flat], slice_numel=_SLICE_NUMEL)
    largest = torch.cat([digest, ~digest])  # ~ turns the order round: the largest of these has the smallest
    members.all_reduce(largest, label, maximum=True)
    return bool(largest[0] == ~largest[1])


def drop_originals(site: Site) -> None:
    """Free the memory of the parameters from before sharding, whoever may still point at them."""
    for ref in site.params:
        if ref.param.is_meta:
            continue
        plain_of(ref.param).data = torch.empty(0, dtype=ref.param.dtype, device=ref.param.device)


def _unwritten(meta: Tensor, device: torch.device) -> nn.Parameter:
    """Real memory for a parameter on meta, of NaN: it stays where no initialiser writes."""
    param = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=False)
    if param.is_floating_point():
        param.data.fill_(math.nan)
    return param


def _is_unwritten(param: nn.Parameter) -> bool:
    """Most writes show in the version. Those through ``.data`` do not: only for them are values read."""
    return param._version == 0 and not (param.is_floating_point() and bool((~param.float().isnan()).any()))


class Initialisers:
    """The initialisers that the modules of ``model`` carry."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        # Hugging Face models and many others refine what constructors did with one method of the model.
        self._owner = next((m for m in self._modules if callable(getattr(m, "_init_weights", None))), None)

    def __call__(self, module: nn.Module) -> None:
        """Run those for ``module`` itself."""
        for name in ("reset_parameters", "_reset_parameters"):
            reset: Callable[[], None] | None = getattr(module, name, None)
            if callable(reset):
                reset()
                break
        if self._owner is not None:
            with torch.no_grad():
                self._owner._init_weights(module)  # type: ignore[operator]

    def around(self, site: Site) -> Iterator[nn.Module]:
        """Modules whose initialisers may write this site's parameters, inner first, as constructors run.

        The modules around a holder count too: some set a child's weights, or all of the model's.
        """
        holders = [module for ref in site.params for module, _ in ref.places]
        places = {place for holder in holders for place in self._places_around[id(holder)]}
        return (self._modules[place] for place in sorted(places, reverse=True))

    @cached_property
    def _places_around(self) -> dict[int, list[int]]:
        """Where each module and those around it are in ``_modules``."""
        found: dict[int, list[int]] = {}
        for place, module in enumerate(self._modules):
            for inner in module.modules():
                found.setdefault(id(inner), []).append(place)
        return found


def _fill_buffers(initialise: Initialisers, module: nn.Module, names: list[str]) -> None:
    before = {name: (id(_buffer(module, name)), _buffer(module, name)._version) for name in names}
    initialise(module)
    after = {name: (id(_buffer(module, name)), _buffer(module, name)._version) for name in names}
    missing = [name for name in names if before[name] == after[name]]
    if missing:
        raise SettingsError(
            f"model on the meta device: expected an initialiser for every buffer, found none that writes "
            f"{', '.join(missing)} of {type(module).__name__}; fill it in reset_parameters(), or "
            "build the model on a "
            "real device"
        )


class _Holding:
    """Modules hold ``real`` parameters inside this context instead of those on meta.

    A parameter that an embedding shares with a head is real in the embedding alone. Models tie their weights
    after the initialisers, and keep the embedding's values: a head's would overwrite the row for padding.
    """

    def __init__(self, site: Site, real: dict[int, nn.Parameter]) -> None:
        self._site = site
        self._real = real

    def __enter__(self) -> None:
        for ref in self._site.params:
            embeddings = [place for place in ref.places if isinstance(place[0], nn.Embedding)]
            for module, attribute in embeddings or ref.places:
                module._parameters[attribute] = self._real[id(ref.param)]

    def __exit__(self, *exc: object) -> None:
        for ref in self._site.params:
            for module, attribute in ref.places:
                module._parameters[attribute] = ref.param


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
