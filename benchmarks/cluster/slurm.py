"""Slurm on namespace hosts: a controller on host 0 and a node on each of the others.

Every host has a name of its own (a UTS namespace) and an /etc/hosts that knows all of them, as machines of a
cluster do. Everything else, the key of munge included, lies in one folder and goes with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.cluster.network import ClusterError, NamespaceCluster, namespace_pids

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "unshare")
# A requeued job waits until the credentials of its first life have expired. `sbatch --wait` asks every 2 s
# where finished jobs are forgotten soon, else every 32 s.
_CONFIG = """\
ClusterName=mics
SlurmctldHost=host0({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={sockets}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={sockets}/spool-%n
SlurmdParameters=config_overrides
SlurmdTimeout=12
MinJobAge=5
MessageTimeout=60
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing_program() -> str | None:
    """The first program of Slurm or munge that this machine lacks."""
    return next((program for program in PROGRAMS if shutil.which(program) is None), None)


def _end_of(output: Path | None) -> str:
    """The last lines that a job printed."""
    if output is None or not output.exists():
        return "no output of a job"
    return "\n".join(output.read_text(errors="replace").splitlines()[-40:])


class SlurmCluster:
    """Nodes host1, host2, ... while the context lasts; ``gpus`` of each exist in Slurm's books alone."""

    def __init__(self, cluster: NamespaceCluster, folder: Path, *, gpus: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._sockets = Path()  # with a short path: that of a socket has at most 108 characters
        self._gpus = gpus
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        missing = missing_program()
        if missing is not None:
            raise ClusterError(f"`{missing}` is not installed: it comes with slurm-wlm, munge or util-linux")
        self._sockets = Path(tempfile.mkdtemp(prefix="slurm"))
        try:
            self._write_files()
            self._start_munge()
            self._daemon(0, ["slurmctld", "-D", "-f", self._config])
            for host in range(1, self._cluster.num_hosts):
                self.start_node(host)
            self.wait_for("all nodes", lambda: self.call("sinfo", "-h", "-o", "%T").split() == ["idle"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in range(self._cluster.num_hosts):
            self.kill_host(host)
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)
        for host in range(self._cluster.num_hosts):
            shutil.rmtree(self._etc(host), ignore_errors=True)
        if Path("/etc/netns").is_dir() and not any(Path("/etc/netns").iterdir()):
            Path("/etc/netns").rmdir()

    def start_node(self, host: int) -> None:
        """Start slurmd, at first or after `kill_host`."""
        self._daemon(host, ["slurmd", "-D", "-N", f"host{host}", "-f", self._config])

    def kill_host(self, host: int) -> None:
        """Every process on it at once, as when the power fails. Its network stays up."""
        while pids := namespace_pids(self._cluster.namespace(host)):
            for pid in pids:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def call(self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run a Slurm command on the controller and return what it prints."""
        running = self.start(*argv, cwd=cwd, env=env)
        output = running.communicate(timeout=120)[0].strip()
        if running.returncode != 0:
            raise ClusterError(f"`{' '.join(argv)}` failed: {output}")
        return output

    def start(
        self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A command on the controller, which goes on meanwhile."""
        inside = ["ip", "netns", "exec", self._cluster.namespace(0), *argv]
        environment = {**os.environ, **(env or {}), "SLURM_CONF": self._config}
        both = subprocess.STDOUT
        return subprocess.Popen(
            inside, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=both, text=True
        )

    def state(self, job: str) -> str:
        """The state of a job, as Slurm names it."""
        shown = self.call("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_for(
        self, what: str, condition: Callable[[], bool], *, timeout_s: float = 60.0, output: Path | None = None
    ) -> None:
        """Ask until it is so. An error shows jobs, nodes and the end of ``output``, which is a job's."""
        deadline = time.monotonic() + timeout_s
        problem = ""
        while True:
            try:
                if condition():
                    return
            except ClusterError as error:  # a controller that is busy answers the next time
                problem = f"\n{error}"
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"waited {timeout_s:.0f} s in vain for {what}; logs are in {self._folder}"
                    f"{problem}\n{self._standing()}\n{_end_of(output)}"
                )
            time.sleep(0.2)

    def _standing(self) -> str:
        """The jobs and nodes, as Slurm shows them."""
        try:
            return "\n".join(
                self.call(*words) for words in (("scontrol", "show", "job"), ("sinfo", "-N", "-l"))
            )
        except (ClusterError, subprocess.TimeoutExpired) as error:
            return str(error)

    @property
    def _config(self) -> str:
        return str(self._folder / "slurm.conf")

    def _etc(self, host: int) -> Path:
        """What `ip netns exec` puts over /etc."""
        return Path("/etc/netns") / self._cluster.namespace(host)

    def _write_files(self) -> None:
        hosts = range(self._cluster.num_hosts)
        names = "".join(f"{self._cluster.address(host)} host{host}\n" for host in hosts)
        for host in hosts:
            self._etc(host).mkdir(parents=True)
            (self._etc(host) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        nodes = [
            f"NodeName=host{host} NodeAddr={self._cluster.address(host)} CPUs=1 Gres=gpu:{self._gpus}"
            for host in hosts[1:]
        ]
        (self._folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=self._folder,
                sockets=self._sockets,
                controller=self._cluster.address(0),
                nodes="\n".join(nodes),
            )
        )
        for gpu in range(self._gpus):
            (self._folder / f"gpu{gpu}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-{self._gpus - 1}]\n")
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self) -> None:
        key, socket = self._folder / "munge.key", self._sockets / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": socket, "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self._folder / file}" for name, file in files.items()]
        with (self._folder / "munged.log").open("wb") as log:
            self._munged = subprocess.Popen(
                ["munged", "--foreground", "--force", *options], stdout=log, stderr=log
            )
        self.wait_for("munged", socket.exists)

    def _daemon(self, host: int, argv: Sequence[str]) -> None:
        named = ["unshare", "--uts", "sh", "-ec", 'hostname "$0"; exec "$@"', f"host{host}", *argv]
        with (self._folder / f"host{host}.log").open("ab") as log:
            self._cluster.exec(host, named, {"SLURM_CONF": self._config}, stdout=log, stderr=log)
