"""Models by name: one table for training, planning, benchmarks and the emulator."""

from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from mics.errors import SettingsError
from mics.models.gpt import GPTConfig

# 50257 tokens of the GPT-2 vocabulary rounded up to a multiple of 128, which matrix kernels prefer.
_VOCAB_SIZE: Final = 50304
# RoBERTa's 50265 rounded up to a multiple of 8, without which 16-bit matrix kernels are several times slower.
_ROBERTA_VOCAB_SIZE: Final = 50272
_BERT_VOCAB_SIZE: Final = 32008


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


def _learned(
    num_layers: int,
    num_heads: int,
    hidden_size: int,
    vocab_size: int = _VOCAB_SIZE,
    seq_len: int = 2048,
    *,
    causal: bool = True,
) -> GPTConfig:
    """With learned positions, as in GPT-2 and in publications."""
    return GPTConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        seq_len=seq_len,
        causal=causal,
        rotary=False,
    )


def _bert(num_layers: int, num_heads: int, hidden_size: int, vocab_size: int = _BERT_VOCAB_SIZE) -> GPTConfig:
    """Every token sees all others, and the loss is over the vocabulary at every position."""
    return _learned(num_layers, num_heads, hidden_size, vocab_size, seq_len=512, causal=False)


_PUBLISHED: Final = {
    # MiCS, arXiv 2205.00119, its table of models. It gives BERT 50B 40 heads, which do not divide 8192: 64.
    "bert-10b": _bert(127, 40, 2560),
    "bert-15b": _bert(190, 40, 2560),
    "bert-20b": _bert(64, 40, 5120),
    "bert-50b": _bert(62, 64, 8192),
    "roberta-20b": _bert(62, 40, 5120, _ROBERTA_VOCAB_SIZE),
    "gpt2-20b": _learned(62, 40, 5120, _ROBERTA_VOCAB_SIZE, seq_len=512),
    # "Making DeepSpeed ZeRO run efficiently on more-affordable hardware" gives no shapes: BERT's blocks.
    "roberta-10b": _bert(127, 40, 2560, _ROBERTA_VOCAB_SIZE),
    "roberta-50b": _bert(62, 64, 8192, _ROBERTA_VOCAB_SIZE),
    "gpt-20b": _learned(24, 64, 8192),
    "gpt-30b": _learned(48, 56, 7168),
    "gpt-66b": _learned(64, 72, 9216),
    # The 100B of MiCS is proprietary: a shape of that size.
    "gpt-100b": _learned(80, 80, 10240),
    "gpt-175b": _learned(96, 96, 12288),
    "gpt-530b": _learned(105, 128, 20480),
    # "Scaling to trillion-parameter model training on AWS"; it does not say how many heads: 128 wide.
    "gpt-1t": _learned(210, 160, 20480, 50264, seq_len=1024),
}
PUBLISHED_SIZES: Final = frozenset(_PUBLISHED)
"""Sizes of papers: theirs have biases, which the planner counts and our blocks lack (under 0.04%)."""

GPT_SIZES: Final = MappingProxyType(
    {
        # Bytes for tokens, so that it learns from any text file within a minute on two CPU cores.
        "nano": GPTConfig(num_layers=3, num_heads=4, hidden_size=96, vocab_size=256, seq_len=64),
        "gpt-tiny": _learned(4, 4, 256, 2048, 64),
        "gpt-small": _learned(8, 8, 512, 4096, 64),
        "gpt-118m": _learned(8, 16, 1024, 8192, 256),
        "gpt-124m": _gpt(12, 12, 768, seq_len=1024, tied=True),
        "gpt-350m": _gpt(24, 16, 1024, tied=True),
        "gpt-1.3b": _gpt(24, 16, 2048, tied=True),
        "gpt-3.6b": _gpt(16, 32, 4096),
        "gpt-6.7b": _gpt(32, 32, 4096),
        "gpt-13b": _gpt(40, 40, 5120),
        **_PUBLISHED,
    }
)
"""Every named size. Its name says roughly how many parameters it has, ``num_parameters`` says exactly."""


def find_size(name: str) -> GPTConfig:
    """A named size, or an error with names that are near."""
    if name in GPT_SIZES:
        return GPT_SIZES[name]
    near = get_close_matches(name, GPT_SIZES, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}? Known: " if near else "known: "
    raise SettingsError(
        f"--model {name!r}: expected a named size, a folder or file of a Hugging Face config, or "
        f"module:function, found none of them; {hint}{', '.join(GPT_SIZES)}"
    )
