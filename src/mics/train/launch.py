"""Starting the ranks of ``mics train`` on this machine: one torchrun agent for each node it plays.

What rank 0 prints is shown: in a terminal above a live board (see ``watch``), else as it comes. Everything
else a rank prints goes to its own file under ``<run>/logs``. When ranks fail, the one that failed first is
shown (see ``failures``). With checkpoints, all ranks are then started again, and go on from the latest.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Final, Literal
from uuid import uuid4

import torch
from rich.console import Console

from mics.checkpoint.folders import latest_in
from mics.checkpoint.storage import Place
from mics.errors import CheckpointError, SettingsError
from mics.train.checkpoints import check_places
from mics.train.config import METRICS_FILE, LaunchSettings, TrainConfig
from mics.train.failures import (
    ERROR_FILES,
    UNREAD_CODE,
    describe_failures,
    find_failures,
    is_hopeless,
    is_told,
    report_failure,
)
from mics.train.folders import check_folders, only_run
from mics.train.model import check_model
from mics.train.ranks import end_with_parent
from mics.train.sample import prompt_tokens
from mics.train.sequences import Sequences, open_sequences
from mics.train.stopping import LEFT_CODE
from mics.train.watch import Nobody, TerminalWatch, Watching
from mics.utils.progress import is_live

_POLL_SECONDS: Final = 0.1
# When one rank has failed, the others need a moment to fail by themselves and say why.
_GRACE_SECONDS: Final = 12.0
# And less once all of them have, but for the one they waited for: it may never end by itself.
_LAST_SECONDS: Final = 4.0
# To save and leave: an agent that was told to stop gives its ranks 30 seconds before it kills them.
_STOP_SECONDS: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The ranks to start."""

    device: Literal["cpu", "cuda"]
    num_nodes: int
    ranks_per_node: int
    ranks_per_gpu: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def plan_launch(settings: LaunchSettings, *, num_gpus: int) -> LaunchPlan:
    """Fill in what the settings leave open from the number of GPUs of this machine."""
    if settings.device == "cuda" and num_gpus == 0:
        raise SettingsError("launch.device: expected a GPU for 'cuda', found none; use 'cpu' or 'auto'")
    if settings.device == "cpu":
        num_gpus = 0
    if num_gpus > 1:
        num_nodes = settings.simulated_nodes or 1
        ranks_per_node = settings.ranks_per_node or max(1, num_gpus // num_nodes)
    else:
        num_nodes = settings.simulated_nodes or settings.hosts or 2  # more than one host is not our business
        ranks_per_node = settings.ranks_per_node or 2
    ranks_per_gpu = 1
    if num_gpus > 0:
        needed = math.ceil(num_nodes * ranks_per_node / num_gpus)
        ranks_per_gpu = settings.ranks_per_gpu or needed
        if ranks_per_gpu < needed:
            raise SettingsError(
                f"launch.ranks_per_gpu: expected at least {needed} for {num_nodes * ranks_per_node} ranks on "
                f"{num_gpus} GPUs, found {ranks_per_gpu}; raise it, or start fewer ranks"
            )
    return LaunchPlan(
        device="cuda" if num_gpus > 0 else "cpu",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        ranks_per_gpu=ranks_per_gpu,
    )


def agent_command(
    plan: LaunchPlan, *, node: int, port: int, log_dir: Path, args: Sequence[str], job: str
) -> list[str]:
    """The torchrun call that starts one node's ranks, each of them ``mics train`` with the same arguments."""
    # 1 is stdout, 2 is stderr, 3 is both: all go to files except what rank 0 prints.
    streams = ["3"] * plan.ranks_per_node
    if node == 0:
        streams[0] = "2"
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={plan.num_nodes}",
        f"--nproc-per-node={plan.ranks_per_node}",
        f"--node-rank={node}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        # We start all of them again, not each agent its own: a node may be gone with its agent.
        "--max-restarts=0",
        f"--rdzv-id={job}",
        f"--log-dir={log_dir / f'node{node}'}",
        "--redirects=" + ",".join(f"{local_rank}:{stream}" for local_rank, stream in enumerate(streams)),
        "-m",
        "mics.cli",
        "train",
        *args,
        # Last, so that they win: every rank then agrees with the launcher on who shares a GPU.
        f"--launch.device={plan.device}",
        f"--launch.ranks-per-gpu={plan.ranks_per_gpu}",
    ]


def agent_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an agent and its ranks. What the user has set stays."""
    defaults = {"PYTHONUNBUFFERED": "1"}
    if plan.device == "cpu":
        # More threads than cores make all of them wait for each other, and models this small gain nothing.
        defaults["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        # All ranks are here: resolving this machine's name may fail, or leave through a firewall.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {**defaults, **environ}


def _seen_environment(console: Console, environ: Mapping[str, str]) -> dict[str, str]:
    """The same where rank 0 writes to a pipe and its text is shown in a terminal."""
    return {"COLUMNS": str(console.width), "FORCE_COLOR": "1", **environ}


def launch(config: TrainConfig, args: Sequence[str]) -> int:
    """Start the ranks, wait for them, and start them again after a failure.

    Returns the exit code: 0, the failed rank's, or 128 + n after signal n.
    """
    plan = plan_launch(config.launch, num_gpus=torch.cuda.device_count())
    check_plan(config, plan)
    job = uuid4().hex
    with only_run(config, job=job, is_launcher=True) as locks:
        return _launch_only(config, plan, args, job=job, locks=locks)


def _launch_only(
    config: TrainConfig, plan: LaunchPlan, args: Sequence[str], *, job: str, locks: Sequence[int]
) -> int:
    log_dir = config.run_dir / "logs"
    shutil.rmtree(log_dir, ignore_errors=True)
    is_seen = config.report.progress == "auto" and is_live(sys.stdout)
    attempts = _Job(
        config=config,
        plan=plan,
        args=[*args, "--report.progress=none"] if is_seen else args,
        name=job,
        locks=locks,
        console=Console(highlight=False, emoji=False) if is_seen else None,
    )
    if not is_seen and config.report.progress != "none":
        print(f"starting {plan.num_ranks} ranks", flush=True)
    for restart in count():
        ending = attempts.run(log_dir if restart == 0 else log_dir / f"restart-{restart}")
        if ending.signum is not None:
            say(f"interrupted; all ranks have been stopped{_saved(config)}")
            return 128 + ending.signum
        if not ending.failed:
            return 0
        failures = find_failures(ending.log_dir, ranks_per_node=plan.ranks_per_node)
        if any(failure.unread for failure in failures):
            return UNREAD_CODE
        if any(failure.left for failure in failures):
            say(f"a rank was asked to leave; all ranks have left{_saved(config)}")
            return LEFT_CODE
        if restart == config.max_restarts or is_hopeless(failures, began=_began(config, ending)):
            return report_failure(ending.log_dir, ranks_per_node=plan.ranks_per_node)
        say(
            f"{describe_failures(failures, ending.agent_codes)}; starting all ranks again, "
            f"{_where_it_goes_on(config)} (restart {restart + 1} of {config.max_restarts}; "
            f"logs are in {ending.log_dir})"
        )
    raise AssertionError("counting ends never")


def _began(config: TrainConfig, ending: _Ending) -> bool:
    """Whether the ranks of an attempt came to train: the first thing they do then is to open this file."""
    metrics = config.run_dir / METRICS_FILE
    return metrics.exists() and metrics.stat().st_mtime >= ending.start_time


def _latest(config: TrainConfig) -> Place | None:
    """The latest checkpoint; none where a store cannot be asked just now."""
    try:
        return latest_in(config.checkpoint_dir) if config.checkpoint.interval else None
    except CheckpointError:
        return None


def _saved(config: TrainConfig) -> str:
    latest = _latest(config)
    if latest is None:
        return ""
    return f"; the latest checkpoint is {latest}, --checkpoint.resume latest goes on from it"


def _where_it_goes_on(config: TrainConfig) -> str:
    latest = _latest(config)
    if latest is None:
        return "from the beginning"
    return f"from {latest.name}"


def say(text: str) -> None:
    """A line of the launcher's own, on stderr."""
    print(f"mics: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How the agents of one attempt ended."""

    log_dir: Path
    start_time: float
    agent_codes: list[int | None]
    failed: bool
    signum: int | None
    """The signal that ended it."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is started, again and again if need be."""

    config: TrainConfig
    plan: LaunchPlan
    args: Sequence[str]
    name: str
    """The same at every attempt: by it the ranks know that they go on."""
    locks: Sequence[int]
    """Files that agents hold open too: they outlive a launcher that is killed, a little."""
    console: Console | None
    """The terminal to draw in; None: rank 0 writes where this process does."""

    def run(self, log_dir: Path) -> _Ending:
        """One attempt. When it returns, no process of it is left."""
        log_dir.mkdir(parents=True)
        port, start_time = _free_port(), time.time()
        agents: list[subprocess.Popen[bytes]] = []
        codes: list[int | None] = []
        failed, signum = False, None
        watch = self._watch()
        try:
            with _interruptible():
                for node in range(self.plan.num_nodes):
                    command = agent_command(
                        self.plan, node=node, port=port, log_dir=log_dir, args=self.args, job=self.name
                    )
                    agents.append(self._start_agent(command, node, log_dir))
                    if agents[-1].stdout is not None:
                        watch.attach(agents[-1].stdout)
                failed = _wait(agents, log_dir, self.plan, watch)
                codes = [agent.poll() for agent in agents]
        except _Interrupt as interrupt:
            signum = interrupt.signum
            watch.stopping()
        finally:  # whatever happened, nothing stays behind
            _stop(agents, watch, patience=_STOP_SECONDS if signum is not None else 0.0)
            watch.close()
        return _Ending(
            log_dir=log_dir, start_time=start_time, agent_codes=codes, failed=failed, signum=signum
        )

    def _watch(self) -> Watching:
        if self.console is None:
            return Nobody()
        on_gpu = self.plan.device == "cuda"
        return TerminalWatch(self.console, self.config, num_ranks=self.plan.num_ranks, on_gpu=on_gpu)

    def _start_agent(self, command: list[str], node: int, log_dir: Path) -> subprocess.Popen[bytes]:
        environ = agent_environment(self.plan, os.environ)
        seen = subprocess.PIPE if self.console is not None else None
        with (log_dir / f"node{node}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=seen if node == 0 else log,
                stderr=log,
                env=environ if self.console is None else _seen_environment(self.console, environ),
                # Out of reach of the terminal's Ctrl-C: we get it, and stop the agents in order.
                start_new_session=True,
                # If we are killed, ranks save and leave.
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
                pass_fds=self.locks,
            )


def check_plan(config: TrainConfig, plan: LaunchPlan, *, write: bool = True) -> Sequences:
    """What the ranks would find out: one line now is better than their failure later.

    Returns where the run's sequences come from. A dry run does not ``write``.
    """
    sequences = open_sequences(config)
    sequences.check_validation(config.batch_size * plan.num_ranks)
    prompt_tokens(config, sequences)
    check_model(config)
    check_places(config)
    size = config.sharding.partition_size
    if size is not None and plan.num_ranks % size:
        raise SettingsError(
            f"sharding.partition_size: expected a divisor of the {plan.num_ranks} ranks, found {size}"
        )
    check_folders(config, write=write)
    return sequences


def _wait(
    agents: Sequence[subprocess.Popen[bytes]], log_dir: Path, plan: LaunchPlan, watch: Watching
) -> bool:
    """Wait until all agents are done, or a rank has failed and the others had a moment to notice."""
    deadline, told = math.inf, False
    while time.monotonic() < deadline:
        codes = [agent.poll() for agent in agents]
        if None not in codes:
            break
        # Not by the agents alone: one that waits for a rank that does not end says nothing meanwhile.
        failed = any(code not in (None, 0) for code in codes) or any(log_dir.glob(ERROR_FILES))
        if deadline == math.inf and failed:
            deadline = time.monotonic() + _GRACE_SECONDS
        if failed and not told:
            failures = find_failures(log_dir, ranks_per_node=plan.ranks_per_node)
            told = is_told(failures, num_ranks=plan.num_ranks)
            if any(failure.unread for failure in failures):
                break
            deadline = min(deadline, time.monotonic() + (_LAST_SECONDS if told else math.inf))
        watch.tick()
        time.sleep(_POLL_SECONDS)
    return any(agent.poll() != 0 for agent in agents)


def _stop(agents: Sequence[subprocess.Popen[bytes]], watch: Watching, *, patience: float) -> None:
    """End all agents, and through them their ranks, which may save first. A second Ctrl-C ends them at once.

    The kernel ends the ranks of an agent that is killed, even ranks that are stopped.
    """
    running = [agent for agent in agents if agent.poll() is None]
    if patience:
        for agent in running:
            agent.terminate()
    deadline = time.monotonic() + patience
    try:
        with _interruptible():
            while time.monotonic() < deadline and any(agent.poll() is None for agent in running):
                watch.tick()
                time.sleep(_POLL_SECONDS)
    except _Interrupt:
        pass
    for agent in running:
        if agent.poll() is None:
            agent.kill()
        agent.wait()


class _Interrupt(BaseException):
    """Somebody wants this process to end. Not an Exception: nothing on the way may take it for an error."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end what is inside: whoever ends this process means the ranks too."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise _Interrupt(signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
