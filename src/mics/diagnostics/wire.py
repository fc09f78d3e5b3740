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
    specs = [unit.spec for unit in units]
    trained = [spec for spec in specs if spec.trainable]
    nbytes = 0
    if mesh.groups.gather.size > 1:
        # A node's ranks bring and add up all blocks, and from node to node go those of one local rank.
        stages = topology.stages(rank)
        num_nodes = topology.partition_size if stages is None else len(stages.inter)
        nbytes += max((_encoded(spec, num_nodes) for spec in specs), default=0)
        nbytes += _reduced(trained, num_nodes, is_staged=stages is not None, over_gloo=mesh.over_gloo)
    if mesh.groups.replication.size > 1:
        over_replicas = any(unit.share.masters_over_replicas for unit in units)
        replica_stages = topology.replica_stages(rank)
        num_members = topology.num_replicas if replica_stages is None else len(replica_stages.inter)
        nbytes += _between_replicas(trained, mesh, num_members, over_replicas=over_replicas)
        if replica_stages is not None and mesh.over_gloo:
            nbytes += max((spec.layout.chunk_numel * spec.grad_dtype.itemsize for spec in trained), default=0)
    return nbytes


def _encoded(spec: UnitSpec, num_nodes: int) -> int:
    """Parameters on their way to other nodes."""
    if not spec.gather.changes(spec.param_dtype):
        return 0
    return num_nodes * spec.gather.wire_nbytes(spec.layout.chunk_numel, spec.param_dtype)


def _reduced(trained: Sequence[UnitSpec], num_nodes: int, *, is_staged: bool, over_gloo: bool) -> int:
    inside = between = sent = 0
    for spec in trained:
        codec, dtype, layout = spec.hop_1, spec.reduce_dtype, spec.layout
        whole = num_nodes * codec.wire_nbytes(layout.chunk_numel, dtype)
        is_encoded = codec.changes(dtype)
        if over_gloo and is_staged:
            inside = max(inside, layout.numel * dtype.itemsize)
        if over_gloo or is_encoded:
            between = max(between, whole)
        if is_encoded:
            sent = max(sent, whole)
    return inside + between + sent


def _between_replicas(
    trained: Sequence[UnitSpec], mesh: MeshCollectives, num_members: int, *, over_replicas: bool
) -> int:
    received = sent = 0
    for spec in trained:
        codec, dtype = spec.hop_2, spec.grad_dtype
        is_encoded = codec.changes(dtype)
        whole = num_members * codec.wire_nbytes(spec.layout.piece_numel, dtype)
        if is_encoded:
            sent = max(sent, whole)
            if not over_replicas:
                sums = codec.of_sums.wire_nbytes(spec.layout.piece_numel, dtype)
                sent = max(sent, num_members * sums)
        if is_encoded or mesh.over_gloo or (mesh.exchanges_replicas and over_replicas):
            received = max(received, whole)
    return received + sent
