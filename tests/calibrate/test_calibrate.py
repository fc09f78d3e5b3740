"""``mics calibrate`` from its ranks to a file that planner and engine read, and what it refuses."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from mics import cli
from mics.calibrate import command
from mics.calibrate.cluster_file import as_yaml, check_writable, described, write_cluster
from mics.calibrate.command import CalibrateConfig, _asked, stand_in
from mics.calibrate.computing import Machine
from mics.calibrate.fit import CollectiveTime
from mics.calibrate.picture import draw_calibration
from mics.calibrate.run import Calibration, node_indices
from mics.config import why_not_cluster
from mics.cost.clusters import Cluster, Computing, Link, find_cluster
from mics.cost.collectives import Kind, Span
from mics.cost.memory import Keeping
from mics.cost.modules import find_model
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape
from mics.errors import SettingsError
from mics.models import GPT_SIZES
from mics.planner.hardware import planned_cluster
from mics.planner.systems import predict
from mics.train.cluster_beside import use_cluster_beside
from mics.train.config import TrainConfig
from mics.utils import own_ranks
from tests.ranks import run_ranks

COMPUTING = Computing(device="cpu", block_flops=4e9, head_flops=5e9, update_bandwidth=2.5e9, param_nbytes=4)
CLUSTER = Cluster(
    name="measured",
    num_nodes=2,
    ranks_per_node=2,
    intra=Link(bandwidth=4.5e8, latency=5e-4, ramp_nbytes=1000.0, slowdown=1.8),
    inter=Link(bandwidth=1.25e7, latency=2e-4, slowdown=1.0),
    flops=4.9e9,
    peak_flops=5.1e9,
    memory_nbytes=1.26e10,
    memory_bandwidth=7.7e9,
    host_nbytes=2.52e10,
    link_slowdown=1.4,
    computing=COMPUTING,
)
MACHINE = Machine(
    matrix_flops=4.9e9,
    wide_flops=5.1e9,
    attention_flops=1e9,
    memory_bandwidth=7.7e9,
    host_bandwidth=0.0,
    computing=COMPUTING,
)


def _calibration() -> Calibration:
    span = Span(size=2, num_nodes=2, on_a_node=1)
    points = [
        CollectiveTime(kind=kind, division="inter", span=span, nbytes=nbytes, seconds=1.0)
        for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
        for nbytes in (65536, 262144, 1 << 20)
    ]
    exact = [replace(point, seconds=point.predicted(CLUSTER)) for point in points]
    return Calibration(cluster=CLUSTER, machine=MACHINE, points=tuple(exact), seconds=9.0)


def _run(args: list[str], port: int) -> int:
    """One rank, as the launcher would start it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        return cli.main(["calibrate", *args])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.full
def test_ranks_measure_and_the_file_is_used(tmp_path: Path) -> None:
    """Two nodes of one rank each write a file with which a plan and a prediction work."""
    out = tmp_path / "cluster.yaml"
    args = ["--out", str(out), "--model", "nano", "--batch-size", "1", "--max-seconds", "2", "--max-mib", "1"]
    codes = run_ranks(2, _run, args, _free_port(), launch="variables", ranks_per_node=1)
    assert codes == [0, 0]
    assert list(tmp_path.iterdir()) == [out], "a part of it was left"
    cluster = planned_cluster(f"{out}:2")
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 1)
    assert 1e6 < cluster.inter.bandwidth < 1e12
    assert 0 <= cluster.inter.latency < 1
    assert cluster.computing is not None
    assert (cluster.computing.device, cluster.computing.param_nbytes) == ("cpu", 4)
    assert "# inter:" in out.read_text() and f"torch {torch.__version__}" in out.read_text()
    setting = Setting(
        model=named_shape("nano"),
        cluster=cluster,
        partition_size=2,
        micro_batch=1,
        accumulation=1,
        activations=Keeping(checkpoint=False),
    )
    assert 1e-4 < predict(setting).step_seconds < 60


def test_a_bad_out_is_told_by_one_rank_before_anything_is_measured(tmp_path: Path) -> None:
    args = ["--out", str(tmp_path / "missing" / "cluster.yaml"), "--max-seconds", "100"]
    assert run_ranks(2, _run, args, _free_port(), launch="variables") == [2, 2]
    args = ["--out", str(tmp_path / "cluster.yaml")]
    assert run_ranks(3, _run, args, _free_port(), launch="variables", ranks_per_node=2) == [2, 2, 2]


def test_what_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"ends in \.yaml"):
        check_writable(tmp_path / "cluster.txt")
    with pytest.raises(SettingsError, match=r"--out .*No such file"):
        check_writable(tmp_path / "missing" / "cluster.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SettingsError, match="found a folder"):
        check_writable(tmp_path / "folder.yaml")
    check_writable(tmp_path / "new.yaml")
    assert not (tmp_path / "new.yaml").exists()


def test_ranks_that_cannot_be_calibrated() -> None:
    assert node_indices(["b", "a", "b", "a"]) == [0, 1, 0, 1]
    with pytest.raises(SettingsError, match="at least 2 ranks"):
        node_indices(["a"])
    with pytest.raises(SettingsError, match="2 on node a, 1 on node b"):
        node_indices(["a", "a", "b"])
    for seconds in (0.0, -5.0, math.nan, math.inf, -math.inf):  # NaN would never end
        with pytest.raises(SettingsError, match="--max-seconds: expected a finite number of at least 1"):
            CalibrateConfig(max_seconds=seconds).check()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_own_ranks_that_are_interrupted(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's agent raises an exception of its own: a line, and the exit code of a shell."""

    def launch(*_: object) -> NoReturn:
        raise SignalException("signalled", sigval=number)

    monkeypatch.setattr(own_ranks, "elastic_launch", lambda *_: launch)
    assert own_ranks.start_ranks("doctor", [], num_ranks=2, explained=()) == code
    assert capsys.readouterr().err == f"mics doctor: ended by {number.name}\n"


def test_ranks_to_start_without_a_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each GPU and at least two, or as many as the flags or the run's file say. Hosts need more."""
    asked: list[int] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "start_ranks", lambda *_, num_ranks, **__: asked.append(num_ranks) or 0)
    file = tmp_path / "run.yaml"
    file.write_text("launch: {ranks_per_node: 3, device: cpu}")
    from_file = ["calibrate", "--config", str(file)]
    for num_gpus, args in (
        (0, ["calibrate"]),
        (1, ["calibrate"]),
        (8, ["calibrate"]),
        (8, ["calibrate", "--launch.device", "cpu"]),
        (8, from_file),
        (8, [*from_file, "--launch.ranks-per-node", "4"]),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=num_gpus: found)
        assert cli.main(args) == 0
    assert asked == [2, 2, 8, 2, 3, 4]
    file.write_text("launch: {hosts: 2}")
    assert cli.main(from_file) == 2
    assert "launch.hosts: expected a launcher on each of the 2 hosts" in capsys.readouterr().err
    assert len(asked) == 6


@pytest.mark.full
@pytest.mark.long
def test_a_machine_is_calibrated_without_a_launcher(tmp_path: Path) -> None:
    """Its own ranks measure it, and rank 0 alone speaks."""
    out = tmp_path / "cluster.yaml"
    args = ["--launch.device", "cpu", "--max-seconds", "1", "--max-mib", "1", "--out", str(out)]
    command = [sys.executable, "-m", "mics.cli", "calibrate", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count(f"written: {out}") == 1
    assert find_cluster(str(out)).ranks_per_node == 2


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    """Everything comes back as it was written; a file of before is replaced at once."""
    file = tmp_path / "cluster.yaml"
    file.write_text("old")
    write_cluster(file, _calibration(), model="gpt-tiny", backend="gloo")
    assert find_cluster(str(file)) == replace(CLUSTER, name="cluster")
    assert planned_cluster(f"{file}:8").world_size == 16
    assert find_cluster(str(file)).computing == COMPUTING


def test_a_link_that_was_not_measured_is_not_shown_as_measured() -> None:
    inside, between = described(_calibration()).splitlines()
    assert "not measured" in inside and "assumed 450 MB/s" in inside
    assert "not measured" not in between and "12.5 MB/s" in between


def test_a_file_with_a_bad_measurement_is_refused(tmp_path: Path) -> None:
    text = as_yaml(_calibration(), model="gpt-tiny", backend="gloo")
    file = tmp_path / "cluster.yaml"
    for wrong, message in (
        (text.replace("slowdown: 1.800", "slowdown: 0.5"), "slowdown >= 1"),
        (text.replace("link_slowdown: 1.400", "link_slowdown: 0.5"), "link_slowdown: expected a number"),
        (text.replace("param_nbytes: 4", "param_nbytes: 3"), "expected 2 or 4"),
        (text.replace("  head_flops", "  heads"), "expected computing to have"),
        (text.replace("  block_flops: 4.0", "  block_flops: x4.0"), "expected a number for computing"),
    ):
        file.write_text(wrong)
        with pytest.raises(SettingsError, match=message):
            find_cluster(str(file))


def _setting(cluster: Cluster) -> Setting:
    return Setting(
        model=named_shape("gpt-tiny"),
        cluster=cluster,
        partition_size=2,
        micro_batch=4,
        accumulation=2,
        activations=Keeping(checkpoint=False),
    )


def test_a_plan_takes_measured_speeds_at_their_word() -> None:
    """Blocks, head and update by hand; wider parameters take longer to gather; what is beside slows down."""
    setting = _setting(CLUSTER)
    block = next(unit for unit in setting.model.units if unit.kind == "block")
    expected = 100 * block.flops / (4e9 * 256 / (256 + 128))
    assert setting.device.forward_seconds(block, 100) == pytest.approx(expected)
    assert setting.device.update_seconds(1000) == pytest.approx(1000 * 30 / 2.5e9)
    narrow = replace(CLUSTER, computing=replace(COMPUTING, param_nbytes=2))
    quick = replace(CLUSTER, intra=replace(CLUSTER.intra, slowdown=1.0))
    step = predict(setting).step_seconds
    assert predict(_setting(narrow)).step_seconds < step
    assert predict(_setting(quick)).step_seconds < step


def test_other_machines_are_told_apart() -> None:
    device = torch.device("cpu")
    assert why_not_cluster(CLUSTER, device, ranks_per_node=2) is None
    assert "expected 4 ranks on a node, found 2" in str(why_not_cluster(CLUSTER, device, ranks_per_node=4))
    gpu = replace(CLUSTER, computing=replace(COMPUTING, device="NVIDIA H200"))
    assert "expected a cluster of 'cpu', found one of 'NVIDIA H200'" in str(
        why_not_cluster(gpu, device, ranks_per_node=2)
    )


def _beside(folder: str, text_of_last: str | None = None) -> tuple[str | None, str | None]:
    """What a rank says and sets; the last one has another file if that is given."""
    import torch.distributed as dist

    from mics.comm import join_world

    own = Path(folder)
    if text_of_last is not None and dist.get_rank() == dist.get_world_size() - 1:
        own = own / "other"
        own.mkdir()
        (own / "cluster.yaml").write_text(text_of_last)
    environ: dict[str, str] = {}
    config = replace(TrainConfig(), config=own / "run.yaml")
    said = use_cluster_beside(config, join_world(), torch.device("cpu"), environ)
    return said, environ.get("MICS_CLUSTER")


def test_the_file_beside_a_run_is_found(tmp_path: Path) -> None:
    """All ranks use it, or all pass it over and say why."""
    assert run_ranks(2, _beside, str(tmp_path)) == [(None, None)] * 2
    file = tmp_path / "cluster.yaml"
    write_cluster(file, _calibration(), model="gpt-tiny", backend="gloo")
    assert run_ranks(2, _beside, str(tmp_path)) == [(f"cluster: {file}", str(file))] * 2
    for said, chosen in run_ranks(2, _beside, str(tmp_path), ranks_per_node=1):
        assert chosen is None
        assert said is not None and "expected 1 ranks on a node, found 2" in said
    for said, chosen in run_ranks(2, _beside, str(tmp_path), "{}"):
        assert chosen is None
        assert said is not None and "another on rank 1" in said
    alone = replace(CLUSTER, num_nodes=1, ranks_per_node=1)
    write_cluster(file, replace(_calibration(), cluster=alone), model="gpt-tiny", backend="gloo")
    for said, chosen in run_ranks(2, _beside, str(tmp_path), ranks_per_node=1):
        assert chosen == str(file)
        assert said is not None and "the link between nodes is assumed (12.5 MB/s, 200 us a hop)" in said
    file.write_text("nonsense")
    for said, chosen in run_ranks(2, _beside, str(tmp_path)):
        assert chosen is None
        assert said is not None and "passed over" in said


def test_plans_say_where_a_link_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of one node has no measured link between nodes: whoever plans for two is told."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MICS_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    words = (
        "measured on one node: the link between nodes is assumed (12.5 MB/s, 200 us a hop); run mics "
        "calibrate on two nodes"
    )
    plan = ["plan", "--model", "nano", "--global-batch", "16", "--cluster"]
    dry = ["train", "--dry-run", "--launch.device", "cpu"]
    alone = replace(_calibration(), cluster=replace(CLUSTER, num_nodes=1))
    for found, expected in ((alone, True), (_calibration(), False)):
        write_cluster(Path("cluster.yaml"), found, model="nano", backend="gloo")
        assert cli.main([*plan, "cluster.yaml:2"]) == 0
        told = f"mics plan: warning: --cluster cluster.yaml:2: {words}\n"
        assert (told in capsys.readouterr().err) == expected
        assert cli.main([*plan, "cluster.yaml", "--nodes", "1", "2"]) == 0
        assert (words in capsys.readouterr().err) == expected
        assert cli.main([*plan, "cluster.yaml:1"]) == 0
        shown = capsys.readouterr()
        assert "assumed" not in shown.err
        assert "1 x cluster (2 ranks)" in shown.out and "GPU" not in shown.out
        assert cli.main([*dry, "--launch.simulated-nodes", "2"]) == 0
        assert (words in " ".join(capsys.readouterr().out.split())) == expected
        assert cli.main([*dry, "--launch.simulated-nodes", "1"]) == 0
        assert "assumed" not in capsys.readouterr().out


def test_who_names_a_cluster_has_chosen(tmp_path: Path) -> None:
    from mics.comm import join_world

    (tmp_path / "cluster.yaml").write_text("nonsense")
    environ = {"MICS_CLUSTER": "p4d.24xlarge"}
    config = replace(TrainConfig(), config=tmp_path / "run.yaml")
    assert use_cluster_beside(config, join_world(), torch.device("cpu"), environ) is None
    assert environ == {"MICS_CLUSTER": "p4d.24xlarge"}


def _shard_with(file: str) -> None:
    import mics
    from mics.models import GPT, GPT_SIZES

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MICS_CLUSTER", file)
        mics.shard(GPT(GPT_SIZES["nano"]))


def test_a_named_file_of_other_ranks_is_refused(tmp_path: Path) -> None:
    from tests.ranks import run_expecting_error

    file = tmp_path / "cluster.yaml"
    write_cluster(file, _calibration(), model="gpt-tiny", backend="gloo")
    run_ranks(2, _shard_with, str(file))
    errors = run_expecting_error(2, _shard_with, str(file), ranks_per_node=1)
    assert all("expected 1 ranks on a node, found 2" in error.message for error in errors)


def test_models_that_are_no_gpt_have_a_stand_in() -> None:
    """Of the same width, length, heads and vocabulary."""
    found = stand_in(find_model("bert-10b"))
    assert (found.hidden_size, found.num_heads, found.seq_len) == (2560, 40, 512)
    assert found.vocab_size == 32008


def test_a_run_says_what_is_computed() -> None:
    """Model and batch size of --config, unless flags say otherwise."""
    run = replace(TrainConfig(), batch_size=3)
    asked = _asked(CalibrateConfig(), run, "cpu")
    assert (asked.config, asked.batch_size) == (GPT_SIZES["nano"], 3)
    asked = _asked(CalibrateConfig(model="gpt-tiny", batch_size=2), run, "cpu")
    assert (asked.config, asked.batch_size) == (GPT_SIZES["gpt-tiny"], 2)
    assert _asked(CalibrateConfig(), None, "cuda").config == GPT_SIZES["gpt-1.3b"]


def test_the_picture_is_drawn_in_both_themes(tmp_path: Path) -> None:
    drawn = draw_calibration(tmp_path / "calibrate.png", _calibration())
    assert [file.name for file in drawn] == ["calibrate.png", "calibrate-dark.png"]
    assert all(file.stat().st_size > 10_000 for file in drawn)
