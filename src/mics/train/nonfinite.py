"""Gradients with a NaN or an infinity: what happens then, on all ranks alike."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mics
from mics.train.config import OptimizerSettings


class NonfiniteError(mics.MicsError):
    """Gradients were not finite, and the settings say that this ends the run."""


class NonfinitePolicy:
    """Leaves out updates by gradients that are not finite, and says where they come from.

    The norm is that of all gradients of all ranks, so one number decides for everybody. The update is left
    out on the device (``found_inf``, as a gradient scaler does it): the host queues the optimizer's step
    before it waits for the norm, and the device has that to do meanwhile.

    With a scaler that is at work (float16), gradients that overflow are no news: it lowers its scale and the
    step is left out, as often in a row as the settings allow.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._settings = settings
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self.num_skipped = 0
        self._num_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` of."""
        scaled = self._scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        return scaled

    def unscale_(self) -> None:
        """After the last backward of a step: gradients as they are without the scale."""
        self._scaler.unscale_(self._optimizer)

    def step(self, norm: Tensor, step: int) -> str | None:
        """The optimizer's step, unless ``norm`` is not finite. Returns what to tell the user, if anything."""
        told = self._step(norm, step)
        self._scaler.update()
        return told

    def _step(self, norm: Tensor, step: int) -> str | None:
        if self._settings.nonfinite == "ignore" and not self._scaler.is_enabled():
            self._optimizer.step()
            return None
        # A fused optimizer reads it, changes nothing where it is 1, and takes its step count back.
        self._optimizer.found_inf = (~norm.isfinite()).to(torch.float32)  # type: ignore[attr-defined]
        on_host = _OnItsWay(norm)
        self._optimizer.step()
        return self._judge(on_host.read(), step)

    def _judge(self, norm: float, step: int) -> str | None:
        if math.isfinite(norm):
            self._num_in_a_row = 0
            return None
        units = ", ".join(mics.nonfinite_units(self._model))
        units = units or "no unit by itself (their norms overflow together)"
        found = f"step {step}: the norm of the gradients is {norm}, because of {units}"
        self.num_skipped += 1
        self._num_in_a_row += 1
        most = self._settings.max_skipped
        if self._settings.nonfinite == "stop" and not self._scaler.is_enabled():
            raise NonfiniteError(
                f"{found}; the parameters are those before this step. Expected finite gradients; lower "
                "optimizer.learning_rate or look at the data of this step, or go on with "
                "optimizer.nonfinite=skip"
            )
        if self._num_in_a_row > most:
            raise NonfiniteError(
                f"{found}; expected at most optimizer.max_skipped={most} such steps in a row, found "
                f"{self._num_in_a_row}; the parameters are those before the first of them"
            )
        return f"{found}; its update is left out ({self.num_skipped} so far)"

    def state_dict(self) -> dict[str, Any]:
        found = {"num_skipped": self.num_skipped, "num_in_a_row": self._num_in_a_row}
        return found | ({"scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_skipped, self._num_in_a_row = state["num_skipped"], state["num_in_a_row"]
        if self._scaler.is_enabled() and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])


class _OnItsWay:
    """A number of the device, to be read on the host when it is there."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value.detach()
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()  # for what came before the copy, not for all that is queued by now
        return float(self._value)
