"""``mics train --nodes``: the first of several hosts. torchrun starts its ranks and restarts all of them.

This prints the torchrun command for the other hosts and then becomes torchrun itself, with the same command.
All it adds is to say how many hosts have joined, which torchrun keeps to itself.
"""

from __future__ import annotations

import os
import pickle
import shlex
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final
from uuid import uuid4

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.run import parse_args, run

from mics.errors import SettingsError
from mics.train.addresses import reachable_address
from mics.train.config import TrainConfig
from mics.train.folders import only_run
from mics.train.launch import LaunchPlan, check_plan, say
from mics.train.stopping import LEFT_CODE

_POLL_SECONDS: Final = 1.0
_OWN_STORES: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With "1" each attempt has a store of its own. A host that comes back does not find the shared one, since
torch 2.13 says where it is to the hosts of the first attempt alone."""


def plan_hosts(config: TrainConfig, *, num_gpus: int) -> LaunchPlan:
    """The ranks of all hosts, each with as many as this one."""
    settings = config.launch
    assert settings.hosts is not None
    if settings.simulated_nodes is not None:
        raise SettingsError(
            "launch.hosts, launch.simulated_nodes: expected one of them, found both; hosts are real, "
            "simulated nodes are all on this one"
        )
    if settings.device == "cuda" and num_gpus == 0:
        raise SettingsError("launch.device: expected a GPU for 'cuda', found none; use 'cpu' or 'auto'")
    on_gpu = settings.device != "cpu" and num_gpus > 0
    return LaunchPlan(
        device="cuda" if on_gpu else "cpu",
        num_nodes=settings.hosts,
        ranks_per_node=settings.ranks_per_node or (num_gpus if on_gpu else 1),
        ranks_per_gpu=settings.ranks_per_gpu or 1,
    )


def other_hosts_command(
    config: TrainConfig, plan: LaunchPlan, args: Sequence[str], *, address: str, job: str
) -> str:
    """What to run on every other host, now and again when one comes back."""
    command = ["torchrun", *_torchrun_args(config, plan, args, address=address, job=job)]
    return f"{_OWN_STORES}=1 {shlex.join(command)}"


def first_host_args(
    config: TrainConfig, plan: LaunchPlan, args: Sequence[str], *, address: str, job: str
) -> list[str]:
    """torchrun's arguments here: the same, and that this is the host where the others meet.

    torchrun numbers hosts in the order of their addresses as text. One in digits comes before the names that
    the others have, so rank 0 is here, and what it shows.
    """
    same = _torchrun_args(config, plan, args, address=address, job=job)
    conf = same.index("--rdzv-conf") + 1
    same[conf] = same[conf].replace("is_host=0", "is_host=1")
    return ["--local-addr", address, *same]


def _torchrun_args(
    config: TrainConfig, plan: LaunchPlan, args: Sequence[str], *, address: str, job: str
) -> list[str]:
    # Who hosts the rendezvous is said: torchrun fails to find out where a host cannot look up its own name.
    conf = f"is_host=0,join_timeout={config.launch.join_seconds}"
    return [
        *("--nnodes", str(plan.num_nodes), "--nproc-per-node", str(plan.ranks_per_node)),
        *("--max-restarts", str(config.max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{config.launch.port}"),
        *("--rdzv-id", job, "--rdzv-conf", conf),
        *("-m", "mics.cli", "train", *args),
    ]


def launch_hosts(config: TrainConfig, args: Sequence[str]) -> int:
    """Print the command for the other hosts and run this one's ranks. Returns the exit code."""
    plan = plan_hosts(config, num_gpus=torch.cuda.device_count())
    check_plan(config, plan)
    address, job = _own_address(config), f"{config.name}-{uuid4().hex[:8]}"
    _require_free(address, config.launch.port)
    with only_run(config, job=job, is_launcher=True):
        return _launch_first(config, plan, args, address=address, job=job)


def _launch_first(
    config: TrainConfig, plan: LaunchPlan, args: Sequence[str], *, address: str, job: str
) -> int:
    others = other_hosts_command(config, plan, args, address=address, job=job)
    which = "the other host" if plan.num_nodes == 2 else f"each of the other {plan.num_nodes - 1} hosts"
    print(f"Run this on {which}, in a folder with the same files:\n\n    {others}\n", flush=True)
    here = first_host_args(config, plan, args, address=address, job=job)
    os.environ[_OWN_STORES] = "1"
    with _Joining.watched(address, config.launch.port, job, num_hosts=plan.num_nodes) as joining:
        try:
            run(parse_args(here))
        except RendezvousTimeoutError:
            raise SettingsError(
                f"--nodes: expected {plan.num_nodes} hosts to join within {config.launch.join_seconds} s, "
                f"found {joining.num_joined}; run the command above on the others, check that they reach "
                f"{address}:{config.launch.port}, or raise --launch.join-seconds"
            ) from None
        except RendezvousConnectionError as error:
            raise SettingsError(
                f"launch.address: expected {address}:{config.launch.port} to be reachable, found {error}; "
                "set --launch.address or --launch.port"
            ) from None
        except ChildFailedError as error:
            return _failed(error)
        except SignalException as error:
            say(f"interrupted by {error.sigval.name}; the ranks of this host have been stopped")
            return 128 + int(error.sigval)
    return 0


def _failed(error: ChildFailedError) -> int:
    """Say which rank of this host failed first; its own error is above."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code == LEFT_CODE:
        say("a rank was asked to leave; the ranks of this host have saved and left")
    else:
        say(
            f"rank {rank} failed with exit code {failure.exitcode} and no restart is left; its error is above"
        )
    return code


def _own_address(config: TrainConfig) -> str:
    address = config.launch.address or reachable_address()
    if address is None:
        raise SettingsError(
            "launch.address: expected an address that the other hosts can reach, found loopback only; "
            "connect this host to a network or set --launch.address"
        )
    return address


def _require_free(address: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise SettingsError(
                f"launch.address, launch.port: expected an address of this host and a free port, found "
                f"{address}:{port} ({error.strerror}); set --launch.address or --launch.port"
            ) from None


class _Joining:
    """Says how many hosts have joined, whenever that changes while torchrun waits for them."""

    def __init__(self, *, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._round = -1
        self._complete = False
        self._ended = threading.Event()
        self.num_joined = 0
        """The most that have joined in this round: those that wait in vain leave it again."""

    @classmethod
    @contextmanager
    def watched(cls, address: str, port: int, job: str, *, num_hosts: int) -> Iterator[_Joining]:
        joining = cls(num_hosts=num_hosts)
        threading.Thread(
            target=joining._watch, args=(address, port, job), name="mics-joining", daemon=True
        ).start()
        try:
            yield joining
        finally:
            joining._ended.set()

    def _watch(self, address: str, port: int, job: str) -> None:
        try:
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
            backend = C10dRendezvousBackend(store, job)
            while not self._ended.wait(_POLL_SECONDS):
                found = backend.get_state()
                if found is not None:
                    state = pickle.loads(found[0])  # torch's own: its agents read it the same way
                    self.note(
                        round_number=state.round, num_joined=len(state.participants), complete=state.complete
                    )
        except RuntimeError:  # torchrun has no store, and says so, or is gone
            return

    def note(self, *, round_number: int, num_joined: int, complete: bool) -> None:
        """One look at the rendezvous."""
        if complete:
            # A round may begin and end between two looks.
            if not self._complete or round_number != self._round:
                say(f"all {self._num_hosts} hosts have joined")
            self._round, self._complete = round_number, True
            return
        if round_number != self._round or self._complete:
            self._round, self._complete, self.num_joined = round_number, False, 0
        if num_joined > self.num_joined:
            self.num_joined = num_joined
            say(f"{num_joined} of {self._num_hosts} hosts have joined")
