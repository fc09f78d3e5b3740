"""What a collective sends: encoded where it leaves, decoded where it arrives.

Gathers and both hops have one codec each: ``sharding/spec.py: UnitSpec`` says which. Another format is one
more class. Values go to members in rows, and each row on the wire is as many bytes as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """How values are on the wire. Sums are made of decoded values, in their own format."""

    def changes(self, dtype: torch.dtype) -> bool:
        """Whether values in ``dtype`` are anything else than themselves on the wire."""
        ...

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """On the wire, of ``numel`` values in ``dtype`` that go to one member."""
        ...

    def encode(self, wires: Tensor, values: Tensor) -> None:
        """Fill the rows of ``wires``, uint8 [n, wire_nbytes], with what is sent of ``values``, [n, numel]."""
        ...

    def decode(self, values: Tensor, wires: Tensor) -> None:
        """Fill the rows of ``values`` with what came."""
        ...

    def add_up(self, out: Tensor, wires: Tensor) -> None:
        """``out`` = the sum of what came from each member, in their order."""
        ...

    @property
    def of_sums(self) -> Codec:
        """How sums go on to all members, where all of them need all."""
        ...

    def of_part(self, index: int, count: int) -> Codec:
        """For one of ``count`` equal parts of what this is for."""
        ...


@dataclass(frozen=True)
class Cast:
    """Values as they are, or in a narrower format."""

    dtype: torch.dtype | None = None

    def changes(self, dtype: torch.dtype) -> bool:
        return self.dtype is not None and self.dtype.itemsize < dtype.itemsize

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self._format(dtype).itemsize

    def encode(self, wires: Tensor, values: Tensor) -> None:
        wires.view(self._format(values.dtype)).copy_(values)

    def decode(self, values: Tensor, wires: Tensor) -> None:
        values.copy_(wires.view(self._format(values.dtype)))

    def add_up(self, out: Tensor, wires: Tensor) -> None:
        add_rows(out, wires.view(self._format(out.dtype)))

    @property
    def of_sums(self) -> Codec:
        return self

    def of_part(self, index: int, count: int) -> Codec:
        return self

    def _format(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and self.changes(dtype) else dtype


PLAIN: Codec = Cast()


def add_rows(out: Tensor, rows: Tensor | Sequence[Tensor]) -> None:
    """``out`` = the sum of ``rows``, in their order and in the wider of both formats.

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
