"""The settings of the run to come, and what they ask of the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mics.checkpoint.arguments import as_place
from mics.cost.memory import ADAM_NBYTES, MASTER_NBYTES
from mics.cost.modules import shape_of_description
from mics.doctor.examination import RunSettings
from mics.doctor.survey import Wishes
from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.settings_file import load_settings

_NBYTES_PER_PARAMETER: Final = MASTER_NBYTES + ADAM_NBYTES
"""In a checkpoint: master weights and AdamW's two moments, in float32."""


def read_settings(file: Path | None, checkpoint_dir: str | None) -> RunSettings:
    """An error is kept, not raised: other ranks may read the file, and the report says who cannot."""
    try:
        train = TrainConfig() if file is None else load_settings(TrainConfig, file)
        # Rank 0 judges, and to count parameters may take a while.
        known = file is not None and os.environ.get("RANK", "0") == "0"
        return RunSettings(train=train, wishes=_wishes(train, checkpoint_dir, known=known))
    except SettingsError as error:
        return RunSettings(train=None, error=str(error))


def _wishes(train: TrainConfig, checkpoint_dir: str | None, *, known: bool) -> Wishes:
    folder = train.checkpoint_dir if train.checkpoint.interval else None
    if checkpoint_dir is not None:
        folder = as_place(checkpoint_dir, "--checkpoint-dir")
    return Wishes(
        checkpoint_dir=folder,
        checkpoint_nbytes=_NBYTES_PER_PARAMETER * num_parameters(train) if known else None,
        kept=train.checkpoint.keep,
        partition_size=train.sharding.partition_size,
        shards=train.data.shards,
        num_nodes=train.launch.hosts,
        ranks_per_node=train.launch.ranks_per_node,
    )


def num_parameters(train: TrainConfig) -> int:
    """Of the model that the settings describe."""
    return shape_of_description(train.model.build()).num_parameters
