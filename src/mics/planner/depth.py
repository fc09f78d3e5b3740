"""How far ahead units are gathered, and which of them travel together: the engine asks here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mics.auto import batch_nbytes, latency_nbytes, move_seconds, prefetch_units
from mics.cost import Kind, Span
from mics.plans import Batching, batches_of
from mics.topology import Cluster


def batching_for(cluster: Cluster, span: Span, largest_nbytes: int) -> Batching:
    """No batch is larger than what the largest unit takes anyway: the memory stays what it would be."""
    return Batching(
        nbytes=min(batch_nbytes(cluster, span), largest_nbytes),
        tiny_nbytes=min(latency_nbytes(cluster, span), largest_nbytes // 16),
    )


def depth_for(
    cluster: Cluster,
    span: Span,
    order: Sequence[int],
    *,
    sizes: Mapping[int, int],
    numels: Mapping[int, int],
    rows: float,
    two_stage: bool,
    lean: bool = False,
) -> int:
    """Units to look ahead along ``order``, each multiplied with ``rows`` rows of activations."""
    batching = batching_for(cluster, span, max(sizes.values(), default=0))
    gathers, computes = [], []
    known: dict[int, float] = {}  # blocks are alike
    for batch in batches_of(order, sizes, batching):
        nbytes = sum(sizes[index] for index in batch)
        numel = sum(numels[index] for index in batch)
        if nbytes not in known:
            known[nbytes] = move_seconds(cluster, Kind.ALL_GATHER, span, nbytes, two_stage=two_stage)
        gathers.append(known[nbytes])
        computes.append(forward_seconds(cluster, numel, rows))
    return prefetch_units(gathers, computes, lean=lean)


def reduction_share(
    cluster: Cluster, span: Span, *, numel: int, nbytes: int, rows: float, two_stage: bool
) -> float:
    """How long the reduction of a unit's gradients takes for each second of the forward of one like it."""
    seconds = move_seconds(cluster, Kind.REDUCE_SCATTER, span, nbytes, two_stage=two_stage)
    return seconds / max(forward_seconds(cluster, numel, rows), 1e-12)


def forward_seconds(cluster: Cluster, numel: int, rows: float) -> float:
    """Time to multiply ``rows`` rows of activations with parameters."""
    return 2 * numel * rows / (cluster.flops or 1e12)
