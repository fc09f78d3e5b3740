"""The namespace cluster: rate and bytes of its uplinks, what it leaves alone, what it cleans up.

Most of it needs root, iproute2 and a kernel with network namespaces, and skips with the reason elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.counters import UPLINK_VARIABLE, uplink_nbytes
from benchmarks.cluster.launch import TIMEOUT_CODE, watch
from benchmarks.cluster.network import (
    ClusterError,
    NamespaceCluster,
    bits_per_second,
    delay_seconds,
    namespace_pids,
    namespaces,
    remove_namespaces,
)
from benchmarks.cluster.requirements import examine, reason_against

REPOSITORY = Path(__file__).parents[1]
RUN = [sys.executable, "-m", "benchmarks.cluster", "run"]


@pytest.fixture(scope="module")
def machine() -> None:
    """Skips what needs a cluster where there can be none."""
    reason = reason_against(examine())
    if reason is not None:
        pytest.skip(f"no namespace cluster on this machine: {reason}")


@pytest.fixture
def name(machine: None) -> Iterator[str]:
    """A cluster name nobody else uses; whatever the test does, nothing under it stays."""
    name = f"mics-test{os.getpid()}"
    interfaces = socket.if_nameindex()
    yield name
    left = remove_namespaces(name)
    assert left == [], "the test left namespaces behind"
    assert socket.if_nameindex() == interfaces, "the machine's own interfaces changed"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_running(pid: int, program: str) -> bool:
    """Whether ``pid`` is ``program``: neither gone nor a zombie that nobody has collected yet."""
    try:
        _, name, state, *_ = Path(f"/proc/{pid}/stat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name == f"({program})" and state not in "ZX"


ALL_REDUCE = """
import json, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from benchmarks.cluster.counters import uplink_nbytes

dist.init_process_group("gloo")
tensor = torch.ones(int(sys.argv[1]))
dist.all_reduce(tensor)
dist.barrier()
before, start = uplink_nbytes(), time.perf_counter()
dist.all_reduce(tensor)
seconds = time.perf_counter() - start
dist.barrier()
after = uplink_nbytes()
report = {
    "value": tensor[0].item(),
    "seconds": seconds,
    "sent_nbytes": after.sent_nbytes - before.sent_nbytes,
    "received_nbytes": after.received_nbytes - before.received_nbytes,
}
Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(report))
print("all reduced", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.long  # the next test reads the same counters
def test_an_all_reduce_over_two_hosts(name: str, tmp_path: Path) -> None:
    """One command brings the cluster up, runs gloo on it and takes it down. Between two ranks an all-reduce
    of S bytes sends S over each uplink: the counters say so within the headers, and the time fits the rate.
    """
    script = tmp_path / "script.py"
    script.write_text(ALL_REDUCE)
    nbytes, rate = 4 << 20, 200e6
    options = ["--name", name, "--hosts", "2", "--rate", "200mbit", "--timeout", "100"]
    done = subprocess.run(
        [
            *RUN,
            *options,
            "--json",
            str(tmp_path / "run.json"),
            "--",
            str(script),
            str(nbytes // 4),
            str(tmp_path),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all reduced") == 1, "host 0's output, and only host 0's"
    uplinks = json.loads((tmp_path / "run.json").read_text())["uplinks"]
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["value"] == 4.0
        assert nbytes < report["sent_nbytes"] < 1.02 * nbytes
        assert nbytes < report["received_nbytes"] < 1.02 * nbytes
        assert report["seconds"] > 0.95 * nbytes * 8 / rate
        assert uplinks[rank]["sent_nbytes"] > 2 * nbytes, "the whole run: two all-reduces and the start"


def step_bytes(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """What benchmarks.cluster.step_bytes finds on two hosts of two ranks."""
    options = ["--name", name, "--hosts", "2", "--ranks", "2", "--rate", "1gbit", "--timeout", "280"]
    program = ["-m", "benchmarks.cluster.step_bytes", "--out", str(out), *arguments]
    done = subprocess.run(
        [*RUN, *options, "--", *program], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.full
def test_compression_takes_less_than_half_of_an_uplink(name: str, tmp_path: Path) -> None:
    """Hop 2 in int8 and lossless refreshes: at most 0.45 of the bytes that a step sends without them."""
    found = step_bytes(name, tmp_path / "bytes.json", "--with", "none", "lossless, hop 2 int8")
    for before, after in zip(*found["uplink_nbytes"].values(), strict=True):
        assert before > 1_000_000
        assert after <= 0.45 * before


@pytest.mark.full
@pytest.mark.long
def test_lossless_refreshes_are_equal_over_uplinks(name: str, tmp_path: Path) -> None:
    """After 200 steps losses, parameters and optimizer state are those of compression=None, to the bit."""
    small = ["--with", "none", "--hidden-size", "32", "--steps", "1", "--first", "1"]
    found = step_bytes(name, tmp_path / "bytes.json", *small, "--equal-steps", "200")
    assert found["equal"]


SEND = """
import socket, sys, time
host, nbytes = sys.argv[1], int(sys.argv[2])
for _ in range(200):
    try:
        connection = socket.create_connection((host, 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
start = time.perf_counter()
connection.sendall(bytes(nbytes))
connection.recv(1)
print(time.perf_counter() - start)
"""
RECEIVE = """
import socket, sys
host, nbytes = sys.argv[1], int(sys.argv[2])
connection, _ = socket.create_server((host, 5000)).accept()
while nbytes:
    nbytes -= len(connection.recv(min(nbytes, 1 << 20)))
connection.sendall(b"k")
"""


def transfer_seconds(cluster: NamespaceCluster, source: int, target: int, nbytes: int) -> float:
    arguments = [cluster.address(target), str(nbytes)]
    receiver = cluster.exec(target, [sys.executable, "-c", RECEIVE, *arguments])
    sender = cluster.exec(source, [sys.executable, "-c", SEND, *arguments], stdout=subprocess.PIPE)
    output, _ = sender.communicate(timeout=30)
    assert receiver.wait(timeout=30) == 0
    return float(output)


def test_only_what_leaves_a_host_is_throttled_and_counted(name: str) -> None:
    """An idle cluster sends nothing. A transfer between hosts takes the rate's time, and its bytes appear at
    its two hosts, to the frame; one inside a host is faster and appears nowhere.
    """
    nbytes = 2_000_000
    with NamespaceCluster(3, "100mbit", name=name) as cluster:
        assert cluster.counters() == [(0, 0)] * 3
        between = transfer_seconds(cluster, 0, 1, nbytes)
        sender, receiver, other = cluster.counters()
        inside = transfer_seconds(cluster, 2, 2, nbytes)
        assert cluster.counters()[2] == other
    assert between > 0.98 * nbytes * 8 / 100e6
    assert inside < between
    frames = -(-nbytes // (9000 - 52))
    assert 0 <= sender.sent_nbytes - (nbytes + 66 * frames) < 10_000, (
        "opening, closing, at most a frame again"
    )
    assert abs(sender.sent_nbytes - receiver.received_nbytes) < 1_000, "at most a last acknowledgement apart"
    assert abs(sender.received_nbytes - receiver.sent_nbytes) < 1_000
    assert max(other) < 200, "what the switch sends everywhere before it knows who is where"


@pytest.mark.long
@pytest.mark.full
def test_a_killed_run_is_cleaned_up_by_the_next(name: str) -> None:
    """SIGKILL leaves namespaces and ranks behind; the next start under the name removes both."""
    runner = subprocess.Popen(
        [*RUN, "--name", name, "--hosts", "2", "--", "--no-python", "sleep", "1000"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ranks() -> list[int]:
        pids = [pid for namespace in namespaces(name) for pid in namespace_pids(namespace)]
        return [pid for pid in pids if is_running(pid, "sleep")]

    try:
        wait_until(lambda: len(ranks()) == 2)
        left = ranks()
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert len(namespaces(name)) == 3
    assert all(is_running(pid, "sleep") for pid in left)
    with NamespaceCluster(1, "100mbit", name=name) as cluster:
        assert set(namespaces(name)) == {cluster.namespace(0), f"{name}-switch"}
        wait_until(lambda: not any(is_running(pid, "sleep") for pid in left), timeout_s=5.0)


def test_an_error_and_a_running_process_do_not_prevent_the_end(name: str) -> None:
    """Leaving by an exception kills what still runs on the hosts and removes them."""
    processes: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with NamespaceCluster(1, "100mbit", name=name) as cluster:
            processes.append(cluster.exec(0, ["sleep", "1000"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes[0].wait(timeout=5) == -signal.SIGKILL
    assert namespaces(name) == []


def test_two_clusters_of_one_name_do_not_fight(name: str) -> None:
    """The second start under a name says who holds it; another name lives beside it."""
    with NamespaceCluster(1, "100mbit", name=name) as cluster:
        with pytest.raises(ClusterError, match=rf"already up \(process {os.getpid()} "):
            NamespaceCluster(1, "100mbit", name=name).__enter__()
        with NamespaceCluster(1, "100mbit", name=f"{name}-b"):
            pass
        assert cluster.counters() == [(0, 0)]


@pytest.mark.parametrize("failing_first", [False, True])
def test_the_others_are_stopped_after_one_failed(failing_first: bool) -> None:
    """The failed host's code counts, whichever host it is; those that do not notice are stopped."""
    argvs = [["sh", "-c", "exit 3"], ["sleep", "1000"]]
    order = argvs if failing_first else argvs[::-1]
    said: list[str] = []
    processes = [subprocess.Popen(argv) for argv in order]
    ending = watch(processes, timeout_s=60.0, grace_s=0.2, say=said.append)
    assert ending.codes == ((3, None) if failing_first else (None, 3))
    assert ending.exit_code == 3
    assert "after another host failed" in said[0]
    assert all(process.returncode is not None for process in processes)


def test_a_timeout_has_its_own_code() -> None:
    """Nothing runs past the timeout; signals count as 128 + n."""
    said: list[str] = []
    late = watch([subprocess.Popen(["sleep", "1000"])], timeout_s=0.2, grace_s=5.0, say=said.append)
    assert late.exit_code == TIMEOUT_CODE
    assert "timeout of 0.2 s" in said[0]
    killed = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    assert watch([killed], timeout_s=60.0, grace_s=5.0, say=said.append).exit_code == 137


def test_rates_and_delays_are_read_as_tc_reads_them() -> None:
    """Decimal prefixes; anything else is refused before a namespace exists."""
    assert bits_per_second("500mbit") == 500e6
    assert bits_per_second("2.5gbit") == 2.5e9
    assert delay_seconds("500us") == pytest.approx(5e-4)
    for rate in ("500", "500mbps", "0mbit", "fast"):
        with pytest.raises(ClusterError, match="expected a rate"):
            bits_per_second(rate)
    with pytest.raises(ClusterError, match="expected a delay"):
        NamespaceCluster(2, "1gbit", delay="1")
    with pytest.raises(ClusterError, match="expected a name"):
        NamespaceCluster(2, "1gbit", name="../etc")


def test_counters_outside_a_cluster_say_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script started the usual way learns what to start it with."""
    monkeypatch.delenv(UPLINK_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"python -m benchmarks\.cluster run"):
        uplink_nbytes()
