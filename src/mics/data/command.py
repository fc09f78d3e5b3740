"""``mics data``: prepare, show, verify, tokenizer."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from mics.data.documents import DocumentFormat, Kind, Separator
from mics.data.index import Split, changed_shards, read_index, wrong_tokenizer
from mics.data.preparing import Preparing
from mics.data.preparing import prepare as prepare_folder
from mics.data.token_data import TokenData
from mics.data.tokenizer import load_tokenizer, tokenizer_of
from mics.data.training_tokenizer import train_tokenizer
from mics.utils.command_line import parse_commands
from mics.utils.extras import require
from mics.utils.numbers import TokenCount, fixed, percent, plural, tokens, volume
from mics.utils.progress import long_work

_Files = Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    tyro.conf.arg(help="files of text, or folders of them; also compressed (.gz, .zst)", metavar="FILES"),
]
_Folder = Annotated[
    tyro.conf.Positional[Path],
    tyro.conf.arg(help="a folder that mics data prepare has made", metavar="FOLDER"),
]
_SHOWN_SOURCES: Final = 5
_SAMPLE_TOKENS: Final = 120
_MUCH_HELD_OUT: Final = 0.1
_MUCH_UNKNOWN: Final = 0.01
_SHARD_TOKENS: Final = TokenCount(100_000_000)


def data(args: Sequence[str]) -> int:
    """Parse and run one of the commands."""
    commands: dict[str, Callable[..., int]] = {
        "prepare": prepare,
        "show": show,
        "tokenizer": tokenizer,
        "verify": verify,
    }
    if isinstance(sys.stdout, io.TextIOWrapper):  # what was made is not lost where a name cannot be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return parse_commands(
            commands,
            args,
            prog="mics data",
            description="Make text into tokenized, shuffled shards to train on, and check them.",
        )
    except KeyboardInterrupt:
        print("mics data: interrupted: nothing unfinished is left; type the same again", file=sys.stderr)
        return 128 + signal.SIGINT


def prepare(
    files: _Files,
    *,
    out: Path,
    tokenizer: str,
    kind: Kind = "auto",
    field: str = "text",
    documents: Separator = "passage",
    end_of_text: str | None = None,
    shard_tokens: TokenCount = _SHARD_TOKENS,
    validation_share: float = 0.01,
    seed: int = 0,
    workers: int | None = None,
) -> int:
    """Tokenize and shuffle documents, and write them as shards with an index.

    The same files, tokenizer and seed give the same bytes, whatever the number of workers.

    Args:
        files: what to read.
        out: The folder to make; it must not exist yet.
        tokenizer: A tokenizer.json, a folder of a Hugging Face model with one, or bytes.
        kind: Of the files; auto takes their suffixes, and text for others.
        field: The field of JSONL, or the column of parquet, that has the text.
        documents: What a document of a text file is: a passage of 8,192 characters or more, up to a blank
            line (of 32,768 or more, up to any line's end); all between two blank lines; a line; or the file.
        end_of_text: The token that ends a document; unset takes the tokenizer's.
        shard_tokens: Tokens in a shard: 100M, 1B.
        validation_share: Share of the tokens that is held out for validation, in whole documents.
        seed: Random seed of the order of documents.
        workers: Threads that tokenize; unset is one for each core.
    """
    asked = Preparing(
        files=files,
        out=out,
        reading=DocumentFormat(kind=kind, field=field, separator=documents),
        shard_tokens=int(shard_tokens),
        validation_share=validation_share,
        seed=seed,
        workers=workers if workers is not None else os.cpu_count() or 1,
    )
    require("data", "mics data prepare")
    index = prepare_folder(asked, load_tokenizer(tokenizer, end_of_text=end_of_text))
    print(
        f"written: {out}: {plural(index.num_documents, 'document')}, {tokens(index.num_tokens('train'))} for "
        f"training, {tokens(index.num_tokens('validation'))} for validation, vocabulary {index.vocab_size:,}"
    )
    held_out = index.num_tokens("validation") / index.all_tokens
    if held_out > validation_share + _MUCH_HELD_OUT:
        print(
            f"mics data: warning: {percent(held_out)} of the tokens are for validation, of "
            f"{percent(validation_share)} that were asked for: documents are long for so little text; "
            "--documents blank-line or line makes shorter ones of text files",
            file=sys.stderr,
        )
    if index.num_unknown:
        unknown = f"{percent(index.unknown_share)} of the tokens are text that the tokenizer does not know"
        if index.unknown_share > _MUCH_UNKNOWN:
            way_out = "train one on this text (mics data tokenizer), or use another"
            print(f"mics data: warning: {unknown}: that text is lost; {way_out}", file=sys.stderr)
        else:
            print(f"unknown: {unknown}")
    print(f"train on it: mics train --data.shards {out} --model.vocab-size {index.vocab_size}")
    return 0


def show(folder: _Folder) -> int:
    """What is inside, and the beginning of the text.

    Args:
        folder: the folder.
    """
    opened = TokenData.open(folder)
    index = opened.index
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        shards = index.of_split(split)
        nbytes = sum(shard.nbytes for shard in shards)
        count = tokens(index.num_tokens(split))
        print(f"{split:<11} {count} in {plural(len(shards), 'shard')}, {volume(nbytes)}")
    mean = index.all_tokens / index.num_documents
    print(f"{'documents':<11} {index.num_documents:,}, {fixed(mean)} tokens on average, seed {index.seed}")
    print(f"{'vocabulary':<11} {index.vocab_size:,} tokens ({index.dtype}), tokenizer {index.tokenizer}")
    if index.num_unknown:
        print(f"{'unknown':<11} {percent(index.unknown_share)} of the tokens are text that it does not know")
    special = index.special
    print(f"{'special':<11} end of text {special.end_of_text}, begin {special.begin}, mask {special.mask}")
    for number, source in enumerate(index.sources[:_SHOWN_SOURCES]):
        found = f"{source.file}: {plural(source.num_documents, 'document')}, {volume(source.nbytes)}"
        print(f"{'' if number else 'sources':<11} {found}")
    if len(index.sources) > _SHOWN_SOURCES:
        print(f"{'':<11} and {len(index.sources) - _SHOWN_SOURCES:,} more")
    print(f"{'text':<11} {tokenizer_of(opened).decode(_beginning(opened))!r}")
    return 0


def _beginning(opened: TokenData) -> list[int]:
    """The first tokens for training."""
    import numpy as np

    stream = opened.stream("train")
    first = np.empty((1, min(_SAMPLE_TOKENS, len(stream))), dtype=np.int64)
    stream.read(np.zeros(1, dtype=np.int64), into=first)
    return [int(token) for token in first[0]]


def verify(folder: _Folder) -> int:
    """Read every shard, and name each that is not what was written. Exit code 1 where there is one.

    Args:
        folder: the folder.
    """
    index = read_index(folder)
    nbytes = sum(shard.nbytes for shard in index.shards)
    with long_work("verify", nbytes) as work:
        wrong = changed_shards(folder, index.shards, progress=work.advance)
    tokenizer = wrong_tokenizer(folder, index)
    wrong += [tokenizer] if tokenizer is not None else []
    for problem in wrong:
        print(problem, file=sys.stderr)
    if wrong:
        return 1
    print(f"ok: {plural(len(index.shards), 'shard')}, {volume(nbytes)}: every byte is what was written")
    return 0


def tokenizer(
    files: _Files,
    *,
    out: Path,
    vocab_size: int = 32_000,
    kind: Kind = "auto",
    field: str = "text",
    documents: Separator = "passage",
    objective: Literal["causal", "masked"] = "causal",
) -> int:
    """Train a byte-level BPE tokenizer on one's own text, with special tokens for every kind of model.

    Args:
        files: what to read.
        out: The folder to make; transformers' AutoTokenizer reads it too.
        vocab_size: Tokens of the vocabulary; fewer where the text has no more pairs to merge.
        kind: Of the files; auto takes their suffixes, and text for others.
        field: The field of JSONL, or the column of parquet, that has the text.
        documents: What a document of a text file is: a passage of 8,192 characters or more, up to a blank
            line (of 32,768 or more, up to any line's end); all between two blank lines; a line; or the file.
        objective: masked: transformers puts each text between <s> and </s>. The tokens are the same.
    """
    reading = DocumentFormat(kind=kind, field=field, separator=documents)
    found = train_tokenizer(files, out, vocab_size=vocab_size, reading=reading, objective=objective)
    fewer = f" of {vocab_size:,}: the text has no more pairs to merge" if found < vocab_size else ""
    print(f"written: {out}: {found:,} tokens{fewer}")
    return 0
