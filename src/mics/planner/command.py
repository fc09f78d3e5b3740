"""``mics plan``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from mics.cost.clusters import PRESETS
from mics.cost.modules import find_model
from mics.cost.shapes import NAMES
from mics.errors import SettingsError
from mics.planner.answer import answer, as_dict
from mics.planner.goodput import Faults
from mics.planner.hardware import planned_cluster
from mics.planner.search import Request
from mics.planner.text import show
from mics.utils.extras import require

_MODELS = f"{', '.join(NAMES)}; a Hugging Face config.json; or module:function that builds an nn.Module"
_CLUSTERS = f"NAME:NODES or FILE.yaml:NODES; names: {', '.join(PRESETS)}"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a training run will cost, how to split it, and whether it fits, before renting anything.

    From arithmetic alone: memory term by term, and a step played through as a schedule of the computation and
    of every link. Say what you want to train on what; the best ways to do it come out, with reasons.
    """

    model: Annotated[str, tyro.conf.arg(help=_MODELS)]
    cluster: Annotated[str, tyro.conf.arg(help=_CLUSTERS)]
    global_batch: int
    """Rows (sequences) of one optimizer step, over all GPUs."""
    seq: int | None = None
    """Tokens of a row; None: the model's usual."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients travel."""
    memory_gib: float | None = None
    """Memory of a GPU, if it is not the cluster's."""
    price: float | None = None
    """Dollars for a node and hour."""
    tokens: float | None = None
    """Tokens to train on, for the time and (with --price) the money that takes."""
    node_mtbf_hours: float | None = None
    """Hours between two failures of one node, on average: gives goodput and the best checkpoint interval."""
    checkpoint_seconds: float = 30.0
    """That training stands still for a checkpoint."""
    restart_seconds: float = 300.0
    """From a failure until training goes on."""
    json: bool = False
    """Print everything as JSON instead."""
    html: Path | None = None
    """Write a page with pictures too."""

    def check(self) -> None:
        """Raise if a number makes no sense."""
        for name, value in (
            ("global-batch", self.global_batch),
            ("seq", self.seq),
            ("memory-gib", self.memory_gib),
            ("tokens", self.tokens),
            ("node-mtbf-hours", self.node_mtbf_hours),
        ):
            if value is not None and not 0 < value < math.inf:
                raise SettingsError(f"--{name}: expected a number above 0, found {value}")
        for name, value in (
            ("price", self.price),
            ("checkpoint-seconds", self.checkpoint_seconds),
            ("restart-seconds", self.restart_seconds),
        ):
            if value is not None and not 0 <= value < math.inf:
                raise SettingsError(f"--{name}: expected a number from 0, found {value}")
        if self.price is not None and self.tokens is None:
            raise SettingsError("--price: expected --tokens beside it, found none; money is for tokens")


def plan(args: Sequence[str]) -> int:
    """Parse, plan, print."""
    config = tyro.cli(PlanConfig, args=list(args), prog="mics plan")
    try:
        config.check()
        if config.html is not None:
            require("plot", "--html")
        request = Request(
            model=find_model(config.model, seq_len=config.seq),
            cluster=planned_cluster(config.cluster),
            global_batch=config.global_batch,
            wire_nbytes=2 if config.reduce_dtype == "bf16" else 4,
            memory_nbytes=None if config.memory_gib is None else config.memory_gib * 2**30,
        )
        faults = None
        if config.node_mtbf_hours is not None:
            faults = Faults(
                node_mtbf=3600 * config.node_mtbf_hours,
                checkpoint=config.checkpoint_seconds,
                restart=config.restart_seconds,
            )
        curves = config.json or config.html is not None
        found = answer(request, faults=faults, tokens=config.tokens, price=config.price, curves=curves)
    except SettingsError as error:
        print(f"mics plan: {error}", file=sys.stderr)
        return 2
    if config.json:
        print(json.dumps(as_dict(found), indent=2, allow_nan=False))
    else:
        show(found, Console())
    if config.html is not None:
        from mics.planner.page import page  # matplotlib takes a second, which only this needs

        try:
            config.html.write_text(page(found))
        except OSError as error:
            print(f"mics plan: --html {config.html}: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"written: {config.html}", file=sys.stderr)
    return 0
