"""What one rank sends in an optimizer step, by purpose: the sums that ``mics.traffic`` counts in a run."""

from __future__ import annotations

from dataclasses import dataclass

from mics.cost.setting import Setting


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that one rank sends per optimizer step, with collectives that waste none."""

    gathers: float
    """Parameters inside the partition group, in every micro-step."""
    hop_1: float
    """Gradients inside the partition group, in every micro-step."""
    hop_2: float
    """Gradients between replicas, once per step."""
    refresh: float
    """New parameters between replicas, once per step."""

    @property
    def total(self) -> float:
        return self.gathers + self.hop_1 + self.hop_2 + self.refresh


def step_bytes(setting: Setting, *, param_nbytes: int) -> StepBytes:
    """As the engine sends them while no unit stays unsharded between its uses."""
    p, replicas = setting.partition_size, setting.num_replicas
    units = [unit for unit in setting.model.units if unit.numel]
    forward = sum(unit.numel for unit in units)
    # The backward of a lookup needs no weights. What is used at a turn is unsharded once: the last unit of a
    # forward, and between the micro-steps of a step the last unit of a backward.
    backward = [unit.numel for unit in units if unit.kind != "embedding"]
    gathered = setting.accumulation * (forward + sum(backward[:-1]))
    gathered -= (setting.accumulation - 1) * sum(backward[:1])
    inside, between = (p - 1) / p, (replicas - 1) / replicas
    shard = forward / p
    return StepBytes(
        gathers=inside * gathered * param_nbytes,
        hop_1=setting.accumulation * inside * forward * setting.wire_nbytes,
        hop_2=(1 if setting.over_replicas else 2) * between * shard * setting.wire_nbytes,
        refresh=between * shard * setting.refresh_nbytes(param_nbytes) if setting.over_replicas else 0.0,
    )
