"""``mics train --nodes``: the command it prints, the errors, and a run on three hosts that loses one."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.cluster.network import NamespaceCluster, namespace_pids
from torch.distributed.run import parse_args

from mics.cli import main
from mics.errors import SettingsError
from mics.train import addresses
from mics.train.addresses import reachable_address, set_gloo_interface
from mics.train.config import LaunchSettings, TrainConfig
from mics.train.hosts import _Joining, first_host_args, other_hosts_command, plan_hosts
from mics.train.settings_file import parse_train_config
from tests.train.host_runs import ENVIRONMENT, SETTINGS, cluster_name, has_saved, losses, reference_losses

__all__ = ["cluster_name"]  # fixtures

ARGS = ["--name", "big run", "--nodes", "3", "--launch.join-seconds", "60"]


def test_all_hosts_run_the_same_command() -> None:
    """torchrun reads both lines, the ranks read the user's arguments, and only the first host is special."""
    config = parse_train_config(ARGS)
    plan = plan_hosts(config, num_gpus=8)
    printed = other_hosts_command(config, plan, ARGS, address="10.0.0.1", job="big-1")
    variable, program, *others = shlex.split(printed)
    assert (variable, program) == ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun")
    there = parse_args(others)
    here = parse_args(first_host_args(config, plan, ARGS, address="10.0.0.1", job="big-1"))
    assert (there.nnodes, there.nproc_per_node, there.max_restarts) == ("3", "8", 3)
    assert (there.rdzv_endpoint, there.rdzv_id) == ("10.0.0.1:29500", "big-1")
    assert (there.rdzv_conf, here.rdzv_conf) == ("is_host=0,join_timeout=60", "is_host=1,join_timeout=60")
    assert (there.local_addr, here.local_addr) == (None, "10.0.0.1")
    differing = {name for name in vars(here) if getattr(here, name) != getattr(there, name)}
    assert differing == {"rdzv_conf", "local_addr"}
    assert there.training_script == "mics.cli" and there.training_script_args == ["train", *ARGS]


def test_the_ranks_of_hosts() -> None:
    """One rank per GPU, one without; what is given is kept. Real and simulated nodes do not mix."""
    four = TrainConfig(launch=LaunchSettings(hosts=4))
    assert plan_hosts(four, num_gpus=8).num_ranks == 32
    assert plan_hosts(four, num_gpus=0).num_ranks == 4
    two = TrainConfig(launch=LaunchSettings(hosts=4, ranks_per_node=2))
    assert plan_hosts(two, num_gpus=8).num_ranks == 8
    mixed = TrainConfig(launch=LaunchSettings(hosts=2, simulated_nodes=2))
    with pytest.raises(SettingsError, match=r"launch\.hosts, launch\.simulated_nodes: expected one of them"):
        plan_hosts(mixed, num_gpus=0)


def test_hosts_that_join_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Each number once; a host that was lost begins a new count, and those that give up do not lower it."""
    joining = _Joining(num_hosts=3)
    for num_joined in (1, 1, 2):
        joining.note(round_number=0, num_joined=num_joined, complete=False)
    joining.note(round_number=0, num_joined=3, complete=True)
    for num_joined in (1, 2, 0):
        joining.note(round_number=1, num_joined=num_joined, complete=False)
    assert joining.num_joined == 2
    for round_number in (2, 2, 3):  # begun and ended between two looks
        joining.note(round_number=round_number, num_joined=3, complete=True)
    said = capsys.readouterr().err.splitlines()
    ones = ["mics: 1 of 3 hosts have joined", "mics: 2 of 3 hosts have joined"]
    all_of_them = "mics: all 3 hosts have joined"
    assert said == [*ones, all_of_them, *ones, all_of_them, all_of_them]


def test_a_port_or_an_address_that_cannot_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before torchrun starts, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = ["train", "--nodes", "2", "--launch.address", "127.0.0.1", "--launch.port", port]
        assert main(args) == 2
    assert f"and a free port, found 127.0.0.1:{port} (" in capsys.readouterr().err
    monkeypatch.setattr("mics.train.hosts.reachable_address", lambda: None)
    assert main(["train", "--nodes", "2"]) == 2
    assert "launch.address: expected an address that the other hosts can reach" in capsys.readouterr().err


def test_gloo_takes_the_interface_towards_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not loopback, not a name that is unknown, and never against the user's choice."""
    monkeypatch.setattr(addresses, "_addresses", lambda: {"lo": "127.0.0.1", "eth1": "10.0.0.2"})
    monkeypatch.setattr(addresses, "_source_address", {"head": "10.0.0.2", "lo0": "127.0.0.1"}.get)
    for given, expected in [
        ({"MASTER_ADDR": "head"}, "eth1"),
        ({"MASTER_ADDR": "head", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"MASTER_ADDR": "lo0"}, None),
        ({"MASTER_ADDR": "unknown"}, None),
        ({}, None),
    ]:
        environ = dict(given)
        set_gloo_interface(environ)
        assert environ.get("GLOO_SOCKET_IFNAME") == expected
    monkeypatch.undo()
    address = reachable_address()
    assert address is None or not address.startswith("127.")


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def start(cluster: NamespaceCluster, host: int, argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Run a command on a host that has a name of its own, which nobody can look up."""
    inside = ["unshare", "--uts", "sh", "-ec", 'hostname "$0"; cd "$1"; shift; exec "$@"']
    with (folder / f"host{host}.log").open("ab") as log:
        argv = [*inside, f"host{host}", str(folder), *argv]
        return cluster.exec(host, argv, ENVIRONMENT, stdout=log, stderr=log)


def printed_command(folder: Path) -> str:
    found = re.search(r"^    (\S+=1 torchrun .*)$", (folder / "host0.log").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.full
@pytest.mark.timeout(600)  # under a load that is not ours; a minute without
def test_three_hosts_lose_one_and_go_on_when_it_is_back(cluster_name: str, tmp_path: Path) -> None:
    """The printed command starts the others, and the lost one again: no loss differs by a bit."""
    (tmp_path / "run.yaml").write_text(SETTINGS)
    run_dir = tmp_path / "runs" / "job"
    first = [sys.executable, "-m", "mics.cli", "train", "--config", "run.yaml", "--nodes", "3"]
    with NamespaceCluster(3, "1gbit", name=cluster_name) as cluster:
        hosts = [start(cluster, 0, first, tmp_path)]
        log = tmp_path / "host0.log"
        wait_until("the command", lambda: "1 of 3 hosts have joined" in log.read_text(), 60)
        command = printed_command(tmp_path)
        assert f"{cluster.address(0)}:29500" in command
        hosts += [start(cluster, host, ["sh", "-c", command], tmp_path) for host in (1, 2)]
        wait_until("a checkpoint", lambda: has_saved(run_dir), 120)
        for pid in namespace_pids(cluster.namespace(1)):
            os.kill(pid, 9)
        hosts[1].wait(timeout=10)
        hosts[1] = start(cluster, 1, ["sh", "-c", command], tmp_path)
        codes = [host.wait(timeout=200) for host in hosts]
    assert codes == [0, 0, 0], log.read_text()
    shown = log.read_text()
    assert "3 ranks = 3 nodes x 1" in shown and "going on from runs/job/checkpoints/step-" in shown
    assert shown.count("mics: all 3 hosts have joined") >= 2
    assert losses(run_dir) == reference_losses(tmp_path, num_ranks=3, ranks_per_node=1)


@pytest.mark.long
@pytest.mark.full
def test_a_host_that_does_not_come_is_counted(cluster_name: str, tmp_path: Path) -> None:
    """After the time that was set, one line says how many of how many came."""
    (tmp_path / "run.yaml").write_text(SETTINGS)
    args = ["--config", "run.yaml", "--nodes", "2", "--launch.join-seconds", "2"]
    with NamespaceCluster(1, "1gbit", name=cluster_name) as cluster:
        host = start(cluster, 0, [sys.executable, "-m", "mics.cli", "train", *args], tmp_path)
        assert host.wait(timeout=100) == 2
    shown = (tmp_path / "host0.log").read_text()
    assert "--nodes: expected 2 hosts to join within 2 s, found 1; run the command above" in shown
    assert "Traceback" not in shown
