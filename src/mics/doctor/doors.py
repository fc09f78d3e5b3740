"""Whether hosts reach each other on the interface that gloo takes: firewalls may pass the store alone.

One rank of each node opens a door, a port of the kernel's choice, and knocks at those of other nodes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mics.doctor.facts import NetworkFacts

_ANSWER: Final = b"mics"
_SECONDS: Final = 3.0
MAX_KNOCKS: Final = 7


def open_door(network: NetworkFacts) -> str:
    """``10.0.0.1:41234``, open as long as the process lives; empty where gloo's interface has no address."""
    chosen = next((each for each in network.interfaces if each.name == network.gloo.name), None)
    if chosen is None or not chosen.addresses:
        return ""
    try:
        server = socket.create_server((chosen.addresses[0], 0), backlog=128)
    except OSError:
        return ""

    def answer() -> None:
        while True:
            with contextlib.suppress(OSError):
                visitor, _ = server.accept()
                with visitor:
                    visitor.sendall(_ANSWER)

    threading.Thread(target=answer, daemon=True, name="mics-doctor-door").start()
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


def to_knock_at(node: str, nodes: Sequence[str]) -> list[str]:
    """The next nodes in a ring: all others where they are few."""
    at = nodes.index(node)
    ring = [nodes[(at + step) % len(nodes)] for step in range(1, len(nodes))]
    return ring[:MAX_KNOCKS]


def knock(door: str) -> str:
    """Nothing if somebody answers, else why not."""
    host, _, port = door.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_SECONDS) as visit:
            visit.settimeout(_SECONDS)
            found = visit.recv(len(_ANSWER))
    except OSError as error:
        return error.strerror or str(error)
    return "" if found == _ANSWER else "somebody else answers at this address"


def knock_at_all(doors: Mapping[str, str]) -> dict[str, str]:
    """Why a node was not reached, for each that was not."""
    if not doors:
        return {}
    with ThreadPoolExecutor(max_workers=len(doors)) as pool:
        answers = dict(zip(doors, pool.map(knock, doors.values()), strict=True))
    return {node: reason for node, reason in answers.items() if reason}


def cut_off(closed: Mapping[tuple[str, str], str]) -> list[str]:
    """Nodes to leave out so that the others reach each other: those with most closed doors first."""
    left, found = set(closed), []
    while left:
        counted = Counter(node for pair in sorted(left, reverse=True) for node in pair)
        worst = counted.most_common(1)[0][0]
        found.append(worst)
        left = {pair for pair in left if worst not in pair}
    return found
