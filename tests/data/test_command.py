"""``mics data`` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mics.cli import main
from mics.data import TokenData
from tests.data.folders import FABLES


def test_from_text_to_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer, shards, and a look at them."""
    tokenizer, out = str(tmp_path / "tokenizer"), tmp_path / "new" / "shards"
    assert main(["data", "tokenizer", str(FABLES), "--vocab-size", "300", "--out", tokenizer]) == 0
    assert capsys.readouterr().out == f"written: {tokenizer}: 300 tokens\n"
    args = [
        "data",
        "prepare",
        str(FABLES),
        "--tokenizer",
        tokenizer,
        "--out",
        str(out),
        "--shard-tokens",
        "10K",
    ]
    assert main(args) == 0
    found = capsys.readouterr().out
    assert "6 documents" in found
    assert f"mics train --data.shards {out} --model.vocab-size 300" in found
    assert main(["data", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    index = TokenData.open(out).index
    assert f"{index.num_tokens('train'):,} tokens in {len(index.of_split('train'))} shards" in shown
    assert "fables.txt: 6 documents, 47.0 kB" in shown
    assert "text        '" in shown
    assert main(args) == 2
    assert "expected a name that is free, found a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["tokenizer", str(FABLES), "--vocab-size", "100", "--out", "{}"],
            "--vocab-size: expected 261 or more",
        ),
        (["prepare", str(FABLES), "--tokenizer", "no.json", "--out", "{}"], "type: mics data tokenizer"),
        (["prepare", str(FABLES), "--tokenizer", "bytes", "--out", "{}", "--workers", "0"], "--workers"),
        (["show", "{}"], "found no such folder"),
        (["verify", "{}"], "found no such folder"),
    ],
)
def test_wrong_input_is_one_line(
    args: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *(arg.format(tmp_path / "out") for arg in args)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.startswith("mics data: error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
