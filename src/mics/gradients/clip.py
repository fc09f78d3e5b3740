"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mics.gradients.agreement import Agreement
from mics.gradients.hops import Hops
from mics.gradients.shards import GradState, UnitGradients
from mics.gradients.shown import ShownGradients
from mics.sharding.unit import Unit


class Clip:
    """Norms of one model's gradients. ``synchronize`` has them summed over the world first."""

    def __init__(
        self,
        hops: Hops,
        shown: ShownGradients,
        *,
        agreement: Agreement,
        device: torch.device,
        synchronize: Callable[[], None],
    ) -> None:
        self._hops = hops
        self._shown = shown
        self._agreement = agreement
        self._device = device
        self._synchronize = synchronize
        # What the latest clipping found, and of which gradients: units, and the norm of each.
        self._clipped: tuple[int, list[Unit], Tensor] | None = None

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, on the device."""
        self._synchronize()
        units = self._units_with_gradients()
        norms = self._norms(units, norm_type)
        # Clipping by a norm that is not finite spoils all gradients: what they were is known from here alone.
        self._clipped = self._hops.num_changes, units, norms
        infinite = math.isinf(norm_type)
        local = torch.linalg.vector_norm(norms, norm_type) if units else norms.sum()
        summed: Tensor = local if infinite else local.pow(norm_type)
        self._agreement.all_reduce(summed, "the gradient norm (mics.clip_grad_norm_)", maximum=infinite)
        return summed if infinite else summed.pow(1.0 / norm_type)

    def scale_to(self, max_norm: float, total: Tensor) -> None:
        """Scale all gradients so that a norm of ``total`` becomes at most ``max_norm``."""
        assert self._clipped is not None, "the norm comes first"
        _, units, _ = self._clipped
        # As torch's own clipping: no comparison on the host, a factor of at most one on the device.
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if units:
            torch._foreach_mul_(
                [self._of(unit).step_gradient() for unit in units], factor.to(units[0].spec.grad_dtype)
            )

    def unit_norms(self) -> tuple[list[Unit], Tensor]:
        """Units with gradients, and the norm of this rank's part of each: before the latest clipping."""
        self._synchronize()
        if self._clipped is not None and self._clipped[0] == self._hops.num_changes:
            return self._clipped[1], self._clipped[2]
        units = self._units_with_gradients()
        return units, self._norms(units, math.inf)

    def _norms(self, units: Sequence[Unit], norm_type: float) -> Tensor:
        """The norm of this rank's piece of each unit's gradient: [len(units)]."""
        exact = any(unit.spec.grad_dtype is torch.float64 for unit in self._hops.units)
        dtype = torch.float64 if exact else torch.float32
        pieces = [self._of(unit).unique_gradient() for unit in units]
        if not pieces:
            return torch.zeros(0, dtype=dtype, device=self._device)
        return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(pieces, norm_type)])

    def _units_with_gradients(self) -> list[Unit]:
        for unit in self._hops.units:
            self._of(unit).drop_cleared()
        return [unit for unit in self._hops.units if self._of(unit).state is GradState.REDUCED]

    def _of(self, unit: Unit) -> UnitGradients:
        return self._shown.of(unit)
