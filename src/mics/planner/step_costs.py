"""What the parts of a step take in one setting: computation, copies to the host, collectives."""

from __future__ import annotations

from functools import cached_property

from mics.cost.auto import Turn, exchange_pays
from mics.cost.collectives import Kind
from mics.cost.memory import ADAM_NBYTES, MASTER_NBYTES
from mics.cost.setting import MOVED_SHARE, Setting
from mics.cost.shapes import UnitShape
from mics.cost.stages import Stage, hop_2_stages, move_stages, refresh_stages, with_moves


class StepCosts:
    """Seconds of units and costs of transfers; each is worked out once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._forwards: dict[tuple[str, int], float] = {}  # by kind and size of the unit
        self._moves: dict[tuple[Kind, int, float], list[Stage]] = {}
        self._hop_2: dict[tuple[int, bool], list[Stage]] = {}

    def forward_seconds(self, unit: UnitShape) -> float:
        key = unit.kind, unit.numel
        if key not in self._forwards:
            self._forwards[key] = self._setting.device.forward_seconds(unit, self._setting.tokens)
        return self._forwards[key]

    def backward_seconds(self, unit: UnitShape) -> float:
        """Twice the forward, and once more where it is recomputed."""
        again = self._setting.activations.checkpoint and unit.kind == "block"
        return (3 if again else 2) * self.forward_seconds(unit)

    def host_seconds(self, unit: UnitShape) -> float:
        """Of the copy of a block's input to the host, or back."""
        setting = self._setting
        if not setting.activations.offload or unit.kind != "block" or not setting.cluster.host_bandwidth:
            return 0.0
        return unit.input_numel * setting.tokens * setting.param_nbytes / setting.cluster.host_bandwidth

    def state_seconds(self, unit: UnitShape) -> float:
        """Of the copy of a unit's masters and optimizer state from the host, or back."""
        setting = self._setting
        if not setting.cluster.host_bandwidth:
            return 0.0
        masters = MASTER_NBYTES if setting.param_nbytes < MASTER_NBYTES else 0
        nbytes = unit.numel * (masters + ADAM_NBYTES) / setting.division.num_owners
        return nbytes / setting.cluster.host_bandwidth

    def moves(self, kind: Kind, nbytes: float, share: float = 1.0) -> list[Stage]:
        """A gather or a reduction inside the partition group. ``share``: as in ``move_seconds``."""
        key = kind, int(nbytes), share
        if key not in self._moves:
            setting = self._setting
            self._moves[key] = move_stages(
                setting.cluster,
                kind,
                setting.partition,
                int(nbytes),
                two_stage=setting.two_stage,
                share=share,
            )
        return self._moves[key]

    def hop_2(self, unit: UnitShape, *, whole: bool) -> list[Stage]:
        """A unit's gradients across replicas. ``whole``: each needs all of them."""
        key = unit.numel, whole
        if key not in self._hop_2:
            setting = self._setting
            self._hop_2[key] = hop_2_stages(
                setting.cluster,
                setting.replication,
                unit.numel / setting.partition_size,
                wire_nbytes=setting.wire_nbytes,
                compression=setting.compression,
                exchanges=self._exchanges,
                whole=whole,
                two_stage=setting.replicas_two_stage,
            )
        return self._hop_2[key]

    def refresh(self, unit: UnitShape) -> list[Stage]:
        """A unit's new parameters across replicas. What is in float8 goes as it is."""
        setting, p = self._setting, self._setting.partition_size
        numel = (unit.numel - unit.float8_numel) / p
        nbytes = setting.refresh_nbytes(setting.param_nbytes) * numel + unit.float8_numel / p
        stages = refresh_stages(
            setting.cluster,
            setting.replication,
            int(nbytes),
            exchanges=self._exchanges,
            two_stage=setting.replicas_two_stage,
        )
        if not setting.sends_moves:
            return stages
        values = setting.param_nbytes * numel
        return with_moves(setting.cluster, stages, own_nbytes=values / setting.num_replicas, nbytes=values)

    def move_old(self, unit: UnitShape) -> list[Stage]:
        """New parameters of a unit that stays, to the ranks of the partition group."""
        setting, values = self._setting, self._setting.param_nbytes * unit.numel
        return with_moves(
            setting.cluster,
            self.moves(Kind.ALL_GATHER, MOVED_SHARE * values),
            own_nbytes=values / setting.partition_size,
            nbytes=values,
        )

    @cached_property
    def _exchanges(self) -> bool:
        """Replicas send each to each, instead of in a ring."""
        setting = self._setting
        largest = 4 * setting.model.largest_numel // setting.partition_size
        two_stage = setting.replicas_two_stage
        return exchange_pays(setting.cluster, setting.replication, largest, two_stage=two_stage)


def whole_masters_pay(setting: Setting) -> bool:
    """Whether a step is shorter with masters whole in every partition group: as the engine decides it."""
    costs = StepCosts(setting)
    units = [unit for unit in setting.model.units if unit.numel]
    forwards = [costs.forward_seconds(unit) for unit in units]
    backwards = [costs.backward_seconds(unit) for unit in units]
    return Turn(
        cluster=setting.cluster,
        replication=setting.replication,
        partition_size=setting.partition_size,
        numels=[unit.numel for unit in units],
        forwards=forwards,
        backwards=backwards,
        wire_nbytes=setting.wire_nbytes,
        compression=setting.compression,
        two_stage=setting.replicas_two_stage,
        refresh_nbytes=setting.refresh_nbytes(setting.param_nbytes),
        other_seconds=(setting.accumulation - 1) * (sum(forwards) + sum(backwards)),
    ).whole_masters_pay()
