"""What every system of a comparison trains: one record, the same for all of them."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from mics.emulator import Imagined
from mics.models import GPTConfig

DType = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]

_TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how one optimizer step is made of micro-steps.

    It names dtypes and devices by strings, so that it travels to other processes and into result files as
    it is, and says nothing about the world: adapters find that in ``torch.distributed``.
    """

    model: GPTConfig
    partition_size: int
    """Ranks that together hold one copy of the parameters. fsdp2 and deepspeed-zero3 shard over the world
    instead, ddp not at all."""
    micro_batch: int
    """Sequences per rank and micro-step."""
    accumulation: int
    """Gradient accumulation steps."""
    checkpoint: bool
    """Recompute each block in the backward."""
    param_dtype: DType
    reduce_dtype: DType
    device: Device
    learning_rate: float = 3e-4
    max_norm: float | None = None
    """Clip the gradients to this norm; None: do not clip."""
    seed: int = 0
    offload: bool = False
    """Activations are offloaded to host memory."""
    imagined: Imagined = "different"
    """What the other ranks of an emulated cluster hold of the parameters."""
    whole_layers: int | None = None
    """Blocks of the whole model, of which ``model`` has some; None: it is whole."""

    def __post_init__(self) -> None:
        for name in ("partition_size", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.whole_layers is not None and not self.model.num_layers <= self.whole_layers:
            raise ValueError(
                f"whole_layers: expected at least {self.model.num_layers}, found {self.whole_layers}"
            )
        for name, allowed in (
            ("param_dtype", get_args(DType)),
            ("reduce_dtype", get_args(DType)),
            ("device", get_args(Device)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, found {getattr(self, name)!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: expected more than 0, found {self.learning_rate}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm: expected more than 0 (or None), found {self.max_norm}")

    @property
    def param(self) -> torch.dtype:
        """``param_dtype`` as torch names it."""
        return _TORCH_DTYPES[self.param_dtype]

    @property
    def scales_loss(self) -> bool:
        """Small gradients vanish in float16: a GradScaler keeps them."""
        return self.param is torch.float16

    @property
    def reduce(self) -> torch.dtype:
        """``reduce_dtype`` as torch names it."""
        return _TORCH_DTYPES[self.reduce_dtype]
