"""`mics doctor` under torchrun on namespace hosts: healthy ones, and ones with a fault each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.network import NamespaceCluster, command, remove_namespaces
from benchmarks.cluster.requirements import examine, reason_against

import mics
from tests.doctor.hosts import Host, can_unshare, clock_ahead, instead_of, read_only, run_doctor

pytestmark = pytest.mark.full


@pytest.fixture
def name() -> Iterator[str]:
    """A cluster name of this test's own; nothing under it stays."""
    reason = reason_against(examine())
    if reason is not None or not can_unshare():
        pytest.skip(f"no namespace hosts on this machine: {reason or 'unshare fails'}")
    name = f"doctor-test{os.getpid()}"
    yield name
    assert remove_namespaces(name) == []


def _without_gpus() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def _findings(out: str, level: str) -> dict[str, list[dict[str, Any]]]:
    """By check."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(out)["findings"]:
        if each["level"] == level:
            found.setdefault(each["check"], []).append(each)
    return found


def _rename_uplink(cluster: NamespaceCluster, host: int, new: str) -> None:
    """The interface that GLOO_SOCKET_IFNAME names is then missing on this host alone."""
    for change in (["down"], ["name", new], ["up"]):
        device = new if change == ["up"] else "uplink"
        command("ip", "-n", cluster.namespace(host), "link", "set", "dev", device, *change)


def _slow_down(cluster: NamespaceCluster, host: int, rate: str) -> None:
    """What this host sends is limited to less than what others send."""
    bucket = ["tbf", "rate", rate, "burst", "20000", "limit", str(1 << 30)]
    command("tc", "-n", cluster.namespace(host), "qdisc", "replace", "dev", "uplink", "root", *bucket)


@pytest.mark.long
def test_five_faults_are_named_with_their_hosts(name: str, tmp_path: Path) -> None:
    """A slow link, a missing interface, another version, a read-only folder and a wrong clock, at once."""
    checkpoints = tmp_path / "shared" / "checkpoints"
    checkpoints.mkdir(parents=True)
    package = Path(mics.__file__)
    other = tmp_path / "other_version.py"
    other.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.7"', package.read_text()))
    with NamespaceCluster(4, "200mbit", name=name) as cluster:
        _slow_down(cluster, 1, "20mbit")
        _rename_uplink(cluster, 2, "eth7")
        hosts = [
            Host(),
            Host(),
            Host(variables=clock_ahead(1000.0)),
            Host(setup=f"{read_only(checkpoints)}\n{instead_of(package, other)}"),
        ]
        args = ["--json", "--checkpoint-dir", str(checkpoints), "--timeout", "60"]
        told = run_doctor(cluster, hosts, args, tmp_path, timeout_s=150.0)
    assert set(told.codes) == {1}, told.other
    failures = _findings(told.out, "fail")
    # On a busy machine others may be slow as well.
    link = next(found for found in failures["bandwidth"] if found["where"].startswith("host-1 "))
    assert link["what"].startswith("sends at")
    (interface,) = failures["interface"]
    assert interface["where"].startswith("host-2 ") and "GLOO_SOCKET_IFNAME=uplink" in interface["what"]
    assert interface["way_out"] == "set GLOO_SOCKET_IFNAME=eth7 there"
    (clock,) = failures["clocks"]
    assert clock["where"].startswith("host-2 ") and "1,000 s ahead" in clock["what"]
    (version,) = failures["versions"]
    assert version["where"].startswith("host-3 ") and "found 0.0.7" in version["what"]
    (folder,) = failures["checkpoints"]
    assert folder["where"].startswith("host-3 ") and "Read-only file system" in folder["what"]
    assert set(failures) == {"bandwidth", "interface", "clocks", "versions", "checkpoints"}
    assert json.loads(told.out)["seconds"] < 60
    assert list(checkpoints.iterdir()) == [], "the doctor leaves nothing behind"


@pytest.mark.long
@pytest.mark.full
def test_without_a_launcher_it_starts_its_own_ranks(tmp_path: Path) -> None:
    """The exit code is the doctor's, and torchrun adds no traceback to the report."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "mics.cli", "doctor", "--checkpoint-dir", str(tmp_path / "file" / "x")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=_without_gpus(), check=False
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"fail checkpoints .*Not a directory; give this user", lines[0])
    assert lines[-1].startswith("no-go: 1 failure, ")
    assert any(line.startswith("ok   ranks            2 ranks on 1 node joined") for line in lines)
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_two_ranks_on_gpus(tmp_path: Path) -> None:
    """Over NCCL, on two GPUs or on one that they share: the product is right, and collectives work."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "mics.cli", "doctor", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    good = _findings(done.stdout, "ok")
    assert "over gloo and NCCL is right" in good["collectives"][0]["what"]
    assert good["results"] and good["versions"]
    held = _findings(done.stdout, "warn").get("GPU memory")  # by other tests' ranks, where they are there
    assert good.get("GPU memory") or (held and "another process holds" in held[0]["what"])
    found = json.loads(done.stdout)
    assert {facts["versions"]["NCCL"] for facts in found["ranks"].values()} != {""}
    assert all(each["rate"] > 1e13 for each in found["computed"].values())
    assert len(found["transfers"]) == 2, "around the node"


@pytest.mark.long  # test_examination.py finds nothing on four ranks, and the next test looks at hosts
def test_healthy_hosts_are_a_go(name: str, tmp_path: Path) -> None:
    """Exit code 0, no failure, and lines for people."""
    checkpoints = tmp_path / "shared" / "checkpoints"
    with NamespaceCluster(2, "200mbit", name=name) as cluster:
        args = ["--checkpoint-dir", str(checkpoints), "--timeout", "60"]
        told = run_doctor(cluster, [Host(), Host()], args, tmp_path, timeout_s=120.0)
    assert told.codes == (0, 0), told.out + told.other
    lines = told.out.splitlines()
    assert lines[-1].startswith("go: 0 failures")
    assert [line for line in lines if line.startswith("fail")] == []
    assert any(re.match(r"ok +checkpoints .*can be written on each node, and shared", line) for line in lines)
    assert any(re.match(r"ok +bandwidth +2\d\.\d MB/s between two nodes", line) for line in lines), told.out
    assert not checkpoints.parent.exists(), "the doctor made it, and takes it away"
