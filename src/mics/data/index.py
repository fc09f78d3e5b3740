"""``index.json``: what a folder of token shards has, so that a missing or changed file is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

import xxhash

from mics.errors import SettingsError

INDEX_FILE: Final = "index.json"
TOKENIZER_FOLDER: Final = "tokenizer"
TOKENIZER_FILE: Final = "tokenizer.json"
BYTES: Final = "bytes"
"""The tokenizer that has no files."""
_FORMAT: Final = "mics token shards"
_VERSION: Final = 1
_READ_NBYTES: Final = 1 << 22
MEND: Final = "copy it again, or prepare the data again"
Split = Literal["train", "validation"]
DTYPES: Final = {"uint16": 2, "uint32": 4}
"""What shards are made of, and the bytes of a token."""
_CHEAP_NBYTES: Final = 250 * 10**6
"""Up to this size of a folder its shards are read whenever it is opened: in a moment, and in seconds on a
slow file system that many nodes share."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of tokens that are no text."""

    end_of_text: int
    """Stands after every document."""
    begin: int | None = None
    """Stands before a sequence of a masked language model."""
    mask: int | None = None
    all_ids: tuple[int, ...] = ()
    """These and all others: padding, unknown, ... They are never masked."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One .npy file of tokens."""

    file: str
    split: Split
    num_tokens: int
    nbytes: int
    digest: str
    """XXH3 with 128 bits, of the whole file."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One input file."""

    file: str
    nbytes: int
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Everything a reader needs to know before it opens a shard."""

    dtype: str
    vocab_size: int
    special: SpecialTokens
    tokenizer: str
    """``bytes``, or the digest of tokenizer.json: sources that are mixed must have the same."""
    seed: int
    num_documents: int
    shards: tuple[Shard, ...]
    sources: tuple[Prepared, ...]
    num_unknown: int = 0
    """Times that the text has what the tokenizer does not know; folders of early versions do not say."""

    def of_split(self, split: Split) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def num_tokens(self, split: Split) -> int:
        return sum(shard.num_tokens for shard in self.of_split(split))

    @property
    def all_tokens(self) -> int:
        """Of both splits."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def unknown_share(self) -> float:
        """Of all tokens, those that stand for text that the tokenizer does not know."""
        return self.num_unknown / self.all_tokens

    def write(self, folder: Path) -> None:
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        content["digest"] = _digest_of_content(content)
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n")


def read_index(folder: Path) -> ShardIndex:
    """The index of a folder, checked for what it must have."""
    file = folder / INDEX_FILE
    if not file.is_file():
        found = "no such folder" if not folder.is_dir() else "none"
        raise SettingsError(
            f"{folder}: expected a folder that mics data prepare has made, with {INDEX_FILE}, found {found}"
        )
    try:
        content = json.loads(file.read_bytes())
        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            raise SettingsError(
                f"{file}: expected version {_VERSION} of {_FORMAT!r}, found version "
                f"{content['version']!r} of {content['format']!r}; use the mics that made it"
            )
        special = _known(SpecialTokens, content["special"])
        index = ShardIndex(
            **{
                **_known(ShardIndex, {"num_unknown": 0, **content}),
                "special": SpecialTokens(**{**special, "all_ids": tuple(special["all_ids"])}),
                "shards": tuple(Shard(**_known(Shard, each)) for each in content["shards"]),
                "sources": tuple(Prepared(**_known(Prepared, each)) for each in content["sources"]),
            }
        )
        _check_index(index)
        _check_unchanged(content, file)
    except SettingsError:
        raise
    except OSError as error:
        raise SettingsError(f"{file}: could not be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(
            f"{file}: expected an index of token shards, found one that lacks or breaks {error}; prepare the "
            "data again"
        ) from None
    return index


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # not isinstance: True is no count


_IS_VALID: Final[dict[str, Callable[[Any], bool]]] = {
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "tuple[int, ...]": lambda value: all(map(_is_count, value)),
    "str": lambda value: isinstance(value, str),
    "Split": lambda value: value in get_args(Split),
}
"""By the type of a field. Those of other types have fields of their own."""


def _known(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class: what is not there is a KeyError, what is more is left out."""
    found = {item.name: content[item.name] for item in fields(cls)}
    for item in fields(cls):
        is_valid = _IS_VALID.get(str(item.type))
        if is_valid is not None and not is_valid(found[item.name]):
            raise ValueError(f"{item.name!r}: {found[item.name]!r:.60}")
    return found


def _check_index(index: ShardIndex) -> None:
    """Raise a ValueError that names what no folder has that was written whole."""
    ids = (index.special.end_of_text, index.special.begin, index.special.mask, *index.special.all_ids)
    files = {shard.file for shard in index.shards}
    for what, value, is_right in (
        ("'dtype'", index.dtype, index.dtype in DTYPES),
        ("'special'", ids, all(number is None or number < index.vocab_size for number in ids)),
        ("'num_documents'", index.num_documents, index.num_documents > 0),
        ("'shards'", "none to train on", index.num_tokens("train") > 0),
        ("'shards'", "one file twice", len(files) == len(index.shards)),
        ("'file'", "in another folder", all(name == Path(name).name for name in files)),
    ):
        if not is_right:
            raise ValueError(f"{what}: {value}")


def _check_unchanged(content: dict[str, Any], file: Path) -> None:
    """Raise if an index that makes sense is not the one that was written: another mask token or split would
    train another model and say nothing. Folders of early versions have no digest."""
    written = content.pop("digest", None)
    found = _digest_of_content(content)
    if written not in (None, found):
        raise SettingsError(
            f"{file}: expected the digest {written}, found {found}: it was changed after it was written; "
            f"{MEND}"
        )


def _digest_of_content(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def check_files(folder: Path, index: ShardIndex) -> None:
    """Raise if a shard is missing or has another size, or if the tokenizer's file is not the one that was
    used. Shards are read where all of them together are small; then one that was changed is found too."""
    for shard in index.shards:
        _raise(_wrong_size(folder, shard))
    if sum(shard.nbytes for shard in index.shards) <= _CHEAP_NBYTES:
        for shard in index.shards:
            _raise(_changed(folder, shard))
    _raise(wrong_tokenizer(folder, index))


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise SettingsError(problem)


def _wrong_size(folder: Path, shard: Shard) -> str | None:
    file = folder / shard.file
    try:
        nbytes = file.stat().st_size
    except FileNotFoundError:
        found = "no such file"
    except OSError as error:
        return f"{file}: could not be read: {error.strerror or error}"
    else:
        if nbytes == shard.nbytes:
            return None
        found = f"{nbytes:,}"
    return f"{file}: expected a shard of {shard.nbytes:,} bytes, found {found}; {MEND}"


def wrong_tokenizer(folder: Path, index: ShardIndex) -> str | None:
    """What is wrong with the tokenizer's file, if anything: a model is sampled and exported with it."""
    if index.tokenizer == BYTES:
        return None
    file = folder / TOKENIZER_FOLDER / TOKENIZER_FILE
    try:
        found = digest_of(file)
    except FileNotFoundError:
        return f"{file}: expected the tokenizer of these shards, found no such file; {MEND}"
    except OSError as error:
        return f"{file}: could not be read: {error.strerror or error}"
    if found == index.tokenizer:
        return None
    return (
        f"{file}: expected the digest {index.tokenizer}, found {found}: the shards were not prepared with "
        f"it; {MEND}"
    )


def changed_shards(
    folder: Path, shards: Sequence[Shard], *, progress: Callable[[int], object] = lambda nbytes: None
) -> list[str]:
    """Read every shard that has its size; a sentence for each that is not what was written."""
    found = (_wrong_size(folder, shard) or _changed(folder, shard, progress) for shard in shards)
    return [problem for problem in found if problem is not None]


def _changed(
    folder: Path, shard: Shard, progress: Callable[[int], object] = lambda nbytes: None
) -> str | None:
    file = folder / shard.file
    try:
        found = digest_of(file, progress=progress)
    except OSError as error:
        return f"{file}: could not be read: {error.strerror or error}"
    if found == shard.digest:
        return None
    return (
        f"{file}: expected the digest {shard.digest}, found {found}: it was changed after it was written; "
        f"{MEND}"
    )


def digest_of(file: Path, *, progress: Callable[[int], object] = lambda nbytes: None) -> str:
    """Of a whole file."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_READ_NBYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()
