"""The loss of a language model from (tokens, targets), for any model that gives logits.

Causal: every token counts, so the mean over a rank's tokens, averaged over micro-steps and ranks, is the mean
over the step. Masked: the number of masked tokens differs between ranks and micro-steps, so each loss is
divided by the number of the whole step::

    loss of a micro-step = sum over its masked tokens x ranks / masked tokens of the step on all ranks

mics averages gradients over the ranks. Their sum over micro-steps is then the gradient of the mean over all
masked tokens of the step: what one process finds on the same sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from mics.comm.lanes import Work
from mics.engine import engine_of
from mics.models import GPT, cross_entropy
from mics.models.huggingface import Objective

IGNORED: Final = -100
"""The target of a token that does not count."""
Batch = tuple[Tensor, Tensor]


class LanguageModelling:
    """Losses and logits of one sharded model. All ranks call each method together."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.objective: Final = objective
        self._model = model
        self._options: dict[str, Any] = {}
        if objective == "causal" and "use_cache" in inspect.signature(model.forward).parameters:
            self._options["use_cache"] = False  # keys and values of earlier tokens: for generation alone

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits [batch, token, vocab]: what the model returns, or ``.logits`` of it."""
        output = self._model(tokens, **self._options)
        found: Tensor = getattr(output, "logits", output)
        return found

    def divisor(self, batches: Sequence[Batch]) -> Tensor | None:
        """What the losses of a step's batches are divided by; None: each by the number of its own tokens."""
        if self.objective == "causal":
            return None
        number = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum().float()
        engine = engine_of(self._model)
        label = "the number of masked tokens"
        engine.mesh.lanes.here(Work("world", "all-reduce", label)).submit(
            partial(engine.mesh.world.all_reduce, number, label)
        )
        # A step without a masked token has a loss of 0.
        return number.clamp(min=1.0) / engine.topology.world_size

    def loss(self, batch: Batch, *, divisor: Tensor | None, num_batches: int) -> Tensor:
        """The part of a step's loss that one of its ``num_batches`` batches has."""
        tokens, targets = batch
        if divisor is not None:
            return cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), divisor=divisor)
        return self._mean(tokens, targets) / num_batches

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Batch]) -> Tensor:
        """The loss of batches: its mean over the ranks is that over all of their tokens."""
        divisor = self.divisor(batches)
        if divisor is None:
            return torch.stack([self._mean(*batch) for batch in batches]).mean()
        losses = [self.loss(batch, divisor=divisor, num_batches=len(batches)) for batch in batches]
        return torch.stack(losses).sum()

    def _mean(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self._model, GPT):
            loss: Tensor = self._model(tokens, targets)
            return loss
        return cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
