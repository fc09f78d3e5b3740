"""Network interfaces and adapters of this host, and which of them gloo and NCCL take."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import torch.distributed as dist

from mics.doctor.facts import Adapter, Interface, InterfaceChoice, NetworkFacts

_NET: Final = Path("/sys/class/net")
_RDMA: Final = Path("/sys/class/infiniband")
_VERBS: Final = Path("/dev/infiniband")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
VIRTUAL: Final = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc")
"""What containers talk to their own host with."""
_PREFIXES: Final = ("NCCL_", "GLOO_", "FI_", "TORCH_NCCL_")
_PLUGINS: Final = ("libnccl-net-ofi.so", "libnccl-net-aws-ofi.so", "libnccl-net.so")


def read_network(environ: Mapping[str, str], *, on_gpu: bool) -> NetworkFacts:
    """Reads files and opens no connection."""
    interfaces, adapters = read_interfaces(), read_adapters()
    has_efa = any(adapter.kind == "efa" for adapter in adapters)
    return NetworkFacts(
        interfaces=interfaces,
        gloo=_tried(choose_for_gloo(interfaces, environ, own_addresses())),
        nccl=choose_for_nccl(interfaces, environ) if on_gpu else None,
        adapters=adapters,
        verbs_open=not adapters or any(os.access(file, os.R_OK) for file in _VERBS.glob("uverbs*")),
        ofi_plugin=find_ofi_plugin(environ) if has_efa else None,
        variables={name: value for name, value in environ.items() if name.startswith(_PREFIXES)},
    )


def read_interfaces() -> list[Interface]:
    """In the kernel's order, which is the order in which NCCL looks at them."""
    return [_interface(name) for _, name in socket.if_nameindex()]


def _interface(name: str) -> Interface:
    folder = _NET / name
    flags = int(_text(folder / "flags") or "0x1", 16)
    speed = _text(folder / "speed")
    return Interface(
        name=name,
        up=bool(flags & _IFF_UP) and _text(folder / "operstate") != "down",
        loopback=bool(flags & _IFF_LOOPBACK) or name == "lo",
        physical=(folder / "device").exists(),
        speed_mbit=int(speed) if speed.isdigit() and int(speed) > 0 else None,
        addresses=_addresses(name),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a driver that does not say, or an interface that is down
        return ""


def _addresses(name: str) -> list[str]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(found[20:24])]


def own_addresses() -> list[str]:
    """What this host's name means to itself."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(each[4][0]) for each in found]


def choose_for_gloo(
    interfaces: Sequence[Interface], environ: Mapping[str, str], own: Sequence[str]
) -> InterfaceChoice:
    """By the variable, else the interface that this host's name leads to, else the loopback."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        there = any(each.name == named for each in interfaces)
        return InterfaceChoice(name=named if there else None, because=f"GLOO_SOCKET_IFNAME={named}")
    for each in interfaces:
        if set(each.addresses) & set(own) and not each.loopback:
            return InterfaceChoice(name=each.name, because="the host's name leads to it")
    loopback = next((each.name for each in interfaces if each.loopback), None)
    why = (
        "leads to it" if any(address.startswith("127.") for address in own) else "has no address of this host"
    )
    return InterfaceChoice(name=loopback, because=f"the host's name {why}")


def _tried(choice: InterfaceChoice) -> InterfaceChoice:
    """What gloo itself says to it."""
    try:
        if choice.because.startswith("GLOO_SOCKET_IFNAME="):
            dist.ProcessGroupGloo.create_device(interface=choice.because.partition("=")[2])
        else:
            dist.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        return InterfaceChoice(name=choice.name, because=choice.because, error=str(error).partition("\n")[0])
    return choice


def choose_for_nccl(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> InterfaceChoice:
    """By NCCL's rule: the variable's prefixes; else ib*, else neither docker nor loopback, else any."""
    usable = [each for each in interfaces if each.up and each.addresses]
    rule = environ.get("NCCL_SOCKET_IFNAME", "")
    if rule:
        found = [each for each in usable if _matches(each.name, rule)]
        return InterfaceChoice(name=found[0].name if found else None, because=f"NCCL_SOCKET_IFNAME={rule}")
    groups = (
        [each for each in usable if each.name.startswith("ib")],
        [each for each in usable if not each.loopback and not each.name.startswith("docker")],
        [each for each in usable if not each.loopback],
        usable,
    )
    first = next((group[0].name for group in groups if group), None)
    return InterfaceChoice(name=first, because="NCCL takes the first that fits")


def _matches(name: str, rule: str) -> bool:
    """``eth,ib``: begins so; ``=eth0``: is so; ``^docker``: not so."""
    inverted = rule.startswith("^")
    exact = rule.removeprefix("^").startswith("=")
    wanted = [word for word in rule.removeprefix("^").removeprefix("=").split(",") if word]
    found = any(name == word if exact else name.startswith(word) for word in wanted)
    return found != inverted


def read_adapters(folder: Path = _RDMA) -> list[Adapter]:
    """EFA, InfiniBand and RoCE adapters, as the kernel lists them."""
    if not folder.is_dir():
        return []
    return [_adapter(each) for each in sorted(folder.iterdir())]


def _adapter(folder: Path) -> Adapter:
    ports = sorted((folder / "ports").glob("*"))
    layers = [_text(port / "link_layer") for port in ports]
    kind: Literal["efa", "infiniband", "roce"] = "infiniband"
    if (folder / "device" / "driver").resolve().name == "efa" or folder.name.startswith("efa"):
        kind = "efa"
    elif layers and all(layer == "Ethernet" for layer in layers):
        kind = "roce"
    states = [_text(port / "state") for port in ports]
    active = kind == "efa" or any("ACTIVE" in state for state in states)
    return Adapter(name=folder.name, kind=kind, active=active)


def find_ofi_plugin(environ: Mapping[str, str]) -> str | None:
    """The name of the aws-ofi-nccl library that NCCL would load; None: there is none that loads."""
    named = environ.get("NCCL_NET_PLUGIN", "")
    wanted = (named, f"libnccl-net-{named}.so") if named else _PLUGINS
    for name in wanted:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None
