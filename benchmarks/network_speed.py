"""From which network on mics pays: predicted step times over the speed of a node's uplink.

    python benchmarks/network_speed.py

The planner's simulation, no GPU needed. It is within 5% of what the emulator measures (docs/planner.md).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from mics.cost.clusters import find_cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape
from mics.planner.systems import predict_quickly

SYSTEMS = ("mics", "hsdp", "fsdp2")
SPEEDS = (100, 200, 400, 800, 1600, 3200)  # Gbit/s per node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt-3.6b", "gpt-20b"])
    parser.add_argument("--cluster", default="benchmarks/clusters/ordinary.yaml:64")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2, 8])
    arguments = parser.parse_args()
    cluster = find_cluster(arguments.cluster)
    print("| model | accumulation | Gbit/s per node | mics, ms | HSDP | FSDP2 over all |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in arguments.model:
        for accumulation in arguments.accumulation:
            for speed in SPEEDS:
                here = replace(cluster, inter=replace(cluster.inter, bandwidth=speed * 1e9 / 8))
                setting = Setting(
                    model=named_shape(name),
                    cluster=here,
                    partition_size=8,
                    micro_batch=arguments.micro_batch,
                    accumulation=accumulation,
                    activations=Keeping(checkpoint=True),
                )
                times = {system: predict_quickly(setting, system).step_seconds for system in SYSTEMS}
                ours = times["mics"]
                row = [f"{1e3 * ours:,.0f}", *(f"{times[each] / ours:.2f} x" for each in ("hsdp", "fsdp2"))]
                print(f"| {name} | {accumulation} | {speed:,} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
