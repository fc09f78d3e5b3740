"""Which entries an optimizer keeps for a parameter, found by a step of its own class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# How an optimizer computes, not what: the one that is there knows what fits its device.
IMPLEMENTATION: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})


def is_per_element(optimizer: Optimizer, param: Tensor, entry: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry of the state of ``param`` has a value for each element of a tensor of ``shape``.

    The shape tells, but where it has no dimensions: there a number looks alike.
    """
    if not isinstance(value, Tensor) or value.shape != torch.Size(shape):
        return False
    if value.dim():
        return True
    group = next(group for group in optimizer.param_groups if any(each is param for each in group["params"]))
    made = state_after_a_step(optimizer, group)
    if made is None:
        return entry != "step"
    return isinstance(made.get(entry), Tensor) and made[entry].dim() > 0


def state_after_a_step(optimizer: Optimizer, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What torch's own optimizers keep for a parameter: found by a step of one element. None: not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None  # a step of somebody else's may do anything
    param = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    param.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    taken = inspect.signature(kind).parameters.keys() - IMPLEMENTATION - {"params"}
    try:
        trial = kind([param], **{key: value for key, value in settings.items() if key in taken})
        with torch.no_grad():
            inspect.unwrap(kind.step)(trial)  # without the hooks that are around every step
    except Exception:  # whatever these settings raise, they say nothing of the state
        return None
    return {key: value for key, value in trial.state[param].items() if value is not None}
