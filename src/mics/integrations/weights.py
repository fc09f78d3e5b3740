"""Weights for other people's programs: folders of safetensors that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import re
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from mics.checkpoint.files import write_durably
from mics.checkpoint.formats.safetensors_files import MAP_NAME
from mics.checkpoint.model_folder import SHARD_NBYTES, export_model
from mics.checkpoint.saving import join_hosts
from mics.checkpoint.together import together
from mics.engine import units_of
from mics.errors import CheckpointError, SettingsError
from mics.models.huggingface import CONFIG

GENERATION: Final = "generation_config.json"
_CALL: Final = "export_safetensors"
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def export_safetensors(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    max_shard_size: int | str = SHARD_NBYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a sharded model as Hugging Face safetensors with an index. All ranks must call it.

    Rank 0 writes, one parameter after the other: no rank ever holds the whole model. A model of transformers
    gets its ``config.json`` and generation settings beside it; ``AutoModel.from_pretrained(folder)`` loads
    the folder. The folder has its name when all of it is on disk, and replaces an earlier export.

    Args:
        max_shard_size: bytes of a file, as a number or as ``"5GB"``; a larger tensor is a file of its own.
        dtype: the format of floating-point tensors; None writes masters as they are.
    """
    nbytes = _nbytes(max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SettingsError(f"{_CALL}: dtype: expected a floating-point format or None, found {dtype!r}")
    out = Path(folder)
    world, host = join_hosts(_CALL)
    together(host, _CALL, lambda: _check_folder(out) if world.rank == 0 else None)
    export_model(
        model, out, beside=partial(write_config, model, dtype=dtype), shard_nbytes=nbytes, dtype=dtype
    )


def param_dtype(model: nn.Module) -> torch.dtype | None:
    """What all units of a sharded model compute in; None where they differ."""
    found = {unit.spec.seen_dtype for unit in units_of(model) if unit.spec.seen_dtype.is_floating_point}
    return found.pop() if len(found) == 1 else None


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model has a config that ``from_pretrained`` would read."""
    return hasattr(getattr(model, "config", None), "to_json_string")


def write_config(model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """What ``from_pretrained`` needs to know of a model, in a folder of its weights in ``dtype``."""
    if not is_of_transformers(model):
        return
    config: Any = model.config
    described = json.loads(config.to_json_string())
    described.pop("torch_dtype", None)  # its name in transformers 4
    described.pop("quantization_config", None)  # of the weights that training began with: these are plain
    described["architectures"] = [type(model).__name__]
    described["dtype"] = str(dtype or next(model.parameters()).dtype).removeprefix("torch.")
    write_durably(folder / CONFIG, json.dumps(described, indent=2, sort_keys=True).encode() + b"\n")
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and not (folder / GENERATION).is_file():
        write_durably(folder / GENERATION, generation.to_json_string().encode())


def _nbytes(size: Any) -> int:
    """A number of bytes, or text such as 5GB, 500MB, 2GiB."""
    found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
        base = 1024 if match and match[3] else 1000
        found = int(float(match[1]) * base ** _UNITS[match[2].upper()]) if match else 0
    if found < 1:
        raise SettingsError(
            f"{_CALL}: max_shard_size: expected a number of bytes, or text such as '5GB', found {size!r}"
        )
    return found


def _check_folder(folder: Path) -> None:
    """Raise if something would be replaced that is no export."""
    if not folder.exists() or (folder / MAP_NAME).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise CheckpointError(
            f"{folder}: expected a new folder, an empty one or an earlier export, found something else; "
            "choose another name"
        )
