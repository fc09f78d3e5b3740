"""Documents out of text, JSONL and parquet files, one after the other and never a whole file of them."""

from __future__ import annotations

import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, NoReturn, cast

from mics.errors import SettingsError
from mics.utils.extras import require

Kind = Literal["auto", "text", "jsonl", "parquet"]
Separator = Literal["passage", "blank-line", "line", "file"]
Advance = Callable[[int], object]
_JSON: Final = (".jsonl", ".ndjson", ".json")
_PARQUET: Final = (".parquet", ".pq")
_COMPRESSED: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_PARQUET_ROWS: Final = 1024
_PASSAGE_CHARACTERS: Final = 8192
_LONG_PASSAGE_CHARACTERS: Final = 4 * _PASSAGE_CHARACTERS
_LONG_LINE_CHARACTERS: Final = 2 * _LONG_PASSAGE_CHARACTERS
_AS_LINES: Final = "write an array as lines with jq -c '.[]', or objects of many lines with jq -c ."


@dataclass(frozen=True, kw_only=True)
class DocumentFormat:
    """How files are read."""

    kind: Kind = "auto"
    field: str = "text"
    """Of JSONL and parquet: the one that has the text."""
    separator: Separator = "passage"
    """Of text files: what a document is. A passage ends at the first blank line after some pages; without one
    at the end of a line, or in a line that is longer than all that: no text of any size is one document."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given; of a folder all that are in it, by name, but for hidden ones. Each must come once."""
    try:
        found = [file for path in paths for file in _files_of(path)]
    except OSError as error:
        raise SettingsError(f"{error.filename}: could not be read: {error.strerror}") from None
    if not found:
        raise SettingsError("FILES: expected at least one file of text, found none")
    num_times = Counter(file.resolve() for file in found)
    twice = next((file for file in found if num_times[file.resolve()] > 1), None)
    if twice is not None:  # a copy for training and one for validation, or a text that counts for more
        raise SettingsError(
            f"{twice}: expected each file once, found it {num_times[twice.resolve()]} times; name it or its "
            "folder once"
        )
    return found


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SettingsError(f"{path}: expected a file or a folder that exists, found none")
    inside = sorted(_files_in(path))
    if not inside:
        raise SettingsError(f"{path}: expected a folder with files, found an empty one")
    return inside


def _files_in(folder: Path) -> Iterator[Path]:
    """Links are followed: not to a folder that was read, nor to one that the link is in. What is hidden is no
    text of the user's: .git, .DS_Store, .cache of a download, ..."""
    known = set(folder.resolve().parents)

    def fail(error: OSError) -> NoReturn:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = Path(place).resolve()
        if real in known:
            folders.clear()
            continue
        known.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(place, name) for name in files if not name.startswith(".")):
            if not file.exists():
                raise SettingsError(
                    f"{file}: expected a file, found a link to {file.readlink()}, which does not exist; "
                    "mend it, or remove it"
                )
            if file.is_file():
                yield file


def read_documents(
    file: Path, how: DocumentFormat, *, advance: Advance = lambda nbytes: None
) -> Iterator[str]:
    """The documents of a file. ``advance`` is told how many of its bytes are read."""
    kind = _kind_of(file) if how.kind == "auto" else how.kind
    read = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}[kind]
    num_documents = 0
    try:
        for text in read(file, how, advance):
            if text:
                num_documents += 1
                yield text
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise SettingsError(f"{file}: could not be read: {reason}") from None
    if num_documents == 0:
        found = "none in it" if file.stat().st_size else "an empty file"
        raise SettingsError(f"{file}: expected text, found {found}; leave it out")


def _kind_of(file: Path) -> Literal["text", "jsonl", "parquet"]:
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in _COMPRESSED]
    last = suffixes[-1] if suffixes else ""
    return "jsonl" if last in _JSON else "parquet" if last in _PARQUET else "text"


def _lines(file: Path, advance: Advance) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without their ends."""
    done = 0
    with file.open("rb") as raw:
        stream = _uncompressed(file, raw)  # with a name: what nobody holds is closed, and ``raw`` with it
        for number, line in enumerate(stream, start=1):
            if number % 256 == 0:
                advance(raw.tell() - done)
                done = raw.tell()
            if b"\0" in line:
                raise SettingsError(
                    f"{file}, line {number}: expected text in UTF-8, found the byte 0; convert the "
                    "file if it is UTF-16 (iconv -f UTF-16 -t UTF-8), unpack it if it is compressed, or "
                    "leave it out"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise SettingsError(
                    f"{file}, line {number}: expected text in UTF-8, found the byte "
                    f"0x{line[error.start]:02x} ({error.reason}); convert the file, or leave it out"
                ) from None
        advance(raw.tell() - done)


def _uncompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    codec = _COMPRESSED.get(file.suffix.lower())
    if codec is None:
        return raw
    require("data", f"a compressed file ({file.name})")
    import pyarrow as pa

    return io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(raw, codec)))


def _text(file: Path, how: DocumentFormat, advance: Advance) -> Iterator[str]:
    passages = how.separator == "passage"
    least = {"line": 0, "blank-line": 0, "passage": _PASSAGE_CHARACTERS, "file": math.inf}[how.separator]
    most = _LONG_PASSAGE_CHARACTERS if passages else math.inf
    lines: list[str] = []
    size = 0
    # A line may end with a carriage return alone, as in old files of the Macintosh.
    for whole in (part for _, ended in _lines(file, advance) for part in ended.split("\r")):
        for line in _pieces(whole) if passages else (whole,):
            is_end = how.separator == "line" or not line.strip()
            if lines or line.strip():
                lines.append(line)
                size += len(line)
            if (is_end and size >= least) or size >= most:
                yield "\n".join(lines).rstrip()
                lines, size = [], 0
    yield "\n".join(lines).rstrip()


def _pieces(line: str) -> Iterator[str]:
    """A line, cut behind spaces where it is very long."""
    start = 0
    while len(line) - start > _LONG_LINE_CHARACTERS:
        most = start + _LONG_LINE_CHARACTERS
        end = line.rfind(" ", most - _LONG_PASSAGE_CHARACTERS, most) + 1 or most
        yield line[start:end]
        start = end
    yield line[start:]


def _jsonl(file: Path, how: DocumentFormat, advance: Advance) -> Iterator[str]:
    for number, line in _lines(file, advance):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SettingsError(
                f"{file}, line {number}: expected JSON, one object in each line, found: {error}; {_AS_LINES}"
            ) from None
        if not isinstance(row, dict):
            found = "an array" if isinstance(row, list) else type(row).__name__
            raise SettingsError(
                f"{file}, line {number}: expected JSON, one object in each line, found {found}; {_AS_LINES}"
            )
        if how.field not in row:
            raise SettingsError(
                f"{file}, line {number}: expected text in the field {how.field!r}, found "
                f"{', '.join(row) or 'no field'}; name the field with --field"
            )
        if row[how.field] is not None:  # as in parquet, a row without a value is no document
            yield _checked(row[how.field], f"{file}, line {number}: expected text in the field {how.field!r}")


def _checked(text: object, expected: str) -> str:
    """What JSON has under a field, if it is text that has bytes."""
    if not isinstance(text, str):
        raise SettingsError(f"{expected}, found {type(text).__name__}; name the field with --field")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may spell half of a UTF-16 pair
        raise SettingsError(
            f"{expected}, found {text[error.start]!a}, which is no character; leave that line out"
        ) from None
    return text


def _parquet(file: Path, how: DocumentFormat, advance: Advance) -> Iterator[str]:
    require("data", f"a parquet file ({file.name})")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        content = parquet.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise SettingsError(f"{file}: expected a parquet file, found: {error}") from None
    with content:
        schema = content.schema_arrow
        if [_is_text(column.type) for column in schema if column.name == how.field] != [True]:
            columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
            raise SettingsError(
                f"{file}: expected text in the column {how.field!r}, found {columns}; name the column with "
                "--field"
            )
        nbytes, rows = file.stat().st_size, max(1, content.metadata.num_rows)
        try:
            for batch in content.iter_batches(batch_size=_PARQUET_ROWS, columns=[how.field]):
                advance(nbytes * len(batch) // rows)
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{file}: expected text in UTF-8 in the column {how.field!r}, found: {error}; write the file "
                "again, or leave it out"
            ) from None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(value) in ("string", "large_string", "string_view")
