"""What imagined members of a group bring.

Each of them is taken to hold much the same as this rank: a gather repeats this rank's part, times a factor
near plus or minus one where that makes sense, and with other low bits where these are encoded numbers
(int8); a sum multiplies it. What comes from one particular other rank is a copy of this rank's own where
there is one, else zeros.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp

from mics.emulator.fabric import Imagined

_FACTORS = (-1.0625, 0.9375, -0.96875, 1.03125)  # of one set of imagined members to the next
# Likewise, of encoded numbers: bits of the lower of two bytes that differ. A bfloat16 keeps its exponent, and
# a code of int8 changes by at most 63.
_FLIPS = (0x2B, 0x15, 0x37, 0x0E)


@dataclass(frozen=True)
class ImaginedMembers:
    """Of a group in which one is real."""

    size: int
    rank: int  # of the one that is real
    hold: Imagined

    def spread(self, output: Tensor, own: Tensor) -> None:
        """``output`` = ``own`` at this rank's place, and at the others' places something like it."""
        if own.numel() == 0:
            return
        rows, part = output.view(self.size, -1), own.reshape(-1)
        here = self.rank
        if rows[here].data_ptr() != part.data_ptr():
            rows[here].copy_(part)
        if self.hold == "zeros":
            rows[:here].zero_()
            rows[here + 1 :].zero_()
            return
        # Twice as many rows with every kernel: few, long and contiguous, so that they take little of the GPU
        # from the computation. The rows after this rank's own, then those before it.
        done, number = 1, 0
        while done < self.size:
            after = self.size - here
            if done < after:
                count = min(done, after - done)
                source, target = rows[here : here + count], rows[here + done : here + done + count]
            else:
                start = self.size - done  # rows from here on are written
                count = min(done, start)
                source, target = rows[start : start + count], rows[start - count : start]
            self._write_like(target, source, number)
            done, number = done + count, number + 1

    def _write_like(self, target: Tensor, source: Tensor, number: int) -> None:
        # Equal rows of a weight would cancel to zeros, which multiply faster.
        if self._varies(target):
            torch.mul(source, _FACTORS[number % len(_FACTORS)], out=target)
        elif target.dtype is torch.int8 and self.hold == "different" and source.shape[-1] % 2 == 0:
            flips = _FLIPS[number % len(_FLIPS)]
            torch.bitwise_xor(source.view(torch.int16), flips, out=target.view(torch.int16))
        else:
            target.copy_(source)

    def write_each(self, targets: list[Tensor], source: Tensor) -> None:
        torch._foreach_copy_(targets, [source.reshape(-1).view(target.shape) for target in targets])
        if self._varies(source):
            others = [target for target in targets if target.data_ptr() != source.data_ptr()]
            factors = [_FACTORS[number % len(_FACTORS)] for number in range(len(others))]
            torch._foreach_mul_(others, factors)

    def _varies(self, tensor: Tensor) -> bool:
        """Whether imagined members have something else than this one in its place."""
        return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and self.hold == "different"


_NONE = torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)


def pretend_object(tensor: Tensor) -> None:
    """What another rank's pickled object looks like here: None. Objects come as a length and as bytes."""
    if tensor.device.type != "cpu":
        return
    if tensor.dtype is torch.int64:
        tensor.fill_(_NONE.numel())
    elif tensor.dtype is torch.uint8:
        fill(tensor, _NONE)


def fill(output: Tensor, source: Tensor) -> None:
    """Fill ``output`` with what is in ``source``, repeated or cut to fit."""
    part = source.reshape(-1)
    if part.numel() == 0 or output.numel() == 0:
        output.zero_()
        return
    if output.is_contiguous() and output.numel() % part.numel() == 0:
        output.view(-1, part.numel()).copy_(
            part
        )  # with no memory of its own: that would count for the system
        return
    count = -(-output.numel() // part.numel())
    output.copy_(part.repeat(count)[: output.numel()].view(output.shape))


def like(own: Tensor, part: Tensor) -> Tensor:
    """``own``, or zeros, in the shape of ``part``: members may contribute different sizes."""
    return own if own.numel() == part.numel() else torch.zeros_like(part)


def own_part(whole: Tensor, output: Tensor, rank: int) -> Tensor:
    numel = output.numel()
    return whole.reshape(-1)[rank * numel : (rank + 1) * numel].view(output.shape)


def reduce(output: Tensor, own: Tensor, size: int, opts: Any) -> None:
    """``output`` = ``own`` reduced over ``size`` equal members."""
    op = getattr(opts, "reduceOp", ReduceOp.SUM)
    if own.dtype is torch.bool or (own.dtype.is_floating_point and own.dtype.itemsize == 1):
        op = ReduceOp.MAX  # no arithmetic in these formats
    if op == ReduceOp.SUM:
        torch.mul(own, size, out=output)
    elif op == ReduceOp.PRODUCT:
        torch.pow(own, size, out=output)
    elif op == ReduceOp.BXOR:
        torch.mul(own, size % 2, out=output)
    elif output.data_ptr() != own.data_ptr():
        output.copy_(own)  # average, minimum, maximum, and, or: of equals
