"""A folder that was damaged is found before it is trained on, by the name of the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mics.cli import main
from mics.data import TokenData
from mics.data.index import INDEX_FILE
from mics.errors import SettingsError


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
        TokenData.open(copied).stream("train")


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


def test_verify_finds_a_changed_byte(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(copied)]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    file = copied / "train-00002.npy"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(bytes(content))
    TokenData.open(copied).stream("train")  # sizes and headers are right
    assert main(["data", "verify", str(copied)]) == 1
    error = capsys.readouterr().err
    assert "train-00002.npy: expected the digest" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda index: index | {"version": 9}, r"index\.json: expected version 1 of .* found version 9"),
        (lambda index: index | {"dtype": "int8"}, r"index\.json: expected an index of token shards"),
        (lambda index: {"format": index["format"], "version": 1}, r"lacks or breaks 'special'"),
        (lambda index: [], r"index\.json: expected an index of token shards"),
    ],
)
def test_a_wrong_index_is_named(change: object, expected: str, copied: Path) -> None:
    assert callable(change)
    file = copied / INDEX_FILE
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(SettingsError, match=expected):
        TokenData.open(copied)


def test_a_folder_without_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"expected a folder that mics data prepare has made, .* found none"
    ):
        TokenData.open(tmp_path)
    with pytest.raises(SettingsError, match="found no such folder"):
        TokenData.open(tmp_path / "nowhere")
