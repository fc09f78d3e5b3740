"""The roll call: before a collective over gloo its members tell each other what they are about to do.

gloo matches what ranks send by order alone. If one gathers a unit while another reduces a vector, it ends the
process from a thread of its own, or hands out wrong data where sizes fit. Roll calls are all of one size, so
they always meet; ranks that find each other elsewhere raise before anything else is sent. NCCL has none: it
would cost the host time, and there liveness.py and the boundary's agreement find out.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch
import torch.distributed as dist

from mics.comm.journal import Action
from mics.comm.liveness import Liveness

_NUM_DIGEST_BYTES: Final = 8
_NUM_BYTES: Final = 192


class RollCall:
    """Which collective of a group this rank joins, told to liveness and, over gloo, to the other members."""

    def __init__(self, liveness: Liveness, group: dist.ProcessGroup, purpose: str) -> None:
        self.liveness = liveness
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._journal = liveness.journal(purpose, self._ranks)
        self._heard = torch.zeros(len(self._ranks), _NUM_BYTES, dtype=torch.uint8, device="cpu")

    def enter(self, kind: str, label: str) -> None:
        """Note that this rank is about to join a collective."""
        self.liveness.enter(self._journal, kind, label)

    def compare(self, kind: str, label: str, nbytes: int = 0) -> None:
        """Raise unless all members are about to join the same one. Over gloo."""
        said = torch.frombuffer(_encoded(kind, label, nbytes), dtype=torch.uint8)
        # A kind of collective that users hardly call: one of theirs in its place waits, and ends nobody.
        dist.all_to_all_single(self._heard, said.expand(len(self._ranks), -1).contiguous(), group=self._group)
        if torch.equal(self._heard, said.expand_as(self._heard)):
            return
        rows = [_decoded(row.numpy().tobytes()) for row in self._heard]
        same_words = len({words for words, _ in rows}) == 1
        done: dict[Action, list[int]] = {}
        for rank, ((theirs, about), size) in zip(self._ranks, rows, strict=True):
            action = theirs, f"{about} ({size} bytes)" if same_words else about
            done.setdefault(action, []).append(rank)
        raise self.liveness.different_ways(self._journal, done)


def _encoded(kind: str, label: str, nbytes: int) -> bytearray:
    """A digest of everything, and as much of the words as there is room for."""
    words = f"{nbytes}|{kind}|{label}".encode()
    row = blake2b(words, digest_size=_NUM_DIGEST_BYTES).digest() + words[: _NUM_BYTES - _NUM_DIGEST_BYTES]
    return bytearray(row.ljust(_NUM_BYTES, b"\0"))


def _decoded(row: bytes) -> tuple[Action, str]:
    """What a member is about to join, and with how many bytes."""
    nbytes, kind, label = row[_NUM_DIGEST_BYTES:].rstrip(b"\0").decode(errors="ignore").split("|", 2)
    return (kind, label), nbytes
