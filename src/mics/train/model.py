"""The model of a run: built on the meta device and sharded, with its own initial values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from mics.cost.modules import shape_of_module
from mics.data.index import read_index
from mics.data.tokenizer import BytesTokenizer
from mics.errors import SettingsError
from mics.models.descriptions import ModelDescription
from mics.train.config import TrainConfig
from mics.train.objective import LanguageModelling
from mics.train.sharding import shard_model

_OF_DEVICES: Final = re.compile(r"meta|cuda|gpu|triton|kernel|device|backend", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A sharded model, and what was known of it before."""

    model: nn.Module
    matrices: frozenset[str]
    """Names of parameters that are decayed."""
    flops_per_token: int
    """Of a forward and a backward."""


def check_model(config: TrainConfig) -> None:
    """Raise if a model of the user's own does not make logits of tokens, tried without memory.

    An error about the meta device, or of a kernel that is for GPUs alone, says nothing about the model.
    """
    described = config.model.build()
    if described.source != "function":
        return
    assert described.objective is not None, "settings refuse such a model"
    shards = config.data.shards
    vocabulary = read_index(shards[0]).vocab_size if shards else BytesTokenizer.vocab_size
    with torch.device("meta"), torch.no_grad():
        model = described.make().eval()
        tokens = torch.zeros(1, described.seq_len, dtype=torch.int64, device="meta")
        try:
            logits: object = LanguageModelling(model, described.objective).logits(tokens)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NameError) as error:
            if isinstance(error, NotImplementedError) or _OF_DEVICES.search(str(error)):
                return
            found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            if _are_logits(logits, tokens, vocabulary):
                return
            found = str(list(logits.shape)) if isinstance(logits, Tensor) else type(logits).__name__
    raise SettingsError(
        f"--model {described.title}: expected a forward that takes tokens {list(tokens.shape)} (int64) and "
        f"returns logits [1, {described.seq_len}, vocabulary], or an object with .logits, with the "
        f"vocabulary at least the {vocabulary:,} of the data, found {found}; change the model's "
        "forward"
    )


def _are_logits(logits: object, tokens: Tensor, vocabulary: int) -> bool:
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        return False
    return logits.shape[:2] == tokens.shape and logits.shape[2] >= vocabulary


def build_model(config: TrainConfig, *, rank: int) -> BuiltModel:
    """The sharded model with its initial values, which depend on the seed alone."""
    # On the meta device the model takes no memory: each unit is given its values when it is sharded, so no
    # rank ever holds the whole. The seed makes those values the same in every run, whatever its ranks.
    torch.manual_seed(config.seed)
    described = config.model.build()
    check_model(config)
    with torch.device("meta"):
        model = described.make()
    if described.source == "config":
        model.float()  # a config that names bf16 says how its weights are stored: sharding.param_dtype counts
    matrices = frozenset(name for name, param in model.named_parameters() if param.ndim >= 2)
    flops = _flops_per_token(model, described)
    shard_model(model, config.sharding)
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
