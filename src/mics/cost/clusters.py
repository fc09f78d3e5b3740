"""Machines and the links between them: clusters by name, and from a file.

Bandwidths are those of the public data sheets, one direction. Latencies and ramps are on no data sheet: they
are round figures of the kind that collective benchmarks report for the fabric. Presets over EFA are also
listed in planner/hardware.py. ``mics calibrate`` measures a cluster and writes its file. By hand it is::

    # my.yaml
    num_nodes: 16
    ranks_per_node: 8
    intra: {bandwidth: 300e9, latency: 3e-6}                       # bytes a second for each rank, seconds
    inter: {bandwidth: 50e9, latency: 20e-6, ramp_nbytes: 65536}   # bytes a second for the whole node
    flops: 600e12                                                  # of one rank, in large matrices
    peak_flops: 989e12                                             # for mics plan: of the data sheet,
    memory_nbytes: 151e9                                           # and of one rank's memory: bytes,
    memory_bandwidth: 4.8e12                                       # bytes a second,
    host_nbytes: 2e12                                              # of a node's own memory,
    host_bandwidth: 55e9                                           # and of copies to it, each way;
    gpu: h100                                                      # a name of cost/gpus.py: formats it has

A measured file also has ``slowdown`` in its links, ``link_slowdown`` and ``computing``: see ``Link``,
``Cluster`` and ``Computing``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mics.cost.gpus import GPUS, Gpu
from mics.errors import SettingsError
from mics.utils.extras import require
from mics.utils.numbers import listed


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a connection. A message of ``ramp_nbytes`` gets half of the bandwidth."""

    bandwidth: float  # bytes a second
    latency: float  # seconds a hop
    ramp_nbytes: float = 0.0
    slowdown: float = 1.0  # of computation while this link is busy: 1 is none, 2 as if it waited

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0 or not self.ramp_nbytes >= 0:
            raise SettingsError(
                f"link: expected bandwidth > 0, latency >= 0 and ramp_nbytes >= 0, found {self}"
            )
        if not self.slowdown >= 1:
            raise SettingsError(f"link: expected slowdown >= 1, found {self.slowdown}")


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How ranks compute, as ``mics calibrate`` measured it: the planner then uses no constant of its own.

    Both speeds count a forward and a backward, with all that is no matrix. They are those of wide matrices:
    a model's own width is taken into account as in cost/compute.py.
    """

    device: str  # "cpu", or the GPU's name in torch
    block_flops: float  # a second, of a transformer block
    head_flops: float  # a second, of the head and the loss
    update_bandwidth: float  # bytes a second of AdamW, by UPDATE_NBYTES of cost/compute.py
    param_nbytes: int = 2  # of a parameter in computation: 4 for processors

    def __post_init__(self) -> None:
        for field in ("block_flops", "head_flops", "update_bandwidth"):
            if not getattr(self, field) > 0:
                raise SettingsError(f"computing.{field}: expected a number above 0, found {self}")
        if self.param_nbytes not in (2, 4):
            raise SettingsError(f"computing.param_nbytes: expected 2 or 4, found {self.param_nbytes!r}")


MACHINE_FIELDS: Final = (
    "flops",
    "peak_flops",
    "memory_nbytes",
    "memory_bandwidth",
    "host_nbytes",
    "host_bandwidth",
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes: ranks talk over ``intra`` inside one, and share one ``inter`` uplink to the others.

    ``intra`` is what each rank has for itself, ``inter`` what all ranks of a node have together. Ranks are
    numbered node by node. ``flops`` is what a rank computes a second, in matrices of a usual size; the
    planner needs the rest too.
    """

    num_nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    name: str = "cluster"
    flops: float = 0.0  # 0: not known
    peak_flops: float = 0.0  # of the data sheet, in 16-bit formats; 0: not known
    memory_nbytes: float = 0.0  # of one rank's device; 0: not known
    memory_bandwidth: float = 0.0  # bytes a second, of that memory; 0: not known
    host_nbytes: float = 0.0  # of a node's own memory; 0: not known
    host_bandwidth: float = 0.0  # bytes a second between a rank's device and it, each way; 0: not known
    gpu: str = ""  # a name of cost/gpus.py, which knows what else it does; empty: not known
    link_slowdown: float = 1.0  # of a transfer while the other link is busy: 1 is none, 2 as if it waited
    computing: Computing | None = None  # None: nobody measured it

    def __post_init__(self) -> None:
        for field in ("num_nodes", "ranks_per_node"):
            count = getattr(self, field)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SettingsError(f"{field}: expected a positive integer, found {count!r}")

        for field in MACHINE_FIELDS:
            value = getattr(self, field)
            if not value >= 0:
                raise SettingsError(f"{field}: expected a number from 0, found {value!r}")
        if not self.link_slowdown >= 1:
            raise SettingsError(f"link_slowdown: expected a number from 1, found {self.link_slowdown!r}")
        if self.gpu and self.gpu not in GPUS:
            raise SettingsError(f"gpu: expected one of {', '.join(GPUS)}, found {self.gpu!r}; leave it out")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rank_word(self) -> str:
        """What a reader calls the device of a rank."""
        return "rank" if self.computing is not None and self.computing.device == "cpu" else "GPU"

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


_GBIT: Final = 1e9 / 8
_NVLINK_RAMP: Final = 64 * 1024
_NETWORK_RAMP: Final = 64 * 1024


def _nvlink(gb_per_second: float) -> Link:
    """Data sheets count both directions of a GPU's NVLinks together: half of it is one direction."""
    return Link(bandwidth=gb_per_second * 1e9 / 2, latency=3e-6, ramp_nbytes=_NVLINK_RAMP)


def _efa(gbit_per_second: float) -> Link:
    return Link(bandwidth=gbit_per_second * _GBIT, latency=20e-6, ramp_nbytes=_NETWORK_RAMP)


def _infiniband(gbit_per_second: float) -> Link:
    return Link(bandwidth=gbit_per_second * _GBIT, latency=5e-6, ramp_nbytes=_NETWORK_RAMP)


def _node(name: str, intra: Link, inter: Link, gpu: Gpu, *, host_gib: float = 0.0) -> Cluster:
    return Cluster(
        name=name,
        num_nodes=1,
        ranks_per_node=8,
        intra=intra,
        inter=inter,
        flops=gpu.tflops * 1e12,
        peak_flops=gpu.peak_tflops * 1e12,
        memory_nbytes=gpu.memory_gib * 2**30,
        memory_bandwidth=gpu.memory_tbs * 1e12,
        host_nbytes=host_gib * 2**30,
        host_bandwidth=gpu.host_gbs * 1e9,
        gpu=gpu.name,
    )


PRESETS: Final = MappingProxyType(
    {
        node.name: node
        for node in (
            # 8 V100 32 GB, NVLink 300 GB/s a GPU, 100 Gbit/s EFA: aws.amazon.com/ec2/instance-types/p3
            _node("p3dn.24xlarge", _nvlink(300), _efa(100), GPUS["v100"], host_gib=768),
            # 8 A100 40 GB, NVSwitch 600 GB/s a GPU, 400 Gbit/s EFA: aws.amazon.com/ec2/instance-types/p4
            _node("p4d.24xlarge", _nvlink(600), _efa(400), GPUS["a100-40gb"], host_gib=1152),
            # The same with A100 80 GB.
            _node("p4de.24xlarge", _nvlink(600), _efa(400), GPUS["a100"], host_gib=1152),
            # 8 A100 40 GB, NVSwitch 600 GB/s a GPU, 8 ConnectX-6 of 200 Gbit/s: NVIDIA DGX A100 (320 GB)
            _node("dgx-a100", _nvlink(600), _infiniband(1600), GPUS["a100-40gb"], host_gib=1024),
            # 8 H100 80 GB, NVSwitch 900 GB/s a GPU, 3200 Gbit/s EFA: aws.amazon.com/ec2/instance-types/p5
            _node("p5.48xlarge", _nvlink(900), _efa(3200), GPUS["h100"], host_gib=2048),
            # 8 H100 80 GB, NVLink 900 GB/s a GPU, 8 ConnectX-7 of 400 Gbit/s: NVIDIA DGX H100 data sheet
            _node("dgx-h100", _nvlink(900), _infiniband(3200), GPUS["h100"], host_gib=2048),
        )
    }
)


_ORDINARY_NETWORK: Final = _efa(400)
_ASSUMED: Final = {"V100": "p3dn.24xlarge", "A100": "p4d.24xlarge", "H100": "dgx-h100", "H200": "dgx-h100"}
_ANY_GPU: Final = replace(_node("gpus", _nvlink(300), _ORDINARY_NETWORK, GPUS["v100"]), gpu="")
_THROUGH_THE_HOST: Final = Link(bandwidth=2e9, latency=50e-6)
_ANY_CPU: Final = Cluster(
    name="cpus",
    num_nodes=1,
    ranks_per_node=1,
    intra=Link(bandwidth=2e9, latency=100e-6),
    inter=Link(bandwidth=1 * _GBIT, latency=200e-6),
    flops=20e9,
)


def assumed_cluster(device_name: str | None, *, num_nodes: int, ranks_per_node: int) -> Cluster:
    """What a cluster of these devices (None: processors) is taken to be when nobody says: see MICS_CLUSTER.

    The network is an ordinary one whatever the device.
    """
    if device_name is None:
        node = _ANY_CPU
    else:
        known = next((preset for part, preset in _ASSUMED.items() if part in device_name), None)
        node = replace(_ANY_GPU if known is None else PRESETS[known], inter=_ORDINARY_NETWORK)
    return replace(node, num_nodes=num_nodes, ranks_per_node=ranks_per_node)


def with_shared_gpus(cluster: Cluster) -> Cluster:
    """The same where several ranks have one GPU: they talk to each other through the host's memory.

    A measured cluster was measured so.
    """
    return cluster if cluster.computing is not None else replace(cluster, intra=_THROUGH_THE_HOST)


def find_cluster(description: str, *, num_nodes: int | None = None) -> Cluster:
    """The cluster that ``NAME:NODES``, ``NAME`` or ``FILE.yaml`` (also ``FILE.yaml:NODES``) stands for."""
    name, _, count = description.partition(":")
    if count:
        if not count.isdecimal() or int(count) < 1:
            raise SettingsError(
                f"cluster {description!r}: expected a number of nodes after the colon, found {count!r}"
            )
        num_nodes = int(count)
    if name.endswith((".yaml", ".yml")):
        cluster = _read(Path(name))
    elif name in PRESETS:
        cluster = PRESETS[name]
    else:
        raise SettingsError(
            f"cluster {description!r}: expected one of {', '.join(PRESETS)} or a .yaml file, each with an "
            f"optional :NODES; found {name!r}"
        )
    return cluster if num_nodes is None else replace(cluster, num_nodes=num_nodes)


def assumed_between_nodes(description: str, *, num_nodes: int) -> str:
    """What to know where a file that was measured on one node stands for several; empty: nothing."""
    measured = find_cluster(description.partition(":")[0])
    if measured.computing is None or measured.num_nodes > 1 or num_nodes == 1:
        return ""
    return (
        f"measured on one node: the link between nodes is assumed ({speed_of(measured.inter)}); run mics "
        "calibrate on two nodes"
    )


def speed_of(link: Link) -> str:
    """``12.3 MB/s, 200 us a hop``."""
    bandwidth, latency = link.bandwidth, link.latency
    speed = f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"
    hop = f"{1e3 * latency:.3g} ms" if latency >= 1e-3 else f"{1e6 * latency:.3g} us"
    return f"{speed}, {hop} a hop"


def _read(path: Path) -> Cluster:
    require("cli", f"cluster file {path}")
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"cluster file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"cluster file {path}: expected YAML, found: {error}") from error
    described = _checked(path, "the file", found, Cluster, required={"ranks_per_node", "intra", "inter"})
    for link in ("intra", "inter"):
        values = _checked(path, link, described[link], Link, required={"bandwidth", "latency"})
        described[link] = Link(**{key: _number(path, f"{link}.{key}", values[key]) for key in values})
        if described[link].latency >= 1:
            raise SettingsError(
                f"cluster file {path}: {link}.latency: expected less than a second, found {values['latency']}"
            )
    for key in (*MACHINE_FIELDS, "link_slowdown"):
        if key in described:
            described[key] = _number(path, key, described[key])
    if described.get("computing") is not None:
        described["computing"] = _computing(path, described["computing"])
    described.setdefault("num_nodes", 1)
    described["name"] = name = str(described.get("name", path.stem))
    if name in PRESETS:
        raise SettingsError(
            f"cluster file {path}: expected a name of its own, found {name}, that of another cluster; "
            f"put a line such as 'name: my-{name}' into the file"
        )
    return Cluster(**described)


def _computing(path: Path, found: Any) -> Computing:
    required = {"device", "block_flops", "head_flops", "update_bandwidth"}
    values = _checked(path, "computing", found, Computing, required=required)
    numbers = {key: _number(path, f"computing.{key}", values[key]) for key in required - {"device"}}
    param_nbytes = int(_number(path, "computing.param_nbytes", values.get("param_nbytes", 2)))
    return Computing(device=str(values["device"]), param_nbytes=param_nbytes, **numbers)


def _checked(path: Path, where: str, found: Any, wanted: type, *, required: set[str]) -> dict[str, Any]:
    known = {field.name for field in fields(wanted)}
    keys = {str(key) for key in found} if isinstance(found, Mapping) else set()
    if required - keys:
        raise SettingsError(
            f"cluster file {path}: expected {where} to have {listed(sorted(required))}, found no "
            f"{listed(sorted(required - keys))}; mics calibrate writes such a file"
        )
    if keys - known:
        raise SettingsError(
            f"cluster file {path}: expected {where} to have at most {listed(sorted(known))}, found also "
            f"{listed(sorted(keys - known))}; leave it out"
        )
    return dict(found)


def _number(path: Path, where: str, value: Any) -> float:
    try:  # YAML reads 50e9 as text because it has no dot
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError):
        raise SettingsError(f"cluster file {path}: expected a number for {where}, found {value!r}") from None
