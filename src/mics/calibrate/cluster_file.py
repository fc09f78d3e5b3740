"""The file of a measured cluster: values that ``mics plan`` and the engine read, and how they came about."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from mics.calibrate.fit import LinkName, worst_error
from mics.calibrate.run import Calibration
from mics.cost.clusters import Link, speed_of
from mics.errors import SettingsError
from mics.utils.numbers import percent

_DOUBTFUL: Final = 0.6  # of a time: a fit that is further off says little


def check_writable(file: Path) -> None:
    """Raise now if nothing can be written there: measuring takes a while."""
    if file.suffix not in (".yaml", ".yml"):
        raise SettingsError(f"--out {file}: expected a name that ends in .yaml, found {file.name!r}")
    try:
        _part(file).write_text("")
        _part(file).unlink()
    except OSError as error:
        raise SettingsError(
            f"--out {file}: expected a folder that can be written to, found: {error.strerror or error}"
        ) from error
    if file.is_dir():
        raise SettingsError(f"--out {file}: expected a file, found a folder")


def write_cluster(file: Path, found: Calibration, *, model: str, backend: str) -> None:
    """All of it or nothing: a run that begins meanwhile reads the file of before."""
    _part(file).write_text(as_yaml(found, model=model, backend=backend))
    _part(file).replace(file)


def _part(file: Path) -> Path:
    return file.with_name(f".{file.name}.part")


def as_yaml(found: Calibration, *, model: str, backend: str) -> str:
    """The file's text."""
    cluster, machine = found.cluster, found.machine
    computing = cluster.computing
    assert computing is not None
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"# Measured by mics calibrate on {now}, in {found.seconds:.0f} s: {cluster.num_nodes} x "
        f"{cluster.ranks_per_node} ranks.",
        f"# torch {torch.__version__}, {backend}, {computing.device} ({platform.machine()}), computing as "
        f"{model}.",
        *(_check_line(found)),
        f"num_nodes: {cluster.num_nodes}",
        f"ranks_per_node: {cluster.ranks_per_node}",
        *_link_lines("intra", cluster.intra, found),
        *_link_lines("inter", cluster.inter, found),
        f"link_slowdown: {cluster.link_slowdown:.3f}  # of a transfer while the other link is busy",
        f"flops: {machine.matrix_flops:.4e}  # of a rank, in the model's own matrices; attention forward "
        f"{machine.attention_flops:.2e}, wide matrices {machine.wide_flops:.2e}",
        f"peak_flops: {cluster.peak_flops:.4e}  # of the data sheet where it is known, else wide matrices",
        f"memory_nbytes: {cluster.memory_nbytes:.4e}  # of a rank",
        f"memory_bandwidth: {cluster.memory_bandwidth:.4e}  # read and written by a copy",
        f"host_nbytes: {cluster.host_nbytes:.4e}  # of a node",
        f"host_bandwidth: {cluster.host_bandwidth:.4e}  # of a copy to pinned memory or back; 0: no device",
        *([f"gpu: {cluster.gpu}"] if cluster.gpu else []),
        "computing:  # forward and backward at the model's shapes, as speeds of wide matrices",
        f"  device: {computing.device}",
        f"  block_flops: {computing.block_flops:.4e}",
        f"  head_flops: {computing.head_flops:.4e}",
        f"  update_bandwidth: {computing.update_bandwidth:.4e}",
        f"  param_nbytes: {computing.param_nbytes}",
    ]
    return "\n".join(lines) + "\n"


def _link_lines(name: LinkName, link: Link, found: Calibration) -> list[str]:
    value = (
        f"{name}: {{bandwidth: {link.bandwidth:.4e}, latency: {link.latency:.4e}, "
        f"ramp_nbytes: {link.ramp_nbytes:.0f}, slowdown: {link.slowdown:.3f}}}"
    )
    num_points = sum(point.division == name for point in found.points)
    if not num_points:
        return [f"# {name}: not measured, since no group of these ranks uses it alone", value]
    worst = percent(worst_error(found.cluster, found.points, name))
    return [f"# {name}: {num_points} points, the worst {worst} off the line", value]


def _check_line(found: Calibration) -> list[str]:
    """Collectives of the whole world were not fitted: they show whether the links explain them."""
    if not any(point.division == "world" for point in found.points):
        return []
    worst = percent(worst_error(found.cluster, found.points, "world"))
    return [f"# Collectives of all ranks, in two stages, are predicted within {worst}."]


def described(found: Calibration) -> str:
    """``inside a node  1.2 GB/s, 90 us a hop, ...`` and the same between nodes, for the end of a run."""

    def of(name: LinkName, link: Link) -> str:
        if not any(point.division == name for point in found.points):
            return f"not measured: no group of these ranks uses it alone; assumed {speed_of(link)}"
        worst = worst_error(found.cluster, found.points, name)
        doubt = f"\nwarning: a point is {percent(worst)} off that line: the machine was busy, or "
        doubt += "--max-seconds too few; measure again"
        slower = f"{speed_of(link)}, computation beside it {percent(link.slowdown - 1)} slower"
        return slower + (doubt if worst > _DOUBTFUL else "")

    cluster = found.cluster
    lines = [f"inside a node  {of('intra', cluster.intra)}", f"between nodes  {of('inter', cluster.inter)}"]
    if any(point.division == "world" for point in found.points):
        lines.append(f"both at once   each {percent(cluster.link_slowdown - 1)} slower")
    return "\n".join(lines)
