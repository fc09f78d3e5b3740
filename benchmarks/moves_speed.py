"""How fast moves of parameters are encoded and decoded, and the bytes they take (src/mics/comm/moves.py).

    python benchmarks/moves_speed.py                   # on a GPU: 455 M parameters of 64 replicas
    python benchmarks/moves_speed.py --numel 1000000   # on a CPU

Values are normal with a deviation of 0.02, as trained weights have them, and move as AdamW moves them: by the
learning rate times a number that is rarely above 1. Speeds count bytes of bfloat16 values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from mics.comm.moves import Moves, Room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, default=455_000_000, help="values of a rank, of all replicas")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numel = args.numel // args.replicas
    masters = 0.02 * torch.randn(numel, device=device)
    old = masters.bfloat16()
    values = old.repeat(args.replicas, 1)
    print("| learning rate | bytes | of values | needed as bytes | as words | encode GB/s | decode GB/s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for rate in args.rates:
        new = (masters + rate * torch.randn(numel, device=device).clamp(-1, 1)).bfloat16()
        needed = torch.zeros(2, dtype=torch.int32, device=device)
        none = Moves(numel, Room(0, 0))
        none.encode(torch.empty(none.nbytes, dtype=torch.uint8, device=device), old, new, needed)
        found = needed.tolist()
        moves = Moves(numel, Room(*(int(1.3 * number) + 16 for number in found)))
        wires = torch.empty(args.replicas, moves.nbytes, dtype=torch.uint8, device=device)
        for wire in wires:
            moves.encode(wire, old, new, needed)
        moves.decode(values, wires, own=0)
        assert torch.equal(values[-1].view(torch.int16), new.view(torch.int16))
        encoding = _seconds(partial(moves.encode, wires[0], old, new, needed), device)
        decoding = _seconds(partial(moves.decode, values, wires, own=0), device)
        values.copy_(old.expand_as(values))
        print(
            f"| {rate:g} | {moves.nbytes:,} | {moves.nbytes / old.nbytes:.3f} | {found[0] / numel:.2%} | "
            f"{found[1] / numel:.2%} | {old.nbytes / encoding / 1e9:.0f} | "
            f"{values.nbytes / decoding / 1e9:.0f} |",
            flush=True,
        )


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """On a GPU of the kernels alone, caches cold; elsewhere the shortest of a few."""
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds = do_bench(action)
        assert isinstance(milliseconds, float)
        return milliseconds / 1e3
    found = []
    for _ in range(5):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    main()
