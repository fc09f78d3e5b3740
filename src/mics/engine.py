"""The record of one sharded model: what ``mics.shard`` made, and where to find it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from mics.activations.offload import Offloader
from mics.activations.policy import Applied
from mics.comm import TrafficCounter, World
from mics.comm.world import MeshCollectives
from mics.errors import MicsError, SettingsError
from mics.gradients.clip import Clip
from mics.gradients.hops import Hops
from mics.gradients.shown import ShownGradients
from mics.gradients.step import Step
from mics.layout.topology import Topology
from mics.schedule.autograd import Autograd
from mics.schedule.events import Events, Progress
from mics.schedule.residency import Residency
from mics.sharding.held import ParameterTable
from mics.sharding.unit import Unit
from mics.utils.structure import CHANGES, watch_modules

# The model owns its engine: a table from models to engines would keep both alive for ever.
_ATTRIBUTE = "_mics_engine"


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """Everything that belongs to one sharded model on this rank."""

    world: World
    mesh: MeshCollectives
    device: torch.device
    units: list[Unit]
    events: Events
    progress: Progress
    residency: Residency
    autograd: Autograd
    shown: ShownGradients
    hops: Hops
    step: Step
    clip: Clip
    members: Members
    traffic: TrafficCounter
    ranks_on_gpu: int = 1  # the most that share one
    activations: Applied | None = None

    @property
    def topology(self) -> Topology:
        """Who holds what."""
        return self.mesh.groups.topology

    @property
    def offloader(self) -> Offloader | None:
        """What moves activations to host memory, if anything does."""
        return None if self.activations is None else self.activations.offloader


class Members:
    """What the model consists of now: parameters that were sharded with it, or in parts of it since.

    Others would be trained by each rank alone. Modules that were taken out of the model are gone: they have
    no gradients and cannot be called, until they are put back.
    """

    def __init__(self, model: nn.Module, autograd: Autograd, *, on_change: Callable[[], None]) -> None:
        self.parts: list[Engine] = []  # sharded on their own, and put into the model
        self._model = model
        self._autograd = autograd
        self._on_change = on_change
        self._seen = -1  # changes

    def check(self) -> None:
        """Raise if the model has parameters that are not sharded. One comparison while nobody changes it."""
        if self._seen != CHANGES.count and not self._autograd.progress.suspended:
            self._look_again()

    def units(self) -> list[Unit]:
        """All units of the model, with those of its parts."""
        self.check()
        return [*self._autograd.units, *(unit for part in self.parts for unit in part.units)]

    def _look_again(self) -> None:
        watch_modules(self._model)
        modules = dict(self._model.named_modules())
        engines = [module.__dict__[_ATTRIBUTE] for module in modules.values() if is_sharded(module)]
        self.parts = [engine for engine in engines if engine.members is not self]
        tables = {name: ParameterTable.of(module) for name, module in modules.items()}
        self._refuse_strangers(tables)
        self._leave_removed(set(modules.values()), {id(table) for table in tables.values()})
        self._autograd.user_hooks.follow(modules.values())
        self._on_change()
        self._seen = CHANGES.count

    def _refuse_strangers(self, tables: Mapping[str, ParameterTable]) -> None:
        units = {*self._autograd.units, *(unit for part in self.parts for unit in part.units)}
        held = (param for unit in units for param in (*unit.shards, *unit.whole.params, *unit.held.copies))
        ours = {id(param) for param in held}
        strange, lost = [], []
        for module, table in tables.items():
            prefix = f"{module}." if module else ""
            for attribute, param in table.items():
                known = table.units.get(attribute) in units and id(param) in ours
                strange += [] if known or param is None else [prefix + attribute]
            gone = [attribute for attribute in table.units if dict.get(table, attribute) is None]
            lost += [prefix + attribute for attribute in gone]
        if strange:
            raise MicsError(
                f"{_listed(strange)}: expected the parameters that mics.shard() has sharded, found new ones, "
                "which each rank would train alone; change the model before mics.shard(), or call it again "
                "on the new part, for example mics.shard(model.head)"
            )
        if lost:
            raise MicsError(
                f"{_listed(lost)}: expected the parameters that mics.shard() has sharded, found them deleted "
                "from their module; change the model before mics.shard(), or delete the whole module"
            )

    def _leave_removed(self, modules: set[nn.Module], tables: set[int]) -> None:
        for site in self._autograd.sites:
            site.is_removed = site.module not in modules
            site.look_again()
        for unit in self._autograd.units:
            for index in unit.held.outside(tables):
                unit.shards[index].grad = None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def attach_engine(model: nn.Module, engine: Engine) -> None:
    """Let ``engine_of(model)`` find ``engine``."""
    object.__setattr__(model, _ATTRIBUTE, engine)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``model`` itself was given to ``mics.shard``."""
    return _ATTRIBUTE in model.__dict__


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model."""
    if not isinstance(model, nn.Module) or not is_sharded(model):
        raise SettingsError(
            f"expected a model that mics.shard() has sharded, found {type(model).__name__}; call "
            "mics.shard(model) first "
            "and pass that same model"
        )
    engine: Engine = model.__dict__[_ATTRIBUTE]
    return engine


def engines_of(model: nn.Module) -> list[Engine]:
    """The engine of a sharded model, and those of parts that were put into it and sharded later."""
    engine = engine_of(model)
    engine.members.check()
    return [engine, *engine.members.parts]


def settle_host(model: nn.Module) -> None:
    """Have masters and optimizer state that belong to host memory arrive there: the host reads next."""
    for engine in engines_of(model):
        engine.step.owner.settle_host()


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a sharded model with all its parts."""
    return engine_of(model).members.units()
