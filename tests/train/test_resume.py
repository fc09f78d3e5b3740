"""A run that goes on from a checkpoint is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mics
from mics.checkpoint.folders import steps_in
from mics.checkpoint.storage import INDEX_NAME
from mics.errors import CheckpointError, SettingsError
from mics.train.checkpoints import Checkpoints, check_places, find_candidates
from mics.train.config import CheckpointSettings, ModelSettings, TrainConfig
from mics.train.data import Dealing
from mics.train.launch import _free_port
from mics.train.ranks import Rank
from tests import tiers
from tests.checkpoint.hostile import alter_own
from tests.ranks import RankError, run_expecting_error, run_ranks
from tests.train.rank_runs import train

DROPOUT = ["--model.dropout", "0.1"]
_ENOUGH = ["--steps", "8"] if tiers.quick else []


def run(folder: Path, *args: str, world: int = 4, trouble: str = "", at_step: int = 0) -> tuple[int, str]:
    """Train on ranks of the pool; the exit code they agree on and what rank 0 showed."""
    given = ["--output-dir", str(folder), *args]
    answers = run_ranks(world, train, _free_port(), given, trouble, at_step, launch="variables")
    codes = {code for code, _ in answers}
    assert len(codes) == 1
    return codes.pop(), answers[0][1]


def run_badly(folder: Path, *args: str, world: int = 4, **trouble: Any) -> list[RankError]:
    given = ["--output-dir", str(folder), *args]
    values = (trouble.get("trouble", ""), trouble.get("at_step", 0))
    return run_expecting_error(world, train, _free_port(), given, *values, launch="variables")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What was measured, without what a clock says."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "validation_loss", "grad_norm", "learning_rate")
    return [
        {key: row[key] for key in kept if key in row}
        for row in found
        if "checkpoint_stall_seconds" not in row
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps on four ranks with dropout, and the checkpoints after steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("reference")
    assert run(folder, *DROPOUT)[0] == 0
    return folder / "demo"


def copied(reference: Path, tmp_path: Path, *, last_step: int) -> Path:
    """The reference as it was when the checkpoint of ``last_step`` was its latest, some steps later."""
    copy = tmp_path / "demo"
    shutil.copytree(reference, copy)
    for step in range(last_step + 4, 13, 4):
        shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    (copy / "checkpoints" / "latest").write_text(f"step-{last_step}\n")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == last_step + 3)
    (copy / "metrics.jsonl").write_text("".join(lines[:cut]) + lines[cut][:20])  # killed while it wrote
    return copy


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    """Weights, moments, schedule, data and every rank's dropout come back; no row is lost or twice."""
    copy = copied(reference, tmp_path, last_step=4)
    code, shown = run(tmp_path, *DROPOUT, "--checkpoint.resume", "latest")
    assert code == 0
    assert f"going on from {copy}/checkpoints/step-4, after step 4" in shown
    assert rows(copy) == rows(reference)


@pytest.mark.parametrize("resume", ["latest", "path"])
def test_a_checkpoint_of_another_model_is_refused_before_ranks_start(
    reference: Path, tmp_path: Path, resume: str
) -> None:
    """By names and shapes. One that is torn is left to the ranks, which pass it over; auto begins anew."""
    copy = copied(reference, tmp_path, last_step=8)
    path = str(copy / "checkpoints") if resume == "path" else resume
    shape = {"num_layers": 2, "hidden_size": 32, "seq_len": 32}

    def check(resume: str, **changed: int) -> None:
        model = ModelSettings(**{**shape, **changed})
        given = CheckpointSettings(resume=resume)
        check_places(TrainConfig(output_dir=tmp_path, model=model, checkpoint=given))

    check(path)
    check("auto", num_layers=3)
    with pytest.raises(SettingsError, match=r"checkpoint\.resume .*step-8: .* another: blocks\.2\..* found"):
        check(path, num_layers=3)
    os.truncate(copy / "checkpoints" / "step-8" / INDEX_NAME, 100)
    check(path, num_layers=3)


@pytest.mark.full
def test_a_torn_checkpoint_is_passed_over(reference: Path, tmp_path: Path) -> None:
    """A rank's state makes no sense in the latest, a byte is wrong in the next: warnings name the files."""
    copy = copied(reference, tmp_path, last_step=8)
    senseless = copy / "checkpoints" / "step-12"
    shutil.copytree(copy / "checkpoints" / "step-8", senseless)
    alter_own(senseless, lambda own: own["extra_state"].update(step="twelve"), rank=1)
    (copy / "checkpoints" / "latest").write_text("step-12\n")
    torn = max((copy / "checkpoints" / "step-8").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 1
    torn.write_bytes(content)
    code, shown = run(tmp_path, *DROPOUT, "--checkpoint.resume", "latest")
    assert code == 0
    assert f"warning: {senseless}/rank-1.json: extra_state 'step': expected a state" in shown
    assert f"warning: {torn}: expected what was written" in shown
    assert f"going back to {copy}/checkpoints/step-4" in shown
    assert rows(copy) == rows(reference)
    assert (tmp_path / "demo/checkpoints.previous/step-8").is_dir(), "nothing is thrown away unasked"


@pytest.mark.full
def test_going_back_makes_the_steps_after_it_history(reference: Path, tmp_path: Path) -> None:
    """A run that is taken up at an earlier step of its own must not be restarted from a later one."""
    copy = copied(reference, tmp_path, last_step=8)
    code, shown = run(tmp_path, *DROPOUT, "--checkpoint.resume", str(copy / "checkpoints" / "step-4"))
    assert code == 0
    assert f"the checkpoints after step-4 are in {copy}/checkpoints.previous now" in shown
    assert (tmp_path / "demo/checkpoints.previous/step-8").is_dir()
    assert (tmp_path / "demo/checkpoints.previous/metrics.jsonl").is_file()
    assert rows(copy) == rows(reference)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the reference, without dropout, which would be drawn by other ranks."""
    folder = tmp_path_factory.mktemp("plain")
    assert run(folder, *_ENOUGH)[0] == 0
    return folder


@pytest.mark.parametrize("world", tiers.first([2, 8], 0, 1))
def test_fewer_and_more_ranks_go_on_with_the_same_sequences(plain: Path, tmp_path: Path, world: int) -> None:
    """The global batch stays: the losses are those of the plain run but for the order of additions."""
    args = ("--checkpoint.resume", str(plain / "demo/checkpoints/step-4"), *_ENOUGH)
    assert run(tmp_path, *args, world=world)[0] == 0
    found, expected = (
        [row["loss"] for row in rows(folder / "demo") if "loss" in row and row["step"] > 4]
        for folder in (tmp_path, plain)
    )
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_world_that_does_not_divide_the_batch_is_an_error(reference: Path, tmp_path: Path) -> None:
    """Sixteen sequences a step on three ranks: said at once, by all of them."""
    copied(reference, tmp_path, last_step=4)
    flags = (*DROPOUT, "--checkpoint.resume", "latest", "--sharding.partition-size", "1")
    for error in run_badly(tmp_path, *flags, world=3):
        assert error.is_a("SettingsError")
        assert "divides the 16 sequences per step" in error.message


@pytest.mark.parametrize(
    ("now", "batch_size", "micro_steps"), [(1, 4, 8), (2, 4, 4), (4, 4, 2), (8, 4, 1), (16, 2, 1), (32, 1, 1)]
)
def test_sequences_are_dealt_to_any_number_of_ranks(now: int, batch_size: int, micro_steps: int) -> None:
    """Batches never grow, since nobody knows whether larger ones fit."""
    before = Dealing(batch_size=4, micro_steps=2, num_ranks=4)
    dealt = Dealing(batch_size=4, micro_steps=2, num_ranks=now).going_on_from(before)
    assert dealt == Dealing(batch_size=batch_size, micro_steps=micro_steps, num_ranks=now)


def test_the_batch_of_a_checkpoint_is_dealt_to_more_ranks() -> None:
    """Also where the settings name it with batches that a plan has made for fewer ranks."""
    config = TrainConfig(batch_size=8, global_batch=32)
    before = Dealing(batch_size=8, micro_steps=1, num_ranks=4)
    dealt = Dealing.asked(config, num_ranks=8, before=before)
    assert dealt == Dealing(batch_size=4, micro_steps=1, num_ranks=8)
    assert Dealing.asked(config, num_ranks=2, before=before).micro_steps == 2
    with pytest.raises(SettingsError, match="divides the 32 sequences per step"):
        Dealing.asked(config, num_ranks=6, before=before)
    with pytest.raises(SettingsError, match="expected a multiple of 64 sequences"):
        Dealing.asked(config, num_ranks=8, before=None)


def test_one_rank_is_asked_to_leave_and_all_do_after_the_same_step(reference: Path, tmp_path: Path) -> None:
    """SIGTERM on rank 1 in step 6: all save the same step and leave with 143; the run goes on from there."""
    code, shown = run(tmp_path, *DROPOUT, trouble="term", at_step=6)
    assert code == 143
    latest = (tmp_path / "demo/checkpoints/latest").read_text().strip()
    assert f"asked to leave: saved {tmp_path}/demo/checkpoints/{latest}" in shown
    step = int(latest.removeprefix("step-"))
    assert step >= 6
    assert rows(tmp_path / "demo")[-1]["step"] == step
    if step < 12 and not tiers.quick:  # where resuming has a test of its own
        assert run(tmp_path, *DROPOUT, "--checkpoint.resume", "latest")[0] == 0
        assert rows(tmp_path / "demo") == rows(reference)


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_unit(tmp_path: Path) -> None:
    """The default: every rank raises the same error, which names the unit and the step."""
    for error in run_badly(tmp_path, trouble="nan", at_step=3):
        assert error.is_a("NonfiniteError")
        assert "step 3: the norm of the gradients is nan, because of" in error.message
        assert "unit 'blocks.0'" in error.message


@pytest.mark.full
def test_a_gradient_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """The update is left out on all ranks and the parameters stay finite; too many in a row end the run."""
    flags = ("--optimizer.nonfinite", "skip", "--checkpoint.interval", "0")
    code, shown = run(tmp_path, *flags, trouble="nan", at_step=3)
    assert code == 0
    assert "step 3: the norm of the gradients is nan" in shown and "left out (1 so far)" in shown
    losses = [row["loss"] for row in rows(tmp_path / "demo") if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0]
    flags += ("--optimizer.max-skipped", "0")
    for error in run_badly(tmp_path, *flags, trouble="nan", at_step=3):
        assert error.is_a("NonfiniteError")
        assert "at most optimizer.max_skipped=0 such steps in a row, found 1" in error.message


def _config(folder: Path, resume: str = "auto") -> TrainConfig:
    return TrainConfig(output_dir=folder, checkpoint=CheckpointSettings(resume=resume))


def test_which_checkpoint_is_meant(reference: Path, tmp_path: Path) -> None:
    """auto goes on in the same job alone; a new run moves the old checkpoints aside."""
    copy = copied(reference, tmp_path, last_step=8)
    steps = [copy / "checkpoints" / f"step-{step}" for step in (8, 4)]
    alone: dict[str, str] = {}
    named = {"TORCHELASTIC_RUN_ID": "nightly"}
    assert find_candidates(_config(tmp_path), restarted=True, environ=alone) == (steps, True)
    assert find_candidates(_config(tmp_path, "latest"), restarted=False, environ=named) == (steps, True)
    aside = steps[0].rename(
        steps[0].with_name(f".{steps[0].name}.previous")
    )  # killed while it was saved again
    found = find_candidates(_config(tmp_path, "latest"), restarted=False, environ=named)
    assert found == ([aside, *steps[1:]], True)
    aside.rename(steps[0])
    # The job is known by its name now, also where nothing failed and a node has joined.
    assert find_candidates(_config(tmp_path), restarted=False, environ=named) == (steps, True)
    elsewhere = _config(tmp_path, str(reference / "checkpoints" / "step-4"))
    assert find_candidates(elsewhere, restarted=False, environ=named)[0] == steps
    other = {"TORCHELASTIC_RUN_ID": "another"}
    found = find_candidates(elsewhere, restarted=True, environ=other)
    assert found == ([reference / "checkpoints" / "step-4"], False)
    assert (tmp_path / "demo/checkpoints.previous/step-8").is_dir()
    assert find_candidates(_config(tmp_path), restarted=False, environ=alone) == ([], True)
    with pytest.raises(CheckpointError, match="lastest: expected a checkpoint"):
        find_candidates(_config(tmp_path, "lastest"), restarted=False, environ=os.environ)


def test_new_runs_of_one_name_lose_nothing_of_earlier_ones(tmp_path: Path) -> None:
    """Started again and again without `latest`: checkpoints and measurements stay, a line says where."""
    config, run_dir = _config(tmp_path), tmp_path / "demo"
    told: list[str] = []

    def begin_anew(step: int) -> None:
        """A run that trains until its checkpoint of ``step``."""
        assert find_candidates(config, restarted=False, environ={}, tell=told.append) == ([], True)
        folder = run_dir / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / INDEX_NAME).touch()
        (run_dir / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')

    for step in (4, 8, 12, 16):
        begin_anew(step)
    assert steps_in(run_dir / "checkpoints") == [16]
    names = [".previous", ".previous-2", ".previous-3"]
    for name, step in zip(names, (4, 8, 12), strict=True):
        previous = run_dir / f"checkpoints{name}"
        assert steps_in(previous) == [step]
        assert (previous / "metrics.jsonl").read_text() == f'{{"step": {step}}}\n'
    assert len(told) == 3 and f"up to step-12, are in {run_dir}/checkpoints.previous-3 now" in told[-1]


def test_other_data_than_the_checkpoints_is_told(tmp_path: Path) -> None:
    """The run goes on: more data may be just what is wanted. Tokens that mean something else never are."""
    model = torch.nn.Linear(1, 1)
    mics.shard(model)
    me = Rank(
        rank=0, num_ranks=1, local_rank=0, ranks_per_node=1, ranks_per_gpu=1, device=torch.device("cpu")
    )

    def checkpoints_of(digest: str, told: list[str], tokenizer: str = "bytes") -> Checkpoints:
        return Checkpoints(
            _config(tmp_path, "latest"),
            me,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            parts={},
            data_digest=digest,
            tell=told.append,
            tokenizer=tokenizer,
        )

    first = checkpoints_of("one", [])
    first.dealing = Dealing(batch_size=1, micro_steps=1, num_ranks=1)
    first.save_now(4)
    for digest, warned in [("one", False), ("other", True)]:
        told: list[str] = []
        assert checkpoints_of(digest, told).resume().step == 4
        assert any("expected those of the checkpoint" in line for line in told) is warned
    with pytest.raises(SettingsError, match=r"trained with \(bytes\), found another \(4f\); prepare"):
        checkpoints_of("one", [], "4f").resume()


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at a save nor after the last step; one that is asked for at SIGTERM must not fail silently."""
    told: list[str] = []
    me = Rank(
        rank=0, num_ranks=1, local_rank=0, ranks_per_node=1, ranks_per_gpu=1, device=torch.device("cpu")
    )
    nothing = torch.nn.Linear(1, 1)
    checkpoints = Checkpoints(
        _config(tmp_path),
        me,
        model=nothing,
        optimizer=torch.optim.SGD(nothing.parameters(), 0.1),
        parts={},
        data_digest="",
        tokenizer="bytes",
        tell=told.append,
    )
    checkpoints.dealing = Dealing(batch_size=1, micro_steps=1, num_ranks=1)
    fails = CheckpointError("rank 0 could not write its part: No space left on device")

    def full(*args: Any, **kwargs: Any) -> None:
        raise fails

    monkeypatch.setattr("mics.save", full)
    interval = _config(tmp_path).checkpoint.interval
    assert checkpoints.save_if_due(interval) is None
    assert len(told) == 1 and "No space left" in told[0] and "Training goes on" in told[0]
    with pytest.raises(CheckpointError):
        checkpoints.save_now(interval)

    class Failed:
        def wait(self) -> None:
            if len(told) < 2:
                raise fails

    begun: list[int] = []
    monkeypatch.setattr("mics.save", lambda *args, step, **kwargs: begun.append(step) or Failed())
    checkpoints._saving = Failed()  # type: ignore[assignment]
    assert checkpoints.save_if_due(2 * interval) is not None
    assert begun == [2 * interval] and len(told) == 2, "one that failed behind it is told, and no reason"
    monkeypatch.setattr(checkpoints, "finish", full)
    checkpoints.finish_or_warn()
    assert len(told) == 3
