"""Runs of ``mics train`` on the ranks of the pool: they start at once, unlike those of a launcher."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks.faults.job import SMALL, Job

from mics.train.launch import _free_port
from tests.ranks import run_ranks

_SHAPE = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.seq-len", "32"]
ARGS = [
    *("--launch.device", "cpu", "--launch.timeout-seconds", "20", "--steps", "12"),
    *("--batch-size", "2", "--micro-steps", "2", "--sharding.partition-size", "2"),
    *("--report.interval", "1", "--report.eval-interval", "5", "--report.eval-batches", "1"),
    *("--report.sample-tokens", "0", "--report.no-save-weights"),
    *("--checkpoint.interval", "4", "--checkpoint.keep", "5"),
]


def train(port: int, args: list[str], trouble: str = "", at_step: int = 0) -> tuple[int, str]:
    """Train as this rank. Returns the exit code and what it showed."""
    from mics.train.loop import run_rank
    from mics.train.settings_file import parse_train_config

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    shown = io.StringIO()
    shape = [] if "--model" in args else _SHAPE
    config = parse_train_config([*ARGS, *shape, *args])
    with contextlib.redirect_stdout(shown), _trouble(trouble, at_step):
        try:
            return run_rank(config), shown.getvalue()
        finally:
            if dist.is_initialized():  # after an error the ranks just leave, but processes of the pool stay
                dist.destroy_process_group()


@contextlib.contextmanager
def _trouble(kind: str, at_step: int) -> Iterator[None]:
    """Rank 1 is asked to leave in a step ("term"), or the gradients of its first block are NaN ("nan")."""
    from mics.data.prefetching import Prefetcher
    from mics.models.gpt import GPT, Block

    if int(os.environ["RANK"]) != 1 or not kind:
        yield
        return
    step = num_blocks = 0

    def note_step(original: Callable[..., Any], feed: Prefetcher[Any], number: int) -> Any:
        nonlocal step
        step = number
        if (kind, step) == ("term", at_step):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(feed, number)

    def note_forward(original: Callable[..., Any], *args: Any) -> Any:
        nonlocal num_blocks
        num_blocks = 0
        return original(*args)

    def spoil(original: Callable[..., Any], *args: Any) -> Any:
        nonlocal num_blocks
        num_blocks += 1
        result = original(*args)
        if (kind, step, num_blocks) == ("nan", at_step, 1) and result.requires_grad:
            result.register_hook(lambda grad: grad * float("nan"))
        return result

    with (
        _around(Prefetcher, "get", note_step),
        _around(GPT, "forward", note_forward),
        _around(Block, "forward", spoil),
    ):
        yield


@contextlib.contextmanager
def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: wrapper(original, *args))
    try:
        yield
    finally:
        setattr(owner, name, original)


def reference_losses(folder: Path, args: Sequence[str]) -> dict[tuple[int, str], float]:
    """Of a job of `benchmarks.faults` that nothing happens to: on two ranks, each a node."""
    given = ["--output-dir", str(folder), "--name", "job", *SMALL, "--sharding.partition-size", "1", *args]
    run_ranks(2, train, _free_port(), given, launch="variables", ranks_per_node=1)
    return Job(folder=folder, args=args).losses()
