"""What a unit is made of, and which part of every unit this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mics.comm.codec import PLAIN, Codec
from mics.guard import Layout, Part
from mics.layout.assign import ParamRef
from mics.layout.flat import UnitLayout
from mics.sharding.float8 import Float8Format


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
    gather: Codec = PLAIN
    """What the partition group sends from node to node of parameters that modules compute with."""
    hop_1: Codec = PLAIN
    """What it sends from node to node of the reduce buffer, to which gradients are cast before."""
    hop_2: Codec = PLAIN
    """What replicas send each other of gradients."""
    keeps_errors: bool = False
    """What rounding in hop 2 loses is sent with the next step's gradients."""
    casts_masters: bool = False
    """Gathers cast the masters on their way: the chunk in the param format is no memory of its own."""
    float8: Float8Format | None = None
    """How its weights are cast to ``param_dtype``, if that is a float8."""
    state_on_host: bool = False
    """Optimizer state is in host memory, and so are masters that are memory of their own."""

    @property
    def label(self) -> str:
        """What errors and traces call it."""
        return f"unit {self.name!r}"

    @property
    def seen_dtype(self) -> torch.dtype:
        """The dtype of whole parameters as modules see them, and of their gradients."""
        return self.param_dtype if self.float8 is None else self.float8.seen_dtype

    @property
    def has_masters(self) -> bool:
        """Whether the masters are memory of their own: they are not where the formats agree."""
        return self.trainable and self.master_dtype is not self.param_dtype

    @property
    def masters_on_host(self) -> bool:
        """Whether the masters are in host memory: what gathers read never is."""
        return self.state_on_host and self.has_masters

    @property
    def hop_2_nbytes(self) -> int:
        """Bytes of this rank's chunk of the gradients, as replicas send it."""
        layout = self.layout
        return layout.num_pieces * self.hop_2.wire_nbytes(layout.piece_numel, self.grad_dtype)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole unit in the format that is gathered."""
        return self.layout.numel * self.param_dtype.itemsize


def label_of(specs: Sequence[UnitSpec]) -> str:
    """What errors and traces call a collective of several units."""
    first, last = specs[0].label, specs[-1].label
    return first if len(specs) == 1 else f"{first} to {last}"


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

    def master_span(self, spec: UnitSpec) -> range:
        """The flat positions whose values ``model.parameters()`` shows on this rank."""
        if self.masters_over_replicas:
            return self.piece_span(spec.layout)
        return self.chunk_span(spec.layout)

    def master_numel(self, spec: UnitSpec) -> int:
        return len(self.master_span(spec))

    def piece_of(self, spec: UnitSpec, chunk: Tensor) -> Tensor:
        """This rank's piece of its [chunk_numel] tensor."""
        numel = spec.layout.piece_numel
        return chunk[self.piece * numel : (self.piece + 1) * numel]

    def own_of(self, spec: UnitSpec, chunk: Tensor) -> Tensor:
        """The part of a [chunk_numel] tensor that the masters cover."""
        return self.piece_of(spec, chunk) if self.masters_over_replicas else chunk

    def views_of(self, spec: UnitSpec, own: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor laid out as the masters: [n, 1, ...], as many dims as it has."""
        span = self.master_span(spec)
        views = []
        for slot in spec.layout.slots:
            overlap = slot.overlap(span)
            piece = own[overlap.start - span.start : overlap.stop - span.start]
            alone = spec.layout.is_undivided
            views.append(piece.view(slot.shape if alone else (-1, *[1] * (len(slot.shape) - 1))))
        return views

    def layouts_of(self, spec: UnitSpec) -> list[Layout]:
        """Which elements of each parameter those parts hold."""
        span = self.master_span(spec)
        # Where every replica holds all of the chunk, one of them counts it.
        counts = self.masters_over_replicas or self.piece == 0
        layouts = []
        for slot, ref in zip(spec.layout.slots, spec.refs, strict=True):
            overlap = slot.overlap(span)
            start, stop = overlap.start - slot.start, overlap.stop - slot.start
            part = Part(
                name=ref.name,
                shape=slot.shape,
                start=start,
                stop=max(start, stop),
                counts=counts,
                alone=spec.layout.is_undivided,
            )
            layouts.append(Layout((part,)))
        return layouts
