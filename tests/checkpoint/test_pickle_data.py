"""Pickles are read as data: the same values as pickle gives, and nothing is ever called."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mics.checkpoint.formats.pickle_data import Name, Record, read_pickle
from mics.errors import CheckpointError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=100)
@given(value=plain, protocol=st.integers(3, 5))  # in 2, bytes are made by a call
@example(value={"a": {1, 2}, "b": frozenset({"x"})}, protocol=4)
@example(value=[2**70, -(2**70), "x" * 300, ["again"] * 3], protocol=2)
def test_plain_values_are_what_pickle_gives(value: Any, protocol: int) -> None:
    """Numbers, strings and containers, in all protocols that torch and DCP write."""
    assert read_pickle(pickle.dumps(value, protocol), "test") == value


class Evil:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_call_is_a_record(tmp_path: Path, protocol: int) -> None:
    """os.system is named, and not called."""
    marker = tmp_path / "ran"
    content = pickle.dumps({"x": Evil(marker)}, protocol)
    found = read_pickle(content, "test")["x"]
    assert isinstance(found, Record)
    assert found.callee == Name("posix", "system")
    assert found.args == (f"touch {marker}",)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "the test would not have noticed"


def test_nothing_is_imported() -> None:
    """A class of a module that is not there is as good as any."""
    found = read_pickle(b"cno.such.module\nThing\n)\x81}(X\x01\x00\x00\x00aK\x01ub.", "test")
    assert found.is_a("no.such.module", "Thing")
    assert found.state == {"a": 1}


def test_items_of_records() -> None:
    """An OrderedDict is a call with items."""
    found = read_pickle(pickle.dumps(collections.OrderedDict(a=1, b=2), 2), "test")
    assert found.is_a("collections", "OrderedDict")
    assert dict(found.items) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "content",
    [
        b"(S'x'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'x'\no.",  # OBJ
        b"\x82\x01.",  # EXT1
        b"\x97.",  # NEXT_BUFFER
        b"Pname\n.",  # PERSID
    ],
)
def test_other_instructions_are_refused(content: bytes) -> None:
    """What no writer of checkpoints uses is an error that names it."""
    with pytest.raises(CheckpointError, match="found the instruction"):
        read_pickle(content, "test")


def test_a_torn_pickle_is_an_error() -> None:
    """Cut anywhere."""
    content = pickle.dumps({"a": [1, (2, "three")], "b": collections.OrderedDict(x=1)})
    for length in range(len(content)):
        with pytest.raises(CheckpointError, match="some/file"):
            read_pickle(content[:length], "some/file")


_SAMPLE = pickle.dumps({"a": [1, (2, "three")], "b": collections.OrderedDict(x=1.5), "c": {4, 5}})


@settings(max_examples=300)
@given(data=st.data())
def test_an_altered_pickle_gives_a_value_or_our_error(data: st.DataObject) -> None:
    """No other exception leaves, whatever the bytes are."""
    content = bytearray(_SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        read_pickle(bytes(content), "test")


def test_deep_nesting_does_not_end_the_process() -> None:
    """A tuple this deep is not hashed."""
    with pytest.raises(CheckpointError, match="as a key"):
        read_pickle(b"}(" + b")" + b"\x85" * 200_000 + b"K\x01u.", "test")
