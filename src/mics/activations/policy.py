"""Which units are recomputed in the backward, and what of their activations goes to host memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mics.activations.offload import LEAST_NBYTES, Budget, Offloader
from mics.activations.saved import SavedInputs
from mics.errors import MicsError, SettingsError
from mics.schedule.events import Events
from mics.utils.deprecation import takes_old_fields
from mics.utils.tensor_trees import put_together, take_apart, tensors_in

Forward = Callable[..., Any]


def _offload_by_type(value: object) -> str:
    """The keyword for what ``offload`` used to mean by the type of its value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "offload"
    return "offload_bytes" if isinstance(value, int) else "offload_fraction"


@takes_old_fields(offload=_offload_by_type)
@dataclass(frozen=True, kw_only=True)
class Activations:
    """What happens to the activations of units.

    ``checkpoint``: "unit" computes units again in their backward, "none" none of them, a class of modules
    those of that class, and a callable those for which it returns True. Where that is no unit, modules with
    units inside are meant, which are recomputed as a whole. ``every``: with "unit", only every so
    many-th. ``offload``: what checkpoints save goes to host memory. ``offload_fraction``: only that of this
    fraction of the units, the first ones. ``offload_bytes``: only so many bytes at a time. Either of the two
    implies ``offload``.
    ``offload_uncheckpointed``: so does whatever else units save that are not recomputed; "auto" where
    none is. ``keep_last``: units whose activations stay on the device because backward needs them at once.
    ``preserve_rng_state`` recomputes with the random numbers of the first time (dropout), and
    ``check_determinism`` compares shapes and formats of what is recomputed with those of then.
    """

    checkpoint: Literal["unit", "none"] | type[nn.Module] | Callable[[nn.Module], bool] = "unit"
    every: int = 1
    offload: bool = False
    offload_fraction: float | None = None
    offload_bytes: int | None = None
    offload_uncheckpointed: Literal["auto"] | bool = "auto"
    keep_last: Literal["auto"] | int = "auto"
    preserve_rng_state: bool = True
    check_determinism: bool = True

    def __post_init__(self) -> None:
        self._check_checkpoint()
        self._check_offload()
        for name in ("preserve_rng_state", "check_determinism"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"Activations.{name}: expected a bool, found {getattr(self, name)!r}")

    def _check_checkpoint(self) -> None:
        chosen = self.checkpoint
        if not (callable(chosen) or (isinstance(chosen, str) and chosen in ("unit", "none"))):
            raise SettingsError(
                f'Activations.checkpoint: expected "unit", "none", a class of modules or a callable, found '
                f"{chosen!r}"
            )
        if isinstance(chosen, type) and not issubclass(chosen, nn.Module):
            raise SettingsError(f"Activations.checkpoint: expected a class of modules, found {chosen!r}")
        if not _is_count(self.every, least=1):
            raise SettingsError(f"Activations.every: expected a number from 1, found {self.every!r}")
        if self.every > 1 and chosen != "unit":
            raise SettingsError(
                f'Activations.every: expected 1 unless checkpoint is "unit", found {self.every} with '
                f"checkpoint={chosen!r}"
            )

    def _check_offload(self) -> None:
        fraction, nbytes, others = self.offload_fraction, self.offload_bytes, self.offload_uncheckpointed
        if not isinstance(self.offload, bool):
            raise SettingsError(
                f"Activations.offload: expected a bool, found {self.offload!r}; offload_fraction or "
                "offload_bytes says how much"
            )
        if fraction is not None and nbytes is not None:
            raise SettingsError(
                "Activations: expected offload_fraction or offload_bytes, found both "
                f"({fraction!r} and {nbytes!r}); give one of them"
            )
        if fraction is not None and not (_is_number(fraction) and 0 <= fraction <= 1):
            raise SettingsError(
                f"Activations.offload_fraction: expected a number from 0 to 1, found {fraction!r}; "
                "offload_bytes takes bytes"
            )
        is_none = _is_count(nbytes, least=0) and nbytes == 0
        if nbytes is not None and not (is_none or _is_count(nbytes, least=LEAST_NBYTES)):
            raise SettingsError(
                f"Activations.offload_bytes: expected 0 or a number of bytes from {LEAST_NBYTES} (smaller "
                f"tensors stay), found {nbytes!r}; offload_fraction takes a fraction"
            )
        if fraction is not None or nbytes is not None:  # that says whether anything leaves
            object.__setattr__(self, "offload", bool(fraction or nbytes))
        if not (isinstance(others, bool) or others == "auto"):
            raise SettingsError(
                f'Activations.offload_uncheckpointed: expected "auto", True or False, found {others!r}'
            )
        if self.keep_last != "auto" and not _is_count(self.keep_last, least=0):
            raise SettingsError(
                f'Activations.keep_last: expected "auto" or a number from 0, found {self.keep_last!r}'
            )

    def share(self) -> tuple[float | None, float]:
        """The fraction of units whose activations leave (None: all), and the most bytes of a forward."""
        nbytes = self.offload_bytes
        return self.offload_fraction, float("inf") if nbytes is None else float(nbytes)

    def takes(self, number: int, module: nn.Module) -> bool:
        """Whether the unit with this number is recomputed."""
        if self.checkpoint == "unit":
            return number % self.every == 0
        if isinstance(self.checkpoint, type):  # also inside what torch.compile put around it
            return isinstance(getattr(module, "_orig_mod", module), self.checkpoint)
        return callable(self.checkpoint) and bool(self.checkpoint(module))

    def taken(self, units: Sequence[nn.Module], around: Sequence[nn.Module]) -> dict[nn.Module, bool]:
        """Which units are recomputed; or, where none is meant, which modules ``around`` units are.

        Asked once: a callable may have its own ideas the second time.
        """
        found = {unit: self.takes(number, unit) for number, unit in enumerate(units)}
        if not isinstance(self.checkpoint, str) and not any(found.values()):
            found |= {module: True for module in around if self.takes(0, module)}
        asks = self.checkpoint != "none" or self.offload
        if asks and not any(recomputes or self.moves(recomputes=recomputes) for recomputes in found.values()):
            raise SettingsError(self._takes_none(units))
        return found

    def _takes_none(self, modules: Sequence[nn.Module]) -> str:
        if not modules:
            return (
                "activations: expected a model with units, found none; name its blocks: mics.shard(units=...)"
            )
        kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
        if isinstance(self.checkpoint, type):
            return (
                "Activations.checkpoint: expected a class of units, or of modules around units, found "
                f"{self.checkpoint.__name__}; units are: {kinds}"
            )
        return (
            "Activations.checkpoint: expected a callable that takes units, or modules around units, found "
            f"one that takes none of {len(modules)} units; they are: {kinds}"
        )

    def moves(self, *, recomputes: bool) -> bool:
        """Whether what a unit saves goes to host memory, as far as the other settings allow."""
        others = self.offload_uncheckpointed
        return self.offload and (recomputes or (self.checkpoint == "none" if others == "auto" else others))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Applied:
    """What was made of a policy."""

    offloader: Offloader | None  # what moves activations, if anything does
    inputs: SavedInputs | None  # what checkpoints keep, where nothing is moved
    recomputed: frozenset[nn.Module]  # in the backward


def apply_activations(
    policy: Activations,
    recomputed: Mapping[nn.Module, bool],
    *,
    device: torch.device,
    is_parameter: Callable[[Tensor], bool],
    events: Events,
    ranks_on_node: int,
) -> Applied:
    """Let the forwards of modules follow ``policy``, which computes some of them again."""
    moved = {module: policy.moves(recomputes=recomputes) for module, recomputes in recomputed.items()}
    outer = [module for module, recomputes in recomputed.items() if recomputes]
    inside = {inner for module in outer for inner in module.modules() if inner is not module}
    # Units may also call others that they do not hold as modules.
    cover = _Cover() if any(moved.values()) or inside.intersection(recomputed) else None
    offloader, inputs = None, None
    if any(moved.values()):
        fraction, limit = policy.share()
        keep_last = None if policy.keep_last == "auto" else policy.keep_last
        offloader = Offloader(
            device,
            Budget(fraction=fraction, limit=limit, keep_last=keep_last),
            num_units=sum(moves and module not in inside for module, moves in moved.items()),
            num_sharing=ranks_on_node,
        )
    elif outer:
        inputs = SavedInputs(sum(module not in inside for module in outer))
    for module, recomputes in recomputed.items():
        forward = module.forward
        if recomputes:
            forward = _computed_again(module, policy, inputs, cover, events)
        if outer:
            forward = _without_cache(module, forward, recomputes=recomputes)
        if moved[module]:
            assert offloader is not None
            forward = _moved(module, forward, offloader, is_parameter, cover)
        if forward is not module.forward:
            # Without gradients nothing is saved, and caches are there to be filled.
            module.forward = _with_gradients(module.forward, forward)
    return Applied(offloader, inputs, frozenset(outer))


def _with_gradients(plain: Forward, forward: Forward) -> Forward:
    @wraps(plain)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    return chosen


class _Cover:
    """On while a unit is at work that keeps nothing but its input: units in it keep nothing then."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def laid(self) -> Iterator[None]:
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before


def _leads_back(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a backward may come to this call: something that goes in needs a gradient, or a parameter.

    In frozen units before the first that is trained nothing does, and what they save nobody keeps.
    """
    given = (*args, *kwargs.values())
    return (
        torch.compiler.is_compiling()
        or any(isinstance(value, Tensor) and value.requires_grad for value in given)
        or any(param.requires_grad for param in module.parameters())
        or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
    )


def _moved(
    module: nn.Module,
    forward: Forward,
    offloader: Offloader,
    is_parameter: Callable[[Tensor], bool],
    cover: _Cover | None,
) -> Forward:
    """What it saves on its way to the host."""

    def moved(*args: Any, **kwargs: Any) -> Any:
        if cover is not None and cover.is_on:
            return forward(*args, **kwargs)
        if not _leads_back(module, args, kwargs):
            offloader.pass_over()
            return forward(*args, **kwargs)
        with offloader.saving(is_parameter):
            return forward(*args, **kwargs)

    return moved


def _computed_again(
    module: nn.Module, policy: Activations, inputs: SavedInputs | None, cover: _Cover | None, events: Events
) -> Forward:
    """Under a checkpoint."""
    forward = module.forward

    def run(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with nullcontext() if cover is None else cover.laid():
            return forward(*args, **kwargs)

    def under_checkpoint(call: Callable[..., Any], *values: Any) -> Any:
        return checkpoint(
            call,
            *values,
            use_reentrant=False,
            preserve_rng_state=policy.preserve_rng_state,
            determinism_check="default" if policy.check_determinism else "none",
        )

    def computed_again(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which follows arguments as they are, and no detours
            num_args, names = len(args), list(kwargs)

            def traced(*now: Any) -> Any:
                return run(now[:num_args], dict(zip(names, now[num_args:], strict=True)))

            return under_checkpoint(traced, *args, *kwargs.values())
        is_covered = cover is not None and cover.is_on
        # Under a cover the second time must be like the first, whatever has become of the inputs.
        if not is_covered and not _leads_back(module, args, kwargs):
            return forward(*args, **kwargs)
        rest, tensors = take_apart((args, kwargs))
        if inputs is not None and not is_covered:
            inputs.add(tensors)
        # The first time as it was called: the caller may want to see what is left in a list.
        at_first = [(args, kwargs)]

        def call(*values: Tensor) -> Any:
            if at_first:
                return run(*at_first.pop())
            with events.recomputing():
                return run(*put_together(rest, values))

        # Tensors in containers too, each by position: what a checkpoint does not see is not moved.
        return under_checkpoint(call, *tensors)

    return computed_again


def _is_cache(value: object) -> bool:
    """Whether it is where Hugging Face's layers keep keys and values for generation."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _without_cache(module: nn.Module, forward: Forward, *, recomputes: bool) -> Forward:
    """Computing again would write into a cache again. Training reads none, unless it began filled.

    Units that are not recomputed get none either: the others would take it for one that began filled.
    """
    module_forward = module.forward

    def without_cache(*args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if not caches:
            return forward(*args, **kwargs)
        if not module.training:  # it is there to be filled
            return module_forward(*args, **kwargs)
        length = max(cache.get_seq_length() for cache in caches)
        if length > 0 and recomputes:
            raise MicsError(
                "a cache of keys and values: expected it to be empty in a unit that is recomputed in its "
                f"backward, found {length} tokens; train without it, or leave the unit out "
                "(Activations.checkpoint)"
            )
        if length > 0:
            return forward(*args, **kwargs)
        _warn_about_cache()
        kept = {
            name: None if _is_cache(value) else False if name == "use_cache" else value
            for name, value in kwargs.items()
        }
        return forward(*(None if _is_cache(value) else value for value in args), **kept)

    return without_cache


@cache
def _warn_about_cache() -> None:
    warnings.warn(
        "mics.Activations: a cache of keys and values stays empty in training, because units are computed "
        "again; use_cache=False says that none is wanted",
        stacklevel=2,
    )
