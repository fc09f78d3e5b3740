"""What a unit is made of, and which part of every unit this rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics.assign import ParamRef
from mics.layout import UnitLayout


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """What a unit is made of. All its parameters share formats, and are trainable or all frozen."""

    index: int
    name: str
    refs: tuple[ParamRef, ...]
    layout: UnitLayout
    trainable: bool
    param_dtype: torch.dtype
    master_dtype: torch.dtype
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of every unit."""

    chunk: int
    piece: int
    masters_over_replicas: bool  # optimizer_sharding == "world"

    def chunk_span(self, layout: UnitLayout) -> range:
        return layout.chunk_span(self.chunk)

    def piece_span(self, layout: UnitLayout) -> range:
        return layout.piece_span(self.chunk, self.piece)

    def master_span(self, layout: UnitLayout, *, trainable: bool) -> range:
        """The flat positions whose values ``model.parameters()`` shows on this rank."""
        if trainable and self.masters_over_replicas:
            return self.piece_span(layout)
        return self.chunk_span(layout)
