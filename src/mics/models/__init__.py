"""Small reference models: plain torch that imports nothing else from mics."""

from mics.models.gpt import GPT, GPTConfig
from mics.models.loss import cross_entropy
from mics.models.sizes import GPT_SIZES, PUBLISHED_SIZES

__all__ = ["GPT", "GPT_SIZES", "PUBLISHED_SIZES", "GPTConfig", "cross_entropy"]
