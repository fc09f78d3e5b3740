"""Refusing DistributedDataParallel, fully_shard and their like around a model that is sharded already.

They take each rank's shards for whole parameters: DDP would give all ranks those of rank 0, FSDP would shard
them again. FSDP asks each module what was applied to it before it touches it. DDP asks nothing, but it takes
the module as its own, which torch tells whoever wants to know.

``torch.distributed.checkpoint.state_dict`` asks the modules of any model the same as FSDP does.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mics.errors import SettingsError

_REFUSED: Final = {"fully_shard": "fully_shard", "replicate": "FSDP or replicate"}
_READER: Final = "_get_fsdp_states_with_modules"  # looks for FSDP in a model, and changes nothing
_watching: RemovableHandle | None = None


def refuse_wrappers(model: nn.Module) -> None:
    """Have the modules of ``model`` refuse to be sharded or replicated by others."""
    global _watching
    for module in model.modules():
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
    if _watching is None:
        _watching = register_module_module_registration_hook(_refuse_replicas)


def show_to_checkpoints(model: nn.Module) -> None:
    """Let functions of ``torch.distributed.checkpoint`` see ``model``: it has the state dicts they expect."""
    for module in model.modules():
        registry = module.__dict__.get(REGISTRY_KEY)
        if isinstance(registry, _Registry):
            registry.is_shown = True


class _Registry(dict[str, Any]):
    """What torch's composable APIs note on a module, and ask before they change it."""

    is_shown = False

    def __contains__(self, name: object) -> bool:
        if name == "replicate" and sys._getframe(2).f_code.co_name == _READER:
            if self.is_shown:
                return False
            raise SettingsError(
                "torch.distributed.checkpoint.state_dict: expected a model of plain tensors or DTensors, "
                "found one that mics.shard() has sharded; take mics.full_state_dict(model) and "
                "mics.load_full_state_dict(model, state), or mics.save and mics.load"
            )
        if isinstance(name, str) and name in _REFUSED:
            _refuse(_REFUSED[name])
        return super().__contains__(name)


def _refuse_replicas(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    parts = module.modules() if module and isinstance(owner, DistributedDataParallel | DataParallel) else ()
    if any(isinstance(part.__dict__.get(REGISTRY_KEY), _Registry) for part in parts):
        _refuse(type(owner).__name__)


def _refuse(wrapper: str) -> NoReturn:
    raise SettingsError(
        f"expected a plain model for {wrapper}, found one that mics.shard() has sharded: it averages "
        "gradients over all ranks by itself. Train with the model that mics.shard() returned as it is, "
        f"without {wrapper}"
    )
