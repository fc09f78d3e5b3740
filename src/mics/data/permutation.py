"""A permutation of 0..n-1 that takes no memory, so that an epoch of any size is shuffled at any place."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mics.data.hashing import draw, words

_ROUNDS: Final = 6


def permute(places: NDArray[np.int64], size: int, *, seed: object) -> NDArray[np.int64]:
    """Where the permutation of ``range(size)`` that belongs to ``seed`` sends ``places``.

    ``seed``: a whole number, or one for every place.

    A Feistel network over the rectangle left x right, the smallest that holds ``size`` places. Each round
    adds a hash of one side to the other, which can be undone, so it is a permutation of the rectangle. A
    place that lands outside ``size`` goes through it again, until it is inside.
    """
    left = words(max(1, math.isqrt(max(0, size - 1)) + 1))
    right = words(max(1, -(-size // int(left[0]))))
    key = np.broadcast_to(words(seed), places.shape).copy()
    found = places.astype(np.uint64)
    outside = np.arange(found.size)
    while outside.size:
        high, low = np.divmod(found[outside], right)
        for number in range(_ROUNDS):
            if number % 2:
                high = (high + draw(key[outside], number, low) % left) % left
            else:
                low = (low + draw(key[outside], number, high) % right) % right
        found[outside] = high * right + low
        outside = outside[found[outside] >= np.uint64(size)]
    return found.astype(np.int64)
