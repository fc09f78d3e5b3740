"""The exactness grid under NCCL, several ranks sharing one GPU: `python -m tests.gpu_grid`.

For machines without pytest. Prints one line per case and, last, how many passed and failed; exits
with 1 if any failed. `--backend gloo` runs the same on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests import grid
from tests.grid import Case
from tests.ranks import POOL
from tests.reference import EXACT, Outcome, differences


def main() -> int:
    """Train, judge and report every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--grid", choices=("quick", "full"), default="quick")
    parser.add_argument("--max-world-size", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="take every n-th case only")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no world after this")
    args = parser.parse_args()
    if args.backend == "nccl" and not torch.cuda.is_available():
        print("no CUDA device: nothing to run (use --backend gloo on a CPU)")
        return 0
    cases = grid.full_cases if args.grid == "full" else grid.quick_cases
    chosen = cases(args.max_world_size)[:: args.every]
    start = time.monotonic()
    num_passed = num_failed = num_left = 0
    try:
        for (world_size, ranks_per_node), group in grid.by_world(chosen).items():
            if time.monotonic() - start > args.budget_s:
                num_left += len(group)
                continue
            for case, problems in _judged(group, world_size, ranks_per_node, args.backend):
                num_passed += not problems
                num_failed += bool(problems)
                print(f"{'FAIL' if problems else 'ok  '} {case}", *problems[:4], sep="\n     ", flush=True)
    finally:
        POOL.close()
    left = f", {num_left} not run" if num_left else ""
    print(f"{num_passed} passed, {num_failed} failed{left} in {time.monotonic() - start:.0f} s")
    return 1 if num_failed else 0


def _judged(
    cases: list[Case], world_size: int, ranks_per_node: int, backend: str
) -> list[tuple[Case, list[str]]]:
    """Each case with what is wrong with it. The first is trained twice: two runs must be equal."""
    device = "cuda" if backend == "nccl" else "cpu"
    try:
        outcomes = _train([*cases, cases[0]], world_size, ranks_per_node, backend, device)
    except AssertionError as error:
        return [(case, [f"did not run: {error}"]) for case in cases]
    judge = grid.judge_gpu if backend == "nccl" else grid.judge
    problems = POOL.map(judge, list(zip(cases, outcomes, strict=False)))
    again = differences(outcomes[-1], outcomes[0], EXACT, EXACT)
    problems[0] += [f"second run: {line}" for line in again]
    return list(zip(cases, problems, strict=True))


def _train(
    cases: list[Case], world_size: int, ranks_per_node: int, backend: str, device: str
) -> list[Outcome]:
    ranks = POOL.run(
        world_size, grid.train_cases, cases, device, ranks_per_node=ranks_per_node, backend=backend
    )
    return grid.merge_ranks(ranks)


if __name__ == "__main__":
    sys.exit(main())
