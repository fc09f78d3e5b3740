"""How fast values become int8 or int4 and come back (src/mics/comm/quantized.py).

    python benchmarks/quantized_speed.py                   # on a GPU: 455 M gradients for 64 replicas
    python benchmarks/quantized_speed.py --numel 1000000   # on a CPU

A rank encodes its chunk of the gradients, a row for each replica, and adds up the rows that come. Speeds
count bytes of values, in ``--dtype``: those that encoding reads and decoding writes, and those that are added
up. Errors come on top.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from mics.comm.quantized import Quantized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, default=455_000_000, help="values of a rank, for all replicas")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A piece starts at a multiple of 64 elements, as those of large parameters do.
    numel = max(64, args.numel // args.replicas // 64 * 64)
    values = torch.randn(args.replicas, numel, device=device).to(getattr(torch, args.dtype))
    errors = torch.zeros_like(values, dtype=torch.bfloat16)
    found, total = torch.empty_like(values), torch.empty_like(values[0])
    print("| format | rounded | of values | encode GB/s | with errors GB/s | decode GB/s | add up GB/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for codec in (Quantized(bits, at_random=at_random) for bits in (8, 4) for at_random in (False, True)):
        wire_nbytes = codec.wire_nbytes(numel, values.dtype)
        wires = torch.empty(args.replicas, wire_nbytes, dtype=torch.uint8, device=device)
        actions = (
            partial(codec.encode, wires, values),
            partial(codec.encode_with, wires, values, errors),
            partial(codec.decode, found, wires),
            partial(codec.add_up, total, wires),
        )
        speeds = [values.nbytes / _seconds(action, device) / 1e9 for action in actions]
        print(
            f"| int{codec.num_bits} | {'at random' if codec.at_random else 'to the nearest'} | "
            f"{wires.nbytes / values.nbytes:.3f} | " + " | ".join(f"{speed:.3g}" for speed in speeds) + " |",
            flush=True,
        )


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """The shortest of a few, after one that compiles."""
    found = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


if __name__ == "__main__":
    main()
