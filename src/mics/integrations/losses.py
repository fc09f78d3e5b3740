"""Which losses of a trainer of transformers count what, so that all ranks together have that of one process.

The trainer hands the number of items of a step (of all ranks and micro-steps) to whoever makes the loss, and
the mean over ranks is what trains::

    made with the number     a share, multiplied by the number of ranks: the mean over ranks is their sum
    made without             a mean over the rank's own items, which counts by their number

Which of both it is shows when a loss is made for the first time: number and setting note that they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn as nn
from torch import Tensor

from mics.guard import plainly

IGNORED: Final = -100  # a label that no loss of transformers counts
_LOOKED_AT: Final = ("__get__", "is_floating_point", "is_complex", "dim", "size", "numel")
_MOVED: Final = ("to", "cpu", "cuda", "float", "detach", "clone")


class _NumItems(Tensor):
    """Notes that somebody computes with it; to look at it, to move and to cast it is nothing."""

    note: _Note

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plainly():
            found = func(*args, **(kwargs or {}))
        watched = next((arg for arg in args if isinstance(arg, cls)), None)
        if watched is None or func.__name__ in _LOOKED_AT:
            return found
        if func.__name__ not in _MOVED:
            watched.note.is_used = True
            return found
        moved = found.as_subclass(cls)
        moved.note = watched.note
        return moved


class _Note:
    """A setting that is on; notes that somebody asked whether it is."""

    is_used = False

    def __bool__(self) -> bool:
        self.is_used = True
        return True


@dataclass
class Loss:
    """A loss while it is made."""

    number: Any  # of items, to be handed in
    has_number: bool  # it is made with the number
    is_multiplied: bool = False  # by the number of ranks, though it is made without the number


@contextmanager
def _handed_on(trainer: Any, model: nn.Module) -> Iterator[_Note]:
    """Notes that the model, or the function that makes the loss, is given the number of items."""
    note, make = _Note(), trainer.compute_loss_func

    def look(module: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
        note.is_used |= given.get("num_items_in_batch") is not None

    def make_and_look(*args: Any, **given: Any) -> Any:
        note.is_used |= given.get("num_items_in_batch") is not None
        return make(*args, **given)

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.compute_loss_func = make_and_look if make is not None else None
    try:
        yield note
    finally:
        handle.remove()
        trainer.compute_loss_func = make


class LossWatch:
    """Finds out with the first loss of training, and the first of evaluation, how they are made."""

    def __init__(self) -> None:
        self._has_number: dict[bool, bool] = {}

    @contextmanager
    def making(self, trainer: Any, model: nn.Module, number: Any, is_training: bool) -> Iterator[Loss]:
        """The trainer multiplies by the number of ranks where its arguments say so: only with the number."""
        args = trainer.args
        average = args.average_tokens_across_devices
        known = self._has_number.get(is_training)
        if not isinstance(number, Tensor):
            yield Loss(number, has_number=number is not None)
            return
        if known is not None:
            args.average_tokens_across_devices = average and known
            try:
                yield Loss(number, known)
            finally:
                args.average_tokens_across_devices = average
            return
        items, asked = number.as_subclass(_NumItems), _Note()
        items.note = _Note()
        loss = Loss(items, has_number=False)
        if average:
            args.average_tokens_across_devices = asked
        try:
            # Code that is compiled for it would take no plain number.
            with torch.compiler.set_stance("force_eager"), _handed_on(trainer, model) as handed_on:
                yield loss
        finally:
            args.average_tokens_across_devices = average
        is_used = torch.tensor(items.note.is_used, dtype=torch.float32, device=number.device)
        used = trainer.accelerator.reduce(is_used, "sum")
        loss.has_number = self._has_number[is_training] = bool(used)  # some rank may have had no labels
        # Who asked multiplies if it has the number; without, it asked in vain.
        loss.is_multiplied = asked.is_used and handed_on.is_used and not loss.has_number


def num_items(
    inputs: Any, labels: list[str], *, is_shifted: bool, per_row: bool, ignored: int
) -> Tensor | None:
    """How many items the loss of a batch is a mean of; None where its labels cannot be counted.

    ``is_shifted``: that of a token is the loss of the next one. ``per_row``: it is a mean over rows.
    """
    if not has_labels(inputs, labels):
        return None
    found: Tensor = inputs.get("shift_labels", inputs[labels[0]])
    if per_row or len(labels) > 1:  # several of one sample each, as the two ends of an answer
        return torch.tensor(len(found), dtype=torch.int64, device=found.device)
    if "shift_labels" not in inputs and found.dim() > 1 and is_shifted:
        found = found[..., 1:]
    if found.is_floating_point():
        return torch.tensor(found.numel(), dtype=torch.int64, device=found.device)
    return (found.ne(IGNORED) & found.ne(ignored)).sum()


def has_labels(inputs: Any, labels: list[str]) -> bool:
    """Whether ``inputs`` have a tensor of each of ``labels``, of a row or more per sample."""
    if not isinstance(inputs, Mapping) or not labels:  # TRL passes lists of prompts
        return False
    found = [inputs.get(name) for name in labels]
    return all(isinstance(each, Tensor) and each.dim() > 0 for each in found)
