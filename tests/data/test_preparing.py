"""From files to shards: nothing is lost, the same bytes come out, and wrong input is named."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mics.data import TokenData, TokenStream
from mics.data import shard_files as shard_files_module
from mics.data.documents import DocumentFormat, find_files, read_documents
from mics.data.preparing import Preparing, prepare, published
from mics.data.shard_files import Buckets
from mics.data.tokenizer import BytesTokenizer, frame_file, load_tokenizer, tokenizer_of
from mics.data.training_tokenizer import train_tokenizer
from mics.errors import SettingsError
from tests.data.folders import FABLES, read

_TEXTS = [f"document {number}: " + "word " * (number % 17 + 1) for number in range(200)]


def _jsonl(file: Path) -> Path:
    file.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in _TEXTS))
    return file


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _tokens(stream: TokenStream) -> list[int]:
    return [int(token) for token in read(stream, [0], len(stream))[0]]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_document_is_there_once(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """In another order, each with the end-of-text token behind; validation has its share."""
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(tokenizer_folder))
    asked = Preparing(
        files=(_jsonl(tmp_path / "a.jsonl"),), out=tmp_path / "out", shard_tokens=500, validation_share=0.2
    )
    index = prepare(asked, tokenizer)
    opened = TokenData.open(tmp_path / "out")
    assert opened.index == index
    found: list[str] = []
    for split in ("validation", "train"):
        tokens = _tokens(opened.stream(split))
        assert tokens[-1] == index.special.end_of_text
        ends = np.flatnonzero(np.array(tokens) == index.special.end_of_text)
        found += [
            tokenizer.decode(part[:-1].tolist()) for part in np.split(np.array(tokens), ends + 1) if part.size
        ]
        if split == "validation":
            assert len(tokens) == pytest.approx(0.2 * sum(s.num_tokens for s in index.shards), abs=120)
    assert sorted(found) == sorted(_TEXTS)
    assert found != _TEXTS
    assert {shard.num_tokens for shard in index.of_split("train")[:-1]} == {500}


def test_bytes_are_the_same_for_any_number_of_workers(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it matter how many buckets there are, or how often they are flushed. The seed does."""
    files = (_jsonl(tmp_path / "a.jsonl"), FABLES)
    made = {}
    for name, workers, seed in (("one", 1, 0), ("four", 4, 0), ("buckets", 2, 0), ("other", 1, 1)):
        if name == "buckets":
            monkeypatch.setattr(shard_files_module, "_BUCKET_NBYTES", 4000)
            monkeypatch.setattr(shard_files_module, "_BUFFERED_NBYTES", 5000)
            monkeypatch.setattr("mics.data.preparing._BATCH_CHARACTERS", 900)
        out = tmp_path / name
        asked = Preparing(files=files, out=out, shard_tokens=4000, seed=seed, workers=workers)
        prepare(asked, load_tokenizer(str(tokenizer_folder)))
        made[name] = _content(out)
    assert made["one"] == made["four"] == made["buckets"]
    assert made["one"] != made["other"]
    assert "tokenizer/tokenizer.json" in made["one"]


def test_all_kinds_of_files_give_the_same_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = "".join(json.dumps({"body": text}) + "\n" for text in _TEXTS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    parquet.write_table(pyarrow.table({"body": _TEXTS, "n": list(range(200))}), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert list(read_documents(tmp_path / name, DocumentFormat(field="body"))) == _TEXTS
    (tmp_path / "d.txt").write_text("\n".join(text.strip() for text in _TEXTS))
    stripped = [text.strip() for text in _TEXTS]
    assert list(read_documents(tmp_path / "d.txt", DocumentFormat(separator="line"))) == stripped


def test_rows_without_a_value_are_no_documents_and_columns_may_be_dictionaries(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = ["one", None, "two", "one"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    parquet.write_table(pyarrow.table({"text": pyarrow.array(values).dictionary_encode()}), tmp_path / "b.pq")
    for name in ("a.jsonl", "b.pq"):
        assert list(read_documents(tmp_path / name, DocumentFormat())) == ["one", "two", "one"]
    parquet.write_table(pyarrow.table({"text": [["one"]]}), tmp_path / "c.pq")
    twice = pyarrow.table([["one"], ["two"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "d.pq")
    for name, found in (("c.pq", r"text \(list<"), ("d.pq", r"text \(string\), text \(string\)")):
        with pytest.raises(SettingsError, match=rf"expected text in the column 'text', found {found}"):
            list(read_documents(tmp_path / name, DocumentFormat()))


def test_a_text_is_cut_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    paragraph = "a line\nanother line\n"
    file.write_bytes(b"\xef\xbb\xbf\n" + f"{paragraph}\n\r\n{paragraph}".encode())
    one = paragraph.strip()
    assert list(read_documents(file, DocumentFormat(separator="blank-line"))) == [one, one]
    assert list(read_documents(file, DocumentFormat(separator="file"))) == [f"{one}\n\n\n{one}"]
    assert list(read_documents(file, DocumentFormat(separator="line"))) == one.split("\n") * 2
    file.write_bytes(f"{paragraph}\r\n".replace("\n", "\r").encode() * 2)
    assert list(read_documents(file, DocumentFormat(separator="blank-line"))) == [one, one]
    file.write_text("\n".join(paragraph for _ in range(1000)))
    passages = list(read_documents(file, DocumentFormat()))
    assert [len(passage) > 8000 for passage in passages] == [True, True, False]
    assert "\n\n".join(passages) == "\n\n".join([one] * 1000)


def test_a_text_without_blank_lines_is_cut_too(tmp_path: Path) -> None:
    """Between lines; a line that is longer than a long passage between words. No text has one document."""
    file = tmp_path / "text.txt"
    lines = [f"line {number} of many" for number in range(20_000)]
    words = "".join(f"{number} " for number in range(100_000))
    for text, joint in (("\n".join(lines), "\n"), (words.rstrip(), " "), ("x" * 300_000, "")):
        file.write_text(text)
        passages = list(read_documents(file, DocumentFormat()))
        assert len(passages) > 3
        assert max(map(len, passages)) <= 1 << 16
        assert joint.join(passages) == text
        assert list(read_documents(file, DocumentFormat(separator="file"))) == [text]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", r"empty\.txt: expected text, found an empty file"),
        ("blank.txt", b"\n \n", r"blank\.txt: expected text, found none in it"),
        ("latin.txt", b"one\ngr\xfcn\n", r"latin\.txt, line 2: expected text in UTF-8, found the byte 0xfc"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: expected text in the field 'text', found body"),
        ("b.jsonl", b'{"text": "x"}\n{"te', r"b\.jsonl, line 2: expected JSON"),
        ("n.jsonl", b'{"text": 5}\n', r"n\.jsonl, line 1: expected text in the field 'text', found int"),
        ("s.jsonl", b'{"text": "\\ud800"}\n', r"s\.jsonl, line 1: .*'\\ud800', which is no character"),
        ("d.jsonl", b"[" * 100_000, r"d\.jsonl, line 1: expected JSON"),
        (
            "r.json",
            b'[{"text": "x"}]',
            r"r\.json, line 1: expected .* one object in .* an array; .* jq -c '\.\[\]'",
        ),
        ("p.json", b'[\n {"text": "x"}\n]', r"p\.json, line 1: expected JSON, .*; .* jq -c '\.\[\]'"),
        ("c.parquet", b"PAR0", r"c\.parquet: expected a parquet file"),
        ("null.jsonl", b'{"text": null}\n', r"null\.jsonl: expected text, found none in it"),
        ("nul.txt", b"x\na\0b", r"nul\.txt, line 2: expected text in UTF-8, found the byte 0; convert"),
        (
            "nul.jsonl",
            b'{"text": "\\u0000"}',
            r"nul\.jsonl: expected text without the bytes 0 and 4, .* found 0",
        ),
        ("eot.txt", b"a\4b", r"eot\.txt: expected text without the bytes 0 and 4, .* found 4 in 'a"),
        ("text.txt.xz", lzma.compress(b"text\n" * 99), r"text\.txt\.xz, line 1: .* unpack it if it"),
        ("latin.TXT.GZ", gzip.compress(b"gr\xfcn"), r"latin\.TXT\.GZ, line 1: .* found the byte 0xfc"),
        ("torn.gz", gzip.compress(b"text\n" * 99)[:-9], r"torn\.gz: could not be read: Truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and "\\" not in value else "",
)
def test_wrong_files_are_named_and_nothing_is_left(
    name: str, content: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=expected):
        prepare(Preparing(files=(tmp_path / name,), out=tmp_path / "out"), BytesTokenizer())
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"files": (Path("nowhere.txt"),)}, r"nowhere\.txt: expected a file or a folder that exists"),
        ({"files": (Path("x" * 256),)}, "x: could not be read: File name too long"),
        ({"files": ()}, "FILES: expected at least one file"),
        ({"seed": 1 << 64}, r"--seed: expected less than 2\^64"),
        ({"out": FABLES.parent}, "expected a name that is free, found a folder"),
        ({"out": FABLES}, "expected a name that is free, found a file"),
        (
            {"reading": DocumentFormat(separator="file")},
            "expected documents for training and for validation, found 1",
        ),
    ],
)
def test_what_cannot_be_prepared_is_named(changed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"files": (FABLES,), "out": tmp_path / "out", **changed}
    with pytest.raises(SettingsError, match=expected):
        prepare(Preparing(**given), BytesTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    """Writers of other programs do not check what they call a string."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    _, lengths, content = pyarrow.array([b"good", b"gr\xfcn"], type=pyarrow.binary()).buffers()
    column = pyarrow.StringArray.from_buffers(2, lengths, content)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(
        SettingsError, match=r"a\.parquet: expected text in UTF-8 in the column 'text', found"
    ):
        list(read_documents(tmp_path / "a.parquet", DocumentFormat()))


def test_a_file_comes_once(tmp_path: Path) -> None:
    """Else copies of a text could be for training and for validation."""
    file = tmp_path / "a.txt"
    file.write_text("text")
    (tmp_path / "b.txt").write_text("text")  # who wants one twice can still have it
    assert find_files((tmp_path,)) == [file, tmp_path / "b.txt"]
    for paths in ((file, file), (file, tmp_path), (tmp_path / ".." / tmp_path.name / "a.txt", file)):
        with pytest.raises(
            SettingsError, match=r"a\.txt: expected each file once, found it 2 times; name it"
        ):
            find_files(paths)


def test_hidden_files_of_a_folder_are_no_text(tmp_path: Path) -> None:
    """Those of git, of downloads, of file browsers; one that is named is read."""
    for name in ("a.txt", ".hidden.txt", ".git/b.txt", "in/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [file.name for file in find_files([tmp_path])] == ["a.txt", "c.txt"]
    assert [file.name for file in find_files([tmp_path / ".hidden.txt"])] == [".hidden.txt"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    """To folders elsewhere too; neither in circles nor out of the folder that was named."""
    for name in ("here/in/a.txt", "there/b.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    for link, target in (("far", "../there"), ("again", "../there"), ("up", ".."), ("in/loop", "../in")):
        (tmp_path / "here" / link).symlink_to(target)
    assert [file.name for file in find_files([tmp_path / "here"])] == ["b.txt", "a.txt"]
    (tmp_path / "here" / "in" / "d.txt").symlink_to("gone")
    with pytest.raises(SettingsError, match=r"d\.txt: expected a file, found a link to gone, which does not"):
        find_files([tmp_path / "here"])


def test_wrong_tokenizers_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tokenizer: expected bytes, a tokenizer\.json or a folder"):
        load_tokenizer(str(tmp_path / "missing"))
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(SettingsError, match=r"expected a tokenizer\.json of the tokenizers library"):
        load_tokenizer(str(file))
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(file)).special == load_tokenizer(str(tokenizer_folder)).special
    with pytest.raises(SettingsError, match=r"no '<end>' in it; name it with --end-of-text"):
        load_tokenizer(str(file), end_of_text="<end>")
    with pytest.raises(SettingsError, match=r"--end-of-text: expected a token that no text has, found 'e',"):
        load_tokenizer(str(file), end_of_text="e")
    assert load_tokenizer(str(file), end_of_text="<pad>").special.end_of_text == 1
    content["added_tokens"] = []
    content["model"]["vocab"].pop("</s>")
    file.write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=r"expected a token that ends a document, found none of"):
        load_tokenizer(str(file))


def test_the_end_of_text_that_was_named_goes_with_the_shards(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Whoever loads the copy finds it, also where the config beside the tokenizer has none."""
    (tmp_path / "tokenizer").mkdir()
    content = (tokenizer_folder / "tokenizer.json").read_text().replace('"</s>"', '"STOP"')
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"), end_of_text="STOP")
    prepare(Preparing(files=(FABLES,), out=tmp_path / "shards"), tokenizer)
    assert tokenizer_of(TokenData.open(tmp_path / "shards")).special == tokenizer.special
    copied = json.loads((tmp_path / "shards" / "tokenizer" / "tokenizer_config.json").read_text())
    assert copied == {"model_max_length": 8, "eos_token": "STOP"}


def test_an_exported_tokenizer_frames_texts_as_training_did(tmp_path: Path) -> None:
    """One that was made for causal models serves a masked one; one that has a frame keeps it."""
    tokenizers = pytest.importorskip("tokenizers")
    train_tokenizer((FABLES,), tmp_path / "a", vocab_size=270, reading=DocumentFormat(), objective="causal")
    file = tmp_path / "a" / "tokenizer.json"
    special = load_tokenizer(str(file)).special
    assert tokenizers.Tokenizer.from_file(str(file)).encode("There").ids[0] != special.begin
    frame_file(file, special)
    ids = tokenizers.Tokenizer.from_file(str(file)).encode("There").ids
    assert (ids[0], ids[-1]) == (special.begin, special.end_of_text)
    framed = file.read_bytes()
    frame_file(file, special)
    assert file.read_bytes() == framed


def test_a_text_cannot_spell_special_tokens(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokens = tokenizer.encode("</s><mask>")
    assert not set(tokens) & set(tokenizer.special.all_ids)
    assert tokenizer.decode(tokens) == "</s><mask>"


@pytest.mark.full
def test_transformers_loads_the_tokenizer(fables: TokenData) -> None:
    """From the folder of shards, with the same ids and RoBERTa's frame."""
    transformers = pytest.importorskip("transformers")
    assert fables.tokenizer_folder is not None
    loaded = transformers.AutoTokenizer.from_pretrained(fables.tokenizer_folder)
    ours = load_tokenizer(str(fables.tokenizer_folder))
    text = "There was once a miller."
    assert loaded(text)["input_ids"] == [0, *ours.encode(text), 2]
    assert (loaded.mask_token_id, loaded.pad_token_id, loaded.eos_token_id) == (4, 1, 2)


def test_only_one_makes_a_folder(tmp_path: Path) -> None:
    """A second one would remove what the first has made; what a killed one has left is in nobody's way."""
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial.lock").touch()
    (tmp_path / "out.partial" / "old").touch()
    with published(out) as folder:
        (folder / "new").touch()
        with pytest.raises(SettingsError, match="out: expected to be alone in making it, found that another"):
            prepare(Preparing(files=(FABLES,), out=out), BytesTokenizer())
    assert [file.name for file in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*given: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with published(tmp_path / "out"):
        assert "out: cannot be locked (Function not implemented)" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("out", "expected a name that is free, found a broken link"), ("out.partial", "to be free too, found")],
)
def test_what_stands_where_the_folder_is_made_is_kept(name: str, expected: str, tmp_path: Path) -> None:
    """And found before hours of work, not behind them."""
    if name == "out":
        (tmp_path / name).symlink_to("nowhere")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(SettingsError, match=expected):
        prepare(Preparing(files=(FABLES,), out=tmp_path / "out"), BytesTokenizer())
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_tokens_that_are_lost_on_the_way_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_them = Buckets.documents
    monkeypatch.setattr(Buckets, "documents", lambda self: itertools.islice(all_of_them(self), 1, None))
    with pytest.raises(SettingsError, match=r"expected shards of the 46,984 tokens that .* gave, found 3"):
        prepare(Preparing(files=(FABLES,), out=tmp_path / "out"), BytesTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buckets, "_files", lambda self, bucket: (Path("/dev/full"), Path("/dev/full")))
    with pytest.raises(SettingsError, match=r"out: could not be written: No space left on device; free some"):
        prepare(Preparing(files=(FABLES,), out=tmp_path / "out"), BytesTokenizer())
    assert list(tmp_path.iterdir()) == []
