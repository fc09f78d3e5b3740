"""Plain Python values as JSON and back, so that no checkpoint needs a pickle.

What JSON cannot say is an object with one key that begins with ``$``::

    (1, 2)  {"$tuple": [1, 2]}     b"ab"   {"$bytes": "YWI="}    a tensor  {"$tensor": [dtype, shape, bytes]}
    {1: 2}  {"$dict": [[1, 2]]}    {1, 2}  {"$set": [1, 2]}      an array  {"$array": [dtype, shape, bytes]}
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mics.checkpoint.index import dtype_name, dtype_of
from mics.errors import CheckpointError, SettingsError


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON; ``where`` is its name in errors."""
    match value:
        case None | bool() | int() | float() | str():
            return _plain(value)
        case bytes() | bytearray():
            return {"$bytes": _text(bytes(value))}
        case tuple():
            return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        case list():
            return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case set() | frozenset():
            tag = "$set" if isinstance(value, set) else "$frozenset"
            return {tag: [encode(item, where) for item in sorted(value, key=repr)]}
        case Tensor():
            plain = value.detach().to("cpu").contiguous()
            raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            return {"$tensor": [dtype_name(plain.dtype), list(plain.shape), _text(raw)]}
        case np.generic() | np.ndarray():
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise _cannot(value, where)
            return {"$array": [array.dtype.str, list(array.shape), _text(array.tobytes())]}
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {str.__str__(key): encode(item, f"{where}.{key}") for key, item in value.items()}
            pairs = [[encode(k, where), encode(item, f"{where}.{k}")] for k, item in value.items()]
            return {"$dict": pairs}
    raise _cannot(value, where)


def decode(value: Any) -> Any:
    """The value that :func:`encode` made JSON of."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        match tag:
            case "$bytes":
                return base64.b64decode(content)
            case "$tuple":
                return tuple(decode(item) for item in content)
            case "$set":
                return {decode(item) for item in content}
            case "$frozenset":
                return frozenset(decode(item) for item in content)
            case "$dict":
                return {decode(key): decode(item) for key, item in content}
            case "$tensor":
                dtype, shape, text = content
                raw = bytearray(base64.b64decode(text))
                # An empty buffer has no memory to take a tensor from.
                none = torch.empty(0, dtype=torch.uint8, device="cpu")
                flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else none
                return flat.view(dtype_of(dtype)).reshape(shape)
            case "$array":
                kind, shape, text = content
                array = np.frombuffer(base64.b64decode(text), dtype=np.dtype(kind)).reshape(shape)
                return array.copy() if shape else array[()]
            case _ if tag.startswith("$"):
                raise CheckpointError(f"expected a value that mics wrote, found one of kind {tag!r}")
    return {key: decode(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    # Subclasses (an IntEnum, numpy's float64, which is a float) would not come back as what they are, but as
    # numbers and strings: that is what they are used as.
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _cannot(value: Any, where: str) -> SettingsError:
    return SettingsError(
        f"{where}: expected numbers, strings, bytes, tensors, arrays, or lists, tuples and dicts of them, "
        f"found {type(value).__name__}; nothing is pickled, so give what it is made of, or an object with "
        "state_dict()"
    )
