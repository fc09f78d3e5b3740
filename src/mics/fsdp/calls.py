"""``fully_shard`` and ``register_fsdp_forward_method``, with FSDP2's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from mics.api import register_forward_method
from mics.comm import join_world
from mics.engine import is_sharded
from mics.errors import SettingsError
from mics.fsdp.module import FSDPModule
from mics.fsdp.records import ModuleRecord, check_alike, check_mesh, find_record, root_of
from mics.fsdp.waiting import find_root, is_inside, wait_for_root
from mics.sharding.held import ParameterTable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module | list[nn.Module])

_NO_POLICY: Final = MixedPrecisionPolicy()
_NO_OFFLOAD: Final = OffloadPolicy()
_NOT_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Any = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Make ``module`` a unit, and with the last call on the outermost module the root; in place.

    The root is sharded when it is first used: when parameters are taken from it (an optimizer is built, a
    state dict is read), when a state dict is loaded, or when it is called. Call it bottom-up, as in FSDP2.

    Args:
        module: a module, or a list of modules that each become a unit with the same settings.
        mesh: a ``DeviceMesh`` over all ranks: 1-D for one partition group of all of them, 2-D for replicas
            (dim 0) and partition groups (dim 1). None: one partition group. The same in all calls.
        reshard_after_forward: False keeps the unit from its forward to its backward. With None in all calls
            mics decides by network and free memory. As a number of ranks: 1 is False, the size of the
            partition group is True.
        mp_policy: formats, the same in all calls but for ``output_dtype``. Optimizers update float32 masters
            also where parameters were built in a narrower dtype.
        shard_placement_fn, offload_policy, ignored_params, dp_mesh_dims: their defaults alone.
    """
    _check_arguments(
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    check_mesh(mesh)
    reshard = _check_reshard(reshard_after_forward, mesh)
    modules: Sequence[Any] = module if isinstance(module, list | tuple) else [module]
    if not modules:
        raise SettingsError(
            "fully_shard: module: expected a module or a list of modules, found an empty list"
        )
    for each in modules:
        _check_module(each)
    for each in modules:
        wait_for_root(each, ModuleRecord(mesh=mesh, policy=mp_policy, reshard=reshard))
    for each in modules:
        check_alike(each)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` compute with sharded parameters, as ``register_forward_method``."""
    if not isinstance(module, FSDPModule):
        return  # as in FSDP2, whose programs call it for modules that may not be sharded
    if not callable(getattr(module, method_name, None)):
        raise SettingsError(
            f"register_fsdp_forward_method: method_name: expected a method of {type(module).__name__}, found "
            f"{method_name!r}"
        )
    module._now_or_later(lambda: _register(module, method_name))


def _register(module: Any, method_name: str) -> None:
    root = root_of(module)
    assert root is not None
    prefix = next(name for name, inner in root.named_modules() if inner is module)
    register_forward_method(root, f"{prefix}.{method_name}" if prefix else method_name)


def _check_arguments(
    *,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Any,
    dp_mesh_dims: Any,
) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise SettingsError(f"fully_shard: mp_policy: expected a MixedPrecisionPolicy, found {mp_policy!r}")
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise SettingsError(
            "fully_shard: offload_policy: expected OffloadPolicy(), found CPUOffloadPolicy: mics keeps "
            "parameters on the device; leave it out, or keep masters and optimizer state in host memory with "
            'mics.shard(model, optimizer_state="host")'
        )
    if type(offload_policy) is not OffloadPolicy:
        raise SettingsError(
            f"fully_shard: offload_policy: expected OffloadPolicy(), found {offload_policy!r}"
        )
    if ignored_params:
        raise SettingsError(
            f"fully_shard: ignored_params: expected none, found {len(ignored_params)}: mics shards every "
            "parameter of the model; keep these in a module outside of it, or as buffers"
        )
    for name, value, way_out in (
        (
            "shard_placement_fn",
            shard_placement_fn,
            "mics divides units in flat order, not by dims of tensors",
        ),
        ("dp_mesh_dims", dp_mesh_dims, "mics takes plain tensors, not DTensors; give a 1-D or 2-D mesh"),
    ):
        if value is not None:
            raise SettingsError(f"fully_shard: {name}: expected None, found {value!r}; {way_out}")


def _check_reshard(asked: Any, mesh: DeviceMesh | None) -> bool | None:
    """A number of ranks is right where it means all of those that share a unit, or one: True and False."""
    if asked is None or isinstance(asked, bool):
        return asked
    size = join_world().size if mesh is None else int(mesh.mesh.shape[-1])
    if isinstance(asked, int) and asked in (1, size):
        return asked == size
    smaller = isinstance(asked, int) and 1 < asked < size and not size % asked
    way_out = f"a 2-D mesh with {asked} ranks in dim 1 gathers over {asked} in forward too" if smaller else ""
    raise SettingsError(
        f"fully_shard: reshard_after_forward: expected True, False, None, 1 or {size} (the ranks of the "
        f"partition group), found {asked!r}: mics keeps a unit whole until backward or divides it over its "
        f"group; {way_out or 'give one of these'}"
    )


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise SettingsError(f"fully_shard: module: expected an nn.Module, found {type(module).__name__}")
    kind, around = type(module).__name__, find_root(module) if is_inside(module) else None
    if isinstance(module, _NOT_CALLED):
        raise SettingsError(
            f"fully_shard: module: expected one with a forward, found {kind}, which is never called; call "
            "fully_shard on its entries"
        )
    if find_record(module) is not None or is_sharded(module):
        raise SettingsError(f"fully_shard: module: expected one that is not sharded yet, found {kind} again")
    if around is not None:
        raise SettingsError(
            f"fully_shard: module: expected inner modules first, found {kind} inside "
            f"{type(around).__name__}, which was given before; call fully_shard bottom-up"
        )
    used = next((name for name, inner in module.named_modules() if _is_used(inner)), None)
    if used is not None:
        raise SettingsError(
            f"fully_shard: module: expected {kind} with nothing in it sharded yet, found {used!r} in use: "
            "its parameters were taken, or it was called, before this call; call "
            "fully_shard on all modules first, and then build the optimizer, count parameters, load or run"
        )


def _is_used(module: nn.Module) -> bool:
    return is_sharded(module) or ParameterTable.holds_units(module)
