"""Initial values: from rank 0's model to everybody's shards, one site at a time.

A model on a real device brings its values. A model on ``meta`` has none: rank 0 makes them, site by site,
with the initialisers the modules carry, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm import Collectives
from mics.errors import SettingsError
from mics.layout.assign import Site
from mics.sharding.buffers import broadcast_together
from mics.sharding.unit import Unit


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave the modules as they were if what is inside fails while all parameters have their values."""
    sizes = [(param, param.numel()) for param in model.parameters()]
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
    for module in model.modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None]
        from_meta = [name for name in names if _buffer(module, name).is_meta]
        for name in names:
            old = _buffer(module, name)
            new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
            repeats = any(n > 1 and stride == 0 for n, stride in zip(new.shape, new.stride(), strict=True))
            module._buffers[name] = new.contiguous() if repeats else new  # else it cannot be written
        if from_meta:
            _fill_buffers(model, module, from_meta)
    buffers = list(model.buffers())
    if buffers and world.size > 1:
        broadcast_together(buffers, world)


def initial_values(
    model: nn.Module, site: Site, device: torch.device, built: Sequence[Unit]
) -> dict[int, Tensor]:
    """Full values of one site's parameters by id, made here if they are on meta.

    Only rank 0's are used. The other ranks make theirs too, at the same time, so that a model that cannot
    be initialised fails on all of them alike.
    """
    if site.params[0].param.is_meta:
        return _run_initialisers(model, site, device, built)
    return {id(ref.param): ref.param.detach() for ref in site.params}


def fill_unit(unit: Unit, values: dict[int, Tensor]) -> None:
    """Give ``unit`` the values that the first rank of its groups has."""
    dtype = unit.spec.master_dtype if unit.spec.param_dtype.is_floating_point else unit.spec.param_dtype
    flat = torch.zeros(unit.spec.layout.numel, dtype=dtype, device=unit.device)
    members = unit.groups.members
    if members.position == 0:
        for slot, ref in zip(unit.spec.layout.slots, unit.spec.refs, strict=True):
            flat[slot.start : slot.stop].copy_(values[id(ref.param)].reshape(-1))
    members.broadcast(flat, unit.spec.label)
    unit.load(flat)


def drop_originals(site: Site) -> None:
    """Free the memory of the parameters from before sharding, whoever may still point at them."""
    for ref in site.params:
        if ref.param.is_meta:
            continue
        ref.param.data = torch.empty(0, dtype=ref.param.dtype, device=ref.param.device)


def _run_initialisers(
    model: nn.Module, site: Site, device: torch.device, built: Sequence[Unit]
) -> dict[int, Tensor]:
    """Run the modules' own initialisers on real memory for this site's parameters alone."""
    real = {id(ref.param): _unwritten(ref.param, device) for ref in site.params}
    for unit in built:  # an initialiser of the whole model must not write to shards that are done
        unit.held.show([ref.param for ref in unit.spec.refs])
    with _Holding(site, real):
        for module in _initialisable(model, site):
            _initialise(model, module)
        missing = [ref.name for ref in site.params if _is_unwritten(real[id(ref.param)])]
    for unit in built:
        unit.held.show(unit.shards)
    if missing:
        raise SettingsError(
            f"model on the meta device: expected an initialiser for every parameter, found none that writes "
            f"{', '.join(missing[:5])}; give the module that holds it a reset_parameters() method, "
            "give the model an "
            "_init_weights(module) method, or build the model on a real device"
        )
    return {key: param.detach() for key, param in real.items()}


def _unwritten(meta: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Real memory for a parameter on meta, of NaN: it stays where no initialiser writes."""
    param = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=False)
    if param.is_floating_point():
        param.data.fill_(math.nan)
    return param


def _is_unwritten(param: nn.Parameter) -> bool:
    """Most writes show in the version. Those through ``.data`` do not: only for them are values read."""
    return param._version == 0 and not (param.is_floating_point() and bool((~param.float().isnan()).any()))


def _initialisable(model: nn.Module, site: Site) -> Iterator[nn.Module]:
    """Modules whose initialisers may write this site's parameters, inner ones first, as constructors run.

    The modules around a holder count too: some set a child's weights, or all of the model's.
    """
    holders = {id(module) for ref in site.params for module, _ in ref.places}
    for module in reversed(list(model.modules())):
        if any(id(inner) in holders for inner in module.modules()):
            yield module


def _initialise(model: nn.Module, module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], None] | None = getattr(module, name, None)
        if callable(reset):
            reset()
            break
    # Hugging Face models and many others refine what constructors did with one method of the model.
    owner = next((m for m in model.modules() if callable(getattr(m, "_init_weights", None))), None)
    if owner is not None:
        with torch.no_grad():
            owner._init_weights(module)  # type: ignore[operator]


def _fill_buffers(model: nn.Module, module: nn.Module, names: list[str]) -> None:
    before = {name: (id(_buffer(module, name)), _buffer(module, name)._version) for name in names}
    _initialise(model, module)
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
