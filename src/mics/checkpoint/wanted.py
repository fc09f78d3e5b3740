"""What a rank wants of a checkpoint, and what it does not find there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mics.checkpoint.records import Index, StoredTensor, TensorPart
from mics.checkpoint.storage import Place
from mics.errors import CheckpointError


@dataclass(kw_only=True)
class Wanted:
    """What this rank wants of a checkpoint, and what it does not find there."""

    index: Index
    parts: list[tuple[TensorPart, str]] = field(
        default_factory=list
    )  # with the name that the checkpoint has for it
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    strided: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # and what is read in place of it

    def stored(self, name: str) -> StoredTensor:
        """A tensor that is known to be there."""
        found = self.index.find(name)
        assert found is not None, name
        return found

    def add_whole(self, tensor: Tensor, name: str, stored: StoredTensor) -> None:
        place = tensor
        if not tensor.is_contiguous():
            place = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self.strided.append((tensor, place))
        span, shape = range(tensor.numel()), tuple(tensor.shape)
        self.add(
            TensorPart(name=name, shape=shape, span=span, values=place.view(-1), whole=True), name, stored
        )

    def add(self, part: TensorPart, name: str, stored: StoredTensor) -> None:
        if stored.shape != part.shape:
            self.problems.append(f"{part.name}: expected shape {part.shape}, found {stored.shape}")
        elif not converts(stored.dtype, part.values.dtype):
            self.problems.append(
                f"{part.name}: expected values that {part.values.dtype} can hold, found {stored.dtype}"
            )
        elif part.span:
            self.parts.append((part, name))

    def raise_problems(self, folder: Place) -> None:
        if self.problems:
            more = f"\n  and {len(self.problems) - 8} more" if len(self.problems) > 8 else ""
            listed = "\n  ".join(self.problems[:8])
            raise CheckpointError(
                f"{folder}: expected a checkpoint of this model, found another:\n  {listed}{more}\n"
                "mics.load(..., strict=False) takes what fits by name"
            )


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values mean the same in another format: masters are wider or narrower than what was saved.

    Not floats of 8 bits, which mean nothing without the scales beside them, and no other kind of numbers.
    """
    if stored == wanted:
        return True
    if stored.is_floating_point and wanted.is_floating_point:
        return min(stored.itemsize, wanted.itemsize) > 1
    if stored.is_complex or wanted.is_complex or stored.is_floating_point or wanted.is_floating_point:
        return stored.is_complex and wanted.is_complex and stored.itemsize <= wanted.itemsize
    if torch.bool in (stored, wanted):
        return torch.uint8 in (stored, wanted)  # masks were bytes once
    least, most = torch.iinfo(stored), torch.iinfo(wanted)
    return most.min <= least.min and least.max <= most.max
