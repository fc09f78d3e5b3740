"""A line in the log now and then, on the first rank, while a save or a load of many GB is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mics.checkpoint.storage import Place
from mics.utils.progress import long_work

_LOG: Final = logging.getLogger("mics")
_SECONDS = 10.0  # between lines


@contextmanager
def told(what: str, folder: Place, nbytes: int, *, rank: int) -> Iterator[Callable[[int], None] | None]:
    """What is inside calls what this yields with the bytes it has done. None: nobody wants to know."""
    if rank != 0 or not _LOG.isEnabledFor(logging.INFO):
        yield None
        return
    with long_work(f"{what} {folder}, part of rank 0", nbytes, tell=_LOG.info, interval=_SECONDS) as work:
        yield work.advance
