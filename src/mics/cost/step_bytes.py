"""What one rank sends in an optimizer step, by purpose: the sums that ``mics.traffic`` counts in a run."""

from __future__ import annotations

from dataclasses import dataclass

from mics.cost.setting import Setting
from mics.cost.stages import Shares, hop_2_nbytes


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
    between = (replicas - 1) / replicas
    shard = forward / p
    hop_2 = hop_2_nbytes(setting.compression, setting.wire_nbytes, whole=not setting.over_replicas)
    shares = Shares.of(setting.compression, param_nbytes=param_nbytes, wire_nbytes=setting.wire_nbytes)
    return StepBytes(
        gathers=_chunks(setting, shares.gather) / p * gathered * param_nbytes,
        hop_1=setting.accumulation * _chunks(setting, shares.reduce) / p * forward * setting.wire_nbytes,
        hop_2=between * shard * hop_2,
        refresh=between * shard * setting.refresh_nbytes(param_nbytes) if setting.over_replicas else 0.0,
    )


def _chunks(setting: Setting, share: float) -> float:
    """That a rank sends of a unit inside the partition group. To other nodes only ``share`` of each goes."""
    num_nodes = setting.partition.num_nodes
    others = setting.partition_size - 1
    narrow = 0 if num_nodes == 1 else num_nodes - 1 if setting.two_stage else others
    return others - narrow + narrow * share
