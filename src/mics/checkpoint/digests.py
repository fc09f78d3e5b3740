"""Digests that tell a torn or altered file. They are no defence against somebody who alters on purpose.

xxh3 reads memory as fast as it can be read; where its library is not installed, the checksum of the standard
library serves, at the cost of some speed. Each file's entry in the index says which it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from mics.errors import CheckpointError

Digest = Callable[[Any], str]
_FAST: Final = "xxh3_128"
_PLAIN: Final = "crc32"


def _crc32(content: Any) -> str:
    return f"{zlib.crc32(content):08x}"


@cache
def _fast() -> Digest | None:
    try:
        import xxhash
    except ImportError:
        return None
    return lambda content: xxhash.xxh3_128(content).hexdigest()


def best_digest() -> str:
    """The name of the digest that new files get."""
    return _PLAIN if _fast() is None else _FAST


def digest_of(name: str) -> Digest:
    """The digest of that name."""
    found = {_PLAIN: _crc32, _FAST: _fast()}.get(name)
    if found is None:
        raise CheckpointError(
            f"expected a way to check files by {name!r}, found none; "
            + ("pip install xxhash" if name == _FAST else "another version of mics wrote them")
        )
    return found
