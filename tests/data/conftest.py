"""A tokenizer and a folder of shards, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mics.data import TokenData
from mics.data.documents import DocumentFormat
from mics.data.preparing import Preparing, prepare
from mics.data.tokenizer import load_tokenizer
from mics.data.training_tokenizer import train_tokenizer
from tests.data.folders import FABLES


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE tokenizer of 400 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer((FABLES,), folder, vocab_size=400, reading=DocumentFormat(), objective="masked")
    return folder


@pytest.fixture(scope="session")
def fables(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> TokenData:
    """The fables by paragraph, in shards of 3,000 tokens. Nobody may write to it."""
    folder = tmp_path_factory.mktemp("shards") / "fables"
    asked = Preparing(
        files=(FABLES,),
        out=folder,
        reading=DocumentFormat(separator="blank-line"),
        shard_tokens=3000,
        validation_share=0.1,
    )
    prepare(asked, load_tokenizer(str(tokenizer_folder)))
    return TokenData.open(folder)
