"""Real gloo collectives on a namespace cluster against the cost model of `mics.cost`.

    python -m benchmarks.cluster.against_model collectives.json

takes what `benchmarks.cluster.collectives` measured. The uplink's bandwidth is the cluster's rate.
What no data sheet has comes from three rows, marked ``fitted``: a hop's latency across hosts and within one
from their smallest all-gathers, the bandwidth within a host from its largest. All other rows are predicted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import bits_per_second

from mics.cost.clusters import Cluster, Link
from mics.cost.collectives import Kind, Span, cost

_KINDS = {
    "all_gather": Kind.ALL_GATHER,
    "all_reduce": Kind.ALL_REDUCE,
    "broadcast": Kind.BROADCAST,
    "all_to_all": Kind.ALL_TO_ALL,
    "reduce_scatter": Kind.ALL_TO_ALL,  # over gloo it is an exchange and a local sum
}


def fit(measured: dict[str, Any]) -> tuple[Cluster, list[dict[str, Any]]]:
    """The cluster's constants, and the rows they come from."""
    rows = [row for row in measured["measurements"] if row["kind"] == "all_gather"]
    across = min((row for row in rows if row["division"] == "across"), key=lambda row: row["nbytes"])
    within = sorted((row for row in rows if row["division"] == "within"), key=lambda row: row["nbytes"])
    ranks_per_node = len(within[0]["groups"][0])
    uplink = bits_per_second(measured["rate"]) / 8
    size = len(across["groups"][0])
    transfer = (size - 1) / size * across["nbytes"] * ranks_per_node / uplink
    first, last = within[0], within[-1]
    hops = ranks_per_node - 1
    share = hops / ranks_per_node
    bandwidth = share * (last["nbytes"] - first["nbytes"]) / max(1e-9, last["seconds"] - first["seconds"])
    cluster = Cluster(
        name="namespaces",
        num_nodes=size,
        ranks_per_node=ranks_per_node,
        inter=Link(bandwidth=uplink, latency=max(0.0, across["seconds"] - transfer) / (size - 1)),
        intra=Link(
            bandwidth=bandwidth,
            latency=max(0.0, first["seconds"] - share * first["nbytes"] / bandwidth) / hops,
        ),
    )
    return cluster, [across, first, last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("measured", type=Path, help="what benchmarks.cluster.collectives wrote")
    measured = json.loads(parser.parse_args().measured.read_text())
    cluster, fitted = fit(measured)
    print(
        f"uplink {cluster.inter.bandwidth / 1e6:.1f} MB/s, {1e3 * cluster.inter.latency:.2f} ms a hop; "
        f"in a host {cluster.intra.bandwidth / 1e6:.0f} MB/s, {1e3 * cluster.intra.latency:.2f} ms a hop\n"
    )
    print("| collective | over | KiB | measured ms | model ms | error |\n|---|---|---:|---:|---:|---:|")
    for row in measured["measurements"]:
        span = Span.of(cluster, row["groups"][0])
        expected = cost(cluster, _KINDS[row["kind"]], span, row["nbytes"]).seconds
        mark = " fitted" if row in fitted else f" {100 * (expected / row['seconds'] - 1):+.0f}%"
        print(
            f"| {row['kind']} | {row['division']} | {row['nbytes'] >> 10} | {1e3 * row['seconds']:.1f} | "
            f"{1e3 * expected:.1f} |{mark} |"
        )


if __name__ == "__main__":
    main()
