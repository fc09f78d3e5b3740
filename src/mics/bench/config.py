"""Settings of ``mics bench`` and ``mics emulate``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
import tyro

from mics.bench.depths import two_depths
from mics.bench.job import DType, Job
from mics.bench.models import BENCH_MODELS
from mics.bench.systems import SYSTEMS
from mics.cost.clusters import PRESETS
from mics.cost.gpus import formats_of
from mics.emulator import Imagined
from mics.errors import SettingsError
from mics.utils.global_batch import AskedBatch
from mics.utils.numbers import TokenCount

_MAX_TIMEOUT: Final = 10**6  # seconds, eleven days: beyond, a number is likely a slip
_MODELS = ", ".join(f"{name} ({model.about})" for name, model in BENCH_MODELS.items())


def _default_model() -> str:
    return "gpt-3.6b" if torch.cuda.is_available() else "gpt-small"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every system trains."""

    model: Annotated[str, tyro.conf.arg(help=_MODELS)] = field(default_factory=_default_model)
    accumulation: int | None = None
    """Gradient accumulation steps; unset: 2, or as many as the global batch needs."""
    micro_batch: int | None = None
    """Sequences per rank and micro-step; unset: the model's usual."""
    global_batch: int | None = None
    """Sequences per optimizer step, over all ranks, instead of --accumulation."""
    global_batch_tokens: TokenCount | None = None
    """Tokens per optimizer step, over all ranks (1M, 4e6, 4_000_000), instead of --accumulation: rounded to a
    whole number of gradient accumulation steps."""
    seq_len: int | None = None
    """Tokens per sequence; unset: the model's usual."""
    loss_in_pieces: bool = False
    """Compute the loss in chunks of the logits, in all systems: less memory at the loss."""
    checkpoint: bool | None = None
    """Recompute each block in the backward (activation checkpointing); unset: as usual for the model."""
    offload: bool = False
    """Offload activations to the CPU: with mics.Activations, in other systems with torch's save_on_cpu."""
    imagined: Imagined = "different"
    """What the other ranks of an emulated cluster hold of the parameters. A GPU multiplies copies and zeros
    faster than real ones: only to compare with figures that were made so."""
    param_dtype: DType | None = None
    """Dtype of the parameters; unset: bfloat16 on a GPU, float32 on a CPU."""
    reduce_dtype: DType = "float32"
    """Dtype of gradients in communication."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where rank 0 computes; auto: on a GPU if there is one."""
    layers: int | None = None
    """Run half of so many blocks, then all of them, and scale to the whole model from the two; unset: run the
    whole model."""
    as_gpu: Literal["v100", "a100", "h100"] | None = None
    """Show times of this GPU: how much faster this device computes the model is measured, and the cluster's
    links follow (emulated clusters); unset: times of this device."""

    def num_accumulation_steps(self, micro_batch: int, seq_len: int, world_size: int) -> int:
        """Given, or what a global batch comes to on so many ranks."""
        asked = AskedBatch(sequences=self.global_batch, tokens=self.global_batch_tokens)
        if not asked.given:
            return 2 if self.accumulation is None else self.accumulation
        if self.accumulation is not None:
            raise SettingsError(
                "--accumulation, --global-batch: expected one of them, found both; leave --accumulation out, "
                "it follows from the global batch"
            )
        asked.check_size(seq_len)
        multiple = micro_batch * world_size
        because = f"micro-batch {micro_batch} on {world_size:,} ranks"
        return asked.fit(seq_len=seq_len, multiple=multiple, because=because).num_sequences // multiple

    def _param_dtype(self, device: str) -> DType:
        """Given, or the usual one of the GPU whose time is shown: a V100 has no bfloat16 at all."""
        formats = formats_of(self.as_gpu or "")
        for flag, dtype in (("--param-dtype", self.param_dtype), ("--reduce-dtype", self.reduce_dtype)):
            if dtype not in (None, "float32", *formats):
                raise SettingsError(
                    f"{flag}: expected {' or '.join(formats)} or float32, which {self.as_gpu} has, "
                    f"found {dtype}; leave it out"
                )
        if self.param_dtype is None:
            return "float32" if device == "cpu" else "bfloat16" if "bfloat16" in formats else "float16"
        return self.param_dtype

    def jobs(self, partition_size: int, world_size: int) -> tuple[Job, ...]:
        """One job, or with ``layers`` that of half of them and that of all."""
        job = self.job(partition_size, world_size)
        return (job,) if self.layers is None else two_depths(job, self.layers)

    def job(self, partition_size: int, world_size: int) -> Job:
        """The same as a job for the systems, on so many ranks."""
        if self.model not in BENCH_MODELS:
            raise SettingsError(f"--model: expected one of {', '.join(BENCH_MODELS)}, found {self.model!r}")
        found = BENCH_MODELS[self.model]
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise SettingsError("--device cuda: expected a CUDA device, found none; leave it out or say cpu")
        dtype = self._param_dtype(device)
        seq_len = found.config.seq_len if self.seq_len is None else self.seq_len
        micro_batch = found.micro_batch if self.micro_batch is None else self.micro_batch
        accumulation = self.num_accumulation_steps(micro_batch, seq_len, world_size)
        try:
            job = Job(
                model=replace(found.config, seq_len=seq_len, loss_in_pieces=self.loss_in_pieces),
                partition_size=partition_size,
                micro_batch=micro_batch,
                accumulation=accumulation,
                checkpoint=found.checkpoint if self.checkpoint is None else self.checkpoint,
                param_dtype=dtype,
                reduce_dtype=self.reduce_dtype,
                device="cuda" if device == "cuda" else "cpu",
                offload=self.offload,
                imagined=self.imagined,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from None
        whole = micro_batch * accumulation * world_size
        AskedBatch(sequences=whole, setting="--micro-batch, --accumulation").check_size(seq_len)
        return job


_CLUSTERS = f"NAME:NODES or FILE.yaml:NODES, several for several rows; names: {', '.join(PRESETS)}"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Train systems side by side and compare them."""

    on: Literal["emulated", "namespace", "ranks"] = "emulated"
    """emulated: this GPU (or CPU) computes as rank 0 of --cluster, whose network is simulated. namespace:
    hosts made of network namespaces (Linux, root, from a source checkout). ranks: torchrun's, or --ranks."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Which to compare. One that cannot run is listed with its error."""
    training: Annotated[Training, tyro.conf.arg(name="")] = field(default_factory=Training)
    cluster: Annotated[tuple[str, ...], tyro.conf.arg(help=_CLUSTERS)] = ("p4d.24xlarge:1",)
    partition_size: tuple[str, ...] = ("node",)
    """Ranks per partition group: a number, node or world; several for several rows."""
    hosts: int = 4
    """namespace: number of hosts."""
    ranks: int | None = None
    """Ranks per host (namespace, default 2) or in all (ranks, default one per GPU, 2 on a CPU)."""
    rate: str = "500mbit"
    """namespace: bandwidth of each host's uplink, as tc takes it."""
    warmup: int = 3
    """Steps before timing starts."""
    steps: int = 3
    """Timed steps per run."""
    repeats: int = 2
    """Runs per system, interleaved."""
    timeout: float = 300.0
    """Seconds without a result after which a run counts as hanging."""
    out: Path = Path("runs/bench")
    """Folder for the table (JSON, Markdown, PNG), traces and timelines."""
    theme: str | None = None
    """Also keep the result as benchmarks/results/THEME_HARDWARE_DATE.md."""

    def check(self) -> None:
        """Raise if something cannot be, before anything is started."""
        _check_systems("--systems", self.systems)
        for name in ("cluster", "partition_size"):
            if not getattr(self, name):
                raise SettingsError(f"--{name.replace('_', '-')}: expected at least one, found none")
        if self.on != "emulated" and self.training.as_gpu is not None:
            raise SettingsError(
                f"--as-gpu: expected --on emulated, found {self.on}: real links have one speed"
            )
        _check_counts(self, warmup=0, steps=1, repeats=1, hosts=1)
        if not 1 <= self.timeout <= _MAX_TIMEOUT:
            raise SettingsError(
                f"--timeout: expected from 1 to {_MAX_TIMEOUT:,} seconds, found {self.timeout:g}"
            )
        if self.ranks is not None:
            _check_counts(self, ranks=1)


@dataclass(frozen=True, kw_only=True)
class EmulateConfig:
    """Train one system as rank 0 of an emulated cluster, and see where the time of a step goes.

    Rank 0 computes really, on this machine's GPU or CPU; the network is simulated.
    """

    cluster: Annotated[str, tyro.conf.arg(help=_CLUSTERS.replace(", several for several rows", ""))] = (
        "p4d.24xlarge:8"
    )
    system: Annotated[str, tyro.conf.arg(help=", ".join(SYSTEMS))] = "mics"
    """What to train with: one of those that mics bench compares."""
    partition_size: int = 8
    """Ranks per partition group."""
    training: Annotated[Training, tyro.conf.arg(name="")] = field(default_factory=Training)
    warmup: int = 3
    """Steps before timing starts."""
    steps: int = 3
    """Timed steps."""
    out: Path = Path("runs/emulate")
    """Folder for the trace and the timeline."""

    def check(self) -> None:
        """Raise if something cannot be, before anything is started."""
        _check_systems("--system", (self.system,))
        _check_counts(self, warmup=0, steps=1)


def _check_systems(flag: str, names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        found = ", ".join(unknown) or "none"
        raise SettingsError(f"{flag}: expected some of {', '.join(SYSTEMS)}, found {found}")


def _check_counts(config: object, **least: int) -> None:
    for name, lowest in least.items():
        if getattr(config, name) < lowest:
            raise SettingsError(f"--{name}: expected at least {lowest}, found {getattr(config, name)}")
