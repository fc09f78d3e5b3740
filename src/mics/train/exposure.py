"""Exposed communication as a metric: measured now and then, since a recorded step takes a little longer."""

from __future__ import annotations

from typing import Final

from torch import nn

import mics
from mics.train.config import TrainConfig

_STEPS: Final = 2  # recorded each time


class ExposureMeter:
    """The share of a step in which the computation waits for communication. All ranks call it alike."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._model = model
        self._interval = config.report.exposure_interval
        self._profile: mics.Profile | None = None
        if config.report.profile:
            folder = config.run_dir / "profile"
            self._profile = mics.profile(model, steps=config.report.profile, folder=folder)
        self._share: float | None = None
        self._next_step = 0

    def begin_step(self, step: int) -> None:
        """Record this step and the next ones, if it is time."""
        if not self._interval or step < self._next_step:
            return
        if self._profile is not None and self._profile.report is None:  # under way
            return
        # The very first steps decide what is prefetched.
        warmup = 2 if self._next_step == 0 else 0
        self._profile = mics.profile(self._model, steps=_STEPS, warmup=warmup, folder=None, show=False)
        self._next_step = step + self._interval

    @property
    def share(self) -> float | None:
        """As last measured; None: not yet."""
        if self._profile is not None and self._profile.report is not None:
            times = self._profile.report.times
            self._share = times.exposed / times.seconds
        return self._share
