"""Plain Python values as JSON and back, so that no checkpoint needs a pickle.

What JSON cannot say is an object with one key that begins with ``$``::

    (1, 2)  {"$tuple": [1, 2]}     b"ab"   {"$bytes": "YWI="}    a tensor  {"$tensor": [dtype, shape, bytes]}
    {1: 2}  {"$dict": [[1, 2]]}    {1, 2}  {"$set": [1, 2]}      an array  {"$array": [dtype, shape, bytes]}
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mics.checkpoint.records import DTYPES, dtype_name, dtype_of, sizes_of
from mics.errors import CheckpointError, SettingsError
from mics.guard import ShardTensor

_MAX_DEPTH: Final = 100
_MAX_KEY_BITS: Final = 64
_MAX_BITS: Final = 1 << 13  # of a number: Python reads about 4,300 digits back
# Plain numbers, text and times of numpy.
_ARRAY_KIND: Final = re.compile(r"[<>|](?:[biufcSU]\d{1,6}|[mM]8(?:\[\d{0,6}\w{1,2}\])?)")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as JSON; ``where`` is its name in errors, ``depth`` how many containers it is in."""
    if depth > _MAX_DEPTH:
        raise SettingsError(
            f"{where:.60}...: expected at most {_MAX_DEPTH} containers inside each other, found more; "
            "does one hold itself?"
        )
    inside = depth + 1
    match value:
        case None | bool() | int() | float() | str():
            return _plain(value, where)
        case bytes() | bytearray():
            return {"$bytes": _text(bytes(value))}
        case tuple():
            return {"$tuple": [encode(item, f"{where}[{i}]", inside) for i, item in enumerate(value)]}
        case list():
            return [encode(item, f"{where}[{i}]", inside) for i, item in enumerate(value)]
        case set() | frozenset():
            tag = "$set" if isinstance(value, set) else "$frozenset"
            return {tag: [_encode_key(item, where, inside) for item in sorted(value, key=repr)]}
        case ShardTensor():
            raise SettingsError(
                f"{where}: expected values that are the same on every rank, found this rank's piece of a "
                "sharded tensor; mics.save(path, model, optimizer) keeps the model itself, and "
                "mics.full_state_dict(model, rank0_only=False) has whole tensors"
            )
        case Tensor():
            if value.layout != torch.strided or value.is_meta or dtype_name(value.dtype) not in DTYPES:
                raise _cannot(value, where)
            plain = value.detach().to("cpu").contiguous()
            raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            return {"$tensor": [dtype_name(plain.dtype), list(plain.shape), _text(raw)]}
        case np.generic() | np.ndarray():
            array = np.asarray(value)
            if not _ARRAY_KIND.fullmatch(array.dtype.str):
                raise _cannot(value, where)
            return {"$array": [array.dtype.str, list(array.shape), _text(array.tobytes())]}
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {
                    str.__str__(key): encode(item, f"{where}.{key}", inside) for key, item in value.items()
                }
            pairs = [
                [_encode_key(key, where, inside), encode(item, f"{where}.{key}", inside)]
                for key, item in value.items()
            ]
            return {"$dict": pairs}
    raise _cannot(value, where)


def _encode_key(value: Any, where: str, depth: int) -> Any:
    """A key of a dict or a set. Not of long numbers: those can be chosen so that all have one hash."""
    if isinstance(value, int) and value.bit_length() > _MAX_KEY_BITS:
        raise SettingsError(f"{where}: expected keys of at most {_MAX_KEY_BITS} bits, found a longer number")
    return encode(value, where, depth)


def decode(value: Any) -> Any:
    """The value that :func:`encode` made JSON of."""
    try:
        return _decode(value)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"expected values that mics wrote, found others ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            if tag not in _TAGS or not isinstance(content, str if tag == "$bytes" else list):
                raise ValueError(f"a value of kind {tag[:60]!r}")
            return _TAGS[tag](content)
    return {key: _decode(item) for key, item in value.items()}


def _decode_key(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_KEY_BITS:
        raise ValueError("a long number as a key")
    return _decode(value)


def _decode_tensor(content: list[Any]) -> Tensor:
    name, sizes, text = content
    raw = bytearray(base64.b64decode(text, validate=True))
    flat = (
        torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.view(dtype_of(name)).reshape(sizes_of(sizes))


def _decode_array(content: list[Any]) -> Any:
    kind, sizes, text = content
    if not isinstance(kind, str) or not _ARRAY_KIND.fullmatch(kind):
        raise ValueError(f"an array of {kind!r:.60}")
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.dtype(kind)).reshape(
        sizes_of(sizes)
    )
    return array.copy() if sizes else array[()]


_TAGS: Final[dict[str, Callable[[Any], Any]]] = {
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tuple": lambda items: tuple(_decode(item) for item in items),
    "$set": lambda items: {_decode_key(item) for item in items},
    "$frozenset": lambda items: frozenset(_decode_key(item) for item in items),
    "$dict": lambda pairs: {_decode_key(key): _decode(item) for key, item in pairs},
    "$tensor": _decode_tensor,
    "$array": _decode_array,
}


def _plain(value: Any, where: str) -> Any:
    # Subclasses (an IntEnum, numpy's float64, which is a float) would not come back as what they are, but as
    # numbers and strings: that is what they are used as.
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise SettingsError(f"{where}: expected a number of at most {_MAX_BITS:,} bits, found a longer one")
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
