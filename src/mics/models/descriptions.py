"""Models as users describe them: a named size, a config of Hugging Face, or a function that builds one.

``mics plan`` and ``mics train`` take the same descriptions, and both find them here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from mics.errors import SettingsError
from mics.models import huggingface
from mics.models.gpt import GPT, GPTConfig
from mics.models.huggingface import HEADS_NAMES, WIDTH_NAMES, Objective, config_number
from mics.models.sizes import GPT_SIZES, find_size

Source = Literal["size", "config", "function"]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What is known of a model before it is built."""

    source: Source
    title: str
    """What a reader calls it."""
    objective: Objective | None
    """What it predicts: the next token, or masked ones. None: neither, so it is planned but not trained."""
    make: Callable[[], nn.Module]
    """The model on torch's default device, with its own initial values."""
    seq_len: int = 0
    """Tokens of a sequence; 0: not known."""
    hidden_size: int = 0
    vocab_size: int = 0
    """0: not known."""
    pad_token: int | None = None
    """The token that it takes for padding: its embedding does not learn, and in some it has no position."""
    gpt: GPTConfig | None = None
    """Of a named size."""
    folder: Path | None = None
    """Of a config: weights, generation settings and a tokenizer may lie beside it."""
    weights: Path | None = None
    """A folder that was described, where it has weights."""

    @property
    def way_to_more_tokens(self) -> str:
        """What to do where its vocabulary is smaller than that of the data."""
        if self.source == "size":
            return "set model.vocab_size to that or more"
        if self.weights is not None:
            return "prepare the data with the tokenizer of the model"
        return f"set the vocabulary to that or more in {self.where}"

    @property
    def where(self) -> str:
        """Where its numbers are."""
        places = {
            "size": "the settings",
            "config": "its config.json",
            "function": "the function that builds it",
        }
        return places[self.source]


@lru_cache(maxsize=16)
def describe_model(text: str, *, objective: Objective | None = None) -> ModelDescription:
    """What ``text`` stands for. Names of sizes come first: a folder called nano is ./nano."""
    if text not in GPT_SIZES:
        if text.endswith(".json"):
            return _of_config(Path(text), folder=None, objective=objective)
        if Path(text).is_dir():
            return _of_config(huggingface.config_in(Path(text)), folder=Path(text), objective=objective)
        if ":" in text:
            return _of_function(text, objective)
        if "/" in text:
            raise SettingsError(
                f"--model {text}: expected a folder with a {huggingface.CONFIG}, found no such folder; "
                "download the model first, or check the path"
            )
    return describe_size(text, find_size(text), objective)


def describe_size(name: str, config: GPTConfig, objective: Objective | None = None) -> ModelDescription:
    """A GPT of ours. ``objective`` decides which tokens each of them sees."""
    if objective is not None:
        config = replace(config, causal=objective == "causal")
    return ModelDescription(
        source="size",
        title=name if GPT_SIZES.get(name) == config else f"{name} (changed)",
        objective="causal" if config.causal else "masked",
        make=partial(GPT, config),
        seq_len=config.seq_len,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        gpt=config,
    )


def width_of(model: nn.Module) -> int:
    """The hidden size of a model: what its config says, or the most common side of its matrices."""
    sides = [min(param.shape) for param in model.parameters() if param.dim() >= 2]
    if not sides:
        raise SettingsError("--model: expected a model with matrices, found none among its parameters")
    return config_number(getattr(model, "config", None), WIDTH_NAMES) or max(set(sides), key=sides.count)


def length_of(model: nn.Module) -> int:
    """The tokens of a sequence as the model's config has them; 0: it does not say."""
    return huggingface.usable_length(getattr(model, "config", None))


def heads_of(model: nn.Module) -> int:
    """Attention heads as the config has them; else as many as are 128 wide."""
    return config_number(getattr(model, "config", None), HEADS_NAMES) or max(1, width_of(model) // 128)


def _of_config(file: Path, *, folder: Path | None, objective: Objective | None) -> ModelDescription:
    described = huggingface.read_config(file)
    config = huggingface.as_config(described, file)
    found = objective or huggingface.objective_of(config)
    if objective is not None:
        huggingface.check_objective(config, objective, file)
    if found is not None:
        huggingface.let_see(config, found)
    where = (file.parent if folder is None else folder).resolve().name
    stem = where if folder is not None or file.name == huggingface.CONFIG else file.stem
    return ModelDescription(
        source="config",
        title=f"{stem} ({config.model_type})",
        objective=found,
        make=partial(huggingface.make_model, config, found, file),
        seq_len=huggingface.usable_length(config),
        hidden_size=config_number(config, WIDTH_NAMES) or 0,
        vocab_size=config_number(config, ("vocab_size",)) or 0,
        pad_token=getattr(config, "pad_token_id", None),
        folder=file.parent,
        weights=folder if folder is not None and huggingface.has_weights(folder) else None,
    )


def _of_function(text: str, objective: Objective | None) -> ModelDescription:
    make = _find_function(text)
    with torch.device("meta"):
        model = make()
    config = getattr(model, "config", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return ModelDescription(
        source="function",
        title=text,
        objective=objective or _objective_of_module(model, text),
        make=make,
        seq_len=length_of(model),
        hidden_size=width_of(model),
        vocab_size=config_number(config, ("vocab_size",)) or max(tables, default=0),
    )


def _objective_of_module(model: nn.Module, text: str) -> Objective:
    """What the model says itself (``objective``, also of its config), else the next token."""
    config = getattr(model, "config", None)
    found = getattr(model, "objective", None) or getattr(config, "objective", None)
    if found is None:
        masked = huggingface.is_masked_class(type(model).__name__) or getattr(config, "causal", True) is False
        return "masked" if masked else "causal"
    if found not in get_args(Objective):
        raise SettingsError(f"--model {text}: expected objective 'causal' or 'masked', found {found!r}")
    answer: Objective = found
    return answer


def _find_function(text: str) -> Callable[[], nn.Module]:
    module_name, _, function_name = text.partition(":")
    here = str(Path.cwd())
    try:
        sys.path.append(here)  # as python -m would; the command's own script does not
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"--model {text}: expected module:function, found: {error}; is the module on PYTHONPATH?"
        ) from error
    except (Exception, SystemExit) as error:  # the module is the user's, and runs as it is imported
        raise SettingsError(
            f"--model {text}: expected a module that can be imported, found {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(here)

    return partial(_call, function, text)


def _call(function: Any, text: str) -> nn.Module:
    try:
        model = function()
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"--model {text}: expected a function without arguments that builds a model, found "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"--model {text}: expected an nn.Module to be returned, found {type(model).__name__}"
        )
    return model
