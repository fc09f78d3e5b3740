"""``mics data`` as a user types it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mics.cli import main
from mics.data import TokenData
from tests.data.folders import FABLES


def test_from_text_to_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer, shards, and a look at them."""
    tokenizer, out = str(tmp_path / "tokenizer"), tmp_path / "new" / "shards"
    assert main(["data", "tokenizer", str(FABLES), "--vocab-size", "300", "--out", tokenizer]) == 0
    assert capsys.readouterr().out == f"written: {tokenizer}: 300 tokens\n"
    large = ["data", "tokenizer", str(FABLES), "--vocab-size", "100000", "--out", f"{tokenizer}-large"]
    assert main(large) == 0
    assert " of 100,000: the text has no more pairs to merge\n" in capsys.readouterr().out
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


def test_verify_names_all_that_is_broken(
    fables: TokenData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard that is missing, one cut short, one with another byte, and the tokenizer: exit code 1."""
    folder = tmp_path / "shards"
    shutil.copytree(fables.folder, folder)
    assert main(["data", "verify", str(folder)]) == 0
    missing, short, changed, *_ = (folder / shard.file for shard in fables.index.shards)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    missing.unlink()
    for file in (short, tokenizer):
        file.write_bytes(file.read_bytes()[:-1])
    changed.write_bytes(changed.read_bytes()[:-1] + b"\xff")
    capsys.readouterr()
    assert main(["data", "verify", str(folder)]) == 1
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if "expected" in line]
    expected = {missing: "no such file", short: " bytes, found", changed: "digest", tokenizer: "digest"}
    assert [line.partition(": ")[0] for line in lines] == [str(file) for file in expected]
    assert all(text in line for text, line in zip(expected.values(), lines, strict=True))
    assert "ok:" not in found.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["tokenizer", str(FABLES), "--vocab-size", "100", "--out", "{}"],
            "--vocab-size: expected 261 (256 bytes and 5 special tokens) to 10,000,000, found 100",
        ),
        (["tokenizer", str(FABLES), "--vocab-size", str(10**30), "--out", "{}"], "found 1,000,000,000"),
        (["prepare", str(FABLES), "--tokenizer", "no.json", "--out", "{}"], "type: mics data tokenizer"),
        (["prepare", str(FABLES), "--tokenizer", "bytes", "--out", "{}", "--workers", "0"], "--workers"),
        (
            ["prepare", str(FABLES), "--tokenizer", "bytes", "--out", "{}", "--end-of-text", "x"],
            "--end-of-text: ",
        ),
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


def test_a_long_document_that_is_held_out_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of the shuffled order may be most of the text."""
    args = ["data", "prepare", str(FABLES), "--tokenizer", "bytes", "--out"]
    assert main([*args, str(tmp_path / "few")]) == 0
    expected = (
        "warning: 17.8% of the tokens are for validation, of 1.0% that were asked for: documents are long"
    )
    assert expected in capsys.readouterr().err
    assert main([*args, str(tmp_path / "many"), "--documents", "blank-line"]) == 0
    assert "warning" not in capsys.readouterr().err


def _word_tokenizer(file: Path, model: dict[str, Any]) -> str:
    """Of the words a and b, that stand between spaces."""
    vocab = {"</s>": 0, "a": 1, "b": 2, **({} if "unk_token" not in model else {"[UNK]": 3})}
    split = {"type": "WhitespaceSplit"}
    file.write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": split, "model": {"vocab": vocab, **model}})
    )
    return str(file)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "unk_token": "[UNK]"},
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "#",
            "max_input_chars_per_word": 9,
        },
        {"type": "BPE", "merges": []},  # leaves out what it does not know
    ],
    ids=lambda model: model["type"],
)
def test_text_that_the_tokenizer_does_not_know_is_counted(
    model: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = _word_tokenizer(tmp_path / "tokenizer.json", model)
    for name, known in (("much", 10), ("little", 1000), ("none", 0)):
        file = tmp_path / f"{name}.txt"
        file.write_text("\n".join(["a b"] * 9 + ["a " * known + ("c" if known else "b")]))
        args = ["--tokenizer", tokenizer, "--documents", "line", "--out", str(tmp_path / name)]
        assert main(["data", "prepare", str(file), *args]) == 0
        shown = capsys.readouterr()
        index = TokenData.open(tmp_path / name).index
        assert index.num_unknown == (name != "none")
        unknown = f"{100 * index.unknown_share:.1f}% of the tokens are text that the tokenizer does not know"
        assert (f"warning: {unknown}: that text is lost; train one" in shown.err) == (name == "much")
        assert (f"unknown: {unknown}\n" in shown.out) == (name == "little")
        assert main(["data", "show", str(tmp_path / name)]) == 0
        assert ("% of the tokens are text that it does not know" in capsys.readouterr().out) == bool(known)


@pytest.mark.parametrize("special", ["[]", "[" * 100_000, '{"a": '])
def test_files_beside_a_tokenizer_that_are_wrong_are_named(
    special: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = _word_tokenizer(tmp_path / "tokenizer.json", {"type": "BPE", "merges": []})
    (tmp_path / "special_tokens_map.json").write_text(special)
    args = ["--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(FABLES), *args]) == 2
    error = capsys.readouterr().err
    assert "special_tokens_map.json: expected " in error
    assert error.count("\n") == 1


def test_a_tokenizer_that_cannot_encode_a_file_is_named_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = _word_tokenizer(tmp_path / "tokenizer.json", {"type": "WordLevel"})
    file = Path(tokenizer)
    file.write_text(
        file.read_text().replace('"type": "WordLevel"', '"type": "WordLevel", "unk_token": "<u>"')
    )
    args = ["--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(FABLES), *args]) == 2
    error = capsys.readouterr().err
    assert f"{FABLES}: expected text that the tokenizer {file} can encode, found: WordLevel error" in error
    assert error.count("\n") == 1


def test_names_that_cannot_be_printed_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        args = ["--tokenizer", "bytes", "--out", str(tmp_path / "\u65e5")]
        assert main(["data", "prepare", str(FABLES), *args]) == 0
        assert b"\\u65e5: 6 documents" in stdout.buffer.getvalue()


def test_an_interrupt_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mics.data.preparing._tokenize", interrupted)
    args = ["data", "prepare", str(FABLES), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert main(args) == 130
    assert capsys.readouterr().err.startswith("mics data: interrupted: nothing unfinished is left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--data.shards", "--data.weights"])
def test_a_flag_without_folders_is_no_default(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: the text that ships with mics would be trained on."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", flag, "--launch.dry-run"])
    assert f"{flag}: expected at least one value, found none" in " ".join(capsys.readouterr().err.split())
