"""Tokenized data: folders of token shards, made by ``mics data prepare`` and read by training.

Nothing here imports torch.
"""

from mics.data.index import INDEX_FILE, ShardIndex, read_index
from mics.data.mixture import Mixture, Source
from mics.data.token_data import TokenData, TokenStream

__all__ = ["INDEX_FILE", "Mixture", "ShardIndex", "Source", "TokenData", "TokenStream", "read_index"]
