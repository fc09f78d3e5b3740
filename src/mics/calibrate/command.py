"""``mics calibrate``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from mics.calibrate.cluster_file import check_writable, described, write_cluster
from mics.calibrate.collectives import Groups
from mics.calibrate.computing import ModelWork
from mics.calibrate.run import Calibration, calibrate_world, node_indices, num_stages
from mics.comm import World, join_world
from mics.cost.modules import find_model, shape_of_description
from mics.cost.shapes import ModelShape
from mics.errors import SettingsError
from mics.models import GPT_SIZES, GPTConfig
from mics.train.config import LaunchSettings, TrainConfig
from mics.train.ranks import joined
from mics.train.settings_file import load_settings
from mics.utils.command_line import parse
from mics.utils.extras import require
from mics.utils.numbers import percent, plural
from mics.utils.own_ranks import num_own_ranks, start_ranks
from mics.utils.progress import long_work

_DEFAULT_MODELS: Final = {"cuda": "gpt-1.3b", "cpu": "gpt-tiny"}
_MODEL = "What to compute: a named size, a config.json or module:function, as in mics plan"


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The ranks that measure; unset takes the settings of --config."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    """Where to compute; auto takes the GPUs if there are any."""
    ranks_per_node: int | None = None
    """Without a launcher, ranks on this machine: unset is one for each GPU, and at least 2."""
    ranks_per_gpu: int | None = None
    """Ranks per GPU; unset is as few as possible."""
    timeout_seconds: int | None = None
    """Timeout of collectives in seconds."""

    def over(self, run: LaunchSettings) -> LaunchSettings:
        """Those of the run, but for what is set here."""
        return replace(run, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Measure the cluster that this runs on, and write the file that describes it.

    Start it as the training is started: torchrun -m mics.cli calibrate. Without a launcher it measures this
    machine alone. mics plan --cluster reads the file; mics train finds it beside its --config file or in the
    working directory.
    """

    out: Path = Path("cluster.yaml")
    """The file to write."""
    config: Path | None = None
    """The YAML file of a mics train run: its model, its batch size and its launch settings."""
    model: Annotated[str | None, tyro.conf.arg(help=_MODEL)] = None
    batch_size: int | None = None
    """Sequences per rank and micro-step; unset: that of --config, else 4."""
    max_seconds: float = 120.0
    """About how long to measure: slow networks get fewer and smaller sizes."""
    max_mib: int = 1024
    """The largest collective, in MiB."""
    picture: Path | None = None
    """Also draw what was measured to this PNG, and to one whose name ends in -dark for dark pages."""
    launch: RankSettings = field(default_factory=RankSettings)

    def check(self) -> None:
        """Raise if a number makes no sense."""
        for name, value, least in (
            ("max-seconds", self.max_seconds, 1),
            ("max-mib", self.max_mib, 1),
            ("batch-size", self.batch_size, 1),
        ):
            if value is not None and not least <= value < math.inf:
                raise SettingsError(f"--{name}: expected a finite number of at least {least}, found {value}")


def calibrate(args: Sequence[str]) -> int:
    """Parse, then measure as the rank this process is and write on rank 0, or start ranks that do."""
    config = parse(CalibrateConfig, args, prog="mics calibrate")
    config.check()
    if config.picture is not None:
        require("plot", "--picture")
    run = None if config.config is None else load_settings(TrainConfig, config.config)
    launch = config.launch.over(LaunchSettings() if run is None else run.launch)
    if "RANK" not in os.environ:
        return _start(launch, args)
    with joined(launch) as me:
        world = join_world()
        try:
            work = _agreed(world, config, run, me.device.type)
        except SettingsError as error:
            if me.rank == 0:
                print(f"mics calibrate: error: {error}", file=sys.stderr)
            return 2
        groups = Groups.of(world, node_indices(world.node_names()))
        shape = ModelWork(config=work.config, batch_size=work.batch_size, device=me.device)
        found = _measure(world, groups, shape, config, quiet=me.rank != 0)
        if me.rank == 0:
            _publish(found, config, work)
    return 0


def _start(launch: LaunchSettings, args: Sequence[str]) -> int:
    """On this machine alone, which is wrong for a run on several."""
    if launch.hosts is not None and launch.hosts > 1:
        raise SettingsError(
            f"launch.hosts: expected a launcher on each of the {launch.hosts} hosts, found none; start it as "
            f"the training is started: torchrun --nnodes {launch.hosts} ... -m mics.cli calibrate"
        )
    num_ranks = launch.ranks_per_node or max(2, num_own_ranks(launch.device, None))
    return start_ranks("calibrate", args, num_ranks=num_ranks, explained=(2,))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is computed, agreed by all ranks."""

    name: str
    config: GPTConfig
    batch_size: int


def _agreed(world: World, config: CalibrateConfig, run: TrainConfig | None, device: str) -> _Asked:
    """Everything that may be wrong is found before anything is measured, on all ranks at once."""
    problem: str | None = None
    asked: _Asked | None = None
    try:
        node_indices(world.node_names())
        asked = _asked(config, run, device)
        if world.rank == 0:
            check_writable(config.out)
            if config.picture is not None:
                _check_folder(config.picture)
    except SettingsError as error:
        problem = str(error)
    problems = [each for each in world.gather_objects(problem) if each is not None]
    if problems:
        raise SettingsError(problems[0])
    assert asked is not None
    return asked


def _check_folder(picture: Path) -> None:
    if not picture.parent.is_dir():
        raise SettingsError(f"--picture {picture}: expected a folder {picture.parent}, found none; make it")


def _asked(config: CalibrateConfig, run: TrainConfig | None, device: str) -> _Asked:
    batch_size = config.batch_size or (run.batch_size if run is not None else 4)
    if config.model is None and run is not None:
        found = run.model.build()
        gpt = stand_in(shape_of_description(found)) if found.gpt is None else found.gpt
        return _Asked(name=found.title, config=gpt, batch_size=batch_size)
    name = config.model or _DEFAULT_MODELS[device]
    shape = GPT_SIZES[name] if name in GPT_SIZES else stand_in(find_model(name))
    return _Asked(name=name, config=shape, batch_size=batch_size)


def stand_in(shape: ModelShape) -> GPTConfig:
    """A GPT with the width, heads, length and vocabulary of another model: what is measured in its place."""
    block = next((unit for unit in shape.units if unit.kind == "block"), None)
    if block is None:
        raise SettingsError(f"--model {shape.name}: expected a model with blocks, found none; name another")
    width = block.input_numel
    heads = max(1, block.score_numel // shape.seq_len)
    if width % (2 * heads):
        heads = 1
    return GPTConfig(
        num_layers=1,
        num_heads=heads,
        hidden_size=width + width % 2,
        vocab_size=shape.vocab_size or 256,
        seq_len=shape.seq_len,
    )


def _measure(
    world: World, groups: Groups, work: ModelWork, config: CalibrateConfig, *, quiet: bool
) -> Calibration:
    max_nbytes = config.max_mib << 20
    if quiet:
        return calibrate_world(world, groups, work, max_nbytes=max_nbytes, max_seconds=config.max_seconds)
    with long_work("calibrate", num_stages(groups), unit="measurements") as shown:
        return calibrate_world(
            world,
            groups,
            work,
            max_nbytes=max_nbytes,
            max_seconds=config.max_seconds,
            advance=shown.advance,
        )


def _publish(found: Calibration, config: CalibrateConfig, asked: _Asked) -> None:
    """Write the file, draw the picture, say what came out."""
    cluster = found.cluster
    assert cluster.computing is not None
    backend = "gloo" if cluster.computing.device == "cpu" else "NCCL"
    model = f"{asked.name}, {asked.batch_size} x {asked.config.seq_len} tokens"
    write_cluster(config.out, found, model=model, backend=backend)
    print(
        f"{plural(cluster.num_nodes, 'node')} x {cluster.ranks_per_node} ranks, {cluster.computing.device}, "
        f"{backend}, {found.seconds:.0f} s\n{described(found)}\n"
        f"a rank computes {cluster.flops / 1e12:.3g} TFLOP/s in matrices of {asked.name}, "
        f"{percent(cluster.flops / cluster.peak_flops)} of its peak\nwritten: {config.out}"
    )
    if config.picture is not None:
        from mics.calibrate.picture import draw_calibration  # matplotlib takes a second

        for drawn in draw_calibration(config.picture, found):
            print(f"drawn: {drawn}")
