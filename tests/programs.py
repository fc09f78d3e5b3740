"""Programs that a user starts with torchrun, run on the ranks of the pool: no interpreter imports torch anew.

What only a process of its own shows, such as its death, is left to tests that start one.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mics.checkpoint.background import finish_all
from tests.ranks import run_ranks


def run_program(num_ranks: int, script: Path, *args: object, cwd: Path, timeout_s: float = 240.0) -> str:
    """What the ranks of a script that must succeed print, one rank after the other. On the CPU."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [str(script), *map(str, args)]
    options: dict[str, Any] = {"launch": "variables", "timeout_s": timeout_s}
    return "".join(run_ranks(num_ranks, run_as_main, words, str(cwd), store.port, **options))


def run_as_main(words: list[str], folder: str, port: int) -> str:
    """On a rank: the script as ``__main__``, with its arguments and in its folder."""
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # env:// joins a store and makes none
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(torch.cuda, "is_available", return_value=False),  # NCCL wants a GPU for each rank
    ):
        try:
            runpy.run_path(words[0], run_name="__main__")
            finish_all()  # as at the end of an interpreter
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return printed.getvalue()
