"""The published experiments: rows are predicted, results are read back, the page is made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.published import ablations, beside_planner, command, page, pictures, planned, trillion
from benchmarks.published.command import Published, main
from benchmarks.published.dated import hardware
from benchmarks.published.emulate import (
    Job,
    Measured,
    is_sound,
    jobs_of,
    known_of,
    layers_of,
    measure,
    measured_of,
)
from benchmarks.published.planned import fits, plan_row, prediction, with_room
from benchmarks.published.predict import PeerAtBest, Range, peers_at_best, predict_row, usual_point
from benchmarks.published.results import RESULTS, Result, error_of, measured_before, newest, read, write
from benchmarks.published.rows import BY_KEY, EXPERIMENTS, ROWS, Measure, Point, rows_of
from matplotlib.image import imread

from mics.bench.command import rows_of as bench_rows
from mics.bench.config import BenchConfig
from mics.bench.depths import too_few
from mics.bench.plan import interleave
from mics.bench.timeline import Exposure
from mics.utils.command_line import parse
from mics.utils.picture_style import DARK, LIGHT
from tests import tiers
from tests.pictures import readable


def _result(experiment: str, tflops: float | None = None) -> Result:
    """Predicted near what is published; measured if there is a number for it."""
    rows = rows_of(experiment)
    predicted: dict[str, Range | None] = {
        row.key: Range(low=0.9 * row.published, high=1.05 * row.published, num_points=4, num_fitting=2)
        for row in rows
    }
    peer = PeerAtBest(
        system="mics", step_seconds=2.0, partition_size=8, micro_batch=4, accumulation=2, activations="kept"
    )
    small = PeerAtBest(system="zero2", problem="does not fit: 42.4 of 29.4 GiB")
    measured = ()
    if tflops is not None:
        jobs = list(jobs_of(rows[0], [peer]))
        row = {"error": None, "step_seconds": [1.0, 0.9, 1.1], "outcomes": []}
        found = [measured_of(job, row) for job in jobs]
        measured = tuple(replace(each, tflops=tflops) if each.role == "row" else each for each in found)
    return Result(
        experiment=experiment, predicted=predicted, peers={rows[0].key: [peer, small]}, measured=measured
    )


def test_one_row_is_predicted() -> None:
    """The largest model has nothing open: one value, within 10%."""
    row = BY_KEY["gpt-175b/mics"]
    found = predict_row(row)
    assert (
        found is not None
        and row.is_right(found.low, found.high)
        and 0 < found.num_fitting <= found.num_points
    )
    assert fits(usual_point(row))


def test_a_speed_up_is_of_the_micro_batch_that_the_document_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is plausible; a system without room for it takes the same batch in smaller micro-steps."""
    row = BY_KEY["bert-10b/zero2"]
    assert row.micro_batch == (8,) and set(row.open_values) == {"accumulation"}
    usual = usual_point(row)
    assert (usual.micro_batch, usual.accumulation) == (8, 4)
    (value,) = plan_row(replace(row, accumulation=(4,))).values.values()
    ours, theirs = row.runs(usual)
    assert with_room(theirs) == theirs

    def little_room(point: Point) -> bool:
        return point.system != "zero2-before" or point.micro_batch <= 2

    monkeypatch.setattr(planned, "fits", little_room)
    smaller = replace(theirs, micro_batch=2, accumulation=16)
    assert with_room(theirs) == smaller
    (slower,) = plan_row(replace(row, accumulation=(4,))).values.values()
    speeds = [prediction(each).tokens_per_second for each in (ours, smaller)]
    assert slower == speeds[0] / speeds[1] > value
    monkeypatch.setattr(planned, "fits", lambda point: point.system != "zero2-before")
    assert not plan_row(row).values


@pytest.mark.full
def test_every_row_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--plan-only` has a value for each figure, or says that what it is compared with does not fit.

    With `--long` for `--all`, and other systems are planned for each experiment. `planner/test_planner.py`
    predicts all rows.
    """
    chosen = EXPERIMENTS if tiers.long else ("gpt-175b", "bert-15b")
    if not tiers.long:
        monkeypatch.setattr(
            command,
            "peers_at_best",
            lambda row: peers_at_best(row) if row.key.startswith("gpt-175b/") else [],
        )
    words = ["--all"] if tiers.long else list(chosen)
    assert main([*words, "--plan-only", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    found = {key: each for result in read(file) for key, each in result.predicted.items()}
    assert set(found) == {row.key for experiment in chosen for row in rows_of(experiment)}
    assert {key for key, each in found.items() if each is None} <= {
        f"bert-{size}b/zero2" for size in (15, 20, 50)
    }
    assert "not run" in file.with_suffix(".md").read_text()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Several experiments go into one file; a later prediction keeps the measurement of an earlier one."""
    one, two = _result("gpt-175b"), _result("gpt-1t")
    file = write(one, tmp_path)
    assert write(two, tmp_path) == file and read(file) == [one, two]
    assert newest("gpt-175b", tmp_path) == one and newest("bert-10b", tmp_path) is None
    measured = _result("gpt-175b", 160.0)
    older = tmp_path / "published_h200_2026-01-01.json"
    write(measured, tmp_path).rename(older)
    found = newest("gpt-175b", tmp_path)
    assert found is not None and found.measured == measured.measured and found.predicted == one.predicted


def test_of_one_day_the_later_prediction_counts(tmp_path: Path) -> None:
    """A planner that has changed since the measurement is what the page shows, beside that measurement."""
    file = write(_result("gpt-175b", 160.0), tmp_path)
    day = file.stem.rpartition("_")[2]
    machines = {}
    for machine, hour, step_seconds in (("h200", "08", 3.0), ("planner", "09", 2.0)):
        kept = json.loads(file.read_text())
        kept["gpt-175b"]["made"] = f"{day}T{hour}:00:00+00:00"
        kept["gpt-175b"]["peers"]["gpt-175b/mics"][0]["step_seconds"] = step_seconds
        if machine == "planner":
            kept["gpt-175b"]["measured"] = []
        machines[machine] = tmp_path / f"published_{machine}_{day}.json"
        machines[machine].write_text(json.dumps(kept))
    file.unlink()
    found = newest("gpt-175b", tmp_path)
    assert found is not None and found.measured
    assert found.peers["gpt-175b/mics"][0].step_seconds == 2.0


def test_a_measurement_stands_beside_its_own_setting() -> None:
    """Where the planner has come to another best setting since, that one is not run."""
    result = _result("gpt-175b", 160.0)
    ((key, (peer, small)),) = result.peers.items()
    (ran,) = [line for line in page.peers_table(result) if line.startswith("| mics")]
    assert ran.endswith("| 2.00 s | 1.00 x | 1.00 s (4 of 96) | 1.00 x |")
    moved = replace(result, peers={key: [replace(peer, micro_batch=2, accumulation=4), small]})
    (other,) = [line for line in page.peers_table(moved) if line.startswith("| mics")]
    assert other.endswith("| 2.00 s | 1.00 x | not run |  |")


def test_the_page_is_made_of_results(tmp_path: Path) -> None:
    """Only what is between markers changes, and making it again changes nothing."""
    write(_result("gpt-175b", 160.0), tmp_path)
    write(_result("roberta-10b"), tmp_path)
    text = page.PAGE.read_text()
    made = page.regenerate(text, tmp_path)
    assert page.regenerate(made, tmp_path) == made
    blank = re.compile(r"(<!-- table: [\w-]+ -->\n).*?(<!-- end -->)", re.DOTALL)
    assert blank.sub(r"\1\2", made) == blank.sub(r"\1\2", text)
    (row,) = [line for line in made.splitlines() if line.startswith("| 175B on 128")]
    assert "| 169 TFLOP/s |" in row
    # The kernels of 2022 are the planner's.
    assert re.search(
        r"\| 152 to 177 \| inside \| 160 \(4 of 96\) \| -5\.3% \| 110 \| -3\d\.\d%, fitted \|", row
    )
    assert "| ZeRO-2 | does not fit: 42.4 of 29.4 GiB | | | | |" in made
    assert made.count("not run") > 10
    with pytest.raises(SystemExit, match="found 'roberta-11b'"):
        page.regenerate("<!-- table: roberta-11b -->\n<!-- end -->", tmp_path)


def test_kernels_of_2022_are_slower_than_those_of_today() -> None:
    """By the planner and by the clock's table; a ratio of two systems has no kernels."""
    row = BY_KEY["gpt-175b/mics"]
    result = _result("gpt-175b", 240.0)
    found = result.with_kernels_of_2022(row)
    assert found is not None and 0.6 * 240 < found.low <= found.high < 0.8 * 240
    assert _result("gpt-100b", 100.0).with_kernels_of_2022(BY_KEY["gpt-100b/mics-scaling"]) is None


def test_what_the_host_decided_is_not_a_result() -> None:
    """It is said in both tables, and counts in no range and no ratio."""
    row = BY_KEY["gpt-175b/mics"]
    result = _result("gpt-175b", 160.0)
    bound = replace(result, measured=tuple(replace(each, host_bound=True) for each in result.measured))
    assert result.emulated(row) is not None and bound.emulated(row) is None
    assert any("| host-bound here |  |" in line for line in page.peers_table(bound))
    assert not any("host-bound" in line for line in page.peers_table(result))
    (line,) = [line for line in page.rows_table("gpt-175b", bound) if "169 TFLOP/s" in line]
    assert line.endswith("| inside | host-bound here |  |  |  |")


def test_the_page_has_every_experiment() -> None:
    text = page.PAGE.read_text()
    tables = page.tables()
    named = set(re.findall(r"<!-- table: ([\w-]+) -->", text))
    assert set(EXPERIMENTS) <= named <= set(tables)
    assert {"ablations-roberta-10b", "ablations-bert-10b"} <= named


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(160, 180, "inside"), (100, 140, "-17.2%"), (186, 190, "+10.1%")],
)
def test_differences(low: float, high: float, words: str) -> None:
    row = BY_KEY["gpt-175b/mics"]
    assert error_of(row, Range(low=low, high=high, num_points=2, num_fitting=2)) == words
    bound = BY_KEY["gpt-1t/offload"]
    for low, high, words in (
        (1, 2, "below the bound"),
        (1, 4, "-50% to +100%: partly below"),
        (2.1, 4, "+5% to +100%: above, the low end within 10%"),
        (2.3, 3, "+15% to +50%: above"),
        (3, 3, "+50%: above"),
    ):
        assert error_of(bound, Range(low=low, high=high, num_points=2, num_fitting=2)) == words
        assert bound.is_right(low, high) is not words.endswith("above")


@pytest.mark.parametrize("experiment", tiers.first(EXPERIMENTS, 2))
def test_measurements_are_commands_of_mics_bench(experiment: str) -> None:
    """It takes them as they are, and whatever would take minutes runs fewer blocks."""
    for row in rows_of(experiment):
        for job in jobs_of(row):
            config = parse(BenchConfig, job.arguments(Path("x")), prog="mics bench")
            config.check()
            assert config.training.checkpoint is (job.point.activations != "kept")
            assert row.measure is not Measure.TFLOPS or job.role == "row"
            layers = layers_of(job.point, job.system)
            assert layers is None or layers >= 4
            dtype = "float16" if config.training.as_gpu == "v100" else "bfloat16"
            training = replace(config.training, device="cpu", param_dtype=dtype)
            runs = interleave(
                [job.system], bench_rows(replace(config, training=training)), repeats=1, record=False
            )
            assert [too_few(run) for run in runs] == [""] * len(runs), "they would not be scaled"


def test_a_drop_is_of_two_systems_on_two_networks() -> None:
    """Four runs; without one of them, or where a host decided, there is no ratio."""
    row = BY_KEY["zero-stages/drop"]
    jobs = list(jobs_of(row))
    assert [(job.system, job.point.cluster) for job in jobs] == [
        (system, cluster) for cluster in ("p4d.24xlarge:8", "dgx-a100:8") for system in ("fsdp2", "zero2")
    ]
    made = [measured_of(job, {"step_seconds": [1.0, 1.0, 1.0]}) for job in jobs]
    speeds = (60.0, 90.0, 100.0, 100.0)  # 40% and 10% are lost
    found = tuple(replace(each, tflops=speed) for each, speed in zip(made, speeds, strict=True))
    result = replace(_result("zero-stages"), measured=found)
    assert page.in_words(row, result.emulated(row)) == "4.0"
    for part in (found[:3], (replace(found[0], host_bound=True), *found[1:])):
        assert replace(result, measured=part).emulated(row) is None
    with_no_loss = (*found[:3], replace(found[3], tflops=90.0))
    assert replace(result, measured=with_no_loss).emulated(row) is None


def test_a_failure_is_a_result() -> None:
    row = BY_KEY["gpt-175b/mics"]
    job = Job(key=row.key, role="row", system="mics", point=usual_point(row))
    found = measured_of(job, {"error": "OutOfMemoryError: no"})
    assert found.error == "OutOfMemoryError: no" and found.tflops is None
    result = replace(_result("gpt-175b"), measured=(found,))
    assert result.emulated(row) is None


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    for words, problem in (
        ([], "found neither"),
        (["--all", "gpt-1t"], "found both"),
        (["gpt-2t"], "found gpt-2t"),
    ):
        with pytest.raises(SystemExit, match=problem):
            main([*words, "--plan-only", "--results", str(tmp_path)])
    assert Published(all=True).chosen() == EXPERIMENTS


@pytest.mark.full
def test_pictures(tmp_path: Path) -> None:
    """Throughput with ranges and with what was not run; scaling with frames; mechanisms; memory."""
    results = {name: _result(name, 150.0 if name == "gpt-175b" else None) for name in EXPERIMENTS}
    with readable() as words:
        assert pictures.draw_throughput(tmp_path / "t.png", ROWS, results, LIGHT)
        scaling = {
            "mics": [(128, 170.0), (256, 170.0), (512, 169.0)],
            "zero3-before": [(128, 86.0), (512, 62.0)],
        }
        pictures.draw_scaling(tmp_path / "s.png", scaling, LIGHT)
        pictures.draw_ablations(tmp_path / "a.png", _ablations(), DARK)
        trillion.draw_memory(tmp_path / "m.png", _trillion(), LIGHT)
    assert "not run" in words and "72%" in words and "+12.0%" in words
    assert imread(tmp_path / "t.png").shape[1] == 1600
    assert not pictures.draw_throughput(tmp_path / "no.png", ROWS, {}, LIGHT)


def _ablations() -> list[ablations.Found]:
    seconds = {way.key: 1.0 + 0.04 * number for number, way in enumerate(ablations.WAYS)}
    return [
        ablations.Found(place=place, key=key, step_seconds=[found], losses=[])
        for place in ("roberta-10b", "bert-10b")
        for key, found in seconds.items()
        if key in ablations.PLACES[place].ways
    ]


def _trillion() -> trillion.Found:
    phases = ("forward", "backward", "optimizer")
    samples = [
        trillion.Sample(phase=phase, unit=unit, allocated=40 << 30, reserved=50 << 30)
        for phase in phases
        for unit in (phase, *(f"blocks.{number}" for number in range(20)))
    ]
    return trillion.Found(
        model="gpt-1t", layers=210, gpu="a100", dilation=2.3, shard_seconds=90, step_seconds=390, tflops=176,
        peak_allocated_nbytes=70 << 30, peak_reserved_nbytes=72 << 30, host_nbytes=67 << 30,
        memory_nbytes=80 << 30, losses=[11.0, 10.9], samples=samples,
        exposure=Exposure(compute_seconds=1, idle_seconds=0, link_seconds={}, exposed_seconds={"inter": 0.0}),
    )  # fmt: skip


def test_the_trillion_is_read_as_it_was_written(tmp_path: Path) -> None:
    from dataclasses import asdict

    (tmp_path / "t.json").write_text(json.dumps(asdict(_trillion())))
    assert trillion.read(tmp_path / "t.json") == _trillion()


@pytest.mark.long
@pytest.mark.full
def test_ablations_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mechanism can be taken away, and the losses stay, but for imagined replicas that meet twice.

    Without `--long` some of them: each has a test of its own.
    """
    ways = [*ablations.WAYS[:1], *tiers.some(ablations.WAYS[1:], 2)]
    place = replace(ablations.PLACES["tiny"], ways=tuple(way.key for way in ways))
    monkeypatch.setitem(ablations.PLACES, "tiny", place)
    file = ablations.main(["--place", "tiny", "--warmup", "1", "--steps", "1", "--results", str(tmp_path)])
    rows = ablations.read(file)
    assert [row.key for row in rows] == [way.key for way in ways]
    for row in rows:
        assert row.error is None, row
        assert row.losses == pytest.approx(rows[0].losses, rel=1e-3 if row.key == "one-hop" else 1e-6), (
            row.key
        )
    table = ablations.table(rows)
    assert len(table) == len(rows) + 2 and "+0.0%" in table[2]
    assert "everything on" in "\n".join(page.ablation_table("tiny", tmp_path))


@pytest.mark.full
def test_the_largest_model_in_small(tmp_path: Path) -> None:
    """The command runs on a CPU, with samples of all phases."""
    file = trillion.main(["--model", "gpt-tiny", "--layers", "2", "--results", str(tmp_path)])
    found = trillion.read(file)
    assert {sample.phase for sample in found.samples} == {"forward", "backward", "optimizer"}
    assert found.step_seconds > 0 and len(list(tmp_path.glob("*.png"))) == 2


def test_a_command_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    """What this hardware measured today is not measured again, and half of a ratio is none."""
    row = BY_KEY["gpt-100b/mics-scaling"]
    ours, theirs = jobs_of(row)
    done = measured_of(ours, {"step_seconds": [2.0, 2.0, 2.0]})
    write(replace(_result("gpt-100b"), measured=(done,)), tmp_path)
    known = measured_before("gpt-100b", tmp_path)
    assert known == (done,)
    (again,) = measure([ours], tmp_path, known)
    assert again.step_seconds == 2.0
    assert replace(_result("gpt-100b"), measured=known).emulated(row) is None
    assert theirs.point.cluster == "p4d.24xlarge:16"


def test_what_another_day_measured_counts_if_only_what_is_missing_is_wanted(tmp_path: Path) -> None:
    """Of the same hardware, the newest first."""
    ours, _ = jobs_of(BY_KEY["gpt-100b/mics-scaling"])
    old, new, other = (
        replace(measured_of(ours, {"step_seconds": [seconds] * 3}), key=f"{seconds}")
        for seconds in (3.0, 2.0, 1.0)
    )
    for day, machine, each in (("01", None, old), ("02", None, new), ("03", "h9000", other)):
        file = write(replace(_result("gpt-100b"), measured=(each,)), tmp_path)
        file.rename(tmp_path / f"published_{machine or hardware()}_2026-01-{day}.json")
    assert measured_before("gpt-100b", tmp_path) == ()
    assert measured_before("gpt-100b", tmp_path, any_day=True) == (new, old)


def test_fewer_blocks_count_where_mics_bench_scales_from_them() -> None:
    """However many would run today, with any warm-up; the first counts. What it refuses is no measurement."""
    row = BY_KEY["gpt-175b/mics"]
    job = Job(key=row.key, role="row", system="mics", point=usual_point(row))
    deep = measured_of(job, {"step_seconds": [2.0] * 3})
    assert deep.layers == 4 and f"--layers {deep.layers} " in deep.command
    few, many, single = (
        replace(
            deep, layers=layers, command=deep.command.replace("--layers 4", f"--layers {layers} --theme x")
        )
        for layers in (4, 12, 2)
    )
    for each in (few, many):
        assert is_sound(each) and known_of(job, [each]) == each
    assert not is_sound(single) and known_of(job, [single]) is None
    assert known_of(job, [replace(few, step_seconds=1.0), many, deep]) == replace(few, step_seconds=1.0)
    replicas, _ = jobs_of(BY_KEY["bert-50b/zero3"])
    kept = measured_of(replicas, {"step_seconds": [2.0] * 3})
    assert kept.layers == 6 and is_sound(kept)
    refused = replace(kept, layers=4, command=kept.command.replace("--layers 6", "--layers 4"))
    assert not is_sound(refused) and known_of(replicas, [refused]) is None


def test_the_page_shows_what_is_not_missing(tmp_path: Path) -> None:
    """A measurement of an older day stands on the page, and `--missing` makes no call for it."""
    peer = _result("gpt-175b").peers["gpt-175b/mics"][0]
    wanted = [*jobs_of(BY_KEY["gpt-175b/mics"], [peer])]
    rows = [
        measured_of(job, {"step_seconds": [seconds] * 3})
        for job, seconds in zip(wanted, (4, 5, 6), strict=True)
    ]
    for day, measured in (("02", rows[1:]), ("01", [replace(rows[0], step_seconds=9.0), rows[0]])):
        file = write(replace(_result("gpt-175b"), measured=tuple(measured)), tmp_path)
        file.rename(tmp_path / f"published_{hardware()}_2026-01-{day}.json")
    found = newest("gpt-175b", tmp_path)
    assert found is not None and [each.step_seconds for each in found.measured] == [9.0, 5.0, 6.0]
    known = measured_before("gpt-175b", tmp_path, any_day=True)
    assert measure(wanted, tmp_path, known) == list(found.measured)


def test_a_crash_says_more_than_a_missing_package() -> None:
    """A later run without the package does not hide why it did not run."""
    row = BY_KEY["gpt-100b/mics"]
    job = Job(key=row.key, role="peer", system="megatron-fsdp", point=usual_point(row))
    missing = measured_of(
        job, {"error": "megatron-fsdp: expected its package, found none that imports (...)"}
    )
    crash = measured_of(job, {"error": "exit status 1: illegal memory access"})
    ran = measured_of(job, {"step_seconds": [2.0] * 3})
    assert known_of(job, [missing]) == missing
    assert known_of(job, [missing, crash]) == crash and known_of(job, [missing, ran, crash]) == ran


def test_a_second_run_of_a_day_keeps_what_the_first_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers come last. A run that is broken off before them leaves those of the run before."""
    peer = PeerAtBest(
        system="hsdp", step_seconds=2.0, partition_size=8, micro_batch=4, accumulation=2, activations="kept"
    )
    monkeypatch.setattr(command, "peers_at_best", lambda row: (peer,))
    monkeypatch.setattr(command, "predict_row", lambda row: None)

    def measured(jobs: Sequence[Job], folder: Path, known: Sequence[Measured] = ()) -> list[Measured]:
        row = {"error": None, "step_seconds": [1.0, 0.9, 1.1], "outcomes": []}
        return [measured_of(job, row) for job in jobs]

    def broken_off(jobs: Sequence[Job], folder: Path, known: Sequence[Measured] = ()) -> list[Measured]:
        if any(job.role == "peer" for job in jobs):
            raise KeyboardInterrupt
        return measured(jobs, folder)

    config = Published(results=tmp_path)
    monkeypatch.setattr(command, "measure", measured)
    whole = command.repeat("gpt-175b", config).measured
    assert [each.role for each in whole].count("peer") == 1 < len(whole)
    monkeypatch.setattr(command, "measure", broken_off)
    with pytest.raises(KeyboardInterrupt):
        command.repeat("gpt-175b", config)
    assert measured_before("gpt-175b", tmp_path) == whole


def test_a_run_that_is_broken_off_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def measured(jobs: Sequence[Job], folder: Path, known: Sequence[Measured] = ()) -> list[Measured]:
        calls.append(len(jobs))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [measured_of(job, {"step_seconds": [1.0] * 3}) for job in jobs]

    monkeypatch.setattr(command, "predict_row", lambda row: None)
    monkeypatch.setattr(command, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        command.repeat("gpt-100b", Published(results=tmp_path, peers=False))
    assert len(measured_before("gpt-100b", tmp_path)) == calls[0] == 3


def test_what_is_no_best_setting_any_more_stays_measured(tmp_path: Path) -> None:
    """A planner that changes asks for other settings, and pages still quote the first ones."""
    job, _ = jobs_of(BY_KEY["gpt-100b/mics-scaling"])
    once = measured_of(job, {"step_seconds": [3.0] * 3})
    again = replace(once, step_seconds=2.0)
    other = replace(once, command=once.command.replace("--micro-batch 4", "--micro-batch 8"))
    for measured in ((once, other), (again,)):
        file = write(replace(_result("gpt-100b"), measured=measured), tmp_path)
    assert read(file)[0].measured == (again, other)


def test_the_whole_trillion_is_in_its_row() -> None:
    """A run of all layers counts before one that was scaled."""
    found = newest("gpt-1t", RESULTS)
    assert found is not None
    row = BY_KEY["gpt-1t/mics"]
    whole = trillion.measured_whole(RESULTS)
    assert [each for each in found.measured if each.key == row.key and each.role == "row"] == list(whole)
    assert found.emulated(row) is not None


def test_measured_settings_are_found_again() -> None:
    """What stands beside the planner: each setting once, as the command that measured it has it."""
    found = list(beside_planner.measured())
    points = [beside_planner.point_of(each) for each in found]
    assert len({*points}) == len(points) > 30 and {"mics", "hsdp", "fsdp2", "zero2"} <= {
        p.system for p in points
    }
    for measured, point in zip(found, points, strict=True):
        assert measured.setting == (
            f"p={point.partition_size}, {point.micro_batch} x {point.accumulation}, {point.activations}, "
            f"{point.seq_len} tokens"
        )
