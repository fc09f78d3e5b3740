"""The model of a run: built on the meta device and sharded, with its own initial values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

import mics
from mics.cost.modules import shape_of_module
from mics.models.descriptions import ModelDescription
from mics.train.config import TrainConfig

_ACTIVATIONS: Final = {
    "keep": None,
    "checkpoint": mics.Activations(),
    "offload": mics.Activations(offload=True),
}
_DTYPES: Final = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A sharded model, and what was known of it before."""

    model: nn.Module
    matrices: frozenset[str]
    """Names of parameters that are decayed."""
    flops_per_token: int
    """Of a forward and a backward."""


def build_model(config: TrainConfig, *, rank: int) -> BuiltModel:
    """The sharded model with its initial values, which depend on the seed alone."""
    # On the meta device the model takes no memory: each unit is given its values when it is sharded, so no
    # rank ever holds the whole. The seed makes those values the same in every run, whatever its ranks.
    torch.manual_seed(config.seed)
    described = config.model.build()
    with torch.device("meta"):
        model = described.make()
    matrices = frozenset(name for name, param in model.named_parameters() if param.ndim >= 2)
    flops = _flops_per_token(model, described)
    mics.shard(
        model,
        partition_size=config.sharding.partition_size,
        optimizer_sharding=config.sharding.optimizer_sharding,
        precision=mics.Precision(
            param_dtype=_DTYPES[config.sharding.param_dtype],
            reduce_dtype=_DTYPES[config.sharding.reduce_dtype] or torch.float32,
            replica_reduce_dtype=_DTYPES[config.sharding.replica_reduce_dtype],
        ),
        activations=_ACTIVATIONS[config.sharding.activations],
    )
    seed_rank(config.seed, step=0, rank=rank)
    return BuiltModel(model=model, matrices=matrices, flops_per_token=flops)


def seed_rank(seed: int, *, step: int, rank: int) -> None:
    """Begin a rank's own random numbers, which dropout draws from."""
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1)
    torch.manual_seed(int(state))


def _flops_per_token(model: nn.Module, described: ModelDescription) -> int:
    """Model FLOPs of a forward and a backward, recomputation not counted."""
    if described.gpt is not None:
        return described.gpt.flops_per_token
    units = shape_of_module(model, name=described.title, seq_len=described.seq_len).units
    seen = 0.5 if described.objective == "causal" else 1.0  # a causal token sees half the keys on average
    return round(3 * sum(unit.matrix_flops + seen * unit.attention_flops for unit in units))
