"""How far values have moved, in place of the values: the same bits, in about a third of the bytes.

An optimizer moves a 16-bit parameter by few units in the last place. Whoever has the value of before needs
the move alone. Moves are taken in the order of the numbers, modulo 2^16, so that every pair of values has
one, and -0.0, infinities and NaN come back to the bit::

    a nibble for each value    -7 to 7, or 15: look among the bytes
    a byte for some            -127 to 127, or 255: look among the words
    a word for few             any move

On the wire, for ``numel`` values in blocks::

    nibbles  [num_blocks * block / 2]   the first half of a block in the low bits, the second in the high ones
    starts   [num_blocks * 2] int32     where the bytes and the words of each block begin
    bytes    [room.num_bytes]
    words    [room.num_words] int16

How many bytes and words there are depends on the values. Sizes on the wire must not: ``room`` says for how
many there is space, and ``needed`` tells how many there were. What does not fit is decoded wrong.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import torch
from torch import Tensor

from mics.utils.digests import digests

_log = logging.getLogger("mics")
_MAX_BLOCK: Final = 512  # as fast as the H200 decodes
_MIN_BLOCK: Final = 16
_ALIGNMENT: Final = 16  # of each part on the wire, and of the whole
SMALL: Final = 7
"""The largest move that a nibble holds."""
MEDIUM: Final = 127
"""The largest move that a byte holds."""


@dataclass(frozen=True)
class Room:
    """For how many moves there is space that a nibble does not hold (a byte each), and a byte does not."""

    num_bytes: int
    num_words: int

    def holds(self, needed: Room) -> bool:
        return needed.num_bytes <= self.num_bytes and needed.num_words <= self.num_words


@dataclass(frozen=True)
class Moves:
    """Encodes and decodes ``numel`` values of 16 bits."""

    numel: int
    room: Room

    @cached_property
    def block(self) -> int:
        """Values whose bytes and words are found by one entry of ``starts``."""
        power = 1 << max(0, self.numel - 1).bit_length()
        return min(_MAX_BLOCK, max(_MIN_BLOCK, power))

    @cached_property
    def num_blocks(self) -> int:
        return -(-self.numel // self.block)

    @cached_property
    def _ends(self) -> tuple[int, int, int, int]:
        """Of each part on the wire, in bytes."""
        ends, end = [], 0
        sizes = (self.num_blocks * self.block // 2, 8 * self.num_blocks)
        for nbytes in (*sizes, self.room.num_bytes, 2 * self.room.num_words):
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        return ends[0], ends[1], ends[2], ends[3]

    @property
    def nbytes(self) -> int:
        """On the wire."""
        return self._ends[3]

    def parts(self, wire: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nibbles, starts, bytes and words; of several wires, stacked, likewise: [..., n]."""
        nibbles, starts, few, _ = self._ends
        return (
            wire[..., : self.num_blocks * self.block // 2],
            wire[..., nibbles : nibbles + 8 * self.num_blocks].view(torch.int32),
            wire[..., starts : starts + self.room.num_bytes],
            wire[..., few : few + 2 * self.room.num_words].view(torch.int16),
        )

    def encode(self, wire: Tensor, old: Tensor, new: Tensor, needed: Tensor) -> None:
        """Fill ``wire`` (uint8 [nbytes]) with the moves from ``old`` to ``new``, 16 bits each.

        ``needed`` (int32 [2], at a multiple of 8 bytes: a GPU adds to both at once) becomes the room that
        they need.
        """
        old, new = old.view(torch.int16), new.view(torch.int16)
        if old.device.type == "cuda":
            from mics.comm import moves_triton

            moves_triton.encode(self, wire, old, new, needed)
        else:
            self._encode(wire, old, new, needed)

    def decode(self, values: Tensor, wires: Tensor, *, own: int) -> None:
        """Move ``values``, [members, numel], by what each member sent: ``wires``, uint8 [members, nbytes].

        Those of the member at position ``own`` are new already.
        """
        values = values.view(torch.int16)
        if values.device.type == "cuda":
            from mics.comm import moves_triton

            moves_triton.decode(self, values, wires, own)
            return
        for position, (row, wire) in enumerate(zip(values, wires, strict=True)):
            if position != own:
                self._decode(row, wire)

    def _encode(self, wire: Tensor, old: Tensor, new: Tensor, needed: Tensor) -> None:
        moves = _wrapped(_ordered(new) - _ordered(old))
        size = moves.abs()
        large, largest = size > SMALL, size > MEDIUM
        nibbles, starts, few, fewer = self.parts(wire)
        padded = torch.full((self.num_blocks * self.block,), SMALL, dtype=torch.uint8, device=old.device)
        padded[: self.numel] = torch.where(large, 15, moves + SMALL)
        low, high = padded.view(self.num_blocks, 2, -1).unbind(1)
        torch.bitwise_or(low, high << 4, out=nibbles.view(self.num_blocks, -1))
        counts = torch.zeros(self.num_blocks * self.block, 2, dtype=torch.int32, device=old.device)
        counts[: self.numel, 0], counts[: self.numel, 1] = large, largest
        in_blocks = counts.view(self.num_blocks, -1, 2).sum(1, dtype=torch.int32)
        ends = in_blocks.cumsum(0, dtype=torch.int32)
        starts.copy_((ends - in_blocks).view(-1))
        needed.copy_(ends[-1])
        rest = moves[large]
        is_word = rest.abs() > MEDIUM
        as_bytes = torch.where(is_word, 255, rest + MEDIUM).to(torch.uint8)[: few.numel()]
        few[: as_bytes.numel()] = as_bytes
        words = rest[is_word].to(torch.int16)[: fewer.numel()]
        fewer[: words.numel()] = words

    def _decode(self, values: Tensor, wire: Tensor) -> None:
        nibbles, _, few, fewer = self.parts(wire)
        pairs = nibbles.view(self.num_blocks, -1)
        codes = torch.stack([pairs & 15, pairs >> 4], 1).view(-1)[: self.numel]
        large = codes == 15
        num_large = int(large.sum())
        as_bytes = few[:num_large].to(torch.int32)
        is_word = as_bytes == 255
        num_words = int(is_word.sum())
        if num_large > few.numel() or num_words > fewer.numel():
            return  # they did not fit
        rest = as_bytes - MEDIUM
        rest[is_word] = fewer[:num_words].to(torch.int32)
        moves = codes.to(torch.int32) - SMALL
        moves[large] = rest
        values.copy_(_ordered(_wrapped(_ordered(values) + moves)))


def checksum(values: Tensor, out: Tensor) -> None:
    """Fill ``out`` (int64 [1]) with a digest of ``values``, the same on all devices of a kind.

    As ``digests``, but by one kernel on a GPU: this is done for every unit in every step.
    """
    if values.device.type == "cuda":
        from mics.comm import moves_triton

        moves_triton.checksum(values.view(torch.int32), out)
    else:
        out.copy_(digests([values]))


@cache
def moves_work(device: torch.device) -> bool:
    """Whether moves can be made on ``device``, tried once.

    On a GPU they take Triton, and Triton takes a C compiler.
    """
    if device.type != "cuda":
        return True
    moves = Moves(_MIN_BLOCK, Room(_MIN_BLOCK, _MIN_BLOCK))
    try:
        values = torch.zeros(2, moves.numel, dtype=torch.int16, device=device)
        wires = torch.zeros(2, moves.nbytes, dtype=torch.uint8, device=device)
        needed = torch.zeros(2, dtype=torch.int32, device=device)
        moves.encode(wires[0], values[0], values[0], needed)
        moves.decode(values, wires, own=1)
        checksum(values[0], torch.zeros(1, dtype=torch.int64, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:
        _log.warning("new parameters go to the replicas as they are, since moves do not work here: %s", error)
        return False
    return True


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floating-point numbers (int16) as numbers in the same order; and the other way round."""
    wide = bits.to(torch.int32)
    return torch.where(wide >= 0, wide, -32769 - wide)


def _wrapped(numbers: Tensor) -> Tensor:
    """Modulo 2^16, around zero."""
    return ((numbers + 32768) & 0xFFFF) - 32768
