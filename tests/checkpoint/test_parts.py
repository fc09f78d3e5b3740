"""The index of many ranks: each writes its part of it, and readers take the parts that they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mics
from mics.checkpoint import apart
from mics.checkpoint.index import read_index, sealed
from mics.checkpoint.records import PieceWriters
from mics.errors import CheckpointError
from tests import tiers
from tests.checkpoint.runs import STEPS, build, everything, has_part_of, train
from tests.ranks import run_ranks


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 100), st.data())
def test_a_division_has_every_element_once(start: int, piece: int, numel: int, data: st.DataObject) -> None:
    """Pieces follow each other, and those of a span are the ones that have an element of it."""
    division = PieceWriters(start, piece, tuple(range((start + numel) // piece + 1)))
    spans = [division.span(each, numel) for each in range(len(division.writers))]
    assert [element for span in spans for element in span] == list(range(numel))
    first = data.draw(st.integers(0, numel))
    wanted = range(first, data.draw(st.integers(first, numel)))
    found = list(division.spans(wanted, numel))
    assert found == [(rank, span) for rank, span in enumerate(spans) if set(span) & set(wanted)]


def _apart(limit: int) -> None:
    apart.MAX_GATHERED_ITEMS = limit  # type: ignore[misc]


def _save(path: str, partition_size: int, sharding: str) -> dict[str, Any]:
    before = apart.MAX_GATHERED_ITEMS
    _apart(0)
    try:
        model, optimizer = build(partition_size, optimizer_sharding=sharding)
        train(model, optimizer, 0, STEPS)
        mics.save(path, model, optimizer, {"step": STEPS})
        return everything(model, optimizer)
    finally:
        _apart(before)


def _load(path: str, partition_size: int, whole: dict[str, Any]) -> tuple[bool, bool]:
    model, optimizer = build(partition_size, seed=1)
    right = mics.load(path, model, optimizer)["step"] == STEPS
    return right and has_part_of(whole, model, optimizer), not (Path(path) / ".metadata").exists()


@pytest.mark.parametrize(("partition_size", "sharding"), tiers.some([(2, "world"), (2, "partition")], 1))
def test_parts_load_on_other_ranks(tmp_path: Path, partition_size: int, sharding: str) -> None:
    """Four ranks write a part each, with and without replicas; two and four load."""
    path = str(tmp_path / "c")
    whole = run_ranks(4, _save, path, partition_size, sharding)[0]
    for ranks, size in ((2, 2), (4, 4)):
        assert run_ranks(ranks, _load, path, size, whole) == [(True, True)] * ranks
    index = read_index(tmp_path / "c")
    name = next(n for n, t in index.tensors.items() if t.num_parts == 4)
    index.chunks_of(name, range(1))
    assert index.lookup.num_read == 1  # type: ignore[union-attr]
    _check_torn(tmp_path / "c")


def _check_torn(folder: Path) -> None:
    """A part that is not what was written, or says what cannot be, is an error with its name."""
    from mics.checkpoint.command import checkpoint

    assert checkpoint(["verify", str(folder)]) == 0
    assert checkpoint(["show", str(folder), "--tensors"]) == 0
    part = folder / "rank-1.index.json"
    whole = part.read_bytes()
    content = json.loads(whole)
    content["items"].popitem()
    for wrong in (whole[:-1], whole.replace(b"0", b"1", 1), json.dumps(content).encode()):
        part.write_bytes(wrong)
        assert checkpoint(["verify", str(folder)]) == 1
    part.write_bytes(whole)
    head = folder / "mics.json"
    text = head.read_bytes()
    head.write_bytes(text.replace(b'"model.', b'"madel.', 1))
    with pytest.raises(CheckpointError, match="digest differs"):
        read_index(folder)
    head.write_bytes(text)
    content = json.loads(text)
    del content["sha256"]
    next(iter(content["tensors"].values()))[-1] = 99
    head.write_bytes(sealed(json.dumps(content, separators=(",", ":")).encode()))
    with pytest.raises(CheckpointError, match="fits together"):
        read_index(folder)
    head.write_bytes(text)
