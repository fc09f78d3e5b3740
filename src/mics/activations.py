"""Which units are computed again in the backward, and what of their activations goes to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mics.errors import SettingsError
from mics.offload import Offloader


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What happens to the activations of units.

    ``checkpoint``: "unit" computes each unit again in its backward, "none" none, a number every so many-th,
    and a callable those for which it returns True. ``offload``: what checkpoints save (and what the other
    units save) goes to host memory: all of it, a fraction (float) or at most so many bytes (int) of a
    micro-step. ``keep_last``: saved tensors that stay on the device because backward needs them at once.
    """

    checkpoint: Literal["unit", "none"] | int | Callable[[nn.Module], bool] = "unit"
    offload: bool | float | int = False
    keep_last: Literal["auto"] | int = "auto"
    preserve_rng_state: bool = True
    check_determinism: bool = True

    def __post_init__(self) -> None:
        chosen = self.checkpoint
        is_count = isinstance(chosen, int) and not isinstance(chosen, bool) and chosen >= 1
        if not (chosen in ("unit", "none") or is_count or callable(chosen)):
            raise SettingsError(
                'Activations.checkpoint: expected "unit", "none", a number from 1 or a callable, '
                f"found {chosen!r}"
            )
        if isinstance(self.offload, bool | int):
            right = self.offload >= 0
        else:
            right = isinstance(self.offload, float) and 0.0 <= self.offload <= 1.0
        if not right:
            raise SettingsError(
                "Activations.offload: expected a bool, a fraction from 0.0 to 1.0 or a number of bytes, "
                f"found {self.offload!r}"
            )
        keep = self.keep_last
        if keep != "auto" and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise SettingsError(f'Activations.keep_last: expected "auto" or a number from 0, found {keep!r}')

    def budget(self, nbytes: int) -> float:
        """Bytes to offload of ``nbytes`` that a micro-step saves."""
        if isinstance(self.offload, bool):
            return float("inf") if self.offload else 0.0
        return self.offload * nbytes if isinstance(self.offload, float) else float(self.offload)

    def takes(self, number: int, module: nn.Module) -> bool:
        """Whether the unit with this number is computed again."""
        if self.checkpoint == "unit":
            return True
        if self.checkpoint == "none":
            return False
        if isinstance(self.checkpoint, int):
            return number % self.checkpoint == 0
        assert callable(self.checkpoint)
        return bool(self.checkpoint(module))


def apply_activations(
    policy: Activations,
    modules: Sequence[nn.Module],
    *,
    device: torch.device,
    is_parameter: Callable[[Tensor], bool],
) -> Offloader | None:
    """Let the forwards of ``modules`` follow ``policy``. What moves their activations, if anything does."""
    offloader = None
    if policy.offload:
        horizon = 1 if policy.keep_last == "auto" else max(1, policy.keep_last)
        offloader = Offloader(
            device,
            budget=policy.budget,
            keep_last=1 if policy.keep_last == "auto" else policy.keep_last,
            horizon=horizon,
        )
    for number, module in enumerate(modules):
        recompute = policy.takes(number, module)
        if recompute or offloader is not None:
            saving = nullcontext if offloader is None else partial(offloader.saving, is_parameter)
            module.forward = _wrapped(module.forward, policy if recompute else None, saving)
    return offloader


def _wrapped(
    forward: Callable[..., Any],
    policy: Activations | None,
    saving: Callable[[], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """``forward`` under a checkpoint (with a policy), and with what it saves in ``saving``."""

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with saving():
            if policy is None:
                return forward(*args, **kwargs)
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                preserve_rng_state=policy.preserve_rng_state,
                determinism_check="default" if policy.check_determinism else "none",
                **kwargs,
            )

    return wrapped
