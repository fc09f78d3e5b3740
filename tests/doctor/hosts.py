"""`mics doctor` on namespace hosts that have names, mounts and clocks of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from benchmarks.cluster.launch import host_environment, stop, torchrun_argv, watch
from benchmarks.cluster.network import NamespaceCluster

_CLOCK = """
import os, time
if "TEST_CLOCK_AHEAD" in os.environ:
    real, ahead = time.time, float(os.environ["TEST_CLOCK_AHEAD"])
    time.time = lambda: real() + ahead
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What is different on one host."""

    setup: str = ""
    """Shell commands, run there in mount and name spaces of its own."""
    variables: Mapping[str, str] = field(default_factory=dict)


def read_only(folder: Path) -> str:
    """A read-only mount of ``folder`` on this host alone."""
    path = shlex.quote(str(folder))
    return f"mount --bind {path} {path}\nmount -o remount,ro,bind {path}"


def instead_of(file: Path, other: Path) -> str:
    """On this host alone ``file`` has what ``other`` has."""
    return f"mount --bind {shlex.quote(str(other))} {shlex.quote(str(file))}"


def clock_ahead(seconds: float) -> dict[str, str]:
    """Python's clock on this host: no namespace has a time of day of its own."""
    return {"TEST_CLOCK_AHEAD": str(seconds)}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the doctor said: rank 0's output, everything else, and the hosts' exit codes."""

    out: str
    other: str
    codes: tuple[int | None, ...]


def run_doctor(
    cluster: NamespaceCluster, hosts: Sequence[Host], args: Sequence[str], folder: Path, *, timeout_s: float
) -> Told:
    """One torchrun with one rank on each host, which are named host-0, host-1, ..."""
    (folder / "sitecustomize.py").write_text(_CLOCK)
    environ = host_environment(cluster, os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ["PYTHONPATH"]])
    with TemporaryFile() as out, TemporaryFile() as other:
        processes = []
        try:
            for number, host in enumerate(hosts):
                rank = ["-m", "mics.cli", "doctor", *args]
                argv = _in_own_spaces(number, host, torchrun_argv(cluster, number, 1, rank))
                variables = {**environ, **host.variables}
                first = number == 0
                processes.append(
                    cluster.exec(number, argv, variables, stdout=out if first else other, stderr=other)
                )
            ending = watch(processes, timeout_s=timeout_s, grace_s=20.0, say=print)
        finally:
            stop(processes)
        return Told(out=_text(out), other=_text(other), codes=ending.codes)


def _in_own_spaces(number: int, host: Host, argv: list[str]) -> list[str]:
    script = f'echo host-{number} >/proc/sys/kernel/hostname\n{host.setup}\nexec "$@"'
    return ["unshare", "--mount", "--uts", "sh", "-ec", script, "sh", *argv]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def can_unshare() -> bool:
    done = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, check=False)
    return done.returncode == 0 and sys.platform == "linux"
