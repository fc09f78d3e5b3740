"""Every (partition size, replicas) pair from {1, 2, 4, 8} loads what every other saved: up to 64 ranks.

`python -m tests.checkpoint.full_grid`. The suite runs the pairs of up to 8 ranks; this takes some minutes
and about 15 GiB of memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoint.runs import loads, trained_and_saved
from tests.ranks import RankPool

SIZES = (1, 2, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-world-size", type=int, default=64)
    args = parser.parse_args()
    pairs = [(p, r) for p in SIZES for r in SIZES if p * r <= args.max_world_size]
    began, num_failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as root, RankPool(args.max_world_size, timeout_s=600) as pool:
        paths = [str(Path(root) / f"{p}x{r}") for p, r in pairs]
        saved = [
            pool.run(p * r, trained_and_saved, path, p)[0] for (p, r), path in zip(pairs, paths, strict=True)
        ]
        for p, r in pairs:
            everybody = pool.run(p * r, loads, paths, saved, p)
            wrong = [
                (f"p{q}R{s}", rank)
                for rank, found in enumerate(everybody)
                for (q, s), equal in zip(pairs, found, strict=True)
                if not equal
            ]
            num_failed += len(wrong)
            print(
                f"p{p}R{r}: {len(pairs)} checkpoints on {p * r} ranks, wrong: {wrong or 'none'}", flush=True
            )
    print(f"{len(pairs) ** 2} pairs, {num_failed} failures, {time.monotonic() - began:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
