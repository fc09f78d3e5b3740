"""Small reference models in plain torch, and the models that users describe."""

from mics.models.gpt import GPT, GPTConfig
from mics.models.loss import cross_entropy
from mics.models.sizes import GPT_SIZES, PUBLISHED_SIZES, find_size

__all__ = ["GPT", "GPT_SIZES", "PUBLISHED_SIZES", "GPTConfig", "cross_entropy", "find_size"]
