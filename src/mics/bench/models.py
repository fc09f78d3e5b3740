"""Models to compare systems on, with the micro-batch that goes with each: those of `mics.models`, whole.

Positions are learned, as in GPT-2 and BERT: without a fused kernel, rotary ones are tens of milliseconds that
say nothing about the systems.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from mics.models import GPT_SIZES, GPTConfig


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model and its usual micro-batch."""

    config: GPTConfig
    micro_batch: int
    checkpoint: bool
    about: str


_SMALL: Final = {
    "nano": "0.4 M parameters",
    "gpt-tiny": "4 M parameters: the network decides",
    "gpt-small": "29 M parameters, for CPUs",
    "gpt-118m": "118 M parameters, for several ranks on one GPU",
}
# Sequences of a micro-step where four are not usual: 8 of the publications' 512 tokens, 8 of the trillion.
_MICRO_BATCH: Final = {name: 8 for name, config in GPT_SIZES.items() if config.seq_len == 512} | {
    "gpt-66b": 1,
    "gpt-100b": 1,
    "gpt-175b": 1,
    "gpt-530b": 1,
    "gpt-1t": 8,
}


def _model(name: str, config: GPTConfig) -> BenchModel:
    small = name in _SMALL
    about = f"hidden {config.hidden_size}, {config.num_layers} layers, sequence {config.seq_len}"
    return BenchModel(
        config=replace(config, rotary=False),
        micro_batch=1 if small else _MICRO_BATCH.get(name, 4),
        checkpoint=not small,
        about=_SMALL[name] if small else about,
    )


BENCH_MODELS: Final = MappingProxyType({name: _model(name, config) for name, config in GPT_SIZES.items()})
