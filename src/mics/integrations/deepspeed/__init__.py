"""A home for training loops of DeepSpeed: its config, the calls of its engine, its checkpoints.

DeepSpeed itself is not imported, and need not be installed.
"""

from mics.integrations.deepspeed.checkpoint import LoadedCheckpoint, load_deepspeed_checkpoint
from mics.integrations.deepspeed.config import DeepSpeedConfig, read_config
from mics.integrations.deepspeed.engine import (
    DeepSpeedEngine,
    add_config_arguments,
    init_distributed,
    initialize,
)
from mics.integrations.deepspeed.schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from mics.integrations.deepspeed.sections import Ignored

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "Ignored",
    "LoadedCheckpoint",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_deepspeed_checkpoint",
    "read_config",
]
