"""The collectives the engine uses, as one small protocol and its implementations."""

from mics.comm.counter import Traffic, TrafficCounter
from mics.comm.group import GroupCollectives
from mics.comm.protocol import Collectives
from mics.comm.two_stage import TwoStageCollectives
from mics.comm.world import World, join_world

__all__ = [
    "Collectives",
    "GroupCollectives",
    "Traffic",
    "TrafficCounter",
    "TwoStageCollectives",
    "World",
    "join_world",
]
