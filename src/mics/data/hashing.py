"""Random numbers as a function of where they are used: no state, the same on every machine.

NumPy's generators promise no stream over versions. A run that resumes under another one must not read other
data, so what is drawn here is a hash of whole numbers: the finalizer of SplitMix64.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def mix(values: Words) -> Words:
    """A bijection of 64-bit words in which every output bit depends on every input bit."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def words(values: object) -> Words:
    """Whole numbers as an array of 64-bit words. Never a scalar: those warn where they wrap around."""
    return np.atleast_1d(np.asarray(values, dtype=np.uint64))


def draw(*parts: object) -> Words:
    """64 random bits for each tuple of whole numbers; arrays are broadcast against each other."""
    state = words(0)
    for part in parts:
        state = mix(state ^ words(part))
    return state
