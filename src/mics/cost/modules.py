"""Shapes of models that somebody has built: any nn.Module on the meta device, Hugging Face configs.

Sizes are exact, by the engine's own rule for units. Work is counted from the matrices: each is taken to be
multiplied once with every token. Activations are those of a transformer block with these matrices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
import torch.nn as nn

from mics.cost.compute import HALF_SPEED_WIDTH
from mics.cost.shapes import ModelShape, UnitKind, UnitShape, named_shape, shape_of_config
from mics.errors import SettingsError
from mics.layout.assign import ParamRef, Site, assign_sites
from mics.models.descriptions import ModelDescription, describe_model, heads_of, length_of, width_of

_BESIDE_MATRICES: Final = 7  # x width: input, norms, residual, and the attention's output twice
_TRAFFIC: Final = 18
_DEFAULT_LENGTH: Final = 2048


def find_model(description: str, *, seq_len: int | None = None) -> ModelShape:
    """A named size, a Hugging Face config or its folder, or ``module:function`` that builds an nn.Module."""
    found = describe_model(description)
    if found.gpt is not None:
        return named_shape(description, seq_len=seq_len)
    with torch.device("meta"):
        model = found.make()
    shape = shape_of_module(model, name=description, seq_len=seq_len)
    if shape.num_calls > 1:
        raise SettingsError(
            "--model: expected a model that calls each of its layers once, found layers that share weights "
            f"and are called {shape.num_calls} times; plan for a model of the same width and depth that does "
            "not share them, which takes the same time and activations"
        )
    return shape


def shape_of_description(found: ModelDescription) -> ModelShape:
    """The model as ``mics train`` builds it."""
    if found.gpt is not None:
        return shape_of_config(found.title, found.gpt)
    with torch.device("meta"):
        model = found.make()
    return shape_of_module(model, name=found.title, seq_len=found.seq_len)


def shape_of_module(model: nn.Module, *, name: str, seq_len: int | None = None) -> ModelShape:
    """What ``mics.shard(model)`` would divide."""
    config = getattr(model, "config", None)
    sites = assign_sites(model)
    width, heads = width_of(model), heads_of(model)
    length = seq_len or length_of(model) or _DEFAULT_LENGTH
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
        name=name,
        seq_len=length,
        units=tuple(units),
        vocab_size=max(vocabulary, default=int(tied or 0)),
        num_calls=_num_calls(config),
    )


def _num_calls(config: object) -> int:
    """ALBERT calls one layer twelve times, or a few layers some times each."""
    num_sets = getattr(config, "num_hidden_groups", None)
    return math.ceil(config.num_hidden_layers / num_sets) if num_sets else 1  # type: ignore[attr-defined]


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
