"""Shapes of models that somebody has built: any nn.Module on the meta device, Hugging Face configs.

Sizes are exact, by the engine's own rule for units. Work is counted from the matrices: each is taken to be
multiplied once with every token. Activations are those of a transformer block with these matrices.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn as nn

from mics.cost.compute import HALF_SPEED_WIDTH
from mics.cost.shapes import ModelShape, UnitKind, UnitShape, named_shape
from mics.errors import SettingsError
from mics.layout.assign import ParamRef, Site, assign_sites

_WIDTH_NAMES: Final = ("hidden_size", "n_embd", "d_model", "dim")
_LENGTH_NAMES: Final = ("max_position_embeddings", "n_positions", "seq_len", "max_seq_len")
_HEADS_NAMES: Final = ("num_attention_heads", "n_head", "num_heads")
_BESIDE_MATRICES: Final = 7  # x width: input, norms, residual, and the attention's output twice
_TRAFFIC: Final = 18
_DEFAULT_LENGTH: Final = 2048


def find_model(description: str, *, seq_len: int | None = None) -> ModelShape:
    """A named size, a Hugging Face ``config.json``, or ``module:function`` that builds an nn.Module."""
    if description.endswith(".json"):
        return shape_of_module(_from_config_file(Path(description)), name=description, seq_len=seq_len)
    if ":" in description:
        return shape_of_module(_from_function(description), name=description, seq_len=seq_len)
    return named_shape(description, seq_len=seq_len)


def shape_of_module(model: nn.Module, *, name: str, seq_len: int | None = None) -> ModelShape:
    """What ``mics.shard(model)`` would divide."""
    config = getattr(model, "config", None)
    sites = assign_sites(model)
    width = _attribute(config, _WIDTH_NAMES) or _width_of(sites)
    length = seq_len or _attribute(config, _LENGTH_NAMES) or _DEFAULT_LENGTH
    heads = _attribute(config, _HEADS_NAMES) or max(1, width // 128)
    modules = {site.module for site in sites}
    units = [
        replace(
            _unit(site, width=width, length=length, heads=heads),
            is_held=any(module in modules for module in site.module.modules() if module is not site.module),
        )
        for site in sites
    ]
    vocabulary = [unit.numel // width for unit in units if unit.kind == "head"]
    tied = getattr(config, "vocab_size", 0) if not vocabulary else 0
    return ModelShape(
        name=name, seq_len=length, units=tuple(units), vocab_size=max(vocabulary, default=int(tied or 0))
    )


def _unit(site: Site, *, width: int, length: int, heads: int) -> UnitShape:
    lookups = {
        id(param)
        for module in site.module.modules()
        if isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    numel = sum(ref.param.numel() for ref in site.params)
    # Tied weights are looked up at one end and multiplied at the other.
    matrices = [
        ref.param.shape
        for ref in site.params
        if ref.param.dim() >= 2 and (id(ref.param) not in lookups or len(ref.places) > 1)
    ]
    flops = sum(2.0 * shape.numel() for shape in matrices)
    kind = _kind(site, lookups=bool(lookups), matrices=matrices, width=width)
    is_block = kind == "block"
    outputs = sum(_outputs(ref) for ref in site.params if ref.param.dim() >= 2)
    return UnitShape(
        name=site.name or type(site.module).__name__,
        kind=kind,
        numel=numel,
        matrix_flops=flops,
        attention_flops=4.0 * length * width if is_block else 0.0,
        width=_width_for_speed(matrices),
        input_numel=width if is_block or kind in ("head", "other") else 0,
        saved_numel=outputs + _BESIDE_MATRICES * width if is_block else width if kind != "embedding" else 0,
        traffic_numel=_TRAFFIC * width if is_block else 2 * width,
        score_numel=heads * length if is_block else 0,
    )


def _kind(site: Site, *, lookups: bool, matrices: list[torch.Size], width: int) -> UnitKind:
    if site.is_block:
        return "block"
    if lookups and not matrices:
        return "embedding"
    vocabulary = [shape for shape in matrices if max(shape) > 4 * width]
    return "head" if vocabulary else "other"


def _width_for_speed(matrices: list[torch.Size]) -> int:
    """One width that is as fast as these matrices together: a narrow one counts by its part of the work."""
    work = sum(shape.numel() for shape in matrices)
    if not work:
        return 0
    slowness = sum(shape.numel() * (1 + HALF_SPEED_WIDTH / min(shape)) for shape in matrices) / work
    return round(HALF_SPEED_WIDTH / (slowness - 1))


def _outputs(ref: ParamRef) -> int:
    """Elements of a token that a matrix gives. torch's own have them in front, others behind."""
    module, _ = ref.places[0]
    return int(ref.param.shape[0 if isinstance(module, nn.Linear) else -1])


def _width_of(sites: list[Site]) -> int:
    sides = [min(ref.param.shape) for site in sites for ref in site.params if ref.param.dim() >= 2]
    if not sides:
        raise SettingsError("--model: expected a model with matrices, found none among its parameters")
    return max(set(sides), key=sides.count)


def _attribute(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _from_config_file(path: Path) -> nn.Module:
    try:
        described = json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--model {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--model {path}: expected JSON, found: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise SettingsError(
            f"--model {path}: expected a Hugging Face config with model_type, found "
            f"{sorted(described) if isinstance(described, dict) else type(described).__name__}"
        )
    try:
        import transformers
    except ImportError as error:
        raise SettingsError(
            f"--model {path}: expected the package transformers to read a config, found none; install it"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**described)
        kinds: tuple[Any, ...] = (
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForMaskedLM,
            transformers.AutoModelForSeq2SeqLM,
            transformers.AutoModel,
        )
        kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[-1])
        with torch.device("meta"):
            model: nn.Module = kind.from_config(config)
    except Exception as error:
        raise SettingsError(f"--model {path}: transformers cannot build it: {error}") from error
    return model


def _from_function(description: str) -> nn.Module:
    module_name, _, function_name = description.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"--model {description}: expected module:function, found: {error}; is the module on PYTHONPATH?"
        ) from error
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise SettingsError(
            f"--model {description}: expected a function without arguments that builds a model, found "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"--model {description}: expected an nn.Module to be returned, found {type(model).__name__}"
        )
    return model
