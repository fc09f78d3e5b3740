"""What recorded modules can do: the methods of FSDP2's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, cast

import torch
import torch.nn as nn

from mics.engine import engine_of
from mics.errors import SettingsError
from mics.fsdp.dtensors import divide_model_state
from mics.fsdp.records import (
    ModuleRecord,
    announce,
    apply_residency,
    find_record,
    recorded,
    root_of,
    units_of_record,
)
from mics.fsdp.unsharded import reshard, unshard

_REFUSED: Final = {
    "set_all_reduce_hook": "mics has no hooks inside hop 2; change gradients before optimizer.step()",
    "set_allocate_memory_from_process_group_for_comm": "mics allocates the buffers of its collectives",
    "set_custom_all_gather": "mics chooses its collectives",
    "set_custom_reduce_scatter": "mics chooses its collectives",
    "set_post_optim_event": "mics gathers after the optimizer's step on the current stream",
    "set_reduce_scatter_max_input_buffers": "mics chooses its reduce buffers",
    "set_symm_mem_for_comm": "mics allocates the buffers of its collectives",
    "set_unshard_in_backward": "mics finds from the recorded order what backward needs",
}


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def wait(self) -> None:
        """Have the parameters: all ranks must call it. Whoever only runs a forward need not."""
        unshard(self._module)


class FSDPModule:
    """A module that was given to ``fully_shard``: the base that is added to its class."""

    _plain_class: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers make others of their class (``layers[:2]``): those are plain ones."""
        made = cls._plain_class.__new__(cls._plain_class)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    # -- memory: what changes no number ---------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Let the module hold whole parameters to read, as ``unsharded.py`` says. All ranks must call it.

        A forward needs no call: mics prefetches by the recorded order.
        """
        module = cast(nn.Module, self)
        if async_op:
            return UnshardHandle(module)
        unshard(module)
        return None

    def reshard(self) -> None:
        """Let the module hold shards again. Inside a forward or backward mics reshards by itself."""
        reshard(cast(nn.Module, self))

    def reset_iter_state(self) -> None:
        """Change nothing: the next forward forgets one that failed."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether units are resharded between forward and backward, from the next forward on."""
        check_bool("set_reshard_after_forward", reshard_after_forward)
        module = cast(nn.Module, self)
        for inner, record in list(recorded(module)):
            if recurse or inner is module:
                record.reshard = reshard_after_forward
        self._change_residency()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Change nothing: between micro-steps mics keeps the units that stay, and reshards the others."""
        check_bool("set_reshard_after_backward", reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Look ahead as many units as the longest list has. Their order is recorded."""
        self._look_ahead("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Look ahead as many units as the longest list has. Their order is recorded."""
        self._look_ahead("set_modules_to_backward_prefetch", modules)

    # -- gradients ------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward is the last one before the optimizer.

        Gradients are right whatever is said: without hop 2 they are summed over replicas when somebody needs
        them. Of modules inside the root nothing needs to be known.
        """
        self._say("set_requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same as ``set_requires_gradient_sync``: hop 1 runs in every micro-step."""
        self._say("set_requires_all_reduce", requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """The same as ``set_requires_gradient_sync``."""
        self._say("set_is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients over all ranks by ``factor``, not by their number."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise SettingsError(f"set_gradient_divide_factor: expected a number above 0, found {factor!r}")
        self._now_or_later(lambda: self._divide_by(float(factor)))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Change nothing: mics always takes zeros for parameters that only other ranks used."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Change nothing: the collectives of mics always add."""

    # -- values ---------------------------------------------------------------------------------------

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """A sharded model has memory already, and on ``meta`` it was initialised."""
        module = cast(nn.Module, self)
        root = root_of(module)
        if root is None:
            return nn.Module.to_empty(module, device=device, recurse=recurse)
        here = engine_of(root).device
        if torch.device(device).type != here.type:
            raise SettingsError(f"to_empty: device: expected {here}, where the shards are, found {device!r}")
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in FSDP2 DTensors, but copies: all ranks must call it. With ``keep_vars`` the parameters."""
        module = cast(nn.Module, self)
        reshard(module, recurse=True)
        state: dict[str, Any] = self._plain_class.state_dict(module, *args, **kwargs)
        asked = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        # Of a module inside, on the way from the root, the root will make them.
        if not asked.get("keep_vars") and (root_of(module) is module or asked.get("destination") is None):
            divide_model_state(module, state, asked.get("prefix", ""))
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Copy whole tensors or DTensors, also with ``assign``: a sharded model keeps its memory."""
        reshard(cast(nn.Module, self), recurse=True)
        return self._plain_class.load_state_dict(cast(nn.Module, self), state_dict, strict)

    # -- inside ---------------------------------------------------------------------------------------

    def _record(self) -> ModuleRecord:
        found = find_record(cast(nn.Module, self))
        assert found is not None, "fully_shard puts it there"
        return found

    def _now_or_later(self, action: Callable[[], None]) -> None:
        record = self._record()
        if record.root is None:
            record.later.append(action)
        else:
            action()

    def _say(self, setter: str, value: bool) -> None:
        check_bool(setter, value)
        module = cast(nn.Module, self)
        record, root = self._record(), root_of(module)
        record.says[setter] = value
        if root is not None and root is module:
            announce(root, record.says)

    def _look_ahead(self, setter: str, modules: Sequence[FSDPModule]) -> None:
        strange = next((module for module in modules if not isinstance(module, FSDPModule)), None)
        if strange is not None:
            raise SettingsError(
                f"{setter}: expected modules that fully_shard was called on, found {type(strange).__name__}"
            )
        self._record().ahead = max(self._record().ahead, len(modules))
        self._change_residency()

    def _change_residency(self) -> None:
        root = root_of(cast(nn.Module, self))
        if root is not None:
            apply_residency(root)

    def _divide_by(self, factor: float) -> None:
        module = cast(nn.Module, self)
        root = root_of(module)
        assert root is not None
        engine = engine_of(root)
        for unit in units_of_record(engine, module):
            if unit.spec.trainable:
                engine.shown.of(unit).divisor = factor


def check_bool(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{what}: expected True or False, found {value!r}")


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise SettingsError(f"{name}: not supported by mics.fsdp: {reason}; leave the call out")

    refuse.__name__ = name
    return refuse


for _name, _reason in _REFUSED.items():
    setattr(FSDPModule, _name, _refusing(_name, _reason))
