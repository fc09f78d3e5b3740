"""`mics plan --write`: the file is read by `mics train`, and means what the plan chose."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from mics.cli import main
from mics.data.index import INDEX_FILE
from mics.planner.command import PlanOutput
from mics.train.config import TrainConfig
from mics.train.settings_file import load_settings


def _written(folder: Path, *args: str) -> TrainConfig:
    data = folder / "data"
    data.mkdir()
    (data / "index.json").touch()
    file = folder / "run.yaml"
    assert main(["plan", "--write", str(file), "--data", str(data), *args]) == 0
    return load_settings(TrainConfig, file)


def test_a_plan_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens become steps, failures an interval; the setting is that of the printed call."""
    batch = ["--global-batch", "512", "--tokens", "26B", "--node-mtbf-hours", "3000"]
    config = _written(tmp_path, "--model", "gpt-6.7b", "--cluster", "p4d.24xlarge:2", *batch)
    assert (config.model.name, config.global_batch, config.name) == ("gpt-6.7b", 512, "gpt-6.7b")
    assert config.steps == round(26e9 / (512 * 2048))
    assert (config.launch.hosts, config.launch.ranks_per_node) == (2, 8)
    assert config.sharding.cluster == "p4d.24xlarge"
    assert config.sharding.param_dtype == "bf16"
    assert config.checkpoint.interval not in (0, 100)
    printed = capsys.readouterr().out
    assert f"partition_size={config.sharding.partition_size}" in printed
    assert (config.sharding.activations == "keep") == ("mics.Activations" not in printed)
    assert f"{config.batch_size} sequence" in printed


def test_what_was_edited_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same plan again changes nothing; another one, or the same over an edited file, renames that."""
    file = tmp_path / "run.yaml"
    plan = ["plan", "--write", str(file), "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:1"]
    assert main([*plan, "--global-batch", "64"]) == main([*plan, "--global-batch", "64"]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
    file.write_text(file.read_text() + "# mine\n")
    for number in (1, 2):
        assert main([*plan, "--global-batch", str(64 * number)]) == 0
        assert f"; what was there is {file}.{number} now" in capsys.readouterr().err
    assert Path(f"{file}.1").read_text().endswith("# mine\n")


def test_what_a_gpu_lacks_is_not_written(tmp_path: Path) -> None:
    """V100s have no bf16; finer units and fewer ahead are written where the plan needs them."""
    batch = ["--global-batch", "256", "--reduce-dtype", "fp16"]
    config = _written(tmp_path, "--model", "gpt-1.3b", "--cluster", "p3dn.24xlarge:2", *batch)
    dtypes = config.sharding.param_dtype, config.sharding.reduce_dtype, config.sharding.replica_reduce_dtype
    assert dtypes == ("fp16", "fp16", "fp16")
    assert config.steps == 1000 and config.checkpoint.interval == 100
    assert f"steps: {config.steps} unless --tokens" in inspect.getsource(PlanOutput), "as --help says"


def test_a_config_of_transformers_keeps_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    described = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 128, **shape}
    (folder / "config.json").write_text(json.dumps(described))
    file = str(folder / "config.json")
    config = _written(tmp_path, "--model", file, "--cluster", "p4d.24xlarge:1", "--global-batch", "64")
    assert (config.model.name, config.name, config.model.seq_len) == (file, "tiny", 128)


def test_data_that_a_run_would_refuse_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan may be made where the data is not: the file is written all the same."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / INDEX_FILE).write_text(json.dumps({"vocab_size": 50_000}))
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / INDEX_FILE).write_text(json.dumps({"vocab_size": 256}))
    folders = [str(tmp_path / name) for name in ("small", "large", "missing")]
    run = ["--model", "nano", "--cluster", "p4d.24xlarge:1", "--global-batch", "64"]
    assert main(["plan", "--write", str(tmp_path / "run.yaml"), *run, "--data", *folders]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--data" in line]
    assert [line.split(";")[0] for line in warnings] == [
        f"mics plan: warning: --data {tmp_path}/large: expected a vocabulary of at most the 256 tokens of "
        "nano, found 50,000",
        f"mics plan: warning: --data {tmp_path}/missing: expected a folder that mics data prepare has made, "
        f"found no {INDEX_FILE} there",
    ]
    assert (tmp_path / "run.yaml").is_file()


def test_what_a_run_would_refuse_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    plan = [
        "plan",
        "--cluster",
        "p4d.24xlarge:1",
        "--global-batch",
        "64",
        "--write",
        str(tmp_path / "r.yaml"),
    ]
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 128}))
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5"}))
    assert main([*plan, "--model", str(tmp_path / "gpt2.json"), "--seq", "129"]) == 2
    assert "--seq: expected at most the 128 positions" in capsys.readouterr().err
    assert main([*plan, "--model", str(tmp_path / "t5.json"), "--seq", "64"]) == 2
    assert "expected a causal or a masked language model" in capsys.readouterr().err
    assert not (tmp_path / "r.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--write", "run.yaml", "--nodes", "1", "2"],
            "--write: expected one number of nodes, found",
        ),
        (["--data", "data"], "--data: expected --write FILE beside it, found none"),
        (
            ["--write", "run.yaml", "--optimizer", "adamw8bit"],
            "--write: expected --optimizer adamw, found adamw8bit",
        ),
        (
            ["--optimizer", "adamw8bit", "--optimizer-state", "host"],
            "--optimizer-state: expected device with --optimizer adamw8bit, found host",
        ),
        (["--write", "no/such/folder/run.yaml"], "--write no/such/folder/run.yaml: expected a file that can"),
    ],
)
def test_what_cannot_be_written(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ["plan", "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:1", "--global-batch", "64"]
    assert main([*plan, *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
