"""Named GPT sizes, from one that trains on a laptop to one that needs a cluster."""

from types import MappingProxyType
from typing import Final

from mics.models.gpt import GPTConfig

# 50257 tokens of the GPT-2 vocabulary rounded up to a multiple of 128, which matrix kernels prefer.
_VOCAB_SIZE: Final = 50304


def _gpt(
    num_layers: int, num_heads: int, hidden_size: int, *, seq_len: int = 2048, tied: bool = False
) -> GPTConfig:
    return GPTConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
        vocab_size=_VOCAB_SIZE,
        seq_len=seq_len,
        tie_weights=tied,
    )


GPT_SIZES: Final = MappingProxyType(
    {
        # Bytes for tokens, so that it learns from any text file within a minute on two CPU cores.
        "nano": GPTConfig(num_layers=3, num_heads=4, hidden_size=96, vocab_size=256, seq_len=64),
        "gpt-124m": _gpt(12, 12, 768, seq_len=1024, tied=True),
        "gpt-350m": _gpt(24, 16, 1024, tied=True),
        "gpt-1.3b": _gpt(24, 16, 2048, tied=True),
        "gpt-3.6b": _gpt(16, 32, 4096),
        "gpt-6.7b": _gpt(32, 32, 4096),
        "gpt-13b": _gpt(40, 40, 5120),
    }
)
"""Every named size. Its name says roughly how many parameters it has, ``num_parameters`` says exactly."""
