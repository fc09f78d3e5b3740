"""What runs where, as the engine that runs has it: settings leave open what it then chooses."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn

import mics
from mics.engine import engine_of
from mics.train.config import TrainConfig
from mics.train.data import Dealing
from mics.utils.global_batch import GlobalBatch
from mics.utils.numbers import count, plural

_FORMATS: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The ranks of a run and what they hold."""

    num_parameters: int
    precision: str
    """What modules compute in."""
    node_sizes: tuple[int, ...]
    """Ranks of each node."""
    partition_size: int
    num_replicas: int
    device: str
    """The name of rank 0's GPU, or "cpu"."""
    ranks_on_gpu: int
    """The most ranks that share one GPU."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What ``mics.shard`` made of ``model``."""
        engine = engine_of(model)
        formats = dict.fromkeys(unit.spec.param_dtype for unit in engine.units)
        device = engine.device
        return cls(
            num_parameters=sum(slot.numel for unit in engine.units for slot in unit.spec.layout.slots),
            precision="+".join(_FORMATS.get(dtype, str(dtype)) for dtype in formats),
            node_sizes=tuple(Counter(engine.topology.node_of).values()),
            partition_size=engine.topology.partition_size,
            num_replicas=engine.topology.num_replicas,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            ranks_on_gpu=engine.ranks_on_gpu,
        )

    @property
    def num_ranks(self) -> int:
        return sum(self.node_sizes)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def num_gpus(self) -> int:
        """GPUs of the run: ranks that share them fill one after the other."""
        return -(-self.num_ranks // self.ranks_on_gpu) if self.on_gpu else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "gpus": self.num_gpus,
            "ranks": self.num_ranks,
            "ranks_of_nodes": list(self.node_sizes),
            "partition_size": self.partition_size,
            "replicas": self.num_replicas,
            "precision": self.precision,
            "num_parameters": self.num_parameters,
        }


def describe_run(config: TrainConfig, setup: Setup, dealing: Dealing) -> str:
    """One paragraph that says what runs where."""
    device = "CPU"
    if setup.on_gpu:
        uneven = "up to " if setup.num_ranks % setup.ranks_on_gpu else ""
        shared = f", {uneven}{setup.ranks_on_gpu} ranks on each" if setup.ranks_on_gpu > 1 else ""
        device = setup.device + shared
    batch = GlobalBatch(
        num_sequences=dealing.num_sequences,
        seq_len=config.model.build().seq_len,
        asked_tokens=config.global_batch_tokens,
    )
    return (
        f"mics {mics.__version__}: {config.model.title}, {count(setup.num_parameters)} parameters, "
        f"{setup.precision}\n"
        f"{plural(setup.num_ranks, 'rank')} = {_nodes(setup)} ({device}), "
        f"partition groups of {setup.partition_size}, replication groups of {setup.num_replicas}\n"
        f"{batch}: {plural(dealing.batch_size, 'sequence')} per rank and micro-step, "
        f"{plural(dealing.micro_steps, 'gradient accumulation step')}"
    )


def describe_title(config: TrainConfig, setup: Setup) -> str:
    return (
        f"{config.name}: {config.model.title} on {plural(setup.num_ranks, 'rank')} ({_nodes(setup)}), "
        f"partition size {setup.partition_size}"
    )


def _nodes(setup: Setup) -> str:
    """``2 nodes x 4``, or ``nodes of 4 + 3`` where they differ."""
    sizes = setup.node_sizes
    if len(set(sizes)) > 1:
        return "nodes of " + " + ".join(str(size) for size in sizes)
    return f"{plural(len(sizes), 'node')} x {sizes[0]}"
