"""Digests of tensors where they are, to compare what several ranks hold without sending it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD: Final = torch.int32
SLICE_NUMEL: Final = 1 << 19  # words that are weighed together: products of 4 MiB

# Any odd numbers with their ones well spread make good weights; these are those of splitmix64, as int64.
_STEP: Final = -0x61C8864680B583EB
_MIX: Final = -0x40A7B892E31B1A47


def digests(tensors: Sequence[Tensor], *, slice_numel: int = SLICE_NUMEL) -> Tensor:
    """A number for each tensor that every bit of it counts in: int64 [len(tensors)], on their device.

    The sum of all 32-bit words, each times a 64-bit odd weight of its own, modulo 2^64. Integers: the order
    of the additions does not matter, so equal bits give equal digests on any device.
    Longer slices take fewer kernels, and 8 bytes of memory for each of their words.
    """
    device = tensors[0].device
    largest = max(tensor.numel() * tensor.element_size() for tensor in tensors)
    num_words = -(-largest // _WORD.itemsize)
    num_slices = max(1, -(-num_words // slice_numel))
    weights = _weights(0, min(num_words, slice_numel), device)
    sums = torch.zeros(len(tensors), num_slices, dtype=torch.int64, device=device)
    for tensor, row in zip(tensors, sums, strict=True):
        for words, place in zip(_slices(tensor, slice_numel), row.unbind(), strict=False):
            torch.sum(words * weights[: words.numel()], 0, out=place)
    # A word's weight is that of its place in its slice times that of the slice: odd as well.
    return (sums * _weights(slice_numel, num_slices, device)).sum(1)


def _slices(tensor: Tensor, slice_numel: int) -> Iterator[Tensor]:
    """The bytes of a 1-D tensor as words, some at a time. Zeros fill up the last word."""
    for part in tensor.view(torch.uint8).split(slice_numel * _WORD.itemsize):
        missing = -part.numel() % _WORD.itemsize
        yield (F.pad(part, (0, missing)) if missing else part).view(_WORD)


def _weights(first: int, numel: int, device: torch.device) -> Tensor:
    """Odd numbers that look random and are the same everywhere, from the ``first`` on: int64 [numel]."""
    values = torch.arange(first + 1, first + numel + 1, dtype=torch.int64, device=device) * _STEP
    values = (values ^ (values >> 30)) * _MIX
    return (values ^ (values >> 27)) | 1
