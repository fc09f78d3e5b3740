"""Ranks for a command where no launcher made any: torchrun's own agent, on this machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_LAST_LINES: Final = 20


def num_own_ranks(device: str, ranks_per_node: int | None) -> int:
    """As many as asked for; else one for each GPU, or two on the CPU."""
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return ranks_per_node or num_gpus or 2


def start_ranks(command: str, args: Sequence[str], *, num_ranks: int, explained: Collection[int]) -> int:
    """Run ``mics command`` as so many ranks. Returns the exit code.

    What rank 0 prints is shown. After an exit code that it has not ``explained``, so is what others printed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside takes part
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # rank 0 says more
    with tempfile.TemporaryDirectory(prefix=f"mics-{command}-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            # The others print only what breaks.
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, num_ranks), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "mics.cli", command, *args)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            if any(code not in explained for code in codes):
                _show_logs(Path(logs))
            return max(code if code > 0 else 1 for code in codes)
        except SignalException as error:  # the agent has ended its ranks
            print(f"mics {command}: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return 128 + int(error.sigval)
    return 0


def _show_logs(logs: Path) -> None:
    """The last words of ranks that ended in a way of their own."""
    for file in sorted(logs.rglob("stderr.log")):
        lines = file.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        if lines:
            print("\n".join([f"rank {file.parent.name} printed last:", *lines]), file=sys.stderr)
