"""A folder that was damaged is found before it is trained on, by the name of the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mics.cli import main
from mics.data import TokenData
from mics.data.index import INDEX_FILE
from mics.errors import SettingsError
from tests.data.folders import read


@pytest.fixture
def copied(fables: TokenData, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fables.folder, tmp_path / "copied"))


def test_a_missing_shard_is_named(copied: Path) -> None:
    (copied / "train-00001.npy").unlink()
    with pytest.raises(
        SettingsError, match=r"train-00001\.npy: expected a shard of 6,128 bytes, found no such"
    ):
        TokenData.open(copied)


def test_a_shard_that_is_cut_short_is_named(copied: Path) -> None:
    file = copied / "validation-00000.npy"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(SettingsError, match=r"validation-00000\.npy: expected a shard of .* bytes, found"):
        TokenData.open(copied)
    unchecked = TokenData.open(copied, check=False)  # a rank that leaves it to another
    with pytest.raises(SettingsError, match=r"validation-00000\.npy: expected a \.npy file of tokens"):
        unchecked.stream("validation")


def test_another_array_of_the_same_size_is_named(copied: Path) -> None:
    """Half as many tokens of twice the size."""
    file = copied / "train-00000.npy"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"<u2", b"<u4").replace(b"(3000,)", b"(1500,)"))
    with pytest.raises(
        SettingsError, match=r"expected 3,000 tokens of uint16, found shape \(1500,\) of uint32"
    ):
        TokenData.open(copied, check=False).stream("train")


def test_the_tokenizer_belongs_to_the_shards(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a trained model would be sampled and exported with another, or with none."""
    file = copied / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(SettingsError, match=r"tokenizer\.json: expected the digest .* not prepared with it"):
        TokenData.open(copied)
    shutil.rmtree(file.parent)
    with pytest.raises(
        SettingsError, match=r"tokenizer\.json: expected the tokenizer of these shards, found"
    ):
        TokenData.open(copied)
    assert main(["data", "verify", str(copied)]) == 1
    assert "tokenizer.json: expected the tokenizer of these shards" in capsys.readouterr().err


def test_a_changed_byte_is_found(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By verify, and by whoever opens a folder that is small; of a large one only sizes are compared."""
    assert main(["data", "verify", str(copied)]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    index, file = TokenData.open(copied).index, copied / "train-00002.npy"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(SettingsError, match=r"train-00002\.npy: expected the digest"):
        TokenData.open(copied)
    monkeypatch.setattr("mics.data.index._CHEAP_NBYTES", sum(shard.nbytes for shard in index.shards) - 1)
    TokenData.open(copied).stream("train")
    assert main(["data", "verify", str(copied)]) == 1
    error = capsys.readouterr().err
    assert "train-00002.npy: expected the digest" in error
    assert error.count("\n") == 1


def test_a_token_that_the_vocabulary_lacks_is_an_error_with_the_name_of_its_shard(copied: Path) -> None:
    """Else a model with a larger one would train on it."""
    file = copied / "train-00001.npy"
    file.write_bytes(file.read_bytes()[:-2] + b"\xff\xff")
    stream = TokenData.open(copied, check=False).stream("train")
    assert read(stream, [0], 5999).max() < 400
    with pytest.raises(SettingsError, match=r"train-00001\.npy: expected tokens below 400, found 65,535: it"):
        read(stream, [0], 6000)


def _changed_shard(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: index | {"shards": [index["shards"][0] | values]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda index: index | {"version": 9}, r"index\.json: expected version 1 of .* found version 9"),
        (lambda index: index | {"dtype": "int8"}, r"index\.json: expected an index of token shards"),
        (lambda index: {"format": index["format"], "version": 1}, r"lacks or breaks 'special'"),
        (lambda index: [], r"index\.json: expected an index of token shards"),
        (lambda index: index | {"seed": -1}, "breaks 'seed': -1;"),
        (lambda index: index | {"vocab_size": "400"}, "breaks 'vocab_size': '400';"),
        (lambda index: index | {"vocab_size": 4}, r"breaks 'special': \(2, 0, 4, "),
        (lambda index: index | {"num_documents": 0}, "breaks 'num_documents': 0;"),
        (lambda index: index | {"shards": []}, "breaks 'shards': none to train on;"),
        (lambda index: index | {"shards": index["shards"] * 2}, "breaks 'shards': one file twice;"),
        (lambda index: index | {"shards": 5}, r"index\.json: expected an index of token shards"),
        (_changed_shard(file="../train-00000.npy"), "breaks 'file': in another folder;"),
        (_changed_shard(num_tokens=True), "breaks 'num_tokens': True;"),
        (_changed_shard(nbytes=6e3), r"breaks 'nbytes': 6000\.0;"),
        (_changed_shard(split="test"), "breaks 'split': 'test';"),
        (_changed_shard(digest=None), "breaks 'digest': None;"),
        (lambda index: index | {"shards": index["shards"][:1]}, "index.json: expected the digest .* changed"),
        (lambda index: index | {"tokenizer": "bytes"}, "index.json: expected the digest .* changed"),
        (
            lambda index: index | {"special": index["special"] | {"mask": 3}},
            "index.json: expected the digest .* changed",
        ),
        (lambda index: json.dumps(index)[:1000], "lacks or breaks Unterminated string"),
        (lambda index: "[" * 100_000, r"index\.json: expected an index of token shards"),
    ],
)
def test_a_wrong_index_is_named(
    change: Callable[[dict[str, Any]], object],
    expected: str,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = copied / INDEX_FILE
    changed = change(json.loads(file.read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(SettingsError, match=expected):
        TokenData.open(copied)
    assert main(["data", "verify", str(copied)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_without_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"expected a folder that mics data prepare has made, .* found none"
    ):
        TokenData.open(tmp_path)
    with pytest.raises(SettingsError, match="found no such folder"):
        TokenData.open(tmp_path / "nowhere")
