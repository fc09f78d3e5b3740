"""Plans, supervision, tables and the commands."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from mics.bench.clock import GpuClock, Term
from mics.bench.command import _draw as draw_rows
from mics.bench.command import bench_together
from mics.bench.config import BenchConfig, Training
from mics.bench.job import Job
from mics.bench.models import BENCH_MODELS
from mics.bench.mps import mps_note
from mics.bench.plan import Outcome, Run, RunPlan, interleave
from mics.bench.provenance import caveats, compute_and_network, emulated_title
from mics.bench.summary import Row, agree, summarise, verdict
from mics.bench.supervise import Launcher, supervise
from mics.bench.table import cells, markdown_table
from mics.bench.timeline import Exposure
from mics.cli import main
from mics.cost.clusters import find_cluster
from mics.models import GPTConfig
from mics.utils.numbers import TokenCount
from tests.pictures import readable

JOB = Job(
    model=GPTConfig(num_layers=1, num_heads=1, hidden_size=8, vocab_size=16, seq_len=4),
    partition_size=2,
    micro_batch=1,
    accumulation=2,
    checkpoint=False,
    param_dtype="float32",
    reduce_dtype="float32",
    device="cpu",
)


def _plan(runs: tuple[Run, ...], folder: Path) -> RunPlan:
    return RunPlan(runs=runs, num_warmup_steps=1, num_steps=2, folder=str(folder))


def _outcome(number: int, seconds: float = 1.0, losses: tuple[float, ...] = (3.0, 2.0)) -> Outcome:
    return Outcome(
        number=number, step_seconds=[seconds, 1.5 * seconds], losses=list(losses), tokens_per_step=8
    )


def test_plans_and_outcomes_travel(tmp_path: Path) -> None:
    """Through files and back, unchanged."""
    cluster = find_cluster("p4d.24xlarge:2")
    plan = _plan(interleave(["mics", "ddp"], [(JOB, cluster), (JOB, 4)], repeats=2, record=True), tmp_path)
    assert [run.system for run in plan.runs] == ["mics", "ddp"] * 4
    assert [run.record for run in plan.runs] == [True] * 4 + [False] * 4
    plan.write(tmp_path / "plan.json")
    assert RunPlan.read(tmp_path / "plan.json") == plan
    exposure = Exposure(compute_seconds=1, idle_seconds=0, link_seconds={}, exposed_seconds={})
    outcome = replace(_outcome(3), exposure=exposure)
    assert Outcome.from_line(outcome.as_line()) == outcome


class _Shown:
    """What is seen of the runs."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.over = 0.0

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, amount: float = 1) -> None:
        self.over += amount


_WORKER = """
import json, os, sys, time
results, numbers = sys.argv[2], [int(n) for n in sys.argv[3].split(",")]
for number in numbers:
    with open(results, "a") as file:
        file.write(json.dumps({"started": number}) + "\\n")
    print(f"[{number + 1}/4] run", flush=True)
    if number == 1:
        print("[rank0]: [rank0]: Traceback of an Error", flush=True)
        print("[rank0]: [rank0]: RuntimeError: no more memory", flush=True)
        os._exit(3)
    if number == 2:
        time.sleep(60)
    with open(results, "a") as file:
        file.write(json.dumps({"number": number, "step_seconds": [1.0]}) + "\\n")
"""


@pytest.mark.full
def test_a_run_that_crashes_or_hangs_does_not_take_the_others_along(tmp_path: Path) -> None:
    """Each is an outcome with its reason, and the rest are measured in a new process."""
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER)
    plan = _plan(interleave(["mics", "fsdp2", "hsdp", "ddp"], [(JOB, 4)], repeats=1, record=False), tmp_path)
    launcher: Launcher = lambda arguments: [sys.executable, str(worker), *arguments[2:]]  # noqa: E731
    shown = _Shown()
    outcomes = supervise(plan, launcher, timeout=3, show=shown)
    assert [outcome.number for outcome in outcomes] == [0, 1, 2, 3]
    errors = [outcome.error for outcome in outcomes]
    assert errors[0] is None and errors[3] is None
    assert errors[1] == "exit status 3: RuntimeError: no more memory"
    assert errors[2] is not None and "nothing happened for 3 s" in errors[2]
    assert "[1/4] run" in shown.said and "[4/4] run" in shown.said
    assert shown.over == 4


def test_a_worker_that_never_starts_ends(tmp_path: Path) -> None:
    plan = _plan(interleave(["mics", "ddp"], [(JOB, 4)], repeats=1, record=False), tmp_path)
    launcher: Launcher = lambda arguments: [sys.executable, "-c", "raise SystemExit(7)"]  # noqa: E731
    shown = _Shown()
    outcomes = supervise(plan, launcher, timeout=3, show=shown)
    assert [outcome.error for outcome in outcomes] == ["exit status 7: no output"] * 2
    assert shown.over == 2
    launcher = lambda arguments: [sys.executable, "-c", ""]  # noqa: E731
    outcomes = supervise(plan, launcher, timeout=3, show=_Shown())
    assert [outcome.error for outcome in outcomes] == ["ended without a result"] * 2


def test_clusters_of_one_size_are_told_apart() -> None:
    clusters = [find_cluster(name) for name in ("p3dn.24xlarge:1", "p5.48xlarge:1")]
    runs = interleave(["mics", "hsdp"], [(JOB, cluster) for cluster in clusters], repeats=1, record=False)
    rows = summarise(runs, [_outcome(number, 2.0**number) for number in range(4)], peak_tflops=None)
    heads, lines = cells(rows)
    assert (
        heads[-1] == "cluster" and [line[-1] for line in lines] == ["p3dn.24xlarge"] * 2 + ["p5.48xlarge"] * 2
    )
    assert len([line for line in verdict(rows) if "shortest step" in line]) == 2


def test_rows_and_verdict() -> None:
    """Medians over repeats, the winner named, a system that failed listed, losses compared."""
    runs = interleave(["mics", "fsdp2", "hsdp"], [(JOB, 4)], repeats=2, record=False)
    outcomes = [_outcome(0, 2.0), _outcome(1, 1.0), Outcome(number=2, error="ImportError: x")]
    outcomes += [_outcome(3, 2.0), _outcome(4, 1.0), Outcome(number=5, error="ImportError: x")]
    rows = summarise(runs, outcomes, peak_tflops=None)
    assert [row.run.system for row in rows] == ["mics", "fsdp2", "hsdp"]
    assert rows[0].step_seconds == (2.5, 2.0, 3.0)
    said = "\n".join(verdict(rows))
    assert "fsdp2 has the shortest step; mics 2.00 x its time" in said
    assert "hsdp did not run: ImportError: x" in said
    assert "losses of all 2 systems agree" in said and agree(rows)
    heads, lines = cells(rows)
    assert "peak GiB" not in heads and "last loss" in heads
    assert lines[2][3:5] == ["hsdp", "did not run"]
    assert markdown_table(rows).count("\n") == 4


@pytest.mark.parametrize("losses", [(3.0, 2.1), (3.0, float("nan")), (float("nan"), 2.0)])
def test_losses_that_disagree_are_said(losses: tuple[float, ...]) -> None:
    runs = interleave(["mics", "ddp", "hsdp"], [(JOB, 4)], repeats=1, record=False)
    rows = summarise(runs, [_outcome(0), _outcome(1, losses=losses), _outcome(2)], peak_tflops=None)
    assert not agree(rows)
    assert any("LOSSES DISAGREE" in line for line in verdict(rows))


def test_pictures_name_cluster_partition_size_and_device(tmp_path: Path) -> None:
    """Of one setting, of several numbers of GPUs, and of real ranks."""
    config = BenchConfig(training=Training(model="gpt-tiny", device="cpu"), out=tmp_path)
    clusters = [find_cluster(f"p4d.24xlarge:{nodes}") for nodes in (1, 2, 4)]
    for places, expected in (
        (clusters[1:2], ["gpt-tiny on 2 x p4d.24xlarge (16 GPUs), partition size 2", "fsdp2 (over all)"]),
        (clusters[:2], ["gpt-tiny on 8 to 16 GPUs of p4d.24xlarge, partition size 2", "ddp (not sharded)"]),
        (
            clusters,
            ["gpt-tiny on 8 to 32 GPUs of p4d.24xlarge, partition size 2", "model TFLOP/s of rank 0, a CPU"],
        ),
        ([4], ["gpt-tiny on 4 real ranks, partition size 2"]),
    ):
        rows = [(JOB, place) for place in places]
        runs = interleave(["mics", "fsdp2", "ddp"], rows, repeats=1, record=False)
        outcomes = [_outcome(number, 1 + 0.01 * number) for number in range(len(runs))]
        with readable() as words:
            draw_rows(summarise(runs, outcomes, peak_tflops=None), config)
        assert set(expected) <= set(words)
        assert any("this CPU (" in word or "a CPU (" in word for word in words)
    assert "Computed by a CPU (" in " ".join(words)


def test_the_named_models() -> None:
    assert BENCH_MODELS["gpt-small"].config.num_parameters == pytest.approx(29.5e6, rel=0.02)
    assert BENCH_MODELS["gpt-3.6b"].config.num_parameters == pytest.approx(3.64e9, rel=0.01)


@pytest.mark.full
def test_bench_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two systems on an emulated cluster: a table, files in every form, and timelines."""
    settings = (
        "--model gpt-tiny --cluster p4d.24xlarge:2 --systems mics hsdp --warmup 0 --steps 1 --repeats 1"
    )
    with patch("mics.bench.command.mps_note", return_value="A daemon is running"):
        assert main(["bench", *settings.split(), "--device", "cpu", "--out", str(tmp_path)]) == 0
    printed, warned = capsys.readouterr()
    assert "Warning: A daemon is running" in warned
    assert "- A daemon is running\n" in (tmp_path / "bench.md").read_text()
    assert "Losses are not compared" in printed and "from one timed step nobody knows the noise" in printed
    assert "gpt-tiny, emulated: compute of this CPU (" in printed
    assert "network of p4d.24xlarge:2" in printed
    assert "2 accumulation steps: global batch 2,048 tokens = 32 sequences of 64" in printed
    assert "not of p4d.24xlarge's GPUs: compare systems with each other" in printed
    assert "TFLOP/s count what is multiplied" in printed
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["system"] for row in found["rows"]] == ["mics", "hsdp"]
    assert all(row["outcomes"][0]["exposure"]["link_nbytes"]["inter"] > 0 for row in found["rows"])
    assert "mics bench --model gpt-tiny" in (tmp_path / "bench.md").read_text()
    names = {file.name for file in tmp_path.iterdir()}
    assert {
        "bench.png",
        "p4d.24xlargex2_8_2_mics.timeline.png",
        "p4d.24xlargex2_8_2_mics.trace.json",
    } <= names


def test_emulate_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "--model gpt-tiny --cluster p3dn.24xlarge:4 --partition-size 16 --warmup 1 --steps 1"
    assert main(["emulate", *settings.split(), "--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "32 ranks of p3dn.24xlarge, emulated, partition size 16" in printed
    assert "exposed inter all_gather" in printed
    flat = " ".join(printed.split())
    assert "compute of this CPU (" in flat and "network of p3dn.24xlarge:4" in flat
    assert "global batch 4,096 tokens = 64 sequences of 64" in flat


@pytest.mark.parametrize(
    ("command", "settings", "complaint"),
    [
        ("bench", "--systems mics zero9", "--systems: expected some of mics"),
        ("bench", "--model gpt-9t", "--model: expected one of"),
        ("bench", "--model gpt-tiny --cluster p9", "cluster 'p9': expected one of"),
        ("bench", "--model gpt-tiny --partition-size 3", "partition_size: expected a divisor"),
        ("bench", "--model gpt-tiny --accumulation 0", "accumulation: expected at least 1"),
        ("bench", "--model gpt-tiny --repeats 0", "--repeats: expected at least 1, found 0"),
        ("bench", "--model gpt-tiny --partition-size many", "expected a number, node or world"),
        ("bench", "--on ranks --ranks 0", "--ranks: expected at least 1"),
        ("bench", "--global-batch 8 --global-batch-tokens 1M", "expected one of them, found both"),
        (
            "bench",
            f"--model gpt-tiny --global-batch {10**18}",
            "--global-batch: expected at most 156,250,000",
        ),
        ("bench", f"--model gpt-tiny --accumulation {10**18}", "--micro-batch, --accumulation: expected at"),
        ("bench", "--global-batch 8 --accumulation 2", "--accumulation, --global-batch: expected one"),
        ("bench", "--model gpt-tiny --global-batch 9", "multiple of 8 sequences (micro-batch 1 on 8 ranks)"),
        (
            "emulate",
            "--model gpt-tiny --global-batch-tokens 100",
            "--global-batch-tokens: expected about 4,096",
        ),
        ("emulate", "--steps 0", "--steps: expected at least 1"),
        ("emulate", "--warmup -1", "--warmup: expected at least 0"),
        ("bench", "--timeout nan", "--timeout: expected from 1 to 1,000,000 seconds, found nan"),
        ("emulate", "--system zero9", "--system: expected some of mics"),
        ("emulate", "--model gpt-tiny --partition-size 5", "partition_size: expected a divisor"),
    ],
)
def test_settings_that_cannot_be(
    command: str, settings: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([command, *settings.split(), "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def _rows(*spans: tuple[float, float]) -> list[Row]:
    """Of systems whose timed steps took these seconds."""
    runs = interleave(["mics", "hsdp", "fsdp2"][: len(spans)], [(JOB, 4)], repeats=1, record=False)
    outcomes = [
        replace(_outcome(number), step_seconds=[low, (low + high) / 2, high])
        for number, (low, high) in enumerate(spans)
    ]
    return summarise(runs, outcomes, peak_tflops=None)


def test_nobody_wins_inside_the_noise() -> None:
    """Steps that overlap name no winner; those that do not are compared."""
    said = verdict(_rows((1.0, 1.2), (1.15, 1.3), (2.0, 2.2)))[0]
    assert "within noise: mics (1.00 s to 1.20 s) and hsdp (1.15 s to 1.30 s) overlap" in said
    assert "so none is faster; fsdp2 1.91 x the time of mics." in said
    assert "shortest" not in said
    said = verdict(_rows((1.0, 1.2), (1.25, 1.3)))[0]
    assert "mics has the shortest step; hsdp 1.16 x its time." in said


def _emulated(*rows: tuple[float, float, float, float]) -> list[Row]:
    """Of emulated systems: (lowest, highest) step, computing and exposed seconds."""
    runs = interleave(
        ["mics", "ddp", "hsdp"][: len(rows)], [(JOB, find_cluster("p4d.24xlarge:1"))], repeats=1, record=True
    )
    outcomes = [
        replace(
            _outcome(number),
            step_seconds=[low, (low + high) / 2, high],
            exposure=Exposure(
                compute_seconds=computed,
                idle_seconds=0.0,
                link_seconds={"intra": exposed, "inter": 0.0},
                exposed_seconds={"intra": exposed, "inter": 0.0},
                link_nbytes={"intra": 0.0, "inter": 0.0},
            ),
        )
        for number, (low, high, computed, exposed) in enumerate(rows)
    ]
    return summarise(runs, outcomes, peak_tflops=None)


def test_nobody_wins_by_what_the_device_computes() -> None:
    """A gap that is all computing is the CPU's; one that is exposed communication is the system's."""
    said = verdict(_emulated((1.0, 1.1, 1.04, 0.0), (1.9, 2.1, 1.98, 0.003), (1.5, 1.6, 1.05, 0.5)))[0]
    assert "no ranking of mics and ddp: computation explains the gap between 1,050.0 ms and 2,000.0" in said
    assert "(computing 1,040.0 ms and 1,980.0 ms, exposed communication 0.0 ms to 3.0 ms)" in said
    assert "hsdp 1.48 x the time of mics" in said and "shortest" not in said and "ddp 1.9" not in said


def test_a_breakdown_of_another_step_is_said() -> None:
    """Timed steps of 469 ms, and one that computed for 824: no ranking rests on that."""
    rows = _emulated((0.46, 0.48, 0.824, 0.003), (0.9, 1.0, 0.93, 0.0))
    first, warned, *_ = verdict(rows)
    assert "ddp and mics are not ranked" in first and "shortest" not in first
    assert "the breakdown of mics is not of the timed step" in warned
    assert "computed 824.0 ms, the timed steps took 460 ms to 480 ms" in warned
    heads, lines = cells(rows)
    assert [line[heads.index("compute ms")] for line in lines] == ["824*", "930"]


@pytest.mark.parametrize(
    ("as_gpu", "expected"),
    [
        (None, "compute of this NVIDIA H200, network of p4d.24xlarge:2"),
        ("a100", "compute of an A100 by the clock of this NVIDIA H200, network of p4d.24xlarge:2"),
        ("v100", "compute of a V100 by the clock of this NVIDIA H200, network of p4d.24xlarge:2"),
    ],
)
def test_titles_say_whose_computation_it_is(as_gpu: str | None, expected: str) -> None:
    with patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        clock = None if as_gpu is None else GpuClock(gpu=as_gpu, terms=())
        assert compute_and_network("cuda", [find_cluster("p4d.24xlarge:2")], [clock]) == expected


def test_one_timed_step_says_nothing_about_noise() -> None:
    runs = interleave(["mics", "hsdp"], [(JOB, 4)], repeats=1, record=False)
    outcomes = [replace(_outcome(number), step_seconds=[1.0 + number]) for number in range(2)]
    said = verdict(summarise(runs, outcomes, peak_tflops=None))[0]
    assert "mics 1.00 s, hsdp 2.00 s; from one timed step nobody knows the noise" in said


def test_a_global_batch_gives_the_accumulation_steps() -> None:
    training = Training(model="gpt-tiny", device="cpu", global_batch_tokens=TokenCount(4000))
    assert [training.job(8, ranks).accumulation for ranks in (8, 16)] == [8, 4]
    assert Training(model="gpt-tiny", device="cpu", global_batch=32).job(8, 16).accumulation == 2
    assert Training(model="gpt-tiny", device="cpu").job(8, 16).accumulation == 2


@pytest.mark.parametrize("command", ["bench", "emulate"])
def test_help_is_in_the_words_of_pytorch(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert "{None}" not in shown and "Gradient accumulation steps" in shown and "Dtype of" in shown


def test_figures_of_another_device_say_so() -> None:
    """An H200 that plays p4d.24xlarge is no A100; one that plays dgx-h100 is near enough."""
    with patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        (line,) = caveats([find_cluster("p4d.24xlarge:2")], "cuda")
        assert "those of one NVIDIA H200 (989 TFLOP/s at its peak), not of p4d.24xlarge's GPUs (312)" in line
        assert caveats([find_cluster("dgx-h100:2")], "cuda") == []
        assert emulated_title([find_cluster("dgx-h100:2")], "cuda") == (
            "emulated: compute of this NVIDIA H200, network of dgx-h100:2"
        )


def test_a_daemon_that_slows_emulated_steps_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's MPS, by the pipe that it reads. A killed one leaves a pipe that nobody reads."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    pipe = tmp_path / "control"
    cluster = find_cluster("p4d.24xlarge:1")
    on_gpu, on_cpu, on_ranks = (
        interleave(["mics"], [(replace(JOB, device=device), place)], repeats=1, record=False)
        for device, place in (("cuda", cluster), ("cpu", cluster), ("cuda", 8))
    )
    assert mps_note(on_gpu) == ""
    os.mkfifo(pipe)
    assert mps_note(on_gpu) == ""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert f"({pipe})" in mps_note(on_gpu) and "echo quit | nvidia-cuda-mps-control" in mps_note(on_gpu)
        assert mps_note(on_cpu) == mps_note(on_ranks) == ""
    finally:
        os.close(reader)


def test_a_device_with_more_memory_says_what_the_emulated_one_lacks() -> None:
    """The H200 that plays an A100 of 40 GB has room for what that one has not."""
    cluster = find_cluster("p4d.24xlarge:1")
    job = replace(JOB, device="cuda")
    runs = interleave(["mics"], [(job, cluster)], repeats=1, record=False)
    fits, too_large = (
        summarise(runs, [replace(_outcome(0), peak_allocated_nbytes=gib << 30)], peak_tflops=None)[0]
        for gib in (38, 43)
    )
    assert fits.shortage is None
    assert too_large.shortage == "needs 43.0 GiB of the 39.0 GiB that a program has there"
    assert any("would not run: needs 43.0 GiB" in line for line in verdict([too_large]))


def test_a_step_that_waits_for_the_host_says_so() -> None:
    """On another GPU's clock the host counts as many times longer."""
    cluster = find_cluster("p4d.24xlarge:1")
    (run,) = interleave(["mics"], [(replace(JOB, device="cuda"), cluster)], repeats=1, record=False)
    clock = GpuClock(gpu="a100", terms=(Term(name="matrices", here=1.0, there=3.0),))
    outcome = replace(_outcome(0), step_seconds=[2.0, 2.0], host_seconds=0.7)
    here, there = (
        summarise([each], [outcome], peak_tflops=None)[0] for each in (run, replace(run, clock=clock))
    )
    assert not here.host_bound and there.host_bound
    assert any("mics waits for the host of this machine" in line for line in verdict([there]))


@pytest.mark.parametrize("problem", ["host", "memory"])
def test_what_could_not_be_there_is_not_ranked(problem: str) -> None:
    """A step that waits for this host, or needs more memory than the GPU named has, is no multiple."""
    cluster = find_cluster("p4d.24xlarge:1")
    runs = interleave(
        ["hsdp", "mics", "fsdp2"], [(replace(JOB, device="cuda"), cluster)], repeats=1, record=False
    )
    outcomes = [
        replace(_outcome(number), step_seconds=[seconds, seconds], peak_allocated_nbytes=1 << 30)
        for number, seconds in enumerate((1.0, 2.0, 3.0))
    ]
    bad = {"host": {"host_seconds": 0.95}, "memory": {"peak_allocated_nbytes": 43 << 30}}[problem]
    rows = summarise(runs, [replace(outcomes[0], **bad), *outcomes[1:]], peak_tflops=None)
    ranking, why = verdict(rows)[:2]
    assert "mics has the shortest step; fsdp2 1.50 x its time." in ranking
    assert ("hsdp waits for the host" if problem == "host" else "hsdp would not run: needs 43.0 GiB") in why
    assert not any("shortest" in line or " x " in line for line in verdict(rows[:2]))


@pytest.mark.long
@pytest.mark.full
def test_calls_together_are_rows_of_each(tmp_path: Path) -> None:
    """One process makes the runs of two calls: a whole model, and one that is scaled from two depths."""
    common = ["--model", "gpt-tiny", "--cluster", "p4d.24xlarge:2", "--device", "cpu", "--repeats", "1"]
    common += ["--warmup", "0", "--steps", "1", "--micro-batch", "1", "--out", str(tmp_path)]
    whole, scaled = bench_together(
        [
            [*common, "--systems", "mics", "--partition-size", "8"],
            [*common, "--systems", "hsdp", "--partition-size", "16", "--layers", "2"],
        ]
    )
    assert [(row.run.system, row.run.job.partition_size) for row in whole] == [("mics", 8)]
    assert [row.run.system for row in scaled] == ["hsdp"] * 3
    assert all(row.outcomes for row in (*whole, *scaled)) and not any(tmp_path.iterdir())
