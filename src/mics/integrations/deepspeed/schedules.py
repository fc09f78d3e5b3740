"""DeepSpeed's learning-rate schedules by their names in a config, as torch schedulers.

The first optimizer step runs at the lowest rate, and the second one is where the schedule counts from 0: that
is how DeepSpeed counts, so a run that moves here keeps its rates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mics.errors import SettingsError

Warmup = Literal["log", "linear"]
DEEPSPEED_STATE: Final = frozenset({"last_batch_iteration"})
"""What DeepSpeed's schedules save."""


class Schedule(LRScheduler):
    """A schedule whose state is where it stands: what it follows is the config's of each run."""

    def state_dict(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("last_epoch", "_step_count", "_last_lr")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of ``state_dict``, or of DeepSpeed's schedule with the same name."""
        if state_dict.keys() != DEEPSPEED_STATE:
            super().load_state_dict(state_dict)
            return
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1  # it is -1 before the first step
        self._step_count = self.last_epoch + 1
        self._last_lr = [float(rate) for rate in self.get_lr()]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` up to ``warmup_max_lr`` (None: the optimizer's own rates), which then stays."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
    ) -> None:
        num_groups = len(optimizer.param_groups)
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.lowest = _per_group(warmup_min_lr, num_groups, "warmup_min_lr")
        self.highest = (
            own if warmup_max_lr is None else _per_group(warmup_max_lr, num_groups, "warmup_max_lr")
        )
        self.rise = _Rise(warmup_num_steps, warmup_type)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        share = self._share(self.last_epoch - 1) if self.last_epoch > 0 else 0.0
        return [low + (high - low) * share for low, high in zip(self.lowest, self.highest, strict=True)]

    def _share(self, step: int) -> float:
        return self.rise(step) if step < self.rise.num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """As ``WarmupLR``, then a straight line down to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
    ) -> None:
        self.total_num_steps = _count(total_num_steps, "total_num_steps")
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
        )

    def _share(self, step: int) -> float:
        if step < self.rise.num_steps:
            return self.rise(step)
        return max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - self.rise.num_steps))


class WarmupCosineLR(Schedule):
    """Shares of the optimizer's own rates: a rise from ``warmup_min_ratio``, half a cosine down."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Warmup = "log",
    ) -> None:
        self.total_num_steps = _count(total_num_steps, "total_num_steps")
        self.first_share = _number(warmup_min_ratio, "warmup_min_ratio")
        self.last_share = _number(cos_min_ratio, "cos_min_ratio")
        self.rise = _Rise(warmup_num_steps, warmup_type)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        share = self._share(self.last_epoch - 1) if self.last_epoch > 0 else 0.0
        return [base * share for base in self.base_lrs]

    def _share(self, step: int) -> float:
        if step < self.rise.num_steps:
            return self.first_share + (1.0 - self.first_share) * self.rise(step)
        left = max(1, self.total_num_steps - self.rise.num_steps)
        done = min(1.0, (step - self.rise.num_steps + 1) / left)
        return self.last_share + (1.0 - self.last_share) * (1.0 + math.cos(math.pi * done)) / 2


class _Rise:
    """From 0 to 1 over the warmup."""

    def __init__(self, num_steps: int, kind: Warmup) -> None:
        if kind not in ("log", "linear"):
            raise SettingsError(
                f'scheduler.params.warmup_type: expected "log" or "linear", found {kind!r}; write one of them'
            )
        self.num_steps = max(2, _count(num_steps, "warmup_num_steps"))
        self.kind = kind

    def __call__(self, step: int) -> float:
        if self.kind == "log":
            return math.log(step + 1) / math.log(self.num_steps)
        return step / self.num_steps


def _per_group(value: float | Sequence[float], num_groups: int, name: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [_number(value, name)] * num_groups
    if len(value) != num_groups:
        raise SettingsError(
            f"scheduler.params.{name}: expected a number, or one for each of {num_groups} parameter groups, "
            f"found {len(value)}; write one number"
        )
    return [_number(each, name) for each in value]


def is_number(value: Any) -> bool:
    """A finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _number(value: float, name: str) -> float:
    if not is_number(value):
        raise SettingsError(f"scheduler.params.{name}: expected a number, found {value!r:.60}; write one")
    return float(value)


def _count(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise SettingsError(
            f"scheduler.params.{name}: expected a whole number of steps above 0, found {value!r}"
        )
    return value


SCHEDULES: Final[dict[str, type[LRScheduler]]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
