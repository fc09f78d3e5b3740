"""Scalars elsewhere: TensorBoard's events are read back; Weights & Biases is a stand-in, and once itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mics.cli import main
from mics.errors import SettingsError
from mics.train.config import ReportSettings, TrainConfig
from mics.train.ranks import Rank
from mics.train.results import History
from mics.train.settings_file import parse_train_config
from tests.train.test_metrics import make_measurement

ME = Rank(rank=0, num_ranks=1, local_rank=0, ranks_per_node=1, ranks_per_gpu=1, device=torch.device("cpu"))


def _config(folder: Path, logger: Any) -> TrainConfig:
    return TrainConfig(output_dir=folder, name="run", report=ReportSettings(logger=logger))


def _train(config: TrainConfig, steps: range, *, after_step: int = 0, loss: float = 3.0) -> None:
    """Steps with measurements, a validation at every fourth and a checkpoint at every fifth."""
    history = History()
    with history.recording(config, ME, after_step=after_step):
        for step in steps:
            if step % 4 == 0:
                history.add_validation(step, loss + 0.5)
            history.add(make_measurement(step, loss=loss, mfu=0.25))
            if step % 5 == 0:
                history.add_checkpoint(step, 0.125)


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar as TensorBoard itself reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "run" / "tensorboard"))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in names}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_lines_that_find_a_full_disk_are_no_reason_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither when they are written nor at the end."""
    history = History()
    with history.recording(_config(tmp_path, "none"), ME):
        assert history._file is not None
        history._file.close()
        history._file = Path("/dev/full").open("a")  # noqa: SIM115
        history.add_validation(4, 3.5)
    assert history.validations == [(4, 3.5)]
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full: could not be written: No space left on device. Training goes on"
    ] * 2


def test_tensorboard_has_every_scalar(tmp_path: Path) -> None:
    _train(_config(tmp_path, "tensorboard"), range(1, 6))
    events = _events(tmp_path)
    assert {name: values[0][1] for name, values in events.items()} == pytest.approx(
        {
            "train/loss": 3.0,
            "train/lr": 1e-3,
            "train/grad_norm": 0.5,
            "val/loss": 3.5,
            "perf/tokens_per_s": 12345.6,
            "perf/tflops": 0.0123,
            "perf/mfu": 0.25,
            "perf/data_wait_s": 0.0,
            "perf/memory_gib": 400_000_000 / 2**30,
            "comm/intra_gb": 0.00459,
            "comm/inter_gb": 0.000765,
            "comm/partition_gb": 0.00459,
            "comm/replication_gb": 0.000765,
            "checkpoint/stall_s": 0.125,
        }
    )
    assert [step for step, _ in events["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in events["val/loss"]] == [4]


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    """What was written after the checkpoint is dropped; a run that begins anew has none of the old steps."""
    config = _config(tmp_path, "tensorboard")
    _train(config, range(1, 9), loss=3.0)
    _train(config, range(6, 11), after_step=5, loss=2.0)
    losses = _events(tmp_path)["train/loss"]
    assert losses == [(step, 3.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 11)]
    _train(config, range(1, 3), loss=1.0)
    assert _events(tmp_path)["train/loss"] == [(1, 1.0), (2, 1.0)]


def test_a_run_that_fails_keeps_its_events(tmp_path: Path) -> None:
    def fail() -> None:
        history = History()
        with history.recording(_config(tmp_path, "tensorboard"), ME):
            history.add(make_measurement(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _events(tmp_path)["train/loss"] == [(1, 2.5)]


class _Wandb(ModuleType):
    """What we use of wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.calls: list[tuple[str, Any]] = []
        self.problem: Exception | None = None

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - their name
        return settings

    def init(self, **settings: Any) -> _Wandb:
        if self.problem is not None:
            raise self.problem
        self.calls.append(("init", settings))
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, wandb: _Wandb) -> None:
    """By the id in the run's folder; a run that begins anew has another."""
    config = _config(tmp_path, "wandb")
    _train(config, range(1, 4))
    _train(config, range(3, 5), after_step=2)
    _train(config, range(1, 2))
    begun = [settings for what, settings in wandb.calls if what == "init"]
    first, second, anew = (settings["id"] for settings in begun)
    assert first == second != anew
    assert {settings["resume"] for settings in begun} == {"allow"}
    assert begun[0]["config"]["report"]["logger"] == "wandb"
    logged = [values for what, values in wandb.calls if what == "log"]
    assert [step for step, values in logged if "train/loss" in values] == [1, 2, 3, 3, 4, 1]
    assert logged[0][1]["perf/tokens_per_s"] == 12345.6
    assert [what for what, _ in wandb.calls].count("finish") == 3


_OFFLINE = """
import sys
from pathlib import Path
from tests.train.test_loggers import _config, _train
_train(_config(Path(sys.argv[1]), "wandb"), range(1, 4))
"""


@pytest.mark.full
def test_wandb_itself_writes_a_run_without_a_network(tmp_path: Path) -> None:
    """The real package, in its offline mode: what it wrote is read back with its own reader."""
    pytest.importorskip("wandb")
    environ = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    script = [sys.executable, "-c", _OFFLINE, str(tmp_path)]
    subprocess.run(script, env=environ, check=True, timeout=120, cwd=Path(__file__).parents[2])
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    written = file.read_bytes()
    assert b"train/loss" in written and b"perf/tokens_per_s" in written and b"comm/inter_gb" in written


def test_wandb_without_an_account_says_what_to_do(tmp_path: Path, wandb: _Wandb) -> None:
    wandb.problem = RuntimeError("api_key not configured\n (no-tty)")
    with pytest.raises(SettingsError, match=r"found RuntimeError: api_key not configured \(no-tty\); type: "):
        _train(_config(tmp_path, "wandb"), range(1, 2))


def test_none_leaves_the_lines_alone(tmp_path: Path, wandb: _Wandb) -> None:
    _train(_config(tmp_path, "none"), range(1, 3))
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["metrics.jsonl"]
    assert wandb.calls == []


@pytest.mark.parametrize("flag", ["--logger", "--report.logger"])
def test_the_logger_is_asked_for_by_a_flag(flag: str) -> None:
    assert parse_train_config([flag, "tensorboard"]).report.logger == "tensorboard"
    assert parse_train_config([]).report.logger == "none"


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_says_what_to_type(
    logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started."""
    monkeypatch.setitem(sys.modules, logger, None)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--logger", logger, "--output-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        f"mics train: error: --logger {logger} needs {logger}, found none; "
        f"type: pip install 'mics-torch[{logger}]'\n"
    )
    assert list(tmp_path.iterdir()) == []
