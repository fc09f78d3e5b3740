"""What `make test` leaves to `make test-all`, and that to `pytest --long`.

A test with the marker `full` runs in `make test-all` alone. Tests that try one thing in several layouts, one
after the other, take `some` of them: in `make test`, which is `pytest --quick`, as many as they ask for; in
`make test-all` twice as many; with `--long` all. Which ones follows from the name of the test: over many
tests all layouts occur, and each run has the same. The test itself must ask: ranks do not know.

Of arguments that one test is called with, `first` leaves all but the first to `make test-all`, and the last
ones to `--long`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

quick = False
"""Whether this is a run of `make test`; set from the option `--quick`."""
long = False
"""Whether nothing is left out; set from the option `--long`."""


def some(items: Sequence[T], num: int = 1) -> list[T]:
    """`num` of `items` in a quick run, twice as many in `make test-all`: the same ones in every such run."""
    num = num if quick else 2 * num
    if long or num >= len(items):
        return list(items)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without the phase
    first = zlib.crc32(test.encode())
    chosen = {(first + number) % len(items) for number in range(num)}
    return [item for index, item in enumerate(items) if index in chosen]


def first(rows: Sequence[Any], num: int = 1, num_full: int | None = None) -> list[Any]:
    """`rows` for `pytest.mark.parametrize`: after the first `num` `full`, after `num_full` also `long`."""
    found = list(rows[:num])
    for index, row in enumerate(rows[num:], start=num):
        is_long = num_full is not None and index >= num_full
        marks = [pytest.mark.full, pytest.mark.long] if is_long else [pytest.mark.full]
        found.append(pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=marks))
    return found
