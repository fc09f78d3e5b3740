"""The training loop of every system that is an ``nn.Module`` and a torch optimizer."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mics.bench.job import Job
from mics.bench.phases import begin
from mics.bench.systems.protocol import Batch, check_batches

Microsteps = Callable[[Any, Sequence[Batch]], Iterator[Batch]]
"""(model, batches) -> the batches again, one a micro-step, the last one announced to the model."""


def adamw(model: nn.Module, job: Job) -> torch.optim.AdamW:
    """The optimizer of every job."""
    return torch.optim.AdamW(
        model.parameters(), lr=job.learning_rate, fused=True if job.device == "cuda" else None
    )


def clip_sharded(model: nn.Module, max_norm: float) -> None:
    """Clip gradients that are whole on every rank, or DTensors, which add up their norms themselves."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Loop:
    """A ``Trainer`` that is told how its system learns of the last micro-step and how it clips."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        *,
        microsteps: Microsteps,
        clip: Callable[[nn.Module, float], object] = clip_sharded,
        same_start: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.same_start = same_start
        self._job = job
        self._model = model
        self._microsteps = microsteps
        self._clip = clip
        self._optimizer = optimizer or adamw(model, job)
        self._scaler = torch.amp.GradScaler(job.device, enabled=job.scales_loss)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        check_batches(self._job, batches)
        losses = []
        for number, (tokens, targets) in enumerate(self._microsteps(self._model, batches)):
            begin("forward", number)
            loss = self._model(tokens, targets) / len(batches)
            begin("backward", number)
            self._scaler.scale(loss).backward()
            losses.append(loss.detach())
        begin("optimizer")
        if self._job.max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            self._clip(self._model, self._job.max_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum()

    def close(self) -> None:
        del self._model, self._optimizer
        gc.collect()  # hooks tie a model into reference cycles: its memory would count for the next system
