"""Small reference models: plain ``nn.Module``s that import nothing from mics."""

from mics.models.gpt import GPT, GPTConfig
from mics.models.sizes import GPT_SIZES

__all__ = ["GPT", "GPT_SIZES", "GPTConfig"]
