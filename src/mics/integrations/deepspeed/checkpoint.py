"""Checkpoints that DeepSpeed wrote: found by their tag, and loaded on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import nn
from torch.optim import Optimizer

from mics.checkpoint import load
from mics.checkpoint.arguments import as_place
from mics.checkpoint.folders import LATEST
from mics.checkpoint.formats.deepspeed_files import is_deepspeed, read_plain
from mics.checkpoint.records import count_of
from mics.checkpoint.saving import join_hosts
from mics.checkpoint.storage import Place, read_file
from mics.checkpoint.together import together
from mics.engine import engine_of
from mics.errors import CheckpointError

T = TypeVar("T")
_LOG: Final = logging.getLogger("mics")
_MAX_TAG_NBYTES: Final = 1 << 10
_COUNTS: Final = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint of DeepSpeed had beside the model and the optimizer."""

    folder: str
    counts: dict[str, int]
    """global_steps, global_samples, skipped_steps."""
    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any]
    """The state of its scheduler; empty without one."""


def load_deepspeed_checkpoint(
    model: nn.Module,
    folder: str | Path | Place,
    optimizer: Optimizer | None = None,
    tag: str | None = None,
    *,
    strict: bool = True,
) -> LoadedCheckpoint:
    """Load what DeepSpeed saved at ZeRO stage 3 or with MiCS into a sharded model. All ranks must call it.

    ``folder`` is the one that ``save_checkpoint`` was given, and ``tag`` by default the one that ``latest``
    names; or the folder of a tag itself. Masters are read in float32, and with an ``optimizer`` its state and
    settings too. Each rank reads its own part. Nothing is unpickled, and DeepSpeed is not needed.
    """
    root = as_place(folder, "load_deepspeed_checkpoint")
    found = on_first_rank("load_deepspeed_checkpoint", lambda: _find(root, tag))
    load(found, model, optimizer, strict=strict)
    plain = read_plain(found)
    left_out = plain.pop("")
    if left_out and engine_of(model).world.rank == 0:
        _LOG.warning("%s: client state that is not plain data is left out: %s", found, left_out)
    counts: dict[str, int] = {key: count_of(plain.pop(key) or 0) for key in _COUNTS if key in plain}
    schedule = plain.pop("lr_scheduler", None) or {}
    if not isinstance(schedule, dict):
        raise CheckpointError(f"{found}: lr_scheduler: expected a dict, found {type(schedule).__name__}")
    return LoadedCheckpoint(folder=str(found), counts=counts, client_state=plain, lr_scheduler=schedule)


def _find(root: Place, tag: str | None) -> Place:
    found = root
    if tag is not None or not is_deepspeed(root):
        found = root / (latest_tag(root) if tag is None else plain_tag(tag))
    if not is_deepspeed(found):
        raise CheckpointError(
            f"{found}: expected a checkpoint of DeepSpeed at ZeRO stage 3 (zero_pp_rank_*_optim_states.pt), "
            "found none; stages 1 and 2: convert it with zero_to_fp32.py, and mics.load the safetensors"
        )
    return found


def on_first_rank(what: str, action: Callable[[], T]) -> T:
    """What ``action`` returns on the first rank, on all ranks: ``latest`` may be moved while ranks look."""
    _, host = join_hosts(what)
    found = together(host, what, lambda: action() if host.rank == 0 else None)
    value: T = host.all_gather(found)[0]
    return value


def latest_tag(root: Place) -> str:
    """The tag that ``latest`` names."""
    if not (root / LATEST).exists():
        raise CheckpointError(f"{root}: expected a file {LATEST!r} that names a tag, found none; give tag=")
    return plain_tag(read_file(root / LATEST, most=_MAX_TAG_NBYTES).decode(errors="replace").strip())


def plain_tag(name: str) -> str:
    """A tag that is the name of a folder, and leads to no other place."""
    if not name or name in (".", "..") or Path(name).name != name or not name.isprintable():
        raise CheckpointError(f"tag: expected the name of a folder, found {name!r:.60}")
    return name
