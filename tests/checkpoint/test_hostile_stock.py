"""Checkpoints of torch.distributed.checkpoint that nobody should trust: errors, and nothing has changed."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.hostile import (
    Trained,
    copied,
    loads_or_refuses,
    refuses,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _weight(metadata: Any) -> tuple[Any, Any]:
    """What is said of model.weight, and where it is."""
    ((_, info),) = [item for item in metadata.storage_data.items() if item[0].fqn == "model.weight"]
    return metadata.state_dict_metadata["model.weight"], info


def _laughs() -> list[Any]:
    """Lists of the same list twice: as text, longer than any memory."""
    value: list[Any] = ["ha"]
    for _ in range(200):
        value = [value, value]
    return value


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _no_length(metadata: Any) -> None:
    _weight(metadata)[1].length = 0


def _another_dtype(metadata: Any) -> None:
    _weight(metadata)[0].properties.dtype = torch.int32


def _half(metadata: Any) -> None:
    _weight(metadata)[0].properties.dtype = torch.float16


def _another_chunk(metadata: Any) -> None:
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([1, 3]))] * 2


def _chunk_outside(metadata: Any) -> None:
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([2, 4]))]


def _swapped(metadata: Any) -> None:
    _weight(metadata)[1].offset = 10**9


def _said(field: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(_weight(metadata)[1], field, value)


def _whole(field: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, field, value())


def _part(field: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda metadata: setattr(_weight(metadata)[0], field, value())


@pytest.mark.parametrize(
    "change",
    [
        _no_length,
        _another_dtype,
        _half,
        _another_chunk,
        _chunk_outside,
        _swapped,
        _said("offset", -1),
        _said("offset", 1.5),
        _said("offset", 1 << 70),
        _said("length", "long"),
        _said("relative_path", _itself()),
        _said("relative_path", "\0"),
        _said("relative_path", "x" * 5000),
        _said("relative_path", "."),
        _said("transform_descriptors", _laughs()),
        _whole("state_dict_metadata", _laughs),
        _whole("state_dict_metadata", dict),
        _whole("storage_data", _itself),
        _whole("storage_data", lambda: {1: 2}),
        _part("size", _laughs),
        _part("chunks", _itself),
        _part("chunks", _laughs),
        _part("properties", _laughs),
    ],
)
def test_an_index_of_dcp_that_does_not_fit(
    stock: Path, tmp_path: Path, target: Trained, change: Callable[[Any], None]
) -> None:
    """Parts of no length, formats and places that are not the archive's, values that hold themselves."""
    folder = copied(stock, tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"\.metadata|__0_0\.distcp|/c: expected a checkpoint of this model", target)


@pytest.mark.parametrize("field", ["planner_data", "storage_meta"])
def test_what_is_not_needed_is_not_looked_into(stock: Path, tmp_path: Path, field: str) -> None:
    """A list that holds itself, where only a hint would be."""
    folder = copied(stock, tmp_path)
    for value in (_itself(), _laughs(), {"model.weight": (_laughs(), _itself())}):
        metadata = dcp.FileSystemReader(stock).read_metadata()
        setattr(metadata, field, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert loads_or_refuses(folder, trained(seed=1))


def test_pickles_that_take_for_ever(stock: Path, tmp_path: Path, target: Trained) -> None:
    """Names that are lists, numbers chosen to have one hash, and one list of parts for many tensors."""
    folder = copied(stock, tmp_path)
    numbers = [(k * (2**61 - 1)).to_bytes(10, "little") for k in range(16, 99)]
    for content in (
        pickle.dumps(_laughs())[:-1] + b"\x8c\x01x\x93.",
        b"}(" + b"".join(b"\x8a\x0a" + number + b"N" for number in numbers) + b"u.",
        pickle.dumps([]) + b"trailing",
    ):
        (folder / ".metadata").write_bytes(content)
        refuses(folder, r"\.metadata: ", target)
    metadata = dcp.FileSystemReader(stock).read_metadata()
    entry, _ = _weight(metadata)
    entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([0, 3]))] * 3_000
    metadata.state_dict_metadata.update({f"model.{n}": entry for n in range(3_000)})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"\.metadata: expected each part of a tensor to be described once", target)


# -- archives of torch.save ------------------------------------------------------------------------------


def _archive(value: Any = None, **changed: bytes) -> dict[str, bytes]:
    stream = io.BytesIO()
    torch.save(torch.ones(2) if value is None else value, stream)
    with zipfile.ZipFile(stream) as source:
        found = {record.filename: source.read(record) for record in source.infolist()}
    return found | {f"archive/{name}": content for name, content in changed.items()}


def _zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as target:
        for name, content in records.items():
            target.writestr(name, content)
    return stream.getvalue()


def _patched(content: bytes, offset: int, value: bytes) -> bytes:
    """The same field of every entry of the central directory, changed."""
    found = bytearray(content)
    at = found.find(b"PK\1\2")
    while at >= 0:
        found[at + offset : at + offset + len(value)] = value
        at = found.find(b"PK\1\2", at + 4)
    return bytes(found)


def _endless() -> bytes:
    """A parameter whose tensor is itself."""
    return b"\x80\x02ctorch._utils\n_rebuild_parameter\n]q\x00Rq\x01h\x00h\x01a0h\x01."


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        b"PK",
        _zipped(_archive(), zipfile.ZIP_DEFLATED),
        _zipped(_archive(torch.zeros(1 << 16)), zipfile.ZIP_DEFLATED),
        _patched(_zipped(_archive()), 24, (0xFFFF0000).to_bytes(4, "little")),  # sizes
        _patched(_zipped(_archive()), 20, (0xFFFF0000).to_bytes(4, "little")),
        _patched(_zipped(_archive()), 8, b"\1\0"),  # encrypted
        _patched(_zipped(_archive()), 42, (0xFFFFFF).to_bytes(4, "little")),  # elsewhere
        _patched(_zipped(_archive()), 42, (1).to_bytes(4, "little")),
        _zipped(_archive(byteorder=b"big")),
        _zipped({**_archive(), "archive/data/1": b"x"}),
        _zipped({**_archive(), "other/data.pkl": b"x"}),
        _zipped({name: content for name, content in _archive().items() if not name.endswith("data.pkl")}),
        _zipped({**_archive(), "archive/data.pkl": _endless()}),
        _zipped({**_archive(), "archive/data.pkl": b"." * (2 << 20)}),
        _zipped({**_archive(), "archive/data.pkl": pickle.dumps(_laughs())}),
        _zipped({f"archive/{n}": b"" for n in range(30_000)}),
    ],
    ids=lambda archive: str(len(archive)),
)
def test_archives_that_lie(stock: Path, tmp_path: Path, target: Trained, archive: bytes) -> None:
    """Compressed, encrypted, of other sizes or places than they say, twice, or in themselves."""
    folder = copied(stock, tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    ((key, info),) = [item for item in metadata.storage_data.items() if item[0].fqn == "model.bias"]
    file = folder / info.relative_path
    metadata.storage_data[key] = type(info)(info.relative_path, file.stat().st_size, len(archive))
    with file.open("ab") as stream:
        stream.write(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(folder, r"__0_0\.distcp: model\.bias: ", target)
