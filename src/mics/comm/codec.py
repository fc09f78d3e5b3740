"""What a hop sends: encoded where it leaves, decoded where it arrives.

Each hop has one codec: ``hop_1`` and ``hop_2`` of ``sharding/spec.py: UnitSpec`` choose it. Another format is
another class here. As yet the wire has one element for each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """How values are on the wire. Sums are made of decoded values, in their own format."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The format on the wire of values in ``dtype``."""
        ...

    def encode(self, wire: Tensor, values: Tensor) -> None:
        """Fill ``wire`` with what is sent of ``values``."""
        ...

    def decode(self, values: Tensor, wire: Tensor) -> None:
        """Fill ``values`` with what came."""
        ...

    def add_up(self, out: Tensor, rows: Tensor | Sequence[Tensor]) -> None:
        """``out`` = the sum of what came from each member, in their order."""
        ...


@dataclass(frozen=True)
class Cast:
    """Values as they are, or in another format."""

    dtype: torch.dtype | None = None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None else self.dtype

    def encode(self, wire: Tensor, values: Tensor) -> None:
        wire.copy_(values)

    def decode(self, values: Tensor, wire: Tensor) -> None:
        values.copy_(wire)

    def add_up(self, out: Tensor, rows: Tensor | Sequence[Tensor]) -> None:
        """In the wider of both formats.

        Formats narrower than float32 are added in float32: a sum over many ranks would drown in rounding.
        """
        wide = out.dtype if out.dtype.itemsize >= 4 else torch.float32
        if isinstance(rows, Tensor) and out.device.type != "cpu":
            # One kernel; on the CPU the loop is what a single process can repeat.
            if out.dtype is wide:
                torch.sum(rows, 0, dtype=wide, out=out)
            else:
                out.copy_(torch.sum(rows, 0, dtype=wide))
            return
        first, *others = rows
        total = first if first.dtype is wide else first.to(wide)
        for row in others:
            total += row
        out.copy_(total)


PLAIN: Codec = Cast()
