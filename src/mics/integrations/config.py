"""What an integration passes on to ``mics.shard``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn as nn

from mics.activations.policy import Activations
from mics.api import shard
from mics.config import OptimizerSharding, OptimizerState, check_values
from mics.errors import SettingsError
from mics.layout.compression import LOSSLESS, Compression
from mics.layout.order import Prefetch
from mics.layout.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class MicsConfig:
    """The arguments of ``mics.shard``, for a trainer that calls it.

    ``precision=None`` follows the trainer's own setting: bfloat16 or float16 parameters over float32 masters
    where it asks for mixed precision, and else the dtype that the model was built in.
    """

    partition_size: int | None = None
    units: Iterable[nn.Module | type[nn.Module]] | None = None
    mesh: DeviceMesh | None = None
    hierarchical: Literal["auto"] | bool = "auto"
    optimizer_sharding: OptimizerSharding = "world"
    optimizer_state: OptimizerState = "device"
    precision: Precision | None = None
    prefetch: Literal["auto"] | int | Prefetch = "auto"
    activations: Activations | None = None
    low_memory: Literal["auto"] | bool = "auto"
    audit_interval: Literal["auto"] | int = "auto"
    compression: Compression | None = LOSSLESS

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["partition_size"], values["mesh"]  # right or wrong for a number of ranks
        precision = Precision() if self.precision is None else self.precision
        check_values(**values | {"precision": precision})
        if isinstance(self.units, Iterable):
            object.__setattr__(self, "units", tuple(self.units))  # several models are sharded with one config

    def shard(self, model: nn.Module, *, param_dtype: torch.dtype | None = None) -> nn.Module:
        """Shard ``model``, in ``param_dtype`` or its own one where nothing else was asked for."""
        precision = self.precision or Precision(param_dtype=param_dtype or _own_dtype(model))
        config = replace(self, precision=precision)
        return shard(model, **{field.name: getattr(config, field.name) for field in fields(config)})


def _own_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of all parameters; None where each has its own and may keep it."""
    params = [param for param in model.parameters() if param.is_floating_point()]
    found = {param.dtype for param in params}
    if len(found) <= 1:
        return next(iter(found), None)
    if torch.float32 in found and any(param.is_cuda for param in params):
        raise SettingsError(
            f"MicsConfig.precision: expected one for a model of several dtypes, found None and parameters in "
            f"{', '.join(sorted(map(str, found)))}; pass mics.Precision(param_dtype=...), or train with bf16"
        )
    return None
