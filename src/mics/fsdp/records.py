"""What ``fully_shard`` was asked for one module, and how mics is asked for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mics.comm import join_world
from mics.engine import Engine, engine_of
from mics.errors import SettingsError
from mics.layout.order import Prefetch
from mics.layout.precision import Precision
from mics.sharding.unit import Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ATTRIBUTE: Final = "_mics_fsdp"


@dataclass(eq=False, kw_only=True)
class ModuleRecord:
    """What was asked for one module."""

    mesh: DeviceMesh | None
    policy: MixedPrecisionPolicy
    reshard: bool | None
    """After forward; None: mics decides."""
    ahead: int = 0
    """Modules to prefetch, the most of any list; 0: mics decides."""
    says: dict[str, bool] = field(default_factory=dict)
    """Which setters have said whether the next backward is the last one before the optimizer."""
    root: ref[nn.Module] | None = None
    """What it was sharded with, once it was."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """What was called before that, and needs it."""


def find_record(module: nn.Module) -> ModuleRecord | None:
    found: ModuleRecord | None = module.__dict__.get(_ATTRIBUTE)
    return found


def put_record(module: nn.Module, record: ModuleRecord) -> None:
    module.__dict__[_ATTRIBUTE] = record


def recorded(module: nn.Module) -> Iterator[tuple[nn.Module, ModuleRecord]]:
    """``module`` and the modules inside that have a record."""
    for inner in module.modules():
        found = find_record(inner)
        if found is not None:
            yield inner, found


def root_of(module: nn.Module) -> nn.Module | None:
    """What ``module`` was sharded with, if it was."""
    found = find_record(module)
    return None if found is None or found.root is None else found.root()


def units_of_record(engine: Engine, module: nn.Module) -> list[Unit]:
    """The units that FSDP2 would keep in the group of ``module``: not those of recorded modules inside it."""
    others = (inner for inner, _ in recorded(module) if inner is not module)
    apart = {id(deeper) for inner in others for deeper in inner.modules()}
    inside = {id(inner) for inner in module.modules()} - apart
    sites = [site for site in engine.autograd.sites if id(site.module) in inside]
    return list(dict.fromkeys(unit for site in sites for unit in site.units))


# -- what mics is asked for ---------------------------------------------------------------------------


def groups_for(mesh: DeviceMesh | None) -> dict[str, Any]:
    """``partition_size`` or ``mesh`` of ``mics.shard``."""
    if mesh is not None and mesh.ndim == 2:
        return {"mesh": mesh}
    return {"partition_size": join_world().size}


def check_mesh(mesh: Any) -> None:
    if mesh is None:
        return
    if not hasattr(mesh, "mesh"):
        raise SettingsError(f"fully_shard: mesh: expected a torch.distributed DeviceMesh, found {mesh!r}")
    ranks, size = mesh.mesh.flatten().tolist(), join_world().size
    if mesh.ndim > 2 or sorted(ranks) != list(range(size)):
        raise SettingsError(
            f"fully_shard: mesh: expected 1 axis (shards) or 2 (replicas, shards) over all {size} ranks, "
            f"found {mesh.ndim} over {len(ranks)}; mics has no tensor or pipeline parallelism"
        )


def precision_for(policy: MixedPrecisionPolicy, model: nn.Module) -> Precision:
    """The formats of FSDP2: without ``param_dtype`` the parameters' own, also on CUDA."""
    dtypes = float_dtypes(model)
    param = policy.param_dtype
    if param is None and len(dtypes) == 1:
        param = next(iter(dtypes))
    if param is None and torch.float32 in dtypes and torch.cuda.is_available():
        raise SettingsError(
            "fully_shard: mp_policy.param_dtype: expected a dtype for a model that mixes "
            f"{_listed(dtypes)}, found None; choose one, or convert the model to one dtype"
        )
    if not policy.cast_forward_inputs and policy.param_dtype is not None and dtypes != {param}:
        raise SettingsError(
            "fully_shard: mp_policy.cast_forward_inputs: expected True where param_dtype lowers parameters, "
            "found False: mics casts the inputs of units; leave it out"
        )
    reduce = policy.reduce_dtype or param or torch.float32
    return Precision(param_dtype=param, reduce_dtype=reduce, replica_reduce_dtype=reduce)


def float_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in model.parameters() if param.is_floating_point()}


def check_alike(module: nn.Module) -> None:
    """Raise if what was asked for ``module`` and for modules in it cannot be had in one model."""
    names = {id(inner): name for name, inner in module.named_modules()}
    (_, first), *others = recorded(module)
    for inner, record in others:
        for what, ours, theirs in (
            ("mesh", first.mesh, record.mesh),
            ("mp_policy", _formats(first.policy), _formats(record.policy)),
        ):
            if ours != theirs:
                raise SettingsError(
                    f"fully_shard: {what}: expected the same for {type(module).__name__} and the modules in "
                    f"it, found {ours} and, for {names[id(inner)]!r}, {theirs}; give all of them the same"
                )


def _formats(policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
    """What must be one for all; ``output_dtype`` may be each module's own."""
    return policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs


def prefetch_for(records: Sequence[ModuleRecord]) -> Any:
    """``prefetch`` of ``mics.shard``: mics decides, unless somebody said what to keep."""
    return "auto" if all(record.reshard is None for record in records) else Prefetch()


# -- what setters change ------------------------------------------------------------------------------


def apply_residency(root: nn.Module) -> None:
    """Have units stay, and be prefetched, as was asked for their modules."""
    engine, records = engine_of(root), list(recorded(root))
    plans = engine.residency.plans
    ahead = max(record.ahead for _, record in records)
    if ahead:
        plans.look_ahead(Prefetch(units=ahead, stay_nbytes=plans.prefetch.stay_nbytes))
    if any(record.reshard is not None for _, record in records):
        if not plans.is_final:
            plans.look_ahead(Prefetch())
        staying = [module for module, record in records if record.reshard is False]
        plans.let_stay(unit.spec.index for module in staying for unit in units_of_record(engine, module))


def announce(root: nn.Module, says: dict[str, bool]) -> None:
    """Tell the engine whether the next backward is the last one before the optimizer."""
    engine_of(root).progress.announce(last=all(says.values()))


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes))
