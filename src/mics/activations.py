"""Which units are computed again in the backward, and what of their activations goes to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

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

    def share(self) -> tuple[float | None, float]:
        """The fraction of units whose activations leave (None: all), and the most bytes of a forward."""
        if isinstance(self.offload, bool):
            return None, float("inf")
        return (
            (self.offload, float("inf")) if isinstance(self.offload, float) else (None, float(self.offload))
        )

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
        fraction, limit = policy.share()
        offloader = Offloader(
            device,
            fraction=fraction,
            limit=limit,
            keep_last=None if policy.keep_last == "auto" else policy.keep_last,
            num_units=len(modules),
            num_sharing=ranks_on_node,
        )
    for number, module in enumerate(modules):
        recompute = policy.takes(number, module)
        if recompute or offloader is not None:
            module.forward = _wrapped(module, policy if recompute else None, offloader, is_parameter)
    return offloader


def _is_cache(value: object) -> bool:
    """Whether it is where Hugging Face's layers keep keys and values for generation."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _without_cache(value: Any) -> Any:
    """Computing again would write into a cache again. Training reads none, unless it began filled."""
    if not _is_cache(value):
        return value
    length = value.get_seq_length()
    if length > 0:
        raise MicsError(
            "a cache of keys and values: expected it to be empty in a unit that is computed again in its "
            f"backward, found {length} tokens; train without it, or leave the unit out "
            "(Activations.checkpoint)"
        )
    return None


def _wrapped(
    module: nn.Module,
    policy: Activations | None,
    offloader: Offloader | None,
    is_parameter: Callable[[Tensor], bool],
) -> Callable[..., Any]:
    """The forward of ``module`` under a checkpoint (with a policy), what it saves on its way to the host."""
    forward = module.forward

    def compute_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert policy is not None
        num_args, names = len(args), list(kwargs)

        def run(*values: Any) -> Any:
            with offloader.covering() if offloader is not None else nullcontext():
                return forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        # By position: what comes by name would collide with the checkpoint's own names, and not be moved.
        return checkpoint(
            run,
            *(_without_cache(value) for value in args),
            *(_without_cache(value) if name != "use_cache" else False for name, value in kwargs.items()),
            use_reentrant=False,
            preserve_rng_state=policy.preserve_rng_state,
            determinism_check="default" if policy.check_determinism else "none",
        )

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Out of training a cache is there to be filled.
        generates = not module.training and any(map(_is_cache, (*args, *kwargs.values())))
        moves = offloader is not None and not offloader.is_covered
        with offloader.saving(is_parameter) if offloader is not None and moves else nullcontext():
            if policy is None or generates:
                return forward(*args, **kwargs)
            return compute_again(args, kwargs)

    return wrapped
