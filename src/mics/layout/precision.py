"""Which number formats a run computes, reduces and keeps its masters in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The formats of a parameter's life.

    ``param`` is what modules compute with and what is gathered. ``None`` means bfloat16 on CUDA and each
    parameter's own format on the CPU. ``reduce`` is what gradients travel in inside the partition group
    (hop 1); they are accumulated over micro-steps in ``float32`` whatever it is. ``replica_reduce`` is what
    they travel in between replicas (hop 2), ``None`` being the format they are accumulated in; a narrower one
    is widened before anything is added. ``master`` is what the optimizer updates.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    replica_reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "master", "replica_reduce"):
            dtype = getattr(self, field)
            if dtype is None and field in ("param", "replica_reduce"):
                continue
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not is_float or dtype.itemsize < 2:  # torch does not add numbers of 8 bits
                raise SettingsError(
                    f"Precision.{field}: expected a floating-point torch.dtype of 16 bits or more, found "
                    f"{dtype!r}; use for example torch.bfloat16 or torch.float32"
                )
        if self.master not in (torch.float32, torch.float64):
            raise SettingsError(
                f"Precision.master: expected torch.float32 or torch.float64, found {self.master}; in "
                "narrower "
                "formats small updates round to nothing"
            )

    def param_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The format a parameter of format ``dtype`` is computed in on ``device``."""
        if not dtype.is_floating_point:
            return dtype
        if self.param is not None:
            return self.param
        # Only full-precision parameters are lowered by default: a model that already mixes formats means it.
        return torch.bfloat16 if device.type == "cuda" and dtype is torch.float32 else dtype

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The format of the master copy of a parameter that was built in ``dtype``."""
        # A double-precision model keeps its precision: rounding its masters would lose what it is for.
        return torch.promote_types(dtype, self.master) if dtype is torch.float64 else self.master

    def reduce_dtype(self, param: torch.dtype) -> torch.dtype:
        """The format in which gradients of parameters of format ``param`` travel."""
        return torch.float64 if param is torch.float64 else self.reduce

    def replica_dtype(self, accumulated: torch.dtype) -> torch.dtype:
        """The format in which gradients that are accumulated in ``accumulated`` travel between replicas."""
        narrow = self.replica_reduce
        return narrow if narrow is not None and narrow.itemsize < accumulated.itemsize else accumulated
