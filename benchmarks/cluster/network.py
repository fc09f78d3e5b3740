"""Several hosts on one machine: network namespaces around one switch, with a limit on every host's uplink.

     <name>-h0                 <name>-h1                  one namespace per host
    +-----------------+       +-----------------+
    | lo: unthrottled |       | lo: unthrottled |         ranks of one host meet here
    | uplink 10.77.0.1|       | uplink 10.77.0.2|         tbf: what the host sends
    +--------|--------+       +--------|--------+
    +--------|-------------------------|--------+
    |      port0        bridge       port1      |         tbf: what the host receives (and netem: delay)
    +-------------------------------------------+
     <name>-switch                                        the bridge has a namespace of its own

Both ends of every veth pair are created inside these namespaces, so the machine's own namespace never holds
an interface, an address or a queue of ours. Every command names its namespace (`ip -n`, `tc -n`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.cluster.counters import UPLINK_VARIABLE, Traffic, statistics_files

UPLINK = "uplink"
"""The interface's name on every host; each sees only its own."""
BRIDGE = "bridge"
MAX_NUM_HOSTS = 64

MTU = 9000
"""Jumbo frames, as clusters use: headers then take 0.7% of the rate instead of 4.4%."""
BURST_S = 0.2e-3
"""How late the kernel's timer may be before tbf's bucket overflows and rate is lost. A full bucket passes
unthrottled after every pause, so it must also be small beside a message."""
MIN_BURST_NBYTES = 20_000
"""Two frames: tbf drops what is larger than its bucket."""
QUEUE_NBYTES = 1 << 30
"""Never fills, because windows are bounded: the network delays and does not drop. A drop would cost a
retransmission timeout (0.2 s), make times erratic and count bytes twice."""
WINDOW_S = 10e-3
"""How much each connection may have under way, in time at full rate: queues stay below the retransmission
timeout while a dozen connections meet at one host, and a rank that waits for a processor loses no rate."""
MIN_WINDOW_NBYTES = 256 << 10
KILL_TIMEOUT_S = 10.0

_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class ClusterError(RuntimeError):
    """The cluster could not be brought up, or was used wrongly."""


def bits_per_second(rate: str) -> float:
    """The rate ``tc`` understands by ``rate``: a number and bit, kbit, mbit or gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or float(match[1]) == 0:
        raise ClusterError(f"expected a rate above 0 such as 500mbit or 2.5gbit, found {rate!r}")
    return float(match[1]) * _RATE_UNITS[match[2]]


def delay_seconds(delay: str) -> float:
    """The time ``tc`` understands by ``delay``: a number and us, ms or s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", delay)
    if match is None:
        raise ClusterError(f"expected a delay such as 500us or 1ms, found {delay!r}")
    return float(match[1]) * _DELAY_UNITS[match[2]]


def command(*argv: str) -> str:
    """Run a short command to its end and return what it printed; errors show the command and its reason."""
    try:
        done = subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ClusterError(f"`{argv[0]}` is not installed: `ip` and `tc` come with iproute2") from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise ClusterError(f"`{' '.join(argv)}` failed: {reason}") from None
    return done.stdout


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP only afterwards: half a teardown would leave namespaces behind."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class NameLock:
    """Held while a cluster of this name is up; the kernel drops it when the holder dies, however it dies."""

    def __init__(self, name: str) -> None:
        self.path = Path("/run") / f"{name}-cluster.lock"
        self._file: IO[str] | None = None

    def acquire(self, *, wait: bool = False) -> None:
        """Take the lock; when another process has it, wait for it or raise an error that names it."""
        while self._file is None:
            try:
                file = self.path.open("a+")
            except OSError as error:
                raise ClusterError(
                    f"cannot open the lock {self.path}: {error.strerror}; are you root?"
                ) from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                raise ClusterError(
                    f"a cluster of this name is already up (process {holder} holds {self.path}); wait for "
                    "it, stop it, or choose another name"
                ) from None
            if os.fstat(file.fileno()).st_nlink > 0:
                self._file = file
            else:  # removed by the holder we waited for: the next comer would not see our lock
                file.close()
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self.path.unlink()
            self._file.close()
            self._file = None


def namespaces(name: str) -> list[str]:
    """The namespaces that exist of the cluster ``name``."""
    pattern = re.compile(rf"{re.escape(name)}-(h\d+|switch)")
    listed = [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]
    return [namespace for namespace in listed if pattern.fullmatch(namespace)]


def namespace_pids(namespace: str) -> list[int]:
    """The processes that run in ``namespace``."""
    return [int(pid) for pid in command("ip", "netns", "pids", namespace).split()]


def _is_ours(namespace: str) -> bool:
    """False where someone gave the name to the namespace this process lives in: never kill all of that."""
    return not (Path("/run/netns") / namespace).samefile("/proc/self/ns/net")


def remove_namespaces(name: str) -> list[str]:
    """Kill what runs in the cluster's namespaces, delete them, and return the names of those there were.

    Deleting a namespace that a process still uses only hides it: its interfaces live on, without a name to
    find them by. So the processes go first.
    """
    found = namespaces(name)
    for namespace in found:
        if not _is_ours(namespace):
            raise ClusterError(
                f"namespace {namespace} is the machine's own under another name; not touching it"
            )
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := [pid for namespace in found for pid in namespace_pids(namespace)]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {pids} in {found} survived SIGKILL for {KILL_TIMEOUT_S:.0f} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for namespace in found:
        command("ip", "netns", "delete", namespace)
    return found


class NamespaceCluster:
    """Hosts with addresses 10.77.0.1, 10.77.0.2, ... while the context lasts; needs root on Linux.

        with NamespaceCluster(2, "500mbit") as cluster:
            process = cluster.exec(1, ["ping", "-c1", cluster.address(0)])
            process.wait()
            print(cluster.counters())

    ``rate`` holds for each direction of each uplink on its own, as for a full-duplex card; the switch itself
    has no limit. ``delay`` is one way between any two hosts. Clusters of different names live side by side.
    Leaving the context kills what still runs on the hosts; what a killed run left behind goes at the next
    start under its name.
    """

    def __init__(self, num_hosts: int, rate: str, delay: str | None = None, name: str = "mics") -> None:
        if not 1 <= num_hosts <= MAX_NUM_HOSTS:
            raise ClusterError(f"expected 1 to {MAX_NUM_HOSTS} hosts, found {num_hosts}")
        if re.fullmatch(r"[a-z][a-z0-9-]{0,39}", name) is None:
            raise ClusterError(f"expected a name of at most 40 of a-z, 0-9 and dashes, found {name!r}")
        self.num_hosts = num_hosts
        self.rate = rate
        self.delay = delay
        self.name = name
        bytes_per_second = bits_per_second(rate) / 8
        round_trip_s = 2 * delay_seconds(delay) if delay else 0.0
        self.burst_nbytes = max(MIN_BURST_NBYTES, int(bytes_per_second * BURST_S))
        self.window_nbytes = max(MIN_WINDOW_NBYTES, int(bytes_per_second * (WINDOW_S + round_trip_s)))
        self._lock = NameLock(name)
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            remove_namespaces(self.name)
            self._create()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:  # one that is still on its way into its namespace is found nowhere else
            if process.poll() is None:
                process.kill()
        self._tear_down()

    def namespace(self, host: int) -> str:
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def exec(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``argv`` on ``host``; ``env`` adds to this process's environment.

        `ip netns exec` replaces itself by ``argv``, so the process returned is ``argv`` itself. It gets a
        session of its own: the terminal's Ctrl-C reaches the caller only, who decides what ends when.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *argv],
            env={**os.environ, **(env or {}), UPLINK_VARIABLE: UPLINK},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Pull the cable between ``host`` and the switch: what is sent is lost, and nobody is told."""
        command("ip", "-n", self._switch, "link", "set", "dev", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Put the cable back in."""
        command("ip", "-n", self._switch, "link", "set", "dev", f"port{host}", "up")

    def counters(self) -> list[Traffic]:
        """Bytes each host has sent and received over its uplink since the cluster came up, in host order."""
        files = [str(file) for file in statistics_files(UPLINK)]
        readings = [
            command("ip", "netns", "exec", self.namespace(host), "cat", *files).split()
            for host in range(self.num_hosts)
        ]
        return [Traffic(sent_nbytes=int(sent), received_nbytes=int(received)) for sent, received in readings]

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _create(self) -> None:
        bridge = ["type", "bridge", "mcast_snooping", "0"]  # snooping announces itself on every uplink
        command("ip", "netns", "add", self._switch)
        command("ip", "-n", self._switch, "link", "add", BRIDGE, "mtu", str(MTU), *bridge)
        _silence(self._switch, BRIDGE)
        command("ip", "-n", self._switch, "link", "set", "dev", BRIDGE, "up")
        for host in range(self.num_hosts):
            self._add_host(host)

    def _add_host(self, host: int) -> None:
        namespace, port = self.namespace(host), f"port{host}"
        command("ip", "netns", "add", namespace)
        veth = ["type", "veth", "peer", "name", port, "mtu", str(MTU), "netns", self._switch]
        command("ip", "-n", namespace, "link", "add", UPLINK, "mtu", str(MTU), *veth)
        _silence(namespace, UPLINK)
        _silence(self._switch, port)
        _send_single_frames(namespace, UPLINK)
        self._throttle(namespace, UPLINK, delay=None)
        self._throttle(self._switch, port, delay=self.delay)
        self._set_tcp(namespace)
        command("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", UPLINK)
        command("ip", "-n", self._switch, "link", "set", "dev", port, "master", BRIDGE, "up")
        command("ip", "-n", namespace, "link", "set", "dev", "lo", "up")
        command("ip", "-n", namespace, "link", "set", "dev", UPLINK, "up")

    def _throttle(self, namespace: str, device: str, delay: str | None) -> None:
        """Limit what leaves by ``device``. Delay is for the switch's ports: every packet leaves by one."""
        parent = ["root"]
        if delay is not None:
            netem = ["netem", "delay", delay, "limit", "1000000"]
            command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", *netem)
            parent = ["parent", "1:1"]
        bucket = ["rate", self.rate, "burst", str(self.burst_nbytes), "limit", str(QUEUE_NBYTES)]
        command("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, "tbf", *bucket)

    def _set_tcp(self, namespace: str) -> None:
        """The same on every machine, whatever its defaults: reno, bounded windows.

        With cubic or bbr, three hosts that send to one at the same time get shares from 25% to 70%; with reno
        and windows that bound the queue, each gets a third to within about 10%.
        """
        settings = {
            "tcp_congestion_control": "reno",
            "tcp_rmem": f"4096 131072 {self.window_nbytes}",
            "tcp_slow_start_after_idle": "0",
        }
        writes = "\n".join(f"echo {value} >/proc/sys/net/ipv4/{key}" for key, value in settings.items())
        command("ip", "netns", "exec", namespace, "sh", "-ec", writes)

    def _tear_down(self) -> None:
        with signals_held_back():
            try:
                remove_namespaces(self.name)
            finally:
                self._lock.release()


def _silence(namespace: str, device: str) -> None:
    """Give ``device`` no IPv6 address: its router solicitations would be counted as traffic."""
    if Path("/proc/sys/net/ipv6/conf").exists():
        command("ip", "-n", namespace, "link", "set", "dev", device, "addrgenmode", "none")


def _send_single_frames(namespace: str, device: str) -> None:
    """Hand ``device`` frames, not the 64 KiB segments a network card would cut up.

    A veth counts a segment as one packet with one header; tbf cuts up those that exceed its bucket, and only
    those. The same transfer would then be counted differently from run to run.
    """
    command("ip", "-n", namespace, "link", "set", "dev", device, "gso_max_segs", "1")
