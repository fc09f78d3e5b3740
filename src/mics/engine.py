"""The record of one sharded model: what ``mics.shard`` made, and where to find it again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn

from mics.boundary import Boundary
from mics.comm import TrafficCounter, World
from mics.comm.world import MeshCollectives
from mics.errors import SettingsError
from mics.offload import Offloader
from mics.saved import SavedInputs
from mics.schedule import Schedule
from mics.topology import Topology
from mics.unit import Unit

# The model owns its engine: a table from models to engines would keep both alive for ever.
_ATTRIBUTE = "_mics_engine"


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """Everything that belongs to one sharded model on this rank."""

    world: World
    topology: Topology
    mesh: MeshCollectives
    units: list[Unit]
    schedule: Schedule
    boundary: Boundary
    traffic: TrafficCounter
    device: torch.device
    ranks_on_gpu: int = 1  # the most that share one
    offloader: Offloader | None = None
    saved_inputs: SavedInputs | None = None
    recomputed: frozenset[nn.Module] = frozenset()  # in the backward


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
