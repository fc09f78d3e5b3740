"""What ranks know about themselves and measured: plain values that travel as JSON.

Hosts may run different versions of mics, which is one of the faults to find. So what is unknown to the reader
is ignored, and what is missing takes its default.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who a rank is."""

    rank: int = 0
    local_rank: int = 0
    ranks_per_node: int = 1
    node: str = "0"
    """The launcher's number of the node, or the host's name."""
    host: str = ""
    stack: str = ""
    """Of ranks with one network stack: the same; the loopback reaches these and nobody else."""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Of a process and its host. Sizes in bytes; a limit of None means unlimited."""

    cpus: int = 1
    threads: int = 1
    """Of torch in this process."""
    memory_nbytes: int = 0
    memory_free_nbytes: int = 0
    shm_nbytes: int | None = None
    """/dev/shm; None: there is none."""
    shm_free_nbytes: int = 0
    memlock_nbytes: int | None = None
    open_files: int | None = None
    seconds_to_start: float = 0.0
    """From the start of the process until it had joined the others."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str = ""
    up: bool = True
    loopback: bool = False
    physical: bool = False
    """A card, not a bridge or a tunnel."""
    speed_mbit: int | None = None
    """As the driver says; None: it does not."""
    addresses: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class InterfaceChoice:
    """The interface that gloo or NCCL takes."""

    name: str | None = None
    """None: nothing fits."""
    because: str = ""
    """The variable that names it, or how it was found."""
    error: str = ""
    """What the library said when it was asked to use it."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter for remote memory access: EFA, InfiniBand, RoCE."""

    name: str = ""
    kind: Literal["efa", "infiniband", "roce"] = "infiniband"
    active: bool = True


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """What this host could send through, and what it will."""

    interfaces: list[Interface] = field(default_factory=list)
    gloo: InterfaceChoice = field(default_factory=InterfaceChoice)
    nccl: InterfaceChoice | None = None
    """None: the run has no GPUs."""
    adapters: list[Adapter] = field(default_factory=list)
    verbs_open: bool = True
    """Whether this process may open the adapters' device files."""
    ofi_plugin: str | None = None
    """The library through which NCCL reaches EFA, if it can be loaded."""
    door: str = ""
    """Address and port at which this node answers; one rank of each node has one."""
    variables: dict[str, str] = field(default_factory=dict)
    """NCCL_*, GLOO_*, FI_* as set."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPU of a rank."""

    name: str = ""
    total_nbytes: int = 0
    free_nbytes: int = 0
    """Before this process used any."""
    num_gpus: int = 1
    """Of this host, as the process sees it."""
    ranks_per_gpu: int = 1
    driver_cuda: int = 0
    """The newest CUDA that the driver knows: 12080 for 12.8."""
    runtime_cuda: int = 0


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """All that a rank says before anything is measured."""

    place: Place = field(default_factory=Place)
    versions: dict[str, str] = field(default_factory=dict)
    machine: MachineFacts = field(default_factory=MachineFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    gpu: GpuFacts | None = None
    max_restarts: int | None = None
    """Of torchrun; None: another launcher."""
    settings_error: str = ""
    """Why the settings cannot be read here."""
    settings_digest: str = ""
    missing_shards: list[str] = field(default_factory=list)
    """Of the folders to train on, those that have none here."""
    data_error: str = ""
    """Why training could not read its data here; the first rank of a node looks."""
    data_seen: bool = True
    """False: to look at all of it takes too long."""
    gpu_error: str = ""
    """Why the GPU cannot be used."""


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """By how many seconds a node's clock is ahead of rank 0's: between these two."""

    low: float = 0.0
    high: float = 0.0

    @property
    def seconds(self) -> float:
        """The least that explains what was seen: 0 if the clocks may agree."""
        return self.low if self.low > 0 else min(self.high, 0.0)


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """What a node can do with the folder of checkpoints."""

    error: str = ""
    """Why it cannot write there."""
    write_rate: float | None = None
    """Bytes per second, down to the disk."""
    read_rate: float | None = None
    """Of what another node wrote, if it is visible."""
    free_nbytes: int = 0
    sees_first: bool = True
    """Whether what rank 0 wrote is visible here."""


@dataclass(frozen=True, kw_only=True)
class ComputeFacts:
    """What a rank's device computed, and how fast."""

    kind: str = ""
    """Devices and libraries of one kind compute the same bits."""
    rate: float = 0.0
    """Flops per second of a matrix product."""
    wrong_rows: int = 0
    """Of a product that has one right answer."""
    nonfinite: int = 0
    """NaN or infinite values in it."""
    unstable: bool = False
    """Whether the same computation gave different bits on this device."""
    digest: str = ""
    """Of a computation in floating point, to compare with devices of the same kind."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes sent from one rank to another while their nodes' other ranks did the same."""

    source: int = 0
    target: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NetworkResults:
    """What a rank measured with collectives."""

    error: str = ""
    """What failed, and how."""
    sent: list[Transfer] = field(default_factory=list)
    nccl_network: str = ""
    """What NCCL says it sends through: Socket, IB, AWS Libfabric."""


@dataclass(frozen=True, kw_only=True)
class Knocks:
    """Nodes that a node did not reach, each with the reason."""

    closed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A rank that did not come, or did not finish a stage in time."""

    rank: int = 0
    stage: str = ""
    error: str = ""


def encode(value: Any) -> str:
    """A record of this file, or a list of them, as JSON."""
    plain = [asdict(each) for each in value] if isinstance(value, list) else asdict(value)
    return json.dumps(plain)


def decode(kind: type[T], data: bytes) -> T:
    """The record again."""
    found = _value(kind, json.loads(data))
    assert isinstance(found, kind)
    return found


def _value(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
        return _value(kind, value)
    if origin is list:
        return [_value(get_args(kind)[0], each) for each in value]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        known = {each.name for each in fields(kind)}
        return kind(**{name: _value(hints[name], each) for name, each in value.items() if name in known})
    return value


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 6``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
