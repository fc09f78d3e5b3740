"""Collectives over gloo as messages from rank to rank, each tagged with what it is.

gloo matches the collectives of a group by their order alone. If one rank gathers a unit while another reduces
a vector, it ends the process from a thread of its own, or hands out wrong data where sizes fit. Messages with
different tags never meet: such ranks wait, and liveness.py finds out why. It is one hop as well, in place of
a ring's many.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

_NOBODY_SENDS: Final = 0  # users' own messages have this tag; we give up before one could come
_AT_ONCE: Final = timedelta(milliseconds=1)


def tag_of(kind: str, label: str, nbytes: int = 0) -> int:
    """A number for a collective, the same on all ranks that call the same one."""
    return 1 + (crc32(f"{kind}|{label}|{nbytes}".encode()) & 0x3FFFFFFF)


def swap(received: Sequence[Tensor], sent: Sequence[Tensor], tag: int, *, group: dist.ProcessGroup) -> None:
    """Send ``sent[r]`` to each member r, and receive ``received[r]`` from each."""
    own, size = group.rank(), group.size()
    works = []
    for distance in range(1, size):
        source, target = (own - distance) % size, (own + distance) % size
        works.append(group.recv([received[source]], source, tag))
        works.append(group.send([sent[target]], target, tag))
    if received[own].data_ptr() != sent[own].data_ptr():
        received[own].copy_(sent[own])
    for work in works:
        work.wait()


Message = tuple[int, int, Tensor]
"""A member, the number of a message among those with one tag, and where it is or goes."""


def deliver(
    received: Sequence[Message], sent: Sequence[Message], tag: int, *, group: dist.ProcessGroup
) -> None:
    """Receive from and send to each member as many messages as there are for it."""
    works = [group.recv([tensor], source, tag + number) for source, number, tensor in received]
    works += [group.send([tensor], target, tag + number) for target, number, tensor in sent]
    for work in works:
        work.wait()


def spread(tensor: Tensor, tag: int, *, group: dist.ProcessGroup) -> None:
    """Everybody's ``tensor`` becomes that of member 0, by a tree: whoever has it sends it on."""
    own, size = group.rank(), group.size()
    reach = 1 << (size - 1).bit_length()
    if own:
        reach = own & -own
        group.recv([tensor], own - reach, tag).wait()
    works = []
    while reach > 1:
        reach //= 2
        if own + reach < size:
            works.append(group.send([tensor], own + reach, tag))
    for work in works:
        work.wait()


def _nothing(size: int) -> tuple[Tensor, ...]:
    """A number for each of ``size`` ranks."""
    return torch.zeros(size, 1, dtype=torch.float32, device="cpu").unbind()


def meet(tag: int, *, group: dist.ProcessGroup) -> None:
    """Return when all members have come here with the same tag."""
    swap(_nothing(group.size()), _nothing(group.size()), tag, group=group)


def break_off(group: dist.ProcessGroup) -> None:
    """Have everything fail that waits in this group, in whatever thread, here and on its other members."""
    # gloo closes all connections of a group when one wait of it takes too long. One that the peer has closed
    # refuses to wait, and leaves the others open.
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([_nothing(1)[0]], peer, _NOBODY_SENDS).wait(_AT_ONCE)
