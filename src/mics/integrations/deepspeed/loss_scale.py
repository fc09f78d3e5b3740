"""What the loss is multiplied by in float16, and how that follows overflows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mics.errors import MicsError

_FACTOR: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The ``fp16`` section: a scale that stays (``static`` above 0), or one that is looked for."""

    static: float = 0.0
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    least: float = 1.0


class LossScale:
    """The scale of a run: halved after ``hysteresis`` overflows, doubled after ``window`` calm steps."""

    def __init__(self, settings: LossScaling) -> None:
        self._settings = settings
        self.value = settings.static or 2.0**settings.initial_power
        self._patience = settings.hysteresis  # overflows that are left before it is halved
        self._num_steps = 0
        self._last_overflow = -1

    def update(self, *, overflowed: bool) -> None:
        """After a step, or one that was left out."""
        settings = self._settings
        if settings.static:
            return
        if overflowed:
            self._lower()
            self._last_overflow = self._num_steps
        else:
            calm = self._num_steps - self._last_overflow - 1  # steps before this one without an overflow
            due = calm > 0 and calm % settings.window == 0
            if due or settings.consecutive_hysteresis:
                self._patience = settings.hysteresis
            if due:
                self.value *= _FACTOR
        self._num_steps += 1

    def _lower(self) -> None:
        if self._patience > 1:
            self._patience -= 1
            return
        if self.value <= self._settings.least:
            raise MicsError(
                f"fp16.min_loss_scale: expected finite gradients at the least scale {self.value:g}, found an "
                "overflow; look for what is not finite with mics.nonfinite_units(model), or train in bf16"
            )
        self.value = max(self.value / _FACTOR, self._settings.least)

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "patience": self._patience,
            "num_steps": self._num_steps,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self._patience = int(state["patience"])
        self._num_steps = int(state["num_steps"])
        self._last_overflow = int(state["last_overflow"])
