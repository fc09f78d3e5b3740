"""Clusters as they are in practice: what collectives get of a data sheet's network."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from mics.cost.clusters import PRESETS, Cluster, find_cluster
from mics.cost.constants import NETWORK_EFFICIENCY, NETWORK_LATENCY
from mics.errors import SettingsError

_OVER_EFA: Final = ("p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge")


def planned_cluster(description: str) -> Cluster:
    """``NAME:NODES`` or ``FILE.yaml:NODES``. A file is taken at its word: it says what was measured."""
    name = description.partition(":")[0]
    if not name.endswith((".yaml", ".yml")) and name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}? Known: " if near else "known: "
        raise SettingsError(
            f"--cluster {description!r}: expected NAME:NODES or FILE.yaml:NODES, found no cluster {name!r}; "
            f"{hint}{', '.join(PRESETS)}"
        )
    cluster = find_cluster(description)
    for field in ("peak_flops", "memory_nbytes", "memory_bandwidth"):
        if not getattr(cluster, field):
            raise SettingsError(
                f"--cluster {description!r}: expected {field}, found nothing; mics plan needs the speed and "
                "the memory of a GPU (the top of mics/cost/clusters.py shows a file with all fields)"
            )
    return in_practice(cluster)


def in_practice(cluster: Cluster) -> Cluster:
    """A named cluster with what its network gives; others as they are."""
    if cluster.name not in _OVER_EFA:
        return cluster
    inter = cluster.inter
    bandwidth = inter.bandwidth * NETWORK_EFFICIENCY
    return replace(cluster, inter=replace(inter, bandwidth=bandwidth, latency=NETWORK_LATENCY))
