"""Starting ranks: what is started where, and which rank is blamed when it ends badly."""

import json
import os
from pathlib import Path

import pytest
import torch

from mics.cli import main
from mics.errors import SettingsError
from mics.train.config import LaunchSettings, ShardingSettings, TrainConfig
from mics.train.failures import (
    Failure,
    describe_failures,
    find_failures,
    is_hopeless,
    is_told,
    report_failure,
)
from mics.train.launch import LaunchPlan, agent_command, agent_environment, launch, plan_launch
from mics.train.ranks import read_rank, share_gpu
from tests.train.model_configs import config_file

TWO_BY_TWO = LaunchPlan(device="cpu", num_nodes=2, ranks_per_node=2, ranks_per_gpu=1)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "expected"),
    [
        (LaunchSettings(), 0, ("cpu", 2, 2, 1)),
        (LaunchSettings(), 1, ("cuda", 2, 2, 4)),
        (LaunchSettings(), 8, ("cuda", 1, 8, 1)),
        (LaunchSettings(device="cpu"), 8, ("cpu", 2, 2, 1)),
        (LaunchSettings(simulated_nodes=2), 8, ("cuda", 2, 4, 1)),
        (LaunchSettings(simulated_nodes=2, ranks_per_node=1), 1, ("cuda", 2, 1, 2)),
        (LaunchSettings(simulated_nodes=4, ranks_per_node=4), 8, ("cuda", 4, 4, 2)),
        (LaunchSettings(simulated_nodes=1, ranks_per_node=3), 0, ("cpu", 1, 3, 1)),
    ],
)
def test_the_ranks_follow_from_the_machine(
    settings: LaunchSettings, num_gpus: int, expected: tuple[str, int, int, int]
) -> None:
    """Two nodes of two on nothing or one GPU, one rank for each of several GPUs, and what is set is kept."""
    plan = plan_launch(settings, num_gpus=num_gpus)
    assert (plan.device, plan.num_nodes, plan.ranks_per_node, plan.ranks_per_gpu) == expected


def test_gpus_that_are_not_there_are_an_error() -> None:
    """Asked for explicitly, a GPU is not replaced by a CPU in silence."""
    with pytest.raises(SettingsError, match=r"launch\.device"):
        plan_launch(LaunchSettings(device="cuda"), num_gpus=0)
    with pytest.raises(SettingsError, match=r"launch\.ranks_per_gpu: expected at least 2"):
        plan_launch(LaunchSettings(simulated_nodes=2, ranks_per_node=2, ranks_per_gpu=1), num_gpus=2)


def test_each_node_is_one_torchrun(tmp_path: Path) -> None:
    """Agents differ in the node's number alone; only rank 0's stdout stays on the terminal."""
    first, second = (
        agent_command(TWO_BY_TWO, node=node, port=1234, log_dir=tmp_path, args=["--steps", "3"], job="j")
        for node in (0, 1)
    )
    assert first[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=2", "--node-rank=0", "--master-port=1234"} <= set(first)
    assert "--redirects=0:2,1:3" in first
    assert "--redirects=0:3,1:3" in second
    assert second[second.index("mics.cli") :] == [
        "mics.cli",
        "train",
        "--steps",
        "3",
        "--launch.device=cpu",
        "--launch.ranks-per-gpu=1",
    ]


def test_cpu_ranks_do_not_fight_for_cores() -> None:
    """One thread a rank; a value the user set stays; GPU ranks keep torch's own choice."""
    assert agent_environment(TWO_BY_TWO, {})["OMP_NUM_THREADS"] == "1"
    assert agent_environment(TWO_BY_TWO, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    gpu_plan = LaunchPlan(device="cuda", num_nodes=1, ranks_per_node=8, ranks_per_gpu=1)
    assert "OMP_NUM_THREADS" not in agent_environment(gpu_plan, {})


def test_a_partition_size_that_does_not_divide_is_found_before_anything_starts(tmp_path: Path) -> None:
    """One line at once instead of four tracebacks later."""
    config = TrainConfig(
        output_dir=tmp_path,
        sharding=ShardingSettings(partition_size=3),
        launch=LaunchSettings(device="cpu"),
    )
    with pytest.raises(
        SettingsError, match=r"sharding\.partition_size: expected a divisor of the 4 ranks, found 3"
    ):
        launch(config, [])
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_cannot_be_is_found_before_anything_starts(tmp_path: Path) -> None:
    """A file of that name; a read-only or a full disk is the same error."""
    (tmp_path / "file").touch()
    config = TrainConfig(output_dir=tmp_path / "file", launch=LaunchSettings(device="cpu"))
    with pytest.raises(
        SettingsError, match=r"output_dir: expected a folder that can be written .* Not a dir"
    ):
        launch(config, [])


def _environ(rank: int, *, num_ranks: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "num_gpus", "ranks_per_gpu", "expected"),
    [
        (4, 2, 4, None, [0, 1, 2, 3]),  # two played nodes on four GPUs
        (4, 2, 2, None, [0, 1, 0, 1]),  # two real nodes of two GPUs
        (4, 2, 1, None, [0, 0, 0, 0]),
        (4, 2, 2, 2, [0, 0, 1, 1]),
    ],
)
def test_every_rank_finds_its_gpu(
    num_ranks: int, per_node: int, num_gpus: int, ranks_per_gpu: int | None, expected: list[int]
) -> None:
    """No GPU is used twice while another one is free."""
    found = [
        read_rank(
            LaunchSettings(ranks_per_gpu=ranks_per_gpu),
            environ=_environ(rank, num_ranks=num_ranks, per_node=per_node),
            num_gpus=num_gpus,
        ).device
        for rank in range(num_ranks)
    ]
    assert found == [torch.device("cuda", index) for index in expected]


def test_a_broken_launcher_is_named() -> None:
    """RANK without WORLD_SIZE is explained, not a KeyError."""
    with pytest.raises(SettingsError, match="WORLD_SIZE"):
        read_rank(LaunchSettings(), environ={"RANK": "0"}, num_gpus=0)


def test_ranks_that_share_a_gpu_claim_different_hosts() -> None:
    """NCCL refuses one device twice on one host."""
    environs: list[dict[str, str]] = [{}, {}]
    for rank, environ in enumerate(environs):
        share_gpu(rank, environ)
    assert environs[0]["NCCL_HOSTID"] != environs[1]["NCCL_HOSTID"]
    assert {environ["NCCL_P2P_DISABLE"] for environ in environs} == {"1"}


def _write_failure(
    log_dir: Path, node: int, local_rank: int, exit_code: int, trace: str | None, time: int
) -> None:
    """What torchrun leaves behind when a rank fails."""
    folder = log_dir / f"node{node}" / "none_x" / "attempt_0" / str(local_rank)
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("last words\n")
    if trace is not None:
        record = {"message": {"message": "", "extraInfo": {"py_callstack": trace, "timestamp": "0"}}}
        (folder / "error.json").write_text(json.dumps(record))
        os.utime(folder / "error.json", ns=(time, time))
    line = f"E0101 api.py:1] failed (exitcode: {exit_code}) local_rank: {local_rank} (pid: 7) of binary: p\n"
    (log_dir / f"node{node}.log").write_text(line)


def test_the_first_error_is_shown_not_its_consequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that lost its peer may report first; the one with the real error is to blame."""
    _write_failure(tmp_path, 0, 0, 1, "Traceback\nRuntimeError: Connection closed by peer", 10)
    _write_failure(tmp_path, 1, 1, 7, "Traceback\nZeroDivisionError: division by zero", 20)
    assert report_failure(tmp_path, ranks_per_node=2) == 7
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "rank 3 (node 1) failed with exit code 7" in shown
    assert "Connection closed" not in shown


def test_a_killed_rank_is_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot write an error; its last words and the signal are shown, and the exit code is the shell's."""
    _write_failure(tmp_path, 0, 1, -9, None, 0)
    _write_failure(tmp_path, 1, 0, 1, "Traceback\nCollectiveError: rank 1 died", 5)
    assert report_failure(tmp_path, ranks_per_node=2) == 137
    shown = capsys.readouterr().err
    assert "rank 1 (node 0) failed with signal SIGKILL" in shown
    assert "last words" in shown


LOST = (
    "Traceback\nmics.errors.CollectiveError: all-gather of unit 'blocks.1' failed in the partition group of "
    "ranks [0, 1]. Dead, stopped or cut off: rank 1 (last seen in collective 7, broadcast of x). The backend "
    "said: Timed out waiting"
)


def _failures(log_dir: Path) -> list[Failure]:
    return find_failures(log_dir, ranks_per_node=1)


def test_a_failure_is_one_sentence_with_the_rank_and_the_collective(tmp_path: Path) -> None:
    """Killed, hung or gone with its node: who it was, and where another rank waited for it."""
    _write_failure(tmp_path, 0, 0, 1, LOST, 10)
    waited = "rank 0 was in all-gather of unit 'blocks.1'"
    hung = _failures(tmp_path)
    assert is_told(hung, num_ranks=2) and not is_told(hung, num_ranks=3)
    assert describe_failures(hung, [1, None]) == f"the others waited in vain for rank 1; {waited}"
    gone = f"node 1 is gone: its agent was ended by SIGKILL; {waited}"
    assert describe_failures(hung, [1, -9]) == gone
    _write_failure(tmp_path, 1, 0, -9, None, 0)
    killed = _failures(tmp_path)
    assert describe_failures(killed, [1, 1]) == f"rank 1 (node 1) was ended by SIGKILL; {waited}"


def test_ranks_are_heard_whose_agent_says_nothing(tmp_path: Path) -> None:
    """An agent that waits for a stopped rank has not written a line yet; a half written file does no harm."""
    _write_failure(tmp_path, 0, 0, 1, LOST, 10)
    (tmp_path / "node0.log").write_text("")
    (torn,) = tmp_path.glob("node0/*/attempt_0/0")
    (torn.with_name("1")).mkdir()
    (torn.with_name("1") / "error.json").write_text('{"mess')
    assert [failure.missing for failure in find_failures(tmp_path, ranks_per_node=2)] == [[1], []]


def test_what_is_not_worth_another_start(tmp_path: Path) -> None:
    """Settings and gradients that are not finite would fail again; leaving on request is no failure."""
    _write_failure(tmp_path, 0, 0, 1, "Traceback\nmics.train.nonfinite.NonfiniteError: step 3", 10)
    _write_failure(tmp_path, 1, 0, 143, None, 10)
    final, left = _failures(tmp_path)
    assert final.is_final and not left.is_final
    assert left.left and not final.left
    assert is_hopeless([final], began=True) and not is_hopeless([left], began=True)


def test_output_that_nobody_reads_is_no_failure(tmp_path: Path) -> None:
    """Rank 0 of `mics train | head`: known by its error while it still ends, then by its exit code."""
    _write_failure(tmp_path, 0, 0, 141, "Traceback\nBrokenPipeError: [Errno 32] Broken pipe", 10)
    assert _failures(tmp_path)[0].unread
    (tmp_path / "node0.log").write_text("")
    assert [failure.unread for failure in _failures(tmp_path)] == [True]
    _write_failure(tmp_path, 1, 0, 1, LOST, 10)
    assert [failure.unread for failure in _failures(tmp_path)].count(True) == 1


def test_an_error_before_training_is_not_tried_again(tmp_path: Path) -> None:
    """A module that is missing stays missing; a rank that was killed, or lost another, may have luck."""
    _write_failure(tmp_path, 0, 0, 1, "Traceback\nModuleNotFoundError: No module named 'numpi'", 10)
    _write_failure(tmp_path, 1, 0, 1, LOST, 10)
    own, lost = _failures(tmp_path)
    assert is_hopeless([own, lost], began=False) and not is_hopeless([own, lost], began=True)
    assert not is_hopeless([lost], began=False) and not is_hopeless([], began=False)


def test_ranks_the_launcher_stopped_are_not_failures(tmp_path: Path) -> None:
    """SIGTERM is how the rest is cleared away."""
    _write_failure(tmp_path, 0, 0, -15, None, 0)
    assert find_failures(tmp_path, ranks_per_node=2) == []


def test_an_agent_that_never_started_shows_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever happened, something is shown and the exit code is not zero."""
    (tmp_path / "node0.log").write_text("no module named torch\n")
    assert report_failure(tmp_path, ranks_per_node=2) == 1
    assert "no module named torch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SettingsError", "CheckpointError"])
def test_what_is_to_mend_looks_as_if_it_had_been_found_before_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line without a traceback, and the exit code of wrong settings."""
    _write_failure(tmp_path, 0, 0, 2, f"Traceback\nmics.errors.{name}: data.shards a: expected b", 10)
    assert report_failure(tmp_path, ranks_per_node=2) == 2
    assert capsys.readouterr().err == "mics train: error: data.shards a: expected b\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--checkpoint.folder", "foo://x/y"], "foo://: expected a protocol that fsspec knows"),
        (["--checkpoint.resume", "nowhere"], "nowhere: expected a checkpoint"),
        (["--model", "tiny"], "model.safetensors: expected a file of safetensors, found one that is torn"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_files_that_cannot_be_read_are_found_before_any_rank_starts(
    args: list[str],
    said: str,
    how: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A store that nobody knows, a checkpoint that is not there, weights that are torn: one line and 2."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    folder = config_file(tmp_path / "tiny", "llama").parent
    (folder / "model.safetensors").write_bytes(b"torn")
    assert main(["train", "--launch.device", "cpu", *args, *how]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("mics train: error: ") and said in shown.err and shown.err.count("\n") == 1
    assert "starting" not in shown.out


def test_torchrun_does_not_try_wrong_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank of a host says what is wrong. Started again they end at once, before they read anything."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("steps: 0\n")
    wrong, right = ["train", "--config", "run.yaml"], ["train", "--dry-run", "--launch.device", "cpu"]

    def start(rank: int, *, attempt: int, args: list[str], ranks: int = 2) -> tuple[int, str]:
        file = tmp_path / f"logs/none_abc/attempt_{attempt}/{rank}/error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        for name, value in (
            ("RANK", rank),
            ("WORLD_SIZE", ranks),
            ("TORCHELASTIC_RESTART_COUNT", attempt),
            ("TORCHELASTIC_ERROR_FILE", file),
        ):
            monkeypatch.setenv(name, str(value))
        return main(args), capsys.readouterr().err

    assert start(0, attempt=1, args=right) == (0, ""), "restarted after something else"
    said = "mics train: error: --config run.yaml: steps: expected at least 1, found 0\n"
    assert start(1, attempt=1, args=wrong) == (2, said)
    assert start(0, attempt=1, args=wrong) == (2, "")
    assert start(0, attempt=2, args=right) == (2, ""), "not read again"
    assert start(0, attempt=2, args=right, ranks=1) == (0, ""), "it may be right on another number of ranks"
    with pytest.raises(SystemExit):
        start(0, attempt=0, args=["train", "--stepps", "3"], ranks=4)
    assert "stepps" in capsys.readouterr().err
    assert start(0, attempt=1, args=right, ranks=4) == (2, "")
