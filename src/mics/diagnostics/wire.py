"""Memory that collectives keep for chunks on their way: predicted, for the memory report.

What `comm/group.py` puts aside: over gloo every chunk that is to be added up; between replicas also where
each sends to each, and where the format of the wire is narrower. Gathers write where the result belongs.
"""

from __future__ import annotations

from collections.abc import Sequence

from mics.comm.world import MeshCollectives
from mics.layout.topology import Topology
from mics.sharding.spec import UnitSpec
from mics.sharding.unit import Unit


def expected_wire_nbytes(
    units: Sequence[Unit], mesh: MeshCollectives, topology: Topology, *, rank: int
) -> int:
    """Bytes on this rank once every unit has been gathered, reduced and updated."""
    trained = [unit.spec for unit in units if unit.spec.trainable]
    nbytes = 0
    if mesh.over_gloo and mesh.groups.gather.size > 1:
        nbytes += _in_partition_group(trained, topology, rank)
    if mesh.groups.replication.size > 1:
        over_replicas = any(unit.share.masters_over_replicas for unit in units)
        nbytes += _between_replicas(trained, mesh, over_replicas=over_replicas)
    return nbytes


def _in_partition_group(trained: Sequence[UnitSpec], topology: Topology, rank: int) -> int:
    stages = topology.stages(rank)
    reduced = max((spec.layout.numel * spec.reduce_dtype.itemsize for spec in trained), default=0)
    # A node's ranks add up all blocks, and over the nodes the one that is theirs.
    return reduced if stages is None else reduced + reduced // len(stages.intra)


def _between_replicas(trained: Sequence[UnitSpec], mesh: MeshCollectives, *, over_replicas: bool) -> int:
    received = sent = 0
    for spec in trained:
        numel, wire = spec.layout.chunk_numel, spec.replica_dtype
        is_narrow = wire.itemsize < spec.grad_dtype.itemsize
        if is_narrow:
            sent = max(sent, numel * wire.itemsize)
        if is_narrow or mesh.over_gloo or (mesh.exchanges_replicas and over_replicas):
            received = max(received, numel * wire.itemsize)
    return received + sent
