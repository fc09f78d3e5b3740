"""What each rank has to itself: random state, and the extra state that a training program gave.

It is JSON in a file of its own, ``rank-N.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch.nn as nn
from torch.optim import Optimizer

from mics.checkpoint.blocks import BlockReader
from mics.checkpoint.files import parse_json
from mics.checkpoint.random_state import check_random_state, random_state
from mics.checkpoint.records import Index
from mics.checkpoint.storage import Place
from mics.checkpoint.values import decode, encode
from mics.engine import Engine
from mics.errors import CheckpointError, SettingsError

_MAX_NBYTES: Final = 4 << 30  # it is read as a whole


def own_file(rank: int, tag: str = "") -> str:
    """The file of what each rank has to itself: random state, the position in its data."""
    return f"rank-{rank}-{tag}.json" if tag else f"rank-{rank}.json"


def own_state(engine: Engine, extra_state: Mapping[Any, Any]) -> bytes:
    """What this rank has to itself, as JSON."""
    own = {
        "extra_state": encode(_states_of(extra_state), "extra_state"),
        "random": encode(random_state(engine.device), "random"),
    }
    content = json.dumps(own).encode()
    if len(content) > _MAX_NBYTES:
        raise SettingsError(
            f"mics.save: expected at most {_MAX_NBYTES:,} bytes of extra_state, found {len(content):,}; "
            "keep large tensors as buffers of the model"
        )
    return content


def _states_of(extra_state: Mapping[str, Any]) -> dict[str, Any]:
    """``extra_state`` with the states of objects in place of the objects."""
    for name, value in extra_state.items():
        if isinstance(value, Optimizer | nn.Module):
            raise SettingsError(
                f"extra_state.{name}: expected what is no part of the sharded model, found "
                f"{type(value).__name__}, whose state is this rank's part alone; several optimizers go to "
                "optimizer=[a, b], another model is saved by a call of its own"
            )
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in extra_state.items()
    }


@dataclass(frozen=True, kw_only=True)
class OwnState:
    """What a rank has to itself: random state and extra state."""

    file: Place
    extra: dict[str, Any]
    given: Mapping[str, Any]
    restore_random: Callable[[], None] | None

    def restore(self) -> dict[str, Any]:
        if self.restore_random is not None:
            self.restore_random()
        for key, value in self.given.items():
            if hasattr(value, "load_state_dict"):
                try:
                    value.load_state_dict(self.extra[key])
                except Exception as error:
                    raise CheckpointError(
                        f"{self.file}: extra_state {key!r}: expected a state that {type(value).__name__} "
                        f"takes, found one that it does not ({type(error).__name__}: {error}). "
                        "The model was loaded"
                    ) from error
        return self.extra


def read_own_state(folder: Place, index: Index, engine: Engine, given: Mapping[str, Any]) -> OwnState:
    """This rank's own where the world is as large as it was, else rank 0's, without its random state."""
    same = index.about.get("world_size") == engine.world.size
    name = own_file(engine.world.rank if same else 0, str(index.about.get("tag", "")))
    file = folder / name
    try:
        own = decode(_content(file, index, name)) if name in index.files else {}
        extra = own.get("extra_state", {}) if isinstance(own, dict) else None
        if not isinstance(extra, dict):
            raise CheckpointError("expected extra state, found something else")
        random = check_random_state(own["random"], engine.device) if same and "random" in own else None
    except CheckpointError as error:
        said = str(error)
        raise CheckpointError(said if said.startswith(str(file)) else f"{file}: {said}") from None
    missing = [key for key in given if key not in extra]
    if missing:
        had = ", ".join(map(repr, extra)) or "none"
        raise CheckpointError(f"{folder}: expected extra_state {missing[0]!r}, found {had}")
    return OwnState(file=file, extra=extra, given=given, restore_random=random)


def _content(file: Place, index: Index, name: str) -> Any:
    stored = index.files[name]
    if stored.nbytes > _MAX_NBYTES:
        raise CheckpointError(f"expected at most {_MAX_NBYTES:,} bytes, found {stored.nbytes:,}")
    with BlockReader(file, stored, [range(stored.nbytes)]) as reader:  # which looks at the size first
        content = bytearray(stored.nbytes)
        reader.read_into(0, memoryview(content))
    return parse_json(bytes(content), file)
