"""Whether this machine can play a cluster, tried for real in a namespace of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.cluster.network import ClusterError, NameLock, command, remove_namespaces

_PROBE_NAME = "mics-check"
_PROBE = f"{_PROBE_NAME}-h0"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One thing the cluster needs, and why it is missing (None: it is there)."""

    name: str
    missing: str | None
    optional: bool


@dataclass(frozen=True, kw_only=True)
class _Check:
    """A function that raises ClusterError with the reason when what ``name`` says is missing."""

    name: str
    run: Callable[[], None]
    optional: bool = False


def _linux() -> None:
    if sys.platform != "linux":
        raise ClusterError(f"expected Linux, found {sys.platform}: network namespaces are Linux's")


def _root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("this process is not root; namespaces and interfaces need it")


def _installed(program: str) -> Callable[[], None]:
    def check() -> None:
        if shutil.which(program) is None:
            raise ClusterError(f"`{program}` is not installed; it comes with the package iproute2")

    return check


def _namespace() -> None:
    remove_namespaces(_PROBE_NAME)
    command("ip", "netns", "add", _PROBE)
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    command("ip", "netns", "exec", _PROBE, "sh", "-ec", f"echo reno >{setting}")


def _interfaces() -> None:
    command("ip", "-n", _PROBE, "link", "add", "bridge", "type", "bridge")
    command("ip", "-n", _PROBE, "link", "add", "uplink", "type", "veth", "peer", "name", "port0")


def _queue(*kind: str) -> Callable[[], None]:
    def check() -> None:
        command("tc", "-n", _PROBE, "qdisc", "replace", "dev", "uplink", "root", *kind)

    return check


_BEFORE_NAMESPACES = [
    _Check(name="Linux", run=_linux),
    _Check(name="root", run=_root),
    _Check(name="ip", run=_installed("ip")),
    _Check(name="tc", run=_installed("tc")),
]
_INSIDE_NAMESPACE = [
    _Check(name="network namespaces", run=_namespace),
    _Check(name="bridge and veth", run=_interfaces),
    _Check(name="tbf (--rate)", run=_queue("tbf", "rate", "1mbit", "burst", "20000", "limit", "1000000")),
    _Check(name="netem (--delay)", run=_queue("netem", "delay", "1ms"), optional=True),
]


def _findings(checks: Sequence[_Check]) -> list[Requirement]:
    """What each check found, up to the first that is missing and not optional: the rest builds on it."""
    found: list[Requirement] = []
    for check in checks:
        missing = None
        try:
            check.run()
        except ClusterError as error:
            missing = str(error)
        found.append(Requirement(name=check.name, missing=missing, optional=check.optional))
        if missing is not None and not check.optional:
            break
    return found


def examine() -> list[Requirement]:
    """Everything the cluster needs, in the order it needs it, up to the first that is missing."""
    lock = NameLock(_PROBE_NAME)
    take_lock = _Check(name="lock in /run", run=partial(lock.acquire, wait=True))
    found = _findings([*_BEFORE_NAMESPACES, take_lock])
    if reason_against(found) is not None:
        return found
    try:
        return found + _findings(_INSIDE_NAMESPACE)
    finally:
        remove_namespaces(_PROBE_NAME)
        lock.release()


def reason_against(requirements: Sequence[Requirement], *, delay: bool = False) -> str | None:
    """Why a cluster (with ``delay``: one whose network is slow to answer) cannot run here, or None."""
    for requirement in requirements:
        if requirement.missing is not None and (delay or not requirement.optional):
            return f"{requirement.name}: {requirement.missing}"
    return None
