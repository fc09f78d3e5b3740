"""What the parts of a step take in one setting: computation, copies to the host, collectives."""

from __future__ import annotations

from mics.cost.auto import Turn, exchange_pays, stage_costs
from mics.cost.collectives import Cost, Kind, cost
from mics.cost.memory import ADAM_NBYTES, MASTER_NBYTES
from mics.cost.setting import Setting
from mics.cost.shapes import UnitShape


class StepCosts:
    """Seconds of units and costs of transfers; each is worked out once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._forwards: dict[tuple[str, int], float] = {}  # by kind and size of the unit
        self._moves: dict[tuple[Kind, int], list[tuple[str, Cost]]] = {}

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

    def moves(self, kind: Kind, nbytes: float) -> list[tuple[str, Cost]]:
        """A gather or a reduction inside the partition group, by stage: (link, cost)."""
        key = kind, int(nbytes)
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        return self._moves[key]

    def _move(self, kind: Kind, nbytes: int) -> list[tuple[str, Cost]]:
        setting = self._setting
        if not setting.two_stage:
            return [("", cost(setting.cluster, kind, setting.partition, nbytes))]
        inter, intra = stage_costs(setting.cluster, kind, setting.partition, nbytes)
        stages = [("inter", inter), ("intra", intra)]
        return stages if kind is Kind.ALL_GATHER else stages[::-1]

    def replica_cost(self, kind: Kind, nbytes: float) -> Cost:
        """Of a chunk of ``nbytes`` across replicas, by a ring or by an exchange."""
        setting = self._setting
        largest = 4 * setting.model.largest_numel // setting.partition_size
        if kind is not Kind.ALL_REDUCE and exchange_pays(setting.cluster, setting.replication, largest):
            kind = Kind.ALL_TO_ALL
        return cost(setting.cluster, kind, setting.replication, int(nbytes))


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
        param_nbytes=setting.param_nbytes,
        other_seconds=(setting.accumulation - 1) * (sum(forwards) + sum(backwards)),
    ).whole_masters_pay()
