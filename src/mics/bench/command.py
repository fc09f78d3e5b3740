"""``mics bench`` and ``mics emulate``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

import mics
from mics.bench.clock import measure_clocks
from mics.bench.config import BenchConfig, EmulateConfig
from mics.bench.depths import too_few, with_whole_models
from mics.bench.job import Job
from mics.bench.measure import measure
from mics.bench.mps import mps_note
from mics.bench.plan import Outcome, Run, RunPlan, interleave
from mics.bench.provenance import (
    batch_of,
    caveats,
    comparison_title,
    computed_by,
    device_name,
    emulated_title,
    setting_of,
)
from mics.bench.report import print_report
from mics.bench.summary import Row, agree, summarise, verdict
from mics.bench.supervise import Launcher, in_one_process, in_ranks, read_results, supervise
from mics.bench.systems import SYSTEMS
from mics.bench.table import markdown_table, terminal_table
from mics.bench.worker import work
from mics.cost.clusters import Cluster, find_cluster
from mics.cost.gpus import find_gpu
from mics.errors import SettingsError
from mics.layout.topology import check_partition_size
from mics.train.hardware import peak_tflops
from mics.utils.command_line import parse
from mics.utils.extras import require
from mics.utils.numbers import plural
from mics.utils.progress import long_work

_LINE_SECONDS: Final = 15.0  # each run has a line of its own too


def bench(args: Sequence[str]) -> int:
    """Compare systems. 0 if those that ran agree, 1 if not or if mics did not run."""
    config = parse(BenchConfig, args, prog="mics bench")
    config.check()
    require("plot", "the picture of a comparison")
    _make_folder(config.out)
    runs = interleave(config.systems, rows_of(config), repeats=config.repeats, record=config.on == "emulated")
    _warn_of_few_blocks(runs)
    noted = _warn_of_mps(runs)
    plan = RunPlan(
        runs=_on_clocks(runs, config.training.as_gpu),
        num_warmup_steps=config.warmup,
        num_steps=config.steps,
        folder=str(config.out.resolve()),
    )
    if config.on == "ranks" and "RANK" in os.environ:
        outcomes = _as_rank(plan, config)
        if outcomes is None:
            return 0
    else:
        launcher, cwd = _launcher(config)
        before = signal.signal(signal.SIGTERM, _leave)  # so that what was started is ended
        try:
            with long_work("bench", len(plan.runs), unit="runs", interval=_LINE_SECONDS) as work:
                outcomes = supervise(plan, launcher, timeout=config.timeout, show=work, cwd=cwd)
        finally:
            signal.signal(signal.SIGTERM, before)
    rows = summarise(*with_whole_models(plan.runs, outcomes), _peak())
    return _publish(rows, config, shlex.join(["mics", "bench", *args]), noted)


def bench_together(calls: Sequence[Sequence[str]]) -> list[list[Row]]:
    """The rows of several calls of ``mics bench`` on emulated clusters, by one process: it starts once.

    All have the first call's number of steps, GPU and folder. No step is looked into, nothing is written.
    """
    configs = [parse(BenchConfig, args, prog="mics bench") for args in calls]
    runs: list[Run] = []
    ends = [0]
    for config in configs:
        config.check()
        own = interleave(config.systems, rows_of(config), repeats=config.repeats, record=False)
        runs += [replace(run, number=ends[-1] + run.number) for run in own]
        ends.append(len(runs))
    first = configs[0]
    _warn_of_mps(runs)
    plan = RunPlan(
        runs=_on_clocks(tuple(runs), first.training.as_gpu),
        num_warmup_steps=first.warmup,
        num_steps=first.steps,
        folder=str(first.out.resolve()),
    )
    with long_work("bench", len(runs), unit="runs", interval=_LINE_SECONDS) as work:
        outcomes = supervise(plan, in_one_process, timeout=first.timeout, show=work)
    return [
        summarise(*with_whole_models(plan.runs[begin:end], outcomes[begin:end]), _peak())
        for begin, end in pairwise(ends)
    ]


def emulate(args: Sequence[str]) -> int:
    """Measure one system on an emulated cluster, in this process."""
    config = parse(EmulateConfig, args, prog="mics emulate")
    config.check()
    require("plot", "the picture of a step")
    _make_folder(config.out)
    cluster = find_cluster(config.cluster)
    jobs = config.training.jobs(config.partition_size, cluster.world_size)
    check_partition_size(config.partition_size, cluster.world_size)
    runs = interleave([config.system], [(job, cluster) for job in jobs], repeats=1, record=True)
    _warn_of_few_blocks(runs)
    _warn_of_mps(runs)
    plan = RunPlan(
        runs=_on_clocks(runs, config.training.as_gpu),
        num_warmup_steps=config.warmup,
        num_steps=config.steps,
        folder=str(config.out.resolve()),
    )
    Console(stderr=True, emoji=False).print(
        f"{config.system} as rank 0 of {cluster.world_size:,} ({config.cluster}) ..."
    )
    outcomes = [measure(run, plan) for run in plan.runs]
    row, *depths = summarise(*with_whole_models(plan.runs, outcomes), _peak())
    batch = batch_of(row.run.job, cluster.world_size, asked_tokens=config.training.global_batch_tokens)
    status = print_report(row, batch, config.out, Console())
    if depths:
        Console(width=None if sys.stdout.isatty() else 220).print(terminal_table([row, *depths], title=""))
    return status


def _on_clocks(runs: tuple[Run, ...], as_gpu: str | None) -> tuple[Run, ...]:
    """The runs in the time of another GPU, if that is asked for."""
    if as_gpu is None:
        return runs
    jobs = [(run.job, find_gpu(as_gpu, run.cluster.gpu).name) for run in runs if run.cluster is not None]
    clocks = measure_clocks(jobs)
    return tuple(replace(run, clock=clock) for run, clock in zip(runs, clocks, strict=True))


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _warn_of_few_blocks(runs: Sequence[Run]) -> None:
    """Before a run that takes minutes."""
    shallowest = min(run.job.model.num_layers for run in runs)
    shallow = [run for run in runs if run.job.model.num_layers == shallowest]
    for few in sorted({few for run in shallow if (few := too_few(run))}):
        _warn(f"{few}; the blocks run, but the whole model gets no row")


def _warn_of_mps(runs: Sequence[Run]) -> list[str]:
    """Before the first run. What stands under the table too."""
    note = mps_note(runs)
    if note:
        _warn(note)
    return [note] if note else []


def _warn(line: str) -> None:
    console = Console(stderr=True, emoji=False)
    console.print(f"Warning: {line}", markup=False, highlight=False, style="yellow")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out {folder}: {error.strerror or error}") from error


def rows_of(config: BenchConfig) -> list[tuple[Job, Cluster | int]]:
    """Every cluster (or the real ranks) with every partition size."""
    places: list[Cluster | int] = [_num_ranks(config)]
    if config.on == "emulated":
        places = [find_cluster(name) for name in config.cluster]
    rows: list[tuple[Job, Cluster | int]] = []
    for place in places:
        world_size, node_size = (
            (place, _ranks_per_node(config))
            if isinstance(place, int)
            else (place.world_size, place.ranks_per_node)
        )
        for text in config.partition_size:
            if text not in ("node", "world") and not text.isdecimal():
                raise SettingsError(f"--partition-size: expected a number, node or world, found {text!r}")
            size = {"node": node_size, "world": world_size}.get(text) or int(text)
            check_partition_size(size, world_size)
            rows += [(job, place) for job in config.training.jobs(size, world_size)]
    return rows


def _ranks_per_node(config: BenchConfig) -> int:
    if config.on == "namespace":
        return 2 if config.ranks is None else config.ranks
    return int(os.environ.get("LOCAL_WORLD_SIZE", _num_ranks(config)))


def _num_ranks(config: BenchConfig) -> int:
    """Ranks in all where they are real."""
    if config.on == "namespace":
        return config.hosts * _ranks_per_node(config)
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if config.ranks is not None:
        return config.ranks
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def _launcher(config: BenchConfig) -> tuple[Launcher, Path | None]:
    if config.on == "emulated":
        return in_one_process, None
    if config.on == "ranks":
        return in_ranks(_num_ranks(config)), None
    source = Path(mics.__file__).resolve().parents[2]
    if not (source / "benchmarks" / "cluster" / "__main__.py").exists():
        raise SettingsError(
            "--on namespace: expected a source checkout with benchmarks/cluster, found an installed package; "
            "clone the repository and install it with pip install -e ."
        )

    def launch(arguments: list[str]) -> list[str]:
        ranks = _ranks_per_node(config)
        return [
            sys.executable, "-m", "benchmarks.cluster", "run", "--hosts", str(config.hosts),
            "--ranks", str(ranks), "--rate", config.rate, "--", *arguments,
        ]  # fmt: skip

    return launch, source


def _as_rank(plan: RunPlan, config: BenchConfig) -> list[Outcome] | None:
    """This process is a rank that a launcher started: make the runs here. None on ranks other than 0."""
    results = config.out / "results.jsonl"
    rank = int(os.environ["RANK"])
    if rank == 0:
        results.unlink(missing_ok=True)
    apart = [run.number for run in plan.runs if SYSTEMS[run.system].isolated]
    problem = None
    try:
        work(plan, results, [run.number for run in plan.runs if run.number not in apart])
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if rank != 0:
            raise
    if rank != 0:
        return None
    started, found = read_results(results)
    outcomes = []
    for run in plan.runs:
        reason = "not run: the ranks were gone"
        if run.number in apart:
            reason = "needs processes of its own: let mics bench start the ranks, without torchrun"
        elif started and run.number == started[-1]:
            reason = problem or reason
        outcomes.append(found.get(run.number) or Outcome(number=run.number, error=reason))
    return outcomes


def _publish(rows: list[Row], config: BenchConfig, command: str, noted: Sequence[str]) -> int:
    """Print the table and write it in every form."""
    title = _title(rows, config)
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(terminal_table(rows, title=title))
    said = [*noted, *_batches(rows, config), *verdict(rows)]
    clusters = [row.run.cluster for row in rows if row.run.cluster is not None]
    said += caveats(clusters, rows[0].run.job.device, [row.run.clock for row in rows]) if clusters else []
    for line in said:
        console.print(line, markup=False, highlight=False)
    text = _document(rows, title, command, said)
    (config.out / "bench.md").write_text(text)
    (config.out / "bench.json").write_text(
        json.dumps(
            {"command": command, "versions": _versions(), "rows": [row.as_dict() for row in rows]}, indent=1
        )
    )
    _draw(rows, config)
    console.print(f"written: {config.out}/bench.md, bench.json, bench.png", markup=False, highlight=False)
    if config.theme is not None:
        kept = (
            Path("benchmarks/results") / f"{config.theme}_{_hardware()}_{datetime.date.today():%Y-%m-%d}.md"
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        console.print(f"kept: {kept}", markup=False, highlight=False)
    ours = [row for row in rows if row.run.system == "mics"]
    return 0 if agree(rows) and all(row.error is None for row in ours) else 1


def _title(rows: list[Row], config: BenchConfig) -> str:
    """What was trained, on what, and whose computation it is."""
    device = rows[0].run.job.device
    clusters = [row.run.cluster for row in rows if row.run.cluster is not None]
    if clusters:
        clocks = [row.run.clock for row in rows]
        return f"{config.training.model}, {emulated_title(clusters, device, clocks)}"
    ranks = plural(rows[0].world_size, "real rank")
    if config.on == "namespace":
        ranks += f" on {plural(config.hosts, 'namespace host')} with uplinks of {config.rate}"
    return f"{config.training.model} on {ranks}, computed by {device_name(device)}"


def _batches(rows: list[Row], config: BenchConfig) -> list[str]:
    """The global batch of every setting."""
    found = {}
    for row in rows:
        batch = batch_of(row.run.job, row.world_size, asked_tokens=config.training.global_batch_tokens)
        found[row.setting] = f"{row.setting}: {batch}"
    return list(found.values())


def _document(rows: list[Row], title: str, command: str, said: list[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    lines = [f"# {title}", "", f"    {command}", "", f"{versions}.", "", markdown_table(rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in said), ""])


def _draw(rows: list[Row], config: BenchConfig) -> None:
    """Step times as bars; over more than two numbers of GPUs, throughput as lines."""
    from mics.bench.picture import Bar, draw_scaling, draw_systems  # matplotlib takes a while to import

    ran = [row for row in rows if row.error is None]
    file, first = config.out / "bench.png", rows[0].run
    title = comparison_title(config.training.model, [row.run for row in rows])
    subtitle = " ".join(
        [computed_by(*(row.run for row in rows)), *([_uplinks(config)] if config.on == "namespace" else [])]
    )
    names = {row.run.system: _system_and_sharding(row.run.system) for row in ran}
    points = {(row.run.system, row.world_size): row.tflops for row in ran}
    if len({row.world_size for row in ran}) > 2 and len(points) == len(ran):
        series = {system: [(w, x) for (s, w), x in points.items() if s == system] for system in names}
        label = "model TFLOP/s " + ("per GPU" if first.job.device == "cuda" else "of rank 0, a CPU")
        draw_scaling(file, series, title=title, subtitle=subtitle, label=label, words=names)
        return
    bars = []
    for row in ran:
        median, low, high = (1e3 * seconds for seconds in row.step_seconds)
        system, setting = row.run.system, setting_of(row.run)
        bars.append(
            Bar(system=system, name=names[system], setting=setting, median=median, low=low, high=high)
        )
    draw_systems(file, bars, title=title, subtitle=f"{subtitle} {_timed(ran)}", label="ms per step")


def _system_and_sharding(system: str) -> str:
    """``mics``, and where that is not over partition groups: ``fsdp2 (over all)``."""
    sharded = {
        "group": "",
        "world": " (over all)",
        "state": " (its state over all)",
        "none": " (not sharded)",
    }
    return system + sharded[SYSTEMS[system].partition]


def _timed(ran: list[Row]) -> str:
    """What bars and the lines on them are."""
    if not ran:
        return "Nothing ran."
    number = min(row.num_timed for row in ran)
    if number < 2:
        return "One timed step each."
    return f"Medians of {number} timed steps; lines reach from the fastest to the slowest."


def _uplinks(config: BenchConfig) -> str:
    return f"{plural(config.hosts, 'namespace host')} with uplinks of {config.rate}."


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"mics": mics.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for peer in ("megatron-fsdp", "deepspeed"):
        try:
            found[peer] = version(peer)
        except PackageNotFoundError:
            continue
    found["hardware"] = _hardware()
    return found


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-").lower()
    return f"cpu{os.cpu_count()}-{platform.machine()}"


def _peak() -> float | None:
    return peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
