"""Small reference models: plain ``nn.Module``s that import nothing from mics."""

from .gpt import GPT, GPTConfig
from .sizes import GPT_SIZES

__all__ = ["GPT", "GPT_SIZES", "GPTConfig"]
