"""Which dtypes a run computes, reduces and keeps its masters in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics.errors import SettingsError
from mics.utils.deprecation import takes_old_fields


@takes_old_fields(
    param="param_dtype", reduce="reduce_dtype", master="master_dtype", replica_reduce="replica_reduce_dtype"
)
@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of parameters and gradients, as in FSDP2's ``MixedPrecisionPolicy``.

    ``param_dtype``: what modules compute with and what is all-gathered. ``None`` means bfloat16 on CUDA and
    each parameter's own dtype on the CPU. ``reduce_dtype``: what gradients travel in inside the partition
    group (hop 1). They are always accumulated over micro-steps in ``float32``. ``replica_reduce_dtype``: what
    they travel in between replicas (hop 2), of different nodes where a node has several; ``None`` means the
    dtype they are accumulated in. A narrower one is widened before anything is added.
    ``master_dtype``: what the optimizer updates.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    replica_reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "master_dtype", "replica_reduce_dtype"):
            dtype = getattr(self, field)
            if dtype is None and field in ("param_dtype", "replica_reduce_dtype"):
                continue
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not is_float or dtype.itemsize < 2:  # torch does not add numbers of 8 bits
                raise SettingsError(
                    f"Precision.{field}: expected a floating-point torch.dtype of 16 bits or more, found "
                    f"{dtype!r}; use for example torch.bfloat16 or torch.float32"
                )
        if self.master_dtype not in (torch.float32, torch.float64):
            raise SettingsError(
                "Precision.master_dtype: expected torch.float32 or torch.float64, found "
                f"{self.master_dtype}; in narrower dtypes small updates round to nothing"
            )

    def dtype_of_param(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """What a parameter that was built in ``dtype`` is computed in on ``device``."""
        if not dtype.is_floating_point:
            return dtype
        if self.param_dtype is not None:
            return self.param_dtype
        # Only full-precision parameters are lowered by default: a model that already mixes dtypes means it.
        return torch.bfloat16 if device.type == "cuda" and dtype is torch.float32 else dtype

    def dtype_of_master(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the master copy of a parameter that was built in ``dtype``."""
        # A double-precision model keeps its precision: rounding its masters would lose what it is for.
        wanted = self.master_dtype
        return torch.promote_types(dtype, wanted) if dtype is torch.float64 else wanted

    def dtype_of_hop_1(self, param_dtype: torch.dtype) -> torch.dtype:
        """What gradients of parameters that are computed in ``param_dtype`` travel in."""
        return torch.float64 if param_dtype is torch.float64 else self.reduce_dtype

    def dtype_of_hop_2(self, accumulated: torch.dtype) -> torch.dtype:
        """What gradients that are accumulated in ``accumulated`` travel in between replicas."""
        narrow = self.replica_reduce_dtype
        return narrow if narrow is not None and narrow.itemsize < accumulated.itemsize else accumulated
