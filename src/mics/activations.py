"""Which units are computed again in the backward, and what of their activations goes to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Final, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mics.errors import MicsError, SettingsError
from mics.offload import Offloader


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What happens to the activations of units.

    ``checkpoint``: "unit" computes units again in their backward, "none" none of them, and a callable those
    for which it returns True. ``every``: with "unit", only every so many-th. ``offload``: what checkpoints
    save (and what the other units save) goes to host memory: all of it, a fraction (float) or at most so many
    bytes (int) of a micro-step. ``keep_last``: units whose activations stay on the device because backward
    needs them at once. ``check_determinism`` compares shapes and formats of what is computed again with those
    of the first time.
    """

    checkpoint: Literal["unit", "none"] | Callable[[nn.Module], bool] = "unit"
    every: int = 1
    offload: bool | float | int = False
    keep_last: Literal["auto"] | int = "auto"
    preserve_rng_state: bool = True
    check_determinism: bool = True

    def __post_init__(self) -> None:
        chosen = self.checkpoint
        if not (chosen in ("unit", "none") or callable(chosen)):
            raise SettingsError(
                f'Activations.checkpoint: expected "unit", "none" or a callable, found {chosen!r}'
            )
        if not _is_count(self.every, least=1):
            raise SettingsError(f"Activations.every: expected a number from 1, found {self.every!r}")
        if self.every > 1 and chosen != "unit":
            raise SettingsError(
                f'Activations.every: expected 1 unless checkpoint is "unit", found {self.every} with '
                f"checkpoint={chosen!r}"
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
        if self.keep_last != "auto" and not _is_count(self.keep_last, least=0):
            raise SettingsError(
                f'Activations.keep_last: expected "auto" or a number from 0, found {self.keep_last!r}'
            )

    def budget(self, nbytes: int) -> float:
        """Bytes to offload of ``nbytes`` that a micro-step saves."""
        if isinstance(self.offload, bool):
            return float("inf") if self.offload else 0.0
        return self.offload * nbytes if isinstance(self.offload, float) else float(self.offload)

    def takes(self, number: int, module: nn.Module) -> bool:
        """Whether the unit with this number is computed again."""
        if self.checkpoint == "unit":
            return number % self.every == 0
        return callable(self.checkpoint) and bool(self.checkpoint(module))


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def apply_activations(
    policy: Activations,
    modules: Sequence[nn.Module],
    *,
    device: torch.device,
    is_parameter: Callable[[Tensor], bool],
    ranks_on_node: int,
) -> Offloader | None:
    """Let the forwards of ``modules`` follow ``policy``. What moves their activations, if anything does."""
    offloader = None
    if policy.offload:
        offloader = Offloader(
            device,
            budget=policy.budget,
            keep_last=None if policy.keep_last == "auto" else policy.keep_last,
            num_units=len(modules),
            num_sharing=ranks_on_node,
        )
    for number, module in enumerate(modules):
        recompute = policy.takes(number, module)
        if recompute or offloader is not None:
            saving = nullcontext if offloader is None else partial(offloader.saving, is_parameter)
            module.forward = _wrapped(module.forward, policy if recompute else None, saving)
    return offloader


# What Hugging Face's layers call the keys and values that they keep for generation.
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Computing again would write into a cache again. Training reads none, unless it began filled."""
    caches = {name: kwargs[name] for name in _CACHES if kwargs.get(name) is not None}
    for name, cache in caches.items():
        length = getattr(cache, "get_seq_length", None)
        if length is not None and length() > 0:
            raise MicsError(
                f"{name}: expected an empty cache in a unit that is computed again in its backward, found "
                f"{length()} tokens; train without it, or leave this unit out (Activations.checkpoint)"
            )
    if not caches and not kwargs.get("use_cache"):
        return kwargs
    return {**kwargs, **dict.fromkeys(caches), **({"use_cache": False} if "use_cache" in kwargs else {})}


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
            kwargs = _without_caches(kwargs)
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                preserve_rng_state=policy.preserve_rng_state,
                determinism_check="default" if policy.check_determinism else "none",
                **kwargs,
            )

    return wrapped
