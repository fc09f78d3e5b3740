"""State dicts of FSDP2's kind: DTensors over the mesh, of models and of optimizers.

FSDP2 divides each tensor by rows, and its programs count on DTensors: in ``model.state_dict()`` and
``optimizer.state_dict()``, which ``torch.distributed.checkpoint`` and its ``get_model_state_dict`` ask. mics
divides units in flat order. So both state dicts are made when they are asked for: all ranks must ask.

FSDP2's are views of the parameters, and these are copies. A program that writes to them, and does not load
them afterwards, would train on with the old values: the next forward or step raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mics.comm.journal import calling
from mics.engine import engine_of, units_of
from mics.errors import MicsError
from mics.fsdp.records import find_record, root_of
from mics.gradients.optimizer import load_listeners
from mics.guard import ShardTensor
from mics.schedule.autograd import UserHooks
from mics.sharding.wrappers import show_to_checkpoints
from mics.state_dict import take_optimizer_state, take_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_roots: WeakIdKeyDictionary = WeakIdKeyDictionary()  # sharded parameter -> ref of the root it belongs to


def divide(mesh: DeviceMesh, whole: Tensor, *, cpu: bool = False) -> Tensor:
    """This rank's rows of ``whole``, as FSDP2 has them. All ranks have it: nothing is sent."""
    placements = placements_of(mesh, whole)
    view = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    found = DTensor.from_local(
        view.to_local().clone(),  # frees the whole one
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )
    return found.cpu() if cpu else found


def placements_of(mesh: DeviceMesh, whole: Tensor | ShardTensor) -> tuple[Placement, ...]:
    """Rows over the last dim of the mesh, the same over the other."""
    num_dims = len(whole.shard_layout.whole_shape) if isinstance(whole, ShardTensor) else whole.dim()
    last: Placement = Shard(0) if num_dims else Replicate()
    return (last,) if mesh.ndim == 1 else (Replicate(), last)


def mesh_of(root: nn.Module) -> DeviceMesh:
    """The mesh that was given, or one of all ranks."""
    record = find_record(root)
    if record is not None and record.mesh is not None:
        return record.mesh
    engine = engine_of(root)
    found = init_device_mesh(engine.device.type, (engine.world.size,))
    if record is not None:
        record.mesh = found
    return found


def show_dtensors(root: nn.Module) -> None:
    """Have state dicts of ``root``, and of optimizers over its parameters, consist of DTensors.

    ``device_mesh`` and ``placements`` of its parameters say how those are divided.
    """
    if not dist.is_initialized():
        return  # one rank alone: its pieces are whole
    mesh = mesh_of(root)
    for unit in units_of(root):
        for param in unit.shards:
            _roots[param] = ref(root)
            described: Any = param
            described.device_mesh, described.placements = mesh, placements_of(mesh, param)
    show_to_checkpoints(root)
    root.register_load_state_dict_pre_hook(_loaded)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_about_to_step))
        load_listeners.append(_meet)


_hooks: list[Any] = []


# -- models -------------------------------------------------------------------------------------------


def divide_model_state(module: nn.Module, state: dict[str, Any], prefix: str = "") -> None:
    """Make DTensors of the pieces in ``state``, which is that of ``module``. All ranks must call it."""
    pieces = {name: value for name, value in state.items() if isinstance(value, ShardTensor)}
    root = root_of(module)
    if root is None or not pieces or not dist.is_initialized():
        return
    take = partial(divide, mesh_of(root))
    params = {prefix + name: id(param) for name, param in module.named_parameters(remove_duplicate=False)}
    with calling("model.state_dict"):
        taken = take_parameters(root, take) if module is root else {}
        for name, piece in pieces.items():
            if name.startswith(prefix):
                found = taken.get(params.get(name, 0))
                state[name] = take(piece.full_tensor()) if found is None else found
    hand_out(root, state)


def hand_out(root: nn.Module, state: Mapping[str, Any]) -> None:
    """Watch the DTensors in ``state`` until ``root`` is called or loaded."""
    copies = _Copies("state_dict()", "model.load_state_dict(state)", state)
    if root not in _of_models:
        handle = root.register_forward_pre_hook(_about_to_run)
        _of_models[root] = copies, handle.remove
    else:
        _of_models[root][0].add(copies)


def _about_to_run(root: nn.Module, args: Any) -> None:
    copies, remove = _of_models.pop(root)
    remove()
    copies.check()


UserHooks.skip(_about_to_run)


def _loaded(root: nn.Module, *rest: Any) -> None:
    if root in _of_models:
        _of_models.pop(root)[1]()


class _Copies:
    """DTensors of state dicts, and which version of their values was handed out."""

    def __init__(self, call: str, way_out: str, state: Mapping[str, Any]) -> None:
        self._call, self._way_out = call, way_out
        self._versions = [
            (name, value, _version(value)) for name, value in state.items() if isinstance(value, DTensor)
        ]

    def add(self, others: _Copies) -> None:
        self._versions += others._versions

    def check(self) -> None:
        """Raise if somebody has written to one."""
        for name, value, version in self._versions:
            if _version(value) != version:
                raise MicsError(
                    f"{self._call}: expected {name!r} as it was returned, found it written to: it is a copy, "
                    f"and what it was copied from has the old values; call {self._way_out} after "
                    "torch.distributed.checkpoint.load, and write to a clone otherwise"
                )


def _version(value: DTensor) -> tuple[int, int]:
    """Changes with each write: to the DTensor, or as DCP does to what is in it."""
    return value._version, value.to_local()._version


_of_models: WeakKeyDictionary[nn.Module, tuple[_Copies, Callable[[], None]]] = WeakKeyDictionary()
_of_optimizers: WeakKeyDictionary[Optimizer, _Copies | None] = WeakKeyDictionary()


# -- optimizers ---------------------------------------------------------------------------------------


def _about_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    copies = _of_optimizers.get(optimizer)
    _meet(optimizer)
    if copies is not None:
        copies.check()


def _meet(optimizer: Optimizer) -> None:
    """At its first step, and whenever it has loaded state: what was handed out is of no interest any more."""
    if optimizer not in _of_optimizers and any(param in _roots for param in _params(optimizer)):
        optimizer.register_state_dict_post_hook(_divide_optimizer_state)
        _of_optimizers[optimizer] = None
    elif _of_optimizers.get(optimizer) is not None:
        _of_optimizers[optimizer] = None


def _divide_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """After ``state_dict()``: DTensors, and of all parameters on all ranks."""
    params = _params(optimizer)
    entries: dict[int, dict[str, Any]] = {}
    for root in {id(root): root for param in params if (root := _root_of(param)) is not None}.values():
        with calling("optimizer.state_dict"):
            taken = take_optimizer_state(root, optimizer, partial(divide, mesh_of(root)))
        names = {id(param): name for name, param in root.named_parameters()}
        entries |= {key: taken[name] for key, name in names.items() if name in taken}
    state = {
        number: entries.get(id(param), state_dict["state"].get(number)) for number, param in enumerate(params)
    }
    found = {number: value for number, value in state.items() if value is not None}
    flat = {f"{number}.{key}": value for number, each in found.items() for key, value in each.items()}
    _of_optimizers[optimizer] = _Copies("optimizer.state_dict()", "optimizer.load_state_dict(state)", flat)
    return {**state_dict, "state": found}


def _params(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _root_of(param: Any) -> nn.Module | None:
    found = _roots.get(param)
    return None if found is None else found()
