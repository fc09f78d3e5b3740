"""Which units' gradients are not finite."""

from __future__ import annotations

import torch
import torch.nn as nn

from mics.engine import Engine, engines_of


def nonfinite_units(model: nn.Module) -> list[str]:
    """The units whose gradient has a NaN or an infinity anywhere in the world, the same list on all ranks.

    For when the norm that ``clip_grad_norm_`` returned is not finite. Clipping by such a norm spoils all
    gradients, so until new ones come this tells what clipping found: units whose own norm is not finite.

    All ranks must call it. One small all-reduce, and the host waits for the answer.
    """
    with torch.no_grad():
        return [name for engine in engines_of(model) for name in _nonfinite_units(engine)]


def _nonfinite_units(engine: Engine) -> list[str]:
    units, norms = engine.clip.unit_norms()
    trained = engine.hops.units
    position = {unit.spec.index: number for number, unit in enumerate(trained)}
    flags = torch.zeros(len(trained), dtype=torch.float32, device=engine.device)
    flags[[position[unit.spec.index] for unit in units]] = (~norms.isfinite()).float()
    engine.mesh.world.all_reduce(flags, "which units are not finite (mics.nonfinite_units)", maximum=True)
    return [unit.spec.label for unit, found in zip(trained, flags.tolist(), strict=True) if found]
