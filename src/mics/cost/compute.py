"""How long a GPU computes: matrices at a speed that depends on their width, the rest at memory speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mics.cost.clusters import Cluster, Computing
from mics.cost.constants import MATRIX_EFFICIENCY, MATRIX_EFFICIENCY_2022
from mics.cost.shapes import UnitShape

HALF_SPEED_WIDTH: Final = 128.0
"""A tile of a matrix kernel (128 x 128 in cuBLAS): narrower matrices leave part of it empty."""
# Attention that is not fused: scores are written by the product, read and written by scaling, masking,
# soft-max (which reads them twice more, for maximum and sum) and dropout, and read for the values: 12.
_SCORE_PASSES: Final = 12.0
UPDATE_NBYTES: Final = 30
"""Moved for each element by AdamW: four reads and three writes in float32, and the 16-bit copy."""
_ITEMSIZE: Final = 2
_UNFUSED_PASSES: Final = 2.0  # norms, GELU and residuals: what one kernel writes the next one reads


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and the kernels it runs."""

    peak_flops: float
    memory_bandwidth: float
    fused: bool = True
    """Attention and other chains of operations in one kernel each, as today; False: as in 2022."""
    computing: Computing | None = None
    """What was measured, which takes the place of the planner's constants."""

    @classmethod
    def of(cls, cluster: Cluster, *, fused: bool = True) -> Device:
        """What the cluster's ranks have."""
        peak = cluster.peak_flops or cluster.flops / MATRIX_EFFICIENCY
        return cls(
            peak_flops=peak,
            memory_bandwidth=cluster.memory_bandwidth or peak / 150,
            fused=fused,
            computing=cluster.computing if fused else None,
        )

    def forward_seconds(self, unit: UnitShape, tokens: float) -> float:
        """Of one unit."""
        width = unit.width or 1
        if self.computing is not None and unit.kind in ("block", "head") and unit.flops:
            measured = self.computing.block_flops if unit.kind == "block" else self.computing.head_flops
            return tokens * unit.flops / (measured * width / (width + HALF_SPEED_WIDTH))
        efficiency = MATRIX_EFFICIENCY if self.fused else MATRIX_EFFICIENCY_2022
        speed = self.peak_flops * efficiency * width / (width + HALF_SPEED_WIDTH)
        matrices = unit.matrix_flops / speed if unit.matrix_flops else 0.0
        attention = unit.attention_flops / speed
        nbytes = float(unit.traffic_numel * _ITEMSIZE)
        if not self.fused:
            nbytes = nbytes * _UNFUSED_PASSES + unit.score_numel * _ITEMSIZE * _SCORE_PASSES
        return tokens * (matrices + attention + nbytes / self.memory_bandwidth)

    def update_seconds(self, numel: float) -> float:
        """Of AdamW on so many elements."""
        bandwidth = self.memory_bandwidth if self.computing is None else self.computing.update_bandwidth
        return numel * UPDATE_NBYTES / bandwidth
