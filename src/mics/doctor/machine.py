"""Facts of a process and its host, as Linux shows them. What a system does not say stays at its default."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

import mics
from mics.doctor.facts import MachineFacts, Place

_SHM: Final = Path("/dev/shm")
_PACKAGES: Final = ("numpy", "safetensors", "transformers")


def read_place(environ: Mapping[str, str]) -> Place:
    """Who the launcher says this rank is; ``RANK`` is known to be there."""
    rank = int(environ["RANK"])
    return Place(
        rank=rank,
        local_rank=int(environ.get("LOCAL_RANK", rank)),
        ranks_per_node=int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1"))),
        node=environ.get("GROUP_RANK") or socket.gethostname(),
        host=socket.gethostname(),
        stack=_network_stack(),
    )


def read_versions() -> dict[str, str]:
    """Of everything that must be alike on all ranks, as installed here."""
    found = {
        "python": platform.python_version(),
        "mics": mics.__version__,
        "mics sources": _digest_of_sources(),
        "torch": torch.__version__,
    }
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    driver = _driver_version()
    if driver:
        found["NVIDIA driver"] = driver
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def read_machine(environ: Mapping[str, str]) -> MachineFacts:
    """Call it once the rank has joined: it measures how long that took."""
    memory = _memory()
    shm = shutil.disk_usage(_SHM) if _SHM.exists() else None
    return MachineFacts(
        cpus=_num_cpus(),
        threads=int(environ.get("OMP_NUM_THREADS", "0") or 0) or torch.get_num_threads(),
        memory_nbytes=memory.get("MemTotal", 0),
        memory_free_nbytes=memory.get("MemAvailable", 0),
        shm_nbytes=None if shm is None else shm.total,
        shm_free_nbytes=0 if shm is None else shm.free,
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        seconds_to_start=_age(),
    )


def _network_stack() -> str:
    """Two containers of one host have two."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.endswith(" kB"))
    return {name: 1024 * int(rest.split()[0]) for name, rest in pairs}


def _age() -> float:
    """Seconds since this process started, by the clock that nobody sets."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime - int(after_name[19]) / os.sysconf("SC_CLK_TCK"))


def _digest_of_sources() -> str:
    """Two hosts may have one version number and different code, as with an editable install."""
    root = Path(mics.__file__).parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def _driver_version() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "")
