"""Which parameters make up which unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.nn as nn

from mics.errors import SettingsError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParamRef:
    """One parameter of the model and every place that holds it (several when weights are tied)."""

    name: str  # the first dotted name, as in model.named_parameters()
    param: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]  # (module, attribute)


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A module whose forward needs parameters gathered, and which parameters those are."""

    name: str  # dotted; "" is the root
    module: nn.Module
    params: tuple[ParamRef, ...]
    is_block: bool = False  # a module that was chosen as a unit, and not one that holds what is left over


def assign_sites(model: nn.Module, units: Iterable[nn.Module | type[nn.Module]] | None = None) -> list[Site]:
    """Give every parameter to exactly one site, in the order of ``model.named_parameters()``.

    A parameter belongs to the innermost unit module around it. What lies outside every unit module
    belongs to the largest module around it that holds no unit. A parameter that several of those hold
    (tied weights) belongs to the module that contains them all, so that it is gathered for each.
    """
    paths = _module_paths(model)
    chosen = repeated_blocks(model) if units is None else _resolve_units(model, units)
    above_units = {id(above) for path in paths if id(path[-1]) in chosen for above in path[:-1]}
    paths_to: dict[int, list[tuple[nn.Module, ...]]] = {}
    for path in paths:
        paths_to.setdefault(id(path[-1]), []).append(path)
    names = {id(module): name for name, module in model.named_modules()}

    members: dict[int, list[ParamRef]] = {}
    modules: dict[int, nn.Module] = {}
    for ref in list_params(model):
        reaching = [path for module, _ in ref.places for path in paths_to[id(module)]]
        owner = _owner(ref.name, reaching, chosen, above_units)
        members.setdefault(id(owner), []).append(ref)
        modules[id(owner)] = owner
    return [
        Site(name=names[key], module=modules[key], params=tuple(refs), is_block=key in chosen)
        for key, refs in members.items()
    ]


def list_params(model: nn.Module) -> list[ParamRef]:
    """Every parameter once, with all the places that hold it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, attribute))
    return [
        ParamRef(name=name, param=param, places=tuple(places[id(param)]))
        for name, param in model.named_parameters()
    ]


def unit_modules(
    model: nn.Module, units: Iterable[nn.Module | type[nn.Module]] | None = None
) -> list[nn.Module]:
    """The modules that were chosen as units, in the order of ``model.modules()``.

    Also those whose parameters all belong to units inside them.
    """
    chosen = repeated_blocks(model) if units is None else _resolve_units(model, units)
    return [module for module in model.modules() if id(module) in chosen]


def modules_around(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules inside the model that are no units, hold some, and may be called."""
    chosen = {id(unit) for unit in units}

    def holds_units(module: nn.Module) -> bool:
        return any(id(inner) in chosen for inner in module.modules())

    return [
        module
        for module in model.modules()
        if not (module is model or id(module) in chosen or isinstance(module, _CONTAINERS))
        and holds_units(module)
    ]


def repeated_blocks(model: nn.Module) -> set[int]:
    """Ids of the entries of every list in which a class of blocks repeats, outermost lists only."""
    entries = [child for child in model.children() if _has_params(child)]
    kinds = {type(entry) for entry in entries}
    is_list = isinstance(model, nn.ModuleList | nn.Sequential)
    callable_entries = not any(isinstance(entry, _CONTAINERS) for entry in entries)
    if is_list and len(kinds) < len(entries) and callable_entries:
        return {id(entry) for entry in entries}
    return {block for entry in entries for block in repeated_blocks(entry)}


def _resolve_units(model: nn.Module, units: Iterable[nn.Module | type[nn.Module]]) -> set[int]:
    inside = {id(module) for module in model.modules()}
    chosen: set[int] = set()
    for unit in units:
        if isinstance(unit, type) and issubclass(unit, nn.Module):
            instances = {id(module) for module in model.modules() if isinstance(module, unit)}
            if not instances:
                raise SettingsError(
                    "units: expected classes of modules inside the model, found "
                    f"{unit.__qualname__}, of which "
                    f"{type(model).__name__} has none; leave it out or check the spelling"
                )
            chosen |= instances
        elif isinstance(unit, nn.Module):
            if id(unit) not in inside:
                raise SettingsError(
                    f"units: expected modules inside the model, found a {type(unit).__name__} that "
                    "is not one "
                    f"of the submodules of {type(model).__name__}; pass modules of the model being sharded"
                )
            chosen.add(id(unit))
        else:
            raise SettingsError(f"units: expected modules or module classes, found {unit!r}")
    return chosen


def _module_paths(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The chain of modules from the root to each module, once for every way to reach it."""
    paths: list[tuple[nn.Module, ...]] = []
    pending: list[tuple[nn.Module, ...]] = [(model,)]
    while pending:
        path = pending.pop()
        paths.append(path)
        # A module that contains itself would never end.
        children = (child for child in path[-1]._modules.values() if child is not None)
        pending.extend((*path, child) for child in children if child not in path)
    return paths


def _owner(
    name: str, paths: Sequence[tuple[nn.Module, ...]], chosen: set[int], above_units: set[int]
) -> nn.Module:
    owners = {id(owner): owner for owner in (_owner_on(path, chosen, above_units) for path in paths)}
    if len(owners) == 1:
        return next(iter(owners.values()))
    columns = zip(*paths, strict=False)
    shared: list[nn.Module] = [column[0] for column in columns if len({id(module) for module in column}) == 1]
    # A list is never called, so nothing would gather for it: take the module that calls its entries.
    around = [module for module in shared if not isinstance(module, _CONTAINERS)]
    if not around:
        raise SettingsError(
            f"{name}: expected a module with a forward around all that share it, found a "
            f"{type(paths[0][0]).__name__}, which is never called; shard the module that holds the list"
        )
    return around[-1]


def _owner_on(path: tuple[nn.Module, ...], chosen: set[int], above_units: set[int]) -> nn.Module:
    inside = [module for module in path if id(module) in chosen]
    if inside:
        return inside[-1]
    below = (module for module in path if id(module) not in above_units)
    return next((module for module in below if not isinstance(module, _CONTAINERS)), path[-1])


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
