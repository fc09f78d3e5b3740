"""A process becomes a rank: which device is its own, and how it joins the others."""

import ctypes
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mics.comm import join_world
from mics.errors import SettingsError
from mics.train.addresses import set_gloo_interface
from mics.train.config import LaunchSettings

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Who this process is."""

    rank: int
    num_ranks: int
    local_rank: int
    ranks_per_node: int
    ranks_per_gpu: int
    device: torch.device


def read_rank(settings: LaunchSettings, *, environ: Mapping[str, str], num_gpus: int) -> Rank:
    """Who the launcher's variables say this process is, and the device that follows from it."""
    try:
        rank, num_ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
        ranks_per_node = int(environ.get("LOCAL_WORLD_SIZE", num_ranks))
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"expected whole numbers in the launcher's variables RANK and WORLD_SIZE, found {error}; "
            "start with torchrun, or unset RANK so that mics starts its own ranks"
        ) from None
    if settings.device == "cuda" and num_gpus == 0:
        raise SettingsError("launch.device: expected a GPU for 'cuda', found none; use 'cpu' or 'auto'")
    ranks_per_gpu = 1
    device = torch.device("cpu")
    if settings.device != "cpu" and num_gpus > 0:
        ranks_per_gpu = settings.ranks_per_gpu or math.ceil(ranks_per_node / num_gpus)
        # By global rank, not by local rank: nodes played on one machine then take different GPUs. Ranks of a
        # real node are consecutive, so theirs stay different too.
        device = torch.device("cuda", rank // ranks_per_gpu % num_gpus)
    return Rank(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        ranks_per_node=ranks_per_node,
        ranks_per_gpu=ranks_per_gpu,
        device=device,
    )


def share_gpu(rank: int, environ: MutableMapping[str, str]) -> None:
    """Let NCCL accept several ranks on one GPU; to be called before NCCL starts.

    It refuses a device it sees twice on one host, so each rank claims a host of its own, and they talk over
    loopback sockets.
    """
    environ["NCCL_HOSTID"] = f"rank{rank}"
    environ["NCCL_P2P_DISABLE"] = "1"
    environ["NCCL_NET"] = "Socket"
    environ["NCCL_SOCKET_IFNAME"] = "lo"


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """Have the kernel end this process when torchrun's agent is gone, even one that is stopped.

    A rank that outlives its agent holds its GPU and its port, and nobody would ever end it.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        end_with_parent(signal.SIGKILL)


def end_with_parent(signum: int) -> None:
    """Have the kernel send this process a signal when the one that started it is gone."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signum)


def _store_of_attempt(environ: Mapping[str, str], timeout: timedelta) -> dict[str, Any]:
    """Where to meet the other ranks of this attempt; nothing where torch's own way will do.

    With its static rendezvous torchrun keeps one store over all restarts, and torch looks up in it where the
    ranks of the attempt before were. Elsewhere the store is new, but agents may count differently. So all use
    the highest count: in an old store the others' counts are older than one's own, or the same.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return {}
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store.set(f"mics-attempt/{rank}", environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    attempt = max(int(store.get(f"mics-attempt/{other}")) for other in range(num_ranks))
    return {
        "store": PrefixStore(f"mics-attempt-{attempt}", store),
        "rank": rank,
        "world_size": num_ranks,
    }


@contextmanager
def joined(settings: LaunchSettings) -> Iterator[Rank]:
    """Join the other ranks, and leave them in order.

    After an error the process just ends: leaving would wait for ranks that wait for this one.
    """
    die_with_launcher(os.environ)
    set_gloo_interface(os.environ)
    me = read_rank(settings, environ=os.environ, num_gpus=torch.cuda.device_count())
    on_gpu = me.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(me.device)
        if me.ranks_per_gpu > 1:
            share_gpu(me.rank, os.environ)
    timeout = timedelta(seconds=settings.timeout_seconds)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timeout,
        device_id=me.device if on_gpu else None,
        **_store_of_attempt(os.environ, timeout),
    )
    yield me
    world = join_world()
    if world.liveness is not None:
        world.liveness.close()  # while the store is there
    with world.naming("barrier", "the end"):
        dist.barrier()
    dist.destroy_process_group()
