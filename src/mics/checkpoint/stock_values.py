"""Values that are not tensors, written the way torch.distributed.checkpoint looks for them.

``dcp.load`` into the state dicts of FSDP2 asks for every entry of the optimizer's ``param_groups``, pickled.
So they are written, beside the index, which has them too. mics itself never reads them.

    optimizer.param_groups.0.lr          in the nested form: by the group's number
    optimizer.param_groups.a.bias.lr     in the flattened form: by parameter
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mics.checkpoint.contents import MODEL, OPTIMIZER


@dataclass(frozen=True, kw_only=True)
class StockValues:
    """Pickled values by name, and further names that mean the same value."""

    pickled: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def stock_values(groups: Sequence[Mapping[str, Any]] | None, module_state: Mapping[str, Any]) -> StockValues:
    """An optimizer's settings (parameters by name) and what modules returned from get_extra_state."""
    pickled = {MODEL + name: _pickled(value) for name, value in module_state.items()}
    aliases = {}
    for number, group in enumerate(groups or ()):
        for key, value in group.items():
            name = f"{OPTIMIZER}param_groups.{number}.{key}"
            pickled[name] = _pickled(value)
            if key != "params":
                aliases.update({f"{OPTIMIZER}param_groups.{param}.{key}": name for param in group["params"]})
    # A parameter may be called 0: then the group's number is what the name means.
    return StockValues(
        pickled=pickled, aliases={alias: name for alias, name in aliases.items() if alias not in pickled}
    )


def nested_path(name: str) -> tuple[str | int, ...]:
    """Where a name belongs in the nested dicts that DCP's tools make.

    model.a.bias: model, a.bias. optimizer.state.a.bias.step: optimizer, state, a.bias, step.
    """
    first, _, rest = name.partition(".")
    if f"{first}." != OPTIMIZER:
        return (first, rest) if rest else (first,)
    kind, _, within = rest.partition(".")
    if kind == "state":
        return first, kind, *within.rsplit(".", 1)
    number, _, key = within.partition(".")
    if number.isdigit() and key and "." not in key:
        return first, kind, int(number), key
    return first, rest


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value.detach().cpu() if isinstance(value, Tensor) else value, stream)
    return stream.getvalue()
