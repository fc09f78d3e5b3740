"""What travels in fewer bytes than it has in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from mics.errors import SettingsError

QUANT_BLOCK_NUMEL: Final = 64
"""Values that are quantised with one scale."""
_SCALE_NBYTES: Final = 2  # bfloat16

Hop2 = Literal["bf16", "int8", "int4"]
_NBYTES: Final = {
    "bf16": 2.0,
    "int8": 1 + _SCALE_NBYTES / QUANT_BLOCK_NUMEL,
    "int4": 0.5 + _SCALE_NBYTES / QUANT_BLOCK_NUMEL,
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How collectives save bytes. The default is lossless; whatever else is set here rounds.

    ``refresh``: how new parameters of 16 bits go to the other replicas after an optimizer step. "lossless":
    as how far each has moved, which most steps need a third of the bytes for, to the same bits. Moves that
    take more than expected cost a second collective, with the values. None: the values.

    ``hop2``: the format of gradients between replicas. "int8" and "int4" have a bfloat16 scale for each 64
    values, and sums are made in float32. Replicas on one node add theirs up before anything is rounded. With
    ``hop2_error_feedback`` what a rank's rounding lost is kept, in bfloat16, and added to what it sends in
    the next step; checkpoints have it. Without it integers are rounded at random, so that none is lost on
    average.

    ``inter_gather`` and ``inter_reduce``: "int8" for parameters and gradients that a partition group sends
    from node to node. With two stages (``hierarchical``) nothing is rounded inside nodes.
    """

    refresh: Literal["lossless"] | None = "lossless"
    hop2: Hop2 | None = None
    hop2_error_feedback: bool = True
    inter_gather: Literal["int8"] | None = None
    inter_reduce: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        _check("refresh", self.refresh, ("lossless",))
        _check("hop2", self.hop2, get_args(Hop2))
        _check("inter_gather", self.inter_gather, ("int8",))
        _check("inter_reduce", self.inter_reduce, ("int8",))
        if not isinstance(self.hop2_error_feedback, bool):
            raise SettingsError(
                f"Compression.hop2_error_feedback: expected True or False, found {self.hop2_error_feedback!r}"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether anything is rounded."""
        return any((self.hop2, self.inter_gather, self.inter_reduce))

    @property
    def keeps_errors(self) -> bool:
        """Whether ranks keep what rounding lost in hop 2."""
        return self.hop2 is not None and self.hop2_error_feedback

    def without_moves(self) -> Compression:
        """The same with new parameters as they are."""
        return replace(self, refresh=None)

    def hop_2_nbytes(self, nbytes: float) -> float:
        """Of a gradient between replicas that takes ``nbytes`` where nothing is rounded."""
        return _least(nbytes, self.hop2)

    def inter_gather_nbytes(self, nbytes: float) -> float:
        """Of a parameter on its way to another node of a partition group, that has ``nbytes``."""
        return _least(nbytes, self.inter_gather)

    def inter_reduce_nbytes(self, nbytes: float) -> float:
        """Of a gradient on its way to another node of a partition group, that has ``nbytes``."""
        return _least(nbytes, self.inter_reduce)


def _check(field: str, found: Any, known: tuple[str, ...]) -> None:
    if found is not None and found not in known:
        expected = ", ".join(f'"{name}"' for name in known)
        raise SettingsError(f"Compression.{field}: expected {expected} or None, found {found!r}")


def _least(nbytes: float, format: str | None) -> float:
    return nbytes if format is None else min(nbytes, _NBYTES[format])


LOSSLESS: Final = Compression()
"""The default: the same bits in fewer bytes."""
UNCOMPRESSED: Final = Compression(refresh=None)
"""Everything as it is."""
