"""What the engine asks of a group of ranks. Implementations sit beside this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from mics.comm.codec import PLAIN, Codec

Action = Callable[[], None]
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Where results go and where they come from, for several tensors that travel as one collective."""
Parts = Callable[[range], Tensor]
"""Of one tensor, what members at consecutive positions hold together: 1-D, empty where they have nothing."""


class UnevenGather(Protocol):
    """Gathers of parts that have any size, over one group."""

    def holds(self, to: int | None) -> range:
        """The positions whose parts this member has afterwards."""
        ...

    def stages(
        self, tensors: Sequence[Parts], label: str, to: int | None = None
    ) -> Sequence[tuple[str, Action]]:
        """Members bring their parts to all others, or to the member at position ``to``.

        Each member gives memory for the positions that it ``holds``, with its own part filled.
        """
        ...


class Collectives(Protocol):
    """Collectives over one group. ``label`` names the unit, for errors and traces.

    Chunk ``c`` of a buffer belongs to the member at position ``position == c``. All members call the same
    methods in the same order. A call returns when its result may be used by work that follows on the
    current stream (CUDA) or at once (CPU); a failure raises ``CollectiveError``.
    """

    @property
    def size(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def uneven(self) -> UnevenGather: ...

    @property
    def staging_nbytes(self) -> int:
        """Bytes this implementation keeps between calls."""
        ...

    @property
    def reduces_first(self) -> str:
        """The name of the link on which reductions begin (see ``reduce_stages``)."""
        ...

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> None:
        """``out[c] = shard of member c``. ``shard`` may be this member's own chunk of ``out``."""
        ...

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        """``out = sum over members of their buffer[position]``. ``out`` may be that chunk of ``buffer``."""
        ...

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        """Sum (or maximum) over members, in place."""
        ...

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Everybody's ``tensor`` becomes that of the member at position 0."""
        ...

    def gather_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        """``all_gather`` of all pairs (out, shard) as one, in its parts.

        Each part comes with the name of the link it uses; they are to be done in this order. ``codec`` says
        how values are on the wire, between nodes where that is a part of its own.
        """
        ...

    def reduce_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        """``reduce_scatter`` of all pairs (out, buffer) likewise.

        ``codec`` says how they are on the wire, between nodes where that is a part of its own; sums are made
        of decoded values.
        """
        ...

    def all_reduce_stages(
        self, tensors: Sequence[Tensor], label: str, codec: Codec = PLAIN
    ) -> Sequence[tuple[str, Action]]:
        """``all_reduce`` of each tensor; a ``codec`` that rounds, rounds the sums on every member alike."""
        ...
