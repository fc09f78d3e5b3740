"""One `torchrun` per host of a cluster, watched until all have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.cluster.network import UPLINK, NamespaceCluster

REPOSITORY = Path(__file__).resolve().parents[2]
MASTER_PORT = 29500
"""Any port will do: host 0's namespace has all of them to itself."""
GRACE_S = 10.0
"""How long the other hosts may go on after one has failed: most notice by themselves and say more."""
TERMINATE_S = 5.0
TIMEOUT_CODE = 124
"""What the command `timeout` returns."""
NUM_LAST_LINES = 60
"""`torchrun` adds some thirty of its own after those of the rank."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the hosts' processes ended."""

    codes: tuple[int | None, ...]
    """Exit code of each host, 128 + n for signal n; None where it had to be stopped."""
    timed_out: bool

    @property
    def exit_code(self) -> int:
        """The worst of the hosts' own codes; 124 after a timeout."""
        if self.timed_out:
            return TIMEOUT_CODE
        return max((code for code in self.codes if code is not None), default=0)


def host_environment(cluster: NamespaceCluster, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the ranks need beyond what they inherit.

    gloo must be told its interface, or it looks up the machine's name, which is no address here. Ranks reach
    their own host's address over its loopback all the same: the kernel routes it there.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY), inherited.get("PYTHONPATH", "")]))
    return {
        "GLOO_SOCKET_IFNAME": UPLINK,
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": path,
        "MICS_UPLINK_RATE": cluster.rate,
        "MICS_UPLINK_DELAY": cluster.delay or "0ms",
    }


def torchrun_argv(
    cluster: NamespaceCluster, host: int, ranks_per_host: int, program: Sequence[str]
) -> list[str]:
    """The `torchrun` of one host; ``program`` is a script or `-m module`, with its arguments."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(cluster.num_hosts)),
        *("--nproc-per-node", str(ranks_per_host)),
        *("--node-rank", str(host)),
        *("--master-addr", cluster.address(0)),
        *("--master-port", str(MASTER_PORT)),
        *program,
    ]


def launch(
    cluster: NamespaceCluster,
    ranks_per_host: int,
    program: Sequence[str],
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> Ending:
    """Run ``program`` on every host; show host 0's output, and the others' last lines if they fail."""
    environment = host_environment(cluster, os.environ)
    with ExitStack() as stack:
        outputs: list[IO[bytes] | None] = [None]
        outputs += [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, cluster.num_hosts)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for host, output in enumerate(outputs):
                argv = torchrun_argv(cluster, host, ranks_per_host, program)
                processes.append(cluster.exec(host, argv, environment, stdout=output, stderr=output))
            ending = watch(processes, timeout_s=timeout_s, grace_s=GRACE_S, say=say)
        finally:
            stop(processes)
        if ending.exit_code != 0:
            for host, output in enumerate(outputs):
                if output is not None and ending.codes[host] != 0:
                    say(_last_words(host, ending.codes[host], output))
        return ending


def watch(
    processes: Sequence[subprocess.Popen[bytes]],
    *,
    timeout_s: float,
    grace_s: float,
    say: Callable[[str], None],
) -> Ending:
    """Wait for all, but not past the timeout, nor past the grace after one has failed; stop the rest."""
    deadline = time.monotonic() + timeout_s
    grace_end: float | None = None
    while None in (codes := [process.poll() for process in processes]):
        now = time.monotonic()
        if grace_end is None and any(codes):
            grace_end = now + grace_s
        if now > deadline or (grace_end is not None and now > grace_end):
            break
        time.sleep(0.05)
    running = [host for host, code in enumerate(codes) if code is None]
    timed_out = bool(running) and grace_end is None
    if timed_out:
        say(f"hosts {running} still run after the timeout of {timeout_s:g} s: stopping them")
    elif running:
        say(f"hosts {running} still run {grace_s:g} s after another host failed: stopping them")
    stop(processes)
    return Ending(codes=tuple(code and _shell_code(code) for code in codes), timed_out=timed_out)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: `torchrun` is asked first, so that it ends its ranks and says what they did."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for process in running:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _shell_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _last_words(host: int, code: int | None, output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()[-NUM_LAST_LINES:]
    what = "was stopped" if code is None else f"failed with exit code {code}"
    return "\n".join([f"host {host} {what}; its last lines:", *(f"  [host {host}] {line}" for line in lines)])
