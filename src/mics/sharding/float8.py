"""Weights of torchao's ``Float8Linear`` that are gathered in 8 bits, with one scale each.

``Float8LinearConfig(enable_fsdp_float8_all_gather=True)`` wraps a weight in a tensor that says so. Masters
stay in float32. A weight's scale comes from its largest element, on whichever rank that is. Modules see
torchao's own float8 tensor over the gathered memory, so they do not cast again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import SettingsError
from mics.layout.assign import ParamRef
from mics.layout.flat import UnitLayout

if TYPE_CHECKING:
    from mics.sharding.unit import Unit

_PLAIN = "convert the model with Float8LinearConfig(enable_fsdp_float8_all_gather=False)"


@dataclass(frozen=True, kw_only=True)
class Float8Format:
    """How weights of a unit are gathered, and what modules take them for."""

    dtype: torch.dtype
    seen_dtype: torch.dtype
    """Of results and gradients."""
    power_of_2: bool
    """Whether scales are rounded to powers of 2."""

    @classmethod
    def of(cls, ref: ParamRef, seen_dtype: torch.dtype) -> Float8Format | None:
        """Of one parameter; None for those that are gathered in a dtype of torch's."""
        if not is_float8_weight(ref.param):
            return None
        weight: Any = ref.param
        config: Any = ref.places[0][0].config
        return cls(dtype=weight._dtype, seen_dtype=seen_dtype, power_of_2=config.round_scales_to_power_of_2)


def is_float8_weight(param: Tensor) -> bool:
    """Whether torchao has marked it as one to be gathered in float8."""
    torchao = sys.modules.get("torchao.float8.fsdp_utils")  # whoever converted the model has imported it
    return torchao is not None and isinstance(param, torchao.WeightWithDynamicFloat8CastTensor)


def plain_of(param: Tensor) -> Tensor:
    """What has the values of a parameter: it itself, or what torchao has wrapped."""
    return param._tensor if is_float8_weight(param) else param  # type: ignore[attr-defined]


def marks_of(param: Tensor) -> dict[str, Any]:
    """What users hung on a parameter."""
    marks = dict(param.__dict__)
    if is_float8_weight(param):
        for own in ("_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale", "_is_param"):
            marks.pop(own, None)
    return marks


def memory_behind(tensor: Tensor) -> Tensor:
    """The memory of a tensor that modules see."""
    return tensor._data if _is_shown(tensor) else tensor  # type: ignore[attr-defined]


def _is_shown(tensor: Tensor) -> bool:
    torchao = sys.modules.get("torchao.float8.float8_training_tensor")
    return torchao is not None and isinstance(tensor, torchao.Float8TrainingTensor)


def check_weights(model: nn.Module) -> None:
    """Raise if a weight that is to be gathered in float8 cannot be."""
    for name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None and is_float8_weight(param):
                _check_weight(f"{name}.{attribute}".removeprefix("."), module, param)


def _check_weight(name: str, module: nn.Module, param: Any) -> None:
    from torchao.float8.float8_linear import Float8Linear

    if not isinstance(module, Float8Linear):
        found, remedy = f"it in a {type(module).__name__}", "leave that module out with module_filter_fn"
    elif not param.requires_grad:
        found, remedy = "it frozen", f"freeze it after mics.shard(), or {_PLAIN}"
    elif param._dtype is not torch.float8_e4m3fn:
        found, remedy = f"it in {param._dtype}", _PLAIN
    elif _scaling(module.config) != ("dynamic", "tensorwise"):
        found, remedy = f"{' '.join(_scaling(module.config))} scaling", _PLAIN
    else:
        return
    raise SettingsError(
        f"mics.shard: {name!r} is to be gathered in float8 (enable_fsdp_float8_all_gather): expected a "
        "trainable weight of a Float8Linear in torch.float8_e4m3fn with dynamic tensorwise scaling, found "
        f"{found}; {remedy}"
    )


def _scaling(config: Any) -> tuple[str, str]:
    cast = config.cast_config_weight
    return cast.scaling_type.value, cast.scaling_granularity.value


class Float8Scales:
    """One scale for each weight of a unit, equal on all ranks. Values are multiplied by it to be cast."""

    def __init__(self, layout: UnitLayout, format: Float8Format, device: torch.device) -> None:
        self._layout = layout
        self._format = format
        self.values = torch.ones(len(layout.slots), dtype=torch.float32, device=device)
        self.are_new = False  # those of the next refresh

    def largest(self, values: Tensor, span: range) -> Tensor:
        """The largest absolute value of each weight, as far as it is in ``values``, which lie at ``span``."""
        found = torch.zeros_like(self.values)
        parts = self._parts(values, span)
        if parts:
            norms = torch._foreach_norm([part for _, part in parts], math.inf)
            for (index, _), norm in zip(parts, norms, strict=True):
                found[index].copy_(norm)
        return found

    def set(self, largest: Tensor) -> None:
        """Take the scales for these largest absolute values."""
        from torchao.float8.float8_utils import amax_to_scale

        self.values.copy_(amax_to_scale(largest, self._format.dtype, self._format.power_of_2))

    def cast(self, out: Tensor, values: Tensor, span: range) -> None:
        """Bring ``values``, which lie at ``span``, to ``out`` in float8."""
        from torchao.float8.float8_utils import to_fp8_saturated

        for (index, part), (_, place) in zip(self._parts(values, span), self._parts(out, span), strict=True):
            scaled = part.to(torch.float32) * self.values[index]
            place.copy_(to_fp8_saturated(scaled, self._format.dtype))

    def _parts(self, values: Tensor, span: range) -> list[tuple[int, Tensor]]:
        """What is there of each weight, by its number."""
        overlaps = [slot.overlap(span) for slot in self._layout.slots]
        return [
            (index, values[overlap.start - span.start : overlap.stop - span.start])
            for index, overlap in enumerate(overlaps)
            if len(overlap)
        ]


def scale_together(units: Sequence[Unit]) -> None:
    """Have the ranks agree on new scales for the next refresh of ``units``, by one reduction for all.

    The host waits for nothing on a GPU.
    """
    scaled = [(unit, unit.masters.scales) for unit in units]
    for groups in dict.fromkeys(unit.groups for unit in units):
        new = [(u, s) for u, s in scaled if s is not None and not s.are_new and u.groups is groups]
        if not new:
            continue
        spans = [unit.share.master_span(unit.spec) for unit, _ in new]
        each = [s.largest(unit.masters.flat, span) for (unit, s), span in zip(new, spans, strict=True)]
        largest = torch.cat(each)
        groups.members.all_reduce(largest, "the largest elements of float8 weights", maximum=True)
        for (_, scales), part in zip(new, largest.split([len(one) for one in each]), strict=True):
            scales.set(part)
            scales.are_new = True


def whole_weight(view: Tensor, scale: Tensor, ref: ParamRef, format: Float8Format) -> nn.Parameter:
    """What a ``Float8Linear`` takes for a weight that is cast: gathered memory, and its scale."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    how: Any = ref.param
    found = Float8TrainingTensor(
        view, scale, format.seen_dtype, how._linear_mm_config, gemm_input_role=GemmInputRole.WEIGHT
    )
    return nn.Parameter(found)


def move_weight(weight: nn.Parameter, view: Tensor) -> None:
    """Have it elsewhere in memory."""
    if _is_shown(weight):
        weight._data = view  # type: ignore[attr-defined]
    else:
        weight.data = view


def as_sent(values: Tensor) -> Tensor:
    """What collectives take for ``values``: not every backend knows float8."""
    is_float8 = values.dtype.is_floating_point and values.dtype.itemsize == 1
    return values.view(torch.uint8) if is_float8 else values
