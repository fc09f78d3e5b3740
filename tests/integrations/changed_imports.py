"""What programs of the hosts import in tests, in place of the host's own class of the same name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import accelerate
import trl
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor

import mics.integrations.accelerate
from mics.integrations.transformers import MicsConfig, MicsTrainerMixin

PARTITION_SIZE = "PARTITION_SIZE"
"""The variable that says how a program is to be sharded."""


class _Sharded(MicsTrainerMixin):
    """The programs pass no settings of mics: they are here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        config = MicsConfig(partition_size=int(os.environ[PARTITION_SIZE]))
        super().__init__(*args, mics_config=config, **options)


class SFTTrainer(_Sharded, trl.SFTTrainer):
    pass


class DPOTrainer(_Sharded, trl.DPOTrainer):
    pass


class RewardTrainer(_Sharded, trl.RewardTrainer):
    pass


class Watched(accelerate.Accelerator):
    """Of accelerate, or of mics where a program is sharded: notes losses, and draws the same samples."""

    def __init__(self, *args: Any, **options: Any) -> None:
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        super().__init__(*args, cpu=True, dataloader_config=config, **options)
        self.losses: list[float] = []

    def backward(self, loss: Tensor, **options: Any) -> None:
        super().backward(loss, **options)
        self.losses.append(float(self.reduce(loss.detach().clone(), "mean")))

    def end_training(self) -> None:
        if self.is_main_process:
            Path("losses.json").write_text(json.dumps(self.losses))
        super().end_training()


class Accelerator(Watched, mics.integrations.accelerate.Accelerator):
    def __init__(self, *args: Any, **options: Any) -> None:
        config = MicsConfig(partition_size=int(os.environ[PARTITION_SIZE]))
        super().__init__(*args, mics_config=config, **options)
