"""What ``mics.save`` and ``mics.load`` are called with, checked before anything is written or read."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from mics.checkpoint.remote import RemotePath, is_url
from mics.checkpoint.storage import Place
from mics.errors import SettingsError

_FOLDED_URL: Final = re.compile(r"(s3a?|gs|gcs|file|memory|abfs|az|https?|hf):/")
_MOST: Final = (1 << 63) - 1  # a longer number would be no name for a folder


def as_place(value: Any, what: str) -> Place:
    """A path as ``open`` would take it, but no bytes and no file descriptor; or a URL."""
    if isinstance(value, RemotePath):
        return value
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise SettingsError(f"{what}: expected path to be a str, a Path or a URL, found {_shown(value)}")
    if is_url(text):
        return RemotePath(text.rstrip("/"))
    if "://" in text or _FOLDED_URL.match(text):
        raise SettingsError(
            f"{what}: expected a path, or a URL such as s3://bucket/folder, found {text!r}; give a URL as a "
            "str, pathlib takes a slash away"
        )
    return Path(text)


def as_optimizers(value: Any, what: str) -> list[Optimizer]:
    """One optimizer, several that share the parameters out, or none."""
    if value is None:
        return []
    found = [value] if isinstance(value, Optimizer) else value
    if not isinstance(found, Sequence) or not all(isinstance(each, Optimizer) for each in found):
        raise SettingsError(
            f"{what}: expected optimizer to be a torch.optim.Optimizer, a list of them or None, found "
            f"{_shown(value)}"
        )
    return list(found)


def as_extra_state(value: Any, what: str) -> Mapping[Any, Any]:
    """Names and what is kept under them."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SettingsError(f"{what}: expected extra_state to be a dict or None, found {_shown(value)}")
    return value


def as_integer(value: Any, name: str, *, least: int) -> int | None:
    """An integer of any kind (Python's, numpy's, a tensor's) as one of Python's; None stays None."""
    if value is None:
        return None
    try:
        number = None if _is_bool(value) else operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # tensors of floats or of several values
        number = None
    if number is None or not least <= number <= _MOST:
        raise SettingsError(
            f"mics.save: expected {name} to be an integer from {least} on, found {_shown(value)}"
        )
    return number


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def _shown(value: Any) -> str:
    """A value in an error: short, and never a collective (a tensor may be a shard)."""
    kind = type(value).__name__
    return kind if isinstance(value, Tensor) else f"{kind} {value!r:.60}"
