"""What the doctor measures and how ranks meet: on one process, and on ranks of this machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mics.checkpoint.remote import RemotePath
from mics.cli import main
from mics.data.preparing import Preparing, prepare
from mics.data.tokenizer import BytesTokenizer
from mics.doctor import compute, folders
from mics.doctor.checks.storage import data
from mics.doctor.clocks import bounds
from mics.doctor.command import doctor
from mics.doctor.compute import examine_device, wrong_rows
from mics.doctor.doors import cut_off, knock_at_all, open_door, to_knock_at
from mics.doctor.examination import _look_at_data, boxed
from mics.doctor.facts import ClockFacts, Interface, InterfaceChoice, NetworkFacts, RankFacts
from mics.doctor.findings import Finding, ok
from mics.doctor.folders import FolderProbe, probe_of
from mics.doctor.gpus import cuda_number
from mics.doctor.interfaces import (
    choose_for_gloo,
    choose_for_nccl,
    find_ofi_plugin,
    read_adapters,
    read_interfaces,
)
from mics.doctor.meeting import join
from mics.doctor.settings import read_settings
from mics.doctor.survey import Survey, Wishes
from mics.doctor.transfers import network_in, payload_nbytes, rounds_of_pairs, set_nccl_log
from mics.errors import SettingsError
from tests.data.folders import FABLES
from tests.ranks import run_ranks

_LO = Interface(name="lo", loopback=True, addresses=["127.0.0.1"])
_DOCKER = Interface(name="docker0", addresses=["172.17.0.1"])
_ETH = Interface(name="eth0", addresses=["10.0.0.1"])
_IB = Interface(name="ib0", addresses=["10.1.0.1"])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that take a moment, where their figures do not matter."""
    monkeypatch.setattr(folders, "_BOX_SECONDS", 0.1)
    monkeypatch.setattr(folders, "_VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr(compute, "_BOX_SECONDS", 0.1)


# -- Ranks ------------------------------------------------------------------------------------------


def _examined(folder: str, port: int, args: list[str]) -> tuple[int, str]:
    """The doctor as one rank, with the launcher's store at ``port``: exit code and what it printed."""
    os.chdir(folder)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(port))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            return doctor(args), out.getvalue()
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def test_four_ranks_on_two_nodes(tmp_path: Path) -> None:
    """All stages on real ranks: rank 0 reports, all have its exit code, and nothing is left behind."""
    settings = _settings_with_shards(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = ["--config", str(settings), "--json"]
    found = run_ranks(4, _examined, str(tmp_path), store.port, args, launch="variables", ranks_per_node=2)
    assert [code for code, _ in found] == [0, 0, 0, 0], found[0][1]
    assert [text for _, text in found[1:]] == ["", "", ""]
    told = json.loads(found[0][1])
    levels = {each["check"]: each["level"] for each in told["findings"]}
    expected = {"ranks", "versions", "clocks", "results", "collectives", "checkpoints", "data"}
    assert {check: levels.get(check) for check in expected} == dict.fromkeys(expected, "ok")
    assert len(told["transfers"]) == 4, "each rank to the one of its number on the other node"
    assert told["seconds"] < 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "run.yaml"]


def _settings_with_shards(folder: Path) -> Path:
    """A settings file, and beside it the data that it names."""
    asked = Preparing(files=(FABLES,), out=folder / "prepared", validation_share=0.2)
    prepare(asked, BytesTokenizer())
    settings = folder / "run.yaml"
    settings.write_text("output_dir: out\nsharding:\n  partition_size: 2\ndata:\n  shards: [prepared]\n")
    return settings


def test_what_training_would_say_about_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard cut short, too little to validate with, and no data at all are failures; good data is not."""
    monkeypatch.chdir(tmp_path)
    train = read_settings(_settings_with_shards(tmp_path), None).train
    assert train is not None

    def finding(num_ranks: int = 4) -> Finding:
        facts = RankFacts(**_look_at_data(train, num_ranks))
        (found,) = data(Survey(num_ranks=1, ranks={0: facts}, wishes=Wishes(shards=train.data.shards)))
        return found

    assert finding() == ok("data", "prepared: all shards are there and have their size")
    assert finding(num_ranks=10_000).what.startswith("data.shards: expected 40,000 sequences or more")
    shard = tmp_path / "prepared" / "train-00000.npy"
    with shard.open("rb+") as file:
        file.truncate(1000)
    assert finding().what.startswith("prepared/train-00000.npy: expected a shard of ")
    assert (finding().level, finding().way_out) == ("fail", "copy it again, or prepare the data again")
    shard.with_name("index.json").unlink()
    assert finding().level == "fail" and finding().way_out.endswith("--out prepared")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int) -> None:
    monkeypatch.chdir(folder)
    port = str(_free_port())
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_does_not_come_is_named(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the timeout the others go on without it: no-go, and nobody hangs."""
    _as_rank(monkeypatch, tmp_path, rank=0)
    began = time.monotonic()
    assert main(["doctor", "--timeout", "1"]) == 1
    assert time.monotonic() - began < 30
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("fail ranks            node 1 (no rank of it came): expected 2 ranks, found 1")


def test_a_rank_that_cannot_reach_the_others_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the address that it tried."""
    _as_rank(monkeypatch, tmp_path, rank=1)
    assert main(["doctor", "--timeout", "1"]) == 1
    assert f"MASTER_PORT={os.environ['MASTER_PORT']} within 1 s, found" in capfd.readouterr().err


def test_wrong_settings_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line."""
    for args, text in (
        (["--timeout", "0"], "--timeout: expected seconds"),
        (["--config", str(tmp_path / "none.yaml")], "cannot be read"),
    ):
        assert main(["doctor", *args]) == 2
        assert text in capsys.readouterr().err


def test_a_restart_of_no_go_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts again what failed; what was found has been said."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["doctor"]) == 1


def test_work_that_hangs_is_given_up() -> None:
    """And an error is a text."""
    assert boxed(lambda: 3, 5.0) == (3, "")
    assert boxed(lambda: time.sleep(0.5), 0.05) == (None, "still at it after 0 s")
    assert boxed(lambda: 1 // 0, 5.0) == (None, "ZeroDivisionError: integer division or modulo by zero")


# -- Devices ----------------------------------------------------------------------------------------


def test_a_sound_device(short: None) -> None:
    """No wrong row, no NaN, the same bits twice."""
    found, again = examine_device(torch.device("cpu")), examine_device(torch.device("cpu"))
    assert (found.wrong_rows, found.nonfinite, found.unstable) == (0, 0, False)
    assert found.digest == again.digest
    assert found.kind == again.kind
    assert found.rate > 1e8


@pytest.mark.parametrize("error", [1.0, -2.0, float("nan"), float("inf")])
def test_one_wrong_value_is_found(error: float) -> None:
    """In any row, whatever it is."""
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.randint(-1, 2, (64, 64), generator=generator) for _ in range(2))
    product = (left @ right).float()
    assert wrong_rows(left, right, product) == 0
    product[17, 23] += error
    assert wrong_rows(left, right, product) == 1


# -- Network ----------------------------------------------------------------------------------------


@given(num_nodes=st.integers(1, 20), limit=st.integers(1, 19))
def test_rounds_are_disjoint_and_cover_all_pairs(num_nodes: int, limit: int) -> None:
    """Nobody twice in a round, no pair twice, and all pairs if there are rounds enough."""
    rounds = rounds_of_pairs(num_nodes, limit)
    assert len(rounds) <= limit
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members)) >= num_nodes - 1
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    if limit >= num_nodes:
        assert set(met) == set(combinations(range(num_nodes), 2))


def test_payloads_are_small_where_links_are_slow() -> None:
    """Most pairs take 0.15 s; the slowest 0.6 s at most, until a floor; a fast network has a limit."""
    assert payload_nbytes([1e8] * 4) == int(0.15e8)
    assert payload_nbytes([1e8] * 3 + [1e6]) == int(0.6e6)
    assert payload_nbytes([1e8] * 3 + [1e3]) == 64 << 10
    assert payload_nbytes([1e12]) == 256 << 20
    assert payload_nbytes([0.0]) == 64 << 10


@given(ahead=st.floats(-1e4, 1e4), there=st.floats(0, 2), back=st.floats(0, 2))
def test_the_clock_lies_within_its_bounds(ahead: float, there: float, back: float) -> None:
    """However long messages take each way; what is called an offset is never more than the true one."""
    asked = 1e6
    low, high = bounds(asked, asked + there + ahead, asked + there + back)
    assert low - 1e-6 <= ahead <= high + 1e-6
    offset = ClockFacts(low=low, high=high).seconds
    assert abs(offset) <= abs(ahead) + 1e-6
    assert offset == 0 or (offset > 0) == (ahead > 0)


def test_the_interface_of_gloo() -> None:
    """The variable, the host's name, or the loopback, which joins nobody."""
    there = [_LO, _DOCKER, _ETH]
    assert choose_for_gloo(there, {"GLOO_SOCKET_IFNAME": "eth0"}, []).name == "eth0"
    assert choose_for_gloo(there, {"GLOO_SOCKET_IFNAME": "eth1"}, []).name is None
    assert choose_for_gloo(there, {}, ["10.0.0.1"]).name == "eth0"
    by_name = choose_for_gloo(there, {}, ["127.0.1.1"])
    assert (by_name.name, by_name.because) == ("lo", "the host's name leads to it")
    assert choose_for_gloo(there, {}, []).because == "the host's name has no address of this host"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("", "ib0"),
        ("eth", "eth0"),
        ("=eth", None),
        ("=eth0", "eth0"),
        ("^ib,lo,docker", "eth0"),
        ("ens", None),
    ],
)
def test_the_interface_of_nccl(rule: str, expected: str | None) -> None:
    """By its rule for the variable: prefixes, exact names, exclusions."""
    environ = {"NCCL_SOCKET_IFNAME": rule} if rule else {}
    assert choose_for_nccl([_LO, _DOCKER, _ETH, _IB], environ).name == expected
    assert choose_for_nccl([_LO, _DOCKER], {}).name == "docker0"


def test_doors_are_knocked_at() -> None:
    """One that is open answers; a closed one has its reason; another program's is not ours."""
    network = NetworkFacts(interfaces=[_LO], gloo=InterfaceChoice(name="lo"))
    door = open_door(network)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        other = f"127.0.0.1:{stranger.getsockname()[1]}"
        threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True).start()
        found = knock_at_all({"a": door, "b": f"127.0.0.1:{_free_port()}", "c": other})
    assert found == {"b": "Connection refused", "c": "somebody else answers at this address"}
    assert open_door(NetworkFacts(interfaces=[_LO], gloo=InterfaceChoice(name="eth0"))) == ""


@given(st.dictionaries(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), st.just("no")))
def test_who_is_left_reaches_each_other(closed: dict[tuple[str, str], str]) -> None:
    """And nobody is left out without a closed door; one node that nobody reaches is the only one to go."""
    out = cut_off(closed)
    assert all(source in out or target in out for source, target in closed)
    assert set(out) <= {node for pair in closed for node in pair}
    assert cut_off({(node, "x"): "no" for node in "abc"}) == ["x"]
    assert to_knock_at("b", "abcd") == ["c", "d", "a"]


def test_this_host_has_a_loopback() -> None:
    """As the kernel lists it."""
    found = {each.name: each for each in read_interfaces()}
    assert found["lo"].loopback and found["lo"].addresses == ["127.0.0.1"]


def test_adapters_as_the_kernel_lists_them(tmp_path: Path) -> None:
    """EFA by its driver, InfiniBand and RoCE by the layer below; a port that is down is not active."""
    for name, layer, state in (
        ("mlx5_0", "InfiniBand", "4: ACTIVE"),
        ("mlx5_1", "Ethernet", "1: DOWN"),
        ("rdmap0", "", ""),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(layer)
        (port / "state").write_text(state)
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "rdmap0" / "device").mkdir()
    (tmp_path / "rdmap0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    found = {each.name: (each.kind, each.active) for each in read_adapters(tmp_path)}
    found.pop("drivers")
    assert found == {"mlx5_0": ("infiniband", True), "mlx5_1": ("roce", False), "rdmap0": ("efa", True)}
    assert find_ofi_plugin({"NCCL_NET_PLUGIN": "none-such"}) is None


def test_what_nccl_says_about_its_network() -> None:
    """The last line counts; a user's own log stays the user's."""
    log = "h0:1:2 [0] NCCL INFO Using network Socket\nh0:1:2 [0] NCCL INFO Using network AWS Libfabric\n"
    assert network_in(log) == "AWS Libfabric"
    assert network_in("nothing") == ""
    assert set_nccl_log({"NCCL_DEBUG": "WARN"}) is None
    assert cuda_number("12.8") == 12080


# -- Folder -----------------------------------------------------------------------------------------


def test_a_folder_is_tried_and_left_as_it_was(short: None, tmp_path: Path) -> None:
    """Written, read by another node, and removed with the folders that were made for it."""
    probes = [FolderProbe(folder=tmp_path / "a" / "b", token="t", node=node) for node in ("0", "1")]
    written = [probe.write() for probe in probes]
    found = probes[1].read(written[1], first="0", other="0")
    assert found.sees_first and not found.error
    assert found.write_rate and found.read_rate and found.free_nbytes
    for probe in probes:
        probe.remove_file()
    for probe in probes:
        probe.remove_folders()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_host_is_not_shared(short: None, tmp_path: Path) -> None:
    """What rank 0 wrote elsewhere does not appear here; a file in the way is an error with its reason."""
    probe = FolderProbe(folder=tmp_path, token="t", node="1")
    assert not probe.read(probe.write(), first="0", other="0").sees_first
    probe.remove_file()
    (tmp_path / "file").touch()
    assert "Not a directory" in FolderProbe(folder=tmp_path / "file" / "x", token="t", node="1").write().error


# -- Stores -----------------------------------------------------------------------------------------


def test_a_store_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes put, see and read objects there and leave none; one that cannot says why."""
    fsspec = pytest.importorskip("fsspec")
    folder = read_settings(None, "memory://doctor/run").wishes.checkpoint_dir
    assert folder == RemotePath("memory://doctor/run")
    one, other = (probe_of(folder, token="t", node=node) for node in ("a", "b"))
    written = [probe.write() for probe in (one, other)]
    found = other.read(written[1], first="a", other="a")
    assert found.write_rate and found.read_rate and found.sees_first and not found.error
    for probe in (one, other):
        probe.remove_file()
    assert list(folder.iterdir()) == []
    assert not one.read(written[0], first="b", other="b").sees_first
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", _refuse)
    assert "memory://doctor/run" in one.write().error


def _refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError("read-only")


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_variables_of_no_launcher(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="RANK, WORLD_SIZE"):
        join(environ, 1.0)
