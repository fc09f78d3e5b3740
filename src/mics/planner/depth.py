"""How far ahead units are gathered, and which of them travel together: the engine asks here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mics.auto import batch_nbytes, gather_seconds, latency_nbytes, prefetch_units
from mics.cost import Span
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
) -> int:
    """Units to look ahead along ``order``, each multiplied with ``rows`` rows of activations."""
    batching = batching_for(cluster, span, max(sizes.values(), default=0))
    gathers, computes = [], []
    known: dict[int, float] = {}  # blocks are alike
    for batch in batches_of(order, sizes, batching):
        nbytes = sum(sizes[index] for index in batch)
        numel = sum(numels[index] for index in batch)
        if nbytes not in known:
            known[nbytes] = gather_seconds(cluster, span, nbytes, two_stage=two_stage)
        gathers.append(known[nbytes])
        computes.append(2 * numel * rows / (cluster.flops or 1e12))
    return prefetch_units(gathers, computes)
