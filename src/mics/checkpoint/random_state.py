"""The state of every source of random numbers that a rank's training may draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mics.errors import CheckpointError

_NUMPY: Final = "MT19937"
_NUM_WORDS: Final = 624  # of the Mersenne twister


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch on the host and on ``device``, of Python, of numpy where its generator is the usual one."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    of_numpy = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] == _NUMPY:
        state["numpy"] = of_numpy
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_random_state(state: Any, device: torch.device) -> Callable[[], None]:
    """What restores a state from a file, once it is known to be one: tried on generators of its own."""
    if not isinstance(state, dict):
        raise CheckpointError(f"expected random state, found {type(state).__name__}")
    name = "torch"
    try:
        torch.Generator().set_state(_bytes(state["torch"]))
        name = "python"
        random.Random().setstate(_of_python(state["python"]))
        name = "numpy"
        if "numpy" in state:
            np.random.RandomState(np.random.MT19937()).set_state(_of_numpy(state["numpy"]))
        name = "cuda"
        if "cuda" in state and device.type == "cuda":
            torch.Generator(device).set_state(_bytes(state["cuda"]))
    except Exception as error:  # each raises whatever it runs into
        raise CheckpointError(
            f"random state of {name}: expected what it can be set to, found something else "
            f"({type(error).__name__}: {error})"
        ) from None
    return lambda: _restore(state, device)


def _restore(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _bytes(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        raise ValueError("expected a tensor of bytes")
    return value


def _of_python(value: Any) -> tuple[Any, ...]:
    version, _, gauss = value
    if version != 3 or not (gauss is None or isinstance(gauss, float)):
        raise ValueError("expected version 3")
    return tuple(value)


def _of_numpy(value: Any) -> dict[str, Any]:
    """numpy looks at no number here, and draws from wherever they say: outside of its memory too."""
    key, pos = value["state"]["key"], value["state"]["pos"]
    sound = (
        value["bit_generator"] == _NUMPY
        and isinstance(key, np.ndarray)
        and (key.shape, key.dtype) == ((_NUM_WORDS,), np.dtype(np.uint32))
        and type(pos) is int
        and 0 <= pos <= _NUM_WORDS
        and type(value["has_gauss"]) is int
        and isinstance(value["gauss"], float)
    )
    if not sound:
        raise ValueError(f"expected {_NUMPY} with {_NUM_WORDS} words and a position among them")
    return dict(value)
