"""Measuring a run: loss, speed, memory and the bytes sent, by kind of group and by link."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from mics.comm import Traffic, join_world
from mics.layout.topology import Topology
from mics.train.hardware import memory_nbytes


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is known after a step. Loss, speeds and bytes are means over the steps since the one before."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean over all ranks, and over the steps since the measurement before."""
    grad_norm: float
    """Global norm before clipping, of the last step."""
    learning_rate: float
    tokens_per_second: float
    """Of all ranks together."""
    tflops: float
    """Model TFLOP/s of one GPU; on CPUs of all ranks together."""
    mfu: float | None
    """Share of the GPU's bf16 peak, or of the peak that mics calibrate measured; None: neither is known."""
    partition_nbytes: int
    """Bytes this rank sent per step inside its partition group."""
    replication_nbytes: int
    """Bytes this rank sent per step across its replication group."""
    memory_nbytes: int
    """GPU: peak of tensors. CPU: what the process holds."""
    seconds: float
    """Training time so far; validation does not count."""
    intra_nbytes: int = 0
    """Bytes this rank sent per step to ranks of its own node, over all groups."""
    inter_nbytes: int = 0
    """Bytes this rank sent per step to other nodes, over all groups."""
    exposed: float | None = None
    """Share of a step in which the computation waits for communication; None: not profiled (yet)."""
    data_wait: float = 0.0
    """Seconds per step that this rank waited for its batches."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SentBytes:
    """Running totals of the bytes this rank sent: by kind of group, and by the link they took."""

    partition_nbytes: int = 0
    replication_nbytes: int = 0
    intra_nbytes: int = 0
    inter_nbytes: int = 0

    def __sub__(self, other: Self) -> Self:
        mine, theirs = asdict(self), asdict(other)
        return type(self)(**{name: mine[name] - theirs[name] for name in mine})

    def per_step(self, num_steps: int) -> dict[str, int]:
        return {name: round(nbytes / num_steps) for name, nbytes in asdict(self).items()}


def sent_bytes(traffic: Traffic, topology: Topology, rank: int) -> SentBytes:
    """What a rank has sent inside its node and to other nodes.

    Two-stage collectives are counted by link. Of a group that one collective serves, as large a share goes to
    other nodes as has its members there.
    """
    by_axis: dict[str, Sequence[int]] = {"world": range(topology.world_size)}
    intra, inter = float(traffic.axis_nbytes("intra")), float(traffic.axis_nbytes("inter"))
    if topology.stages(rank) is None:
        by_axis["partition"] = topology.partition_group(rank)
    if topology.replica_stages(rank) is None:
        by_axis["replication"] = topology.replication_group(rank)
    for axis, ranks in by_axis.items():
        nbytes, node = traffic.axis_nbytes(axis), topology.node_of[rank]
        away = sum(topology.node_of[other] != node for other in ranks) / max(1, len(ranks) - 1)
        inter += nbytes * away
        intra += nbytes * (1 - away)
    return SentBytes(
        partition_nbytes=traffic.partition_nbytes,
        replication_nbytes=traffic.replication_nbytes,
        intra_nbytes=round(intra),
        inter_nbytes=round(inter),
    )


@dataclass(frozen=True, kw_only=True)
class Speedometer:
    """Turns tokens per second into TFLOP/s and, where the peak is known, into MFU."""

    flops_per_token: int
    num_devices: int
    """GPUs of the run; 1 on CPUs, whose ranks share the cores."""
    peak_tflops: float | None

    def tflops(self, tokens_per_second: float) -> float:
        return tokens_per_second * self.flops_per_token / self.num_devices / 1e12

    def mfu(self, tokens_per_second: float) -> float | None:
        return None if self.peak_tflops is None else self.tflops(tokens_per_second) / self.peak_tflops


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """The clock and the byte counters at one moment, or the difference of two moments."""

    seconds: float
    sent: SentBytes

    def __sub__(self, other: Self) -> Self:
        return type(self)(seconds=self.seconds - other.seconds, sent=self.sent - other.sent)

    def as_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **asdict(self.sent)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        sent = {name: found[name] for name in asdict(SentBytes()) if name in found}
        return cls(seconds=found["seconds"], sent=SentBytes(**sent))


class Meter:
    """Collects a run's numbers on the device and brings them to the host only when asked to measure."""

    def __init__(
        self,
        *,
        sent: Callable[[], SentBytes],
        speedometer: Speedometer,
        tokens_per_step: int = 0,
        device: torch.device,
    ) -> None:
        self._sent = sent
        self._speedometer = speedometer
        self.tokens_per_step = tokens_per_step
        self._device = device
        # Both since the last measurement; the sum is this rank's, [] fp32.
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self._num_steps = 0
        self._data_wait = 0.0
        self._total_seconds = 0.0
        self._mark = self._now()  # what the next measurement counts from

    def add(self, loss: Tensor, *, data_wait: float = 0.0) -> None:
        """Note one step's loss, without waiting for it, and the seconds it waited for data."""
        self._loss_sum += loss
        self._data_wait += data_wait
        self._num_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time and the bytes of what happens inside (validation)."""
        so_far = self._now() - self._mark
        yield
        self._mark = self._now() - so_far

    def measure(self, step: int, *, grad_norm: Tensor, learning_rate: float) -> Measurement:
        """Wait for the device and read everything off. All ranks call it together."""
        loss = mean_over_ranks(self._loss_sum / self._num_steps)
        now = self._now()
        passed = now - self._mark
        self._total_seconds += passed.seconds
        tokens_per_second = self.tokens_per_step * self._num_steps / passed.seconds
        measurement = Measurement(
            step=step,
            loss=loss,
            grad_norm=grad_norm.item(),
            learning_rate=learning_rate,
            tokens_per_second=tokens_per_second,
            tflops=self._speedometer.tflops(tokens_per_second),
            mfu=self._speedometer.mfu(tokens_per_second),
            memory_nbytes=memory_nbytes(self._device),
            seconds=self._total_seconds,
            data_wait=self._data_wait / self._num_steps,
            **passed.sent.per_step(self._num_steps),
        )
        self._loss_sum.zero_()
        self._num_steps = 0
        self._data_wait = 0.0
        self._mark = now
        return measurement

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to report as if it had not stopped. All ranks call it together."""
        since = self._now() - self._mark
        return {
            "loss_sum": self._loss_sum.item(),
            "mean_loss_sum": mean_over_ranks(self._loss_sum),
            "num_steps": self._num_steps,
            "data_wait": self._data_wait,
            "total_seconds": self._total_seconds,
            "since": since.as_dict(),
            "num_ranks": dist.get_world_size(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another meter had, on as many ranks or on others."""
        same = state["num_ranks"] == dist.get_world_size()
        self._loss_sum.fill_(state["loss_sum" if same else "mean_loss_sum"])
        self._num_steps = state["num_steps"]
        self._data_wait = state.get("data_wait", 0.0)  # checkpoints of before have none
        self._total_seconds = state["total_seconds"]
        self._mark = self._now() - _Reading.from_dict(state["since"])

    def _now(self) -> _Reading:
        # The queue of the device must be empty, or its work would be booked on whatever comes next.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return _Reading(seconds=time.perf_counter(), sent=self._sent())


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks, on the host."""
    total = value.detach().clone()
    with join_world().naming("all-reduce", "a mean over ranks"):
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()
