"""What one rank sends in an optimizer step, by purpose: the sums that ``mics.traffic`` counts in a run."""

from __future__ import annotations

from collections.abc import Sequence
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
    in_float8 = sum(unit.float8_numel for unit in units)
    gathered_in_float8 = _gathered(setting, [unit.float8_numel for unit in units])
    gathered = _gathered(setting, [unit.numel for unit in units]) - gathered_in_float8
    between = (replicas - 1) / replicas
    shard = forward / p
    hop_2 = hop_2_nbytes(
        setting.compression,
        setting.wire_nbytes,
        setting.replication,
        whole=not setting.over_replicas,
        two_stage=setting.replicas_two_stage,
    )
    shares = Shares.of(setting.compression, param_nbytes=param_nbytes, wire_nbytes=setting.wire_nbytes)
    fresh = setting.refresh_nbytes(param_nbytes) * (forward - in_float8) + in_float8
    return StepBytes(
        gathers=(
            _chunks(setting, shares.gather) * gathered * param_nbytes
            + _chunks(setting, 1) * gathered_in_float8
        )
        / p,
        hop_1=setting.accumulation * _chunks(setting, shares.reduce) / p * forward * setting.wire_nbytes,
        hop_2=shard * hop_2,
        refresh=between * fresh / p if setting.over_replicas else 0.0,
    )


def _gathered(setting: Setting, numels: Sequence[int]) -> int:
    """Elements of a step, of those that each unit with parameters has."""
    units = [unit for unit in setting.model.units if unit.numel]
    # The backward of a lookup needs no weights. What is used at a turn is unsharded once: the last unit of a
    # forward, and between the micro-steps of a step the last unit of a backward.
    backward = [numel for unit, numel in zip(units, numels, strict=True) if unit.kind != "embedding"]
    found = setting.accumulation * (sum(numels) + sum(backward[:-1]))
    return found - (setting.accumulation - 1) * sum(backward[:1])


def _chunks(setting: Setting, share: float) -> float:
    """That a rank sends of a unit inside the partition group. To other nodes only ``share`` of each goes."""
    num_nodes = setting.partition.num_nodes
    others = setting.partition_size - 1
    narrow = 0 if num_nodes == 1 else num_nodes - 1 if setting.two_stage else others
    return others - narrow + narrow * share
