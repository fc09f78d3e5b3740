"""Models to compare systems on, with the micro-batch that goes with each.

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


BENCH_MODELS: Final = MappingProxyType(
    {
        "gpt-tiny": BenchModel(
            config=GPTConfig(
                num_layers=4, num_heads=4, hidden_size=256, vocab_size=2048, seq_len=64, rotary=False
            ),
            micro_batch=1,
            checkpoint=False,
            about="4 M parameters: the network decides",
        ),
        "gpt-small": BenchModel(
            config=GPTConfig(
                num_layers=8, num_heads=8, hidden_size=512, vocab_size=4096, seq_len=64, rotary=False
            ),
            micro_batch=1,
            checkpoint=False,
            about="29 M parameters, for CPUs",
        ),
        "gpt-118m": BenchModel(
            config=GPTConfig(
                num_layers=8, num_heads=16, hidden_size=1024, vocab_size=8192, seq_len=256, rotary=False
            ),
            micro_batch=1,
            checkpoint=False,
            about="118 M parameters, for several ranks on one GPU",
        ),
        "gpt-3.6b": BenchModel(
            config=replace(GPT_SIZES["gpt-3.6b"], rotary=False),
            micro_batch=4,
            checkpoint=True,
            about="hidden 4096, 16 layers, sequence 2048",
        ),
        "gpt-20b": BenchModel(
            config=replace(
                GPT_SIZES["gpt-3.6b"], num_layers=24, num_heads=64, hidden_size=8192, rotary=False
            ),
            micro_batch=4,
            checkpoint=True,
            about="hidden 8192, 24 layers, sequence 2048",
        ),
        "bert-10b": BenchModel(
            config=GPTConfig(
                num_layers=24,
                num_heads=40,
                hidden_size=2560,
                vocab_size=32128,
                seq_len=512,
                causal=False,
                rotary=False,
            ),
            micro_batch=8,
            checkpoint=True,
            about="blocks of BERT 10B: 24 of its 127 layers",
        ),
        "gpt-100b": BenchModel(
            config=replace(
                GPT_SIZES["gpt-3.6b"], num_layers=4, num_heads=80, hidden_size=10240, rotary=False
            ),
            micro_batch=1,
            checkpoint=True,
            about="blocks of a 100 B GPT: 4 of its 80 layers",
        ),
    }
)
