"""What makes a folder of weights one that ``transformers`` load: config, generation settings, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn

from mics.checkpoint.exporting import files_beside
from mics.checkpoint.files import write_durably
from mics.checkpoint.model_folder import export_model
from mics.models.huggingface import CONFIG

_GENERATION: Final = "generation_config.json"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model has a config that ``from_pretrained`` would read."""
    return hasattr(getattr(model, "config", None), "to_json_string")


def export_folder(model: nn.Module, out: Path, *, sources: Sequence[Path | None]) -> None:
    """Write a folder that ``AutoModel.from_pretrained`` loads. All ranks must call it.

    ``sources``: folders to copy a tokenizer and generation settings from; a later one's replace an earlier's.
    """
    export_model(model, out, beside=partial(_write_beside, model, sources))


def _write_beside(model: nn.Module, sources: Sequence[Path | None], folder: Path) -> None:
    for source in filter(None, sources):
        for file in files_beside(source):
            shutil.copyfile(file, folder / file.name)
    config: Any = model.config
    described = json.loads(config.to_json_string())
    described.pop("torch_dtype", None)  # its name in transformers 4
    described["architectures"] = [type(model).__name__]
    described["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_durably(folder / CONFIG, json.dumps(described, indent=2, sort_keys=True).encode() + b"\n")
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and not (folder / _GENERATION).is_file():
        write_durably(folder / _GENERATION, generation.to_json_string().encode())
