"""``MicsFabricStrategy``: ``lightning.Fabric`` over models that mics shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision
from lightning.fabric.plugins.precision import Precision as PrecisionPlugin
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from mics.engine import is_sharded
from mics.errors import SettingsError
from mics.gradients.optimizer import check_optimizer
from mics.integrations.lightning.checkpoints import (
    is_folder,
    load_folder,
    save_folder,
    whole_optimizer_state,
)
from mics.integrations.lightning.settings import Sharding, StateDictType
from mics.integrations.micro_steps import micro_step
from mics.state_dict import full_state_dict


class MicsFabricStrategy(DDPStrategy):
    """Train models that ``mics.shard`` shards, with ``lightning.Fabric``.

    Takes what ``MicsStrategy`` takes. ``fabric.setup`` shards the model, and gives optimizers that were built
    on it their pieces.
    """

    def __init__(
        self,
        partition_size: int | None = None,
        *,
        state_dict_type: StateDictType = "full",
        timeout: timedelta = default_pg_timeout,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **settings: Any,
    ) -> None:
        self._sharding = Sharding(
            owner=type(self).__name__,
            settings={"partition_size": partition_size, **settings},
            state_dict_type=state_dict_type,
        )
        super().__init__(
            timeout=timeout, cluster_environment=cluster_environment, checkpoint_io=checkpoint_io
        )
        self._backward_sync_control = _Microsteps()
        self._models: list[ref[nn.Module]] = []

    @property
    def precision(self) -> PrecisionPlugin:
        return super().precision

    @precision.setter
    def precision(self, plugin: PrecisionPlugin | None) -> None:
        if plugin is not None:
            self._sharding.check_precision(plugin, (PrecisionPlugin, MixedPrecision, HalfPrecision))
        self._precision = plugin

    # -- set-up -------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))  # mics.shard initialises, one unit at a time
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        if not is_sharded(module) and not any(param.is_meta for param in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        self._sharding.shard(module, self.precision.precision, self.root_device)
        self._models.append(ref(module))
        return _Forward(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        names = {param: name for name, param in module.named_parameters()}
        wrapped = self.setup_module(module)
        params = dict(module.named_parameters())
        for optimizer in optimizers:
            _check_fresh(optimizer)
            for group in optimizer.param_groups:
                # What is not of this model stays: mics refuses what it does not know when it steps.
                group["params"] = [params[names[p]] if p in names else p for p in group["params"]]
            check_optimizer(optimizer)
        return wrapped, optimizers, scheduler

    # -- checkpoints --------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole tensors on rank 0, empty elsewhere."""
        module = _unwrapped(module)
        return full_state_dict(module) if is_sharded(module) else super().get_module_state_dict(module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        super().load_module_state_dict(_unwrapped(module), state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state with whole tensors on rank 0, empty elsewhere."""
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        alive = [model for weak in self._models if (model := weak()) is not None]
        models = [model for model in alive if own & {id(param) for param in model.parameters()}]
        return whole_optimizer_state(models, optimizer) if models else super().get_optimizer_state(optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        path = str(self.broadcast(path))
        if self._sharding.state_dict_type == "full":
            if self.is_global_zero and is_folder(path):
                self.checkpoint_io.remove_checkpoint(path)
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        for name, given in (("storage_options", storage_options), ("filter", filter)):
            if given is not None:
                raise SettingsError(f"{name}: expected None with state_dict_type='sharded', found {given!r}")
        model, optimizers = _parts(state)
        parts = [model, *optimizers]
        rest = {key: value for key, value in state.items() if not any(value is part for part in parts)}
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        save_folder(path, _unwrapped(model), optimizers, rest)

    def load_checkpoint(
        self,
        path: Any,
        state: Any | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        path = str(self.broadcast(path))
        if not self.broadcast(is_folder(path)):
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        state = {"model": state} if isinstance(state, nn.Module) else state
        if not isinstance(state, dict):
            raise SettingsError(
                f"state: expected a dict with a model to load the folder {path} into, found "
                f"{type(state).__name__}"
            )
        model, optimizers = _parts(state)
        rest = load_folder(path, _unwrapped(model), optimizers, strict=strict, weights_only=weights_only)
        parts = [model, *optimizers]
        for key, value in state.items():
            if any(value is part for part in parts):
                continue
            if key not in rest:
                if strict:
                    raise SettingsError(
                        f"state[{key!r}]: expected it in the checkpoint {path}, found {sorted(rest)}; pass "
                        "strict=False to leave it as it is"
                    )
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


class _Forward(nn.Module):
    """Calls a sharded model. Lightning sends methods that are marked as forwards through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Microsteps(_BackwardSyncControl):
    """``fabric.no_backward_sync``: where the micro-steps of a step announce themselves."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return micro_step(_unwrapped(module), last=not enabled)


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Forward) else module


def _check_fresh(optimizer: Optimizer) -> None:
    if optimizer.state:
        raise SettingsError(
            f"{type(optimizer).__name__}: expected an optimizer without state, found some; set it up before "
            "its first step, and load its state after fabric.setup(). Adagrad has state when it is built: "
            "build it after fabric.setup_module(model)"
        )


def _parts(state: dict[str, Any]) -> tuple[nn.Module, Sequence[Optimizer]]:
    """The sharded model in ``state``, and the optimizers."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    models = [module for module in modules if is_sharded(_unwrapped(module))]
    if len(models) != 1:
        raise SettingsError(
            f"state: expected one model that fabric.setup() has sharded, found {len(models)}; save each in a "
            "checkpoint of its own, or use state_dict_type='full'"
        )
    return models[0], [value for value in state.values() if isinstance(value, Optimizer)]
