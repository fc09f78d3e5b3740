"""Addresses and network interfaces of this host, as the others see it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from typing import Final

_ELSEWHERE: Final = "198.51.100.1"
"""An address of RFC 5737 that is nobody's: the way to it is the default route. Nothing is sent there."""
_SIOCGIFADDR: Final = 0x8915  # Linux's <linux/sockios.h>: the IPv4 address of an interface


def reachable_address() -> str | None:
    """This host's address on the default route, else on its first interface; None: there is loopback only."""
    found = _source_address(_ELSEWHERE)
    if found is None:
        others = [each for each in _addresses().values() if not _is_loopback(each)]
        found = others[0] if others else None
    return found


def set_gloo_interface(environ: MutableMapping[str, str]) -> None:
    """Let gloo use the interface towards rank 0's host, unless the user named one.

    gloo takes the interface of this host's name otherwise, and many hosts give their name a loopback address.
    """
    host = environ.get("MASTER_ADDR")
    if host is None or "GLOO_SOCKET_IFNAME" in environ:
        return
    source = _source_address(host)
    if source is None or _is_loopback(source):
        return
    for interface, address in _addresses().items():
        if address == source:
            environ["GLOO_SOCKET_IFNAME"] = interface


def _source_address(host: str) -> str | None:
    """The address that this host sends to ``host`` from, without sending anything; None: there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # no route, or the name is not known
            return None
        address: str = probe.getsockname()[0]
        return address


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # without an address, or not Linux
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
