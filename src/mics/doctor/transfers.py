"""Bandwidth between nodes, pair by pair, over the backend that the training uses.

In each round nodes form disjoint pairs, and every rank of a node sends to the rank of its own number on the
other: first one way, then the other. Few nodes meet all others. Many meet a few, in as many rounds.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mics.doctor.facts import NetworkResults, Transfer
from mics.train.ranks import Rank, share_gpu

MAX_ROUNDS: Final = 7
_REPEATS: Final = 2
_PROBE_NBYTES: Final = 512 << 10
_MIN_NBYTES, _MAX_NBYTES = 64 << 10, 256 << 20
_USUAL_SECONDS: Final = 0.15
_SLOWEST_SECONDS: Final = 0.6
_LAST_SECONDS: Final = 4.0  # for a last round, and to leave


def rounds_of_pairs(num_nodes: int, limit: int = MAX_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, no pair twice; all pairs where ``limit`` allows it."""
    seats = list(range(num_nodes)) + ([-1] if num_nodes % 2 else [])  # who meets -1 pauses
    rounds = []
    for _ in range(min(len(seats) - 1, limit)):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]  # one stays, the others move on
    return rounds


def payload_nbytes(rates: Sequence[float]) -> int:
    """So much that most pairs take a moment, and the slowest not much longer."""
    known = [rate for rate in rates if rate > 0]
    if not known:
        return _MIN_NBYTES
    wanted = min(_USUAL_SECONDS * statistics.median(known), _SLOWEST_SECONDS * min(known))
    return int(min(max(wanted, _MIN_NBYTES), _MAX_NBYTES))


def network_in(log: str) -> str:
    """What NCCL said it uses: ``Using network AWS Libfabric``."""
    found = re.findall(r"Using network (.+)", log)
    return found[-1].strip() if found else ""


@dataclass
class Network:
    """The ranks that measure, in the order of the process group, and this one among them."""

    me: Rank
    nodes: Sequence[Sequence[int]]
    """Ranks of each node that take part."""
    store: PrefixStore
    seconds: float
    group: dist.ProcessGroup | None = None
    stage: str = "start"
    deadline: float = math.inf
    _log: Path | None = field(default=None, repr=False)

    @property
    def members(self) -> list[int]:
        return sorted(rank for ranks in self.nodes for rank in ranks)

    def measure(self) -> NetworkResults:
        """Join, check the sum of an all-reduce, then send. An error keeps what was measured before it."""
        sent: list[Transfer] = []
        self.deadline = time.monotonic() + self.seconds
        try:
            self._join()
            self._check_sum()
            self._send_all(sent)
            self._leave()
        except (RuntimeError, ValueError) as error:
            return NetworkResults(error=f"{self.stage}: {_first_line(error)}", sent=sent)
        return NetworkResults(sent=sent, nccl_network=self._nccl_network())

    def _join(self) -> None:
        timeout = timedelta(seconds=self.seconds)
        self.stage = "gloo: joining"
        on_gpu = self.me.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.me.device)  # each thread has its own
            self._log = set_nccl_log(os.environ)
            # A collective that is stuck raises in the thread that waits for it.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            if self.me.ranks_per_gpu > 1:
                share_gpu(self.me.rank, os.environ)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", self.store),
            rank=self.members.index(self.me.rank),
            world_size=len(self.members),
            timeout=timeout,
        )
        self._sum(torch.device("cpu"))
        if on_gpu:
            self.stage = "NCCL: joining"
            group = dist.new_group(backend="nccl", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            self.group = group

    def _sum(self, device: torch.device) -> float:
        value = torch.ones(1, dtype=torch.float32, device=device)
        dist.all_reduce(value, group=self.group)
        return value.item()

    def _check_sum(self) -> None:
        self.stage = f"{self.backend}: all-reduce"
        found = self._sum(self.me.device)
        if found != len(self.members):
            raise RuntimeError(f"expected the sum {len(self.members)}, found {found}")

    @property
    def backend(self) -> str:
        return "NCCL" if self.me.device.type == "cuda" else "gloo"

    def _send_all(self, sent: list[Transfer]) -> None:
        """A first round to learn how much to send, then all rounds."""
        rounds = rounds_of_pairs(len(self.nodes))
        probes: list[Transfer] = []
        if rounds:
            self._send_round(rounds[0], _PROBE_NBYTES, probes)
        else:
            self._ring(_PROBE_NBYTES, probes)
        rates = torch.zeros(len(self.members), dtype=torch.float64, device="cpu")
        rates[self.members.index(self.me.rank)] = max(
            (each.nbytes / each.seconds for each in probes), default=0
        )
        dist.all_reduce(rates)
        nbytes = payload_nbytes(rates.tolist())
        for pairs in rounds:
            is_late = time.monotonic() > self.deadline - _LAST_SECONDS
            late = torch.tensor([is_late], dtype=torch.float32, device="cpu")
            dist.all_reduce(late)  # all stop together
            if late.item():
                break
            self._send_round(pairs, nbytes, sent)
        if self.backend == "NCCL":
            self._ring(nbytes, sent)

    def _send_round(self, pairs: Sequence[tuple[int, int]], nbytes: int, sent: list[Transfer]) -> None:
        """Each pair one way, then the other."""
        for one, other in (*pairs, *((b, a) for a, b in pairs)):
            senders, receivers = self.nodes[one], self.nodes[other]
            for source, target in zip(senders, receivers, strict=False):
                if self.me.rank in (source, target):
                    self.stage = f"{self.backend}: rank {source} to rank {target}"
                    seconds = min(self._one_way(source, target, nbytes) for _ in range(_REPEATS))
                    if self.me.rank == source:
                        sent.append(Transfer(source=source, target=target, nbytes=nbytes, seconds=seconds))

    def _one_way(self, source: int, target: int, nbytes: int) -> float:
        """Seconds from the first byte until the target says that it has all."""
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self.me.device)
        word = torch.empty(1, dtype=torch.uint8, device=self.me.device)
        if self.me.rank == target:
            self._one(dist.isend, word, source)
            self._one(dist.irecv, payload, source)
            self._one(dist.isend, word, source)
            return 0.0
        self._one(dist.irecv, word, target)
        began = time.perf_counter()
        self._one(dist.isend, payload, target)
        self._one(dist.irecv, word, target)
        return time.perf_counter() - began

    def _one(self, kind: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        self._all([dist.P2POp(kind, tensor, self.members.index(peer), group=self.group)])

    def _all(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if self.me.device.type == "cuda":
            torch.cuda.synchronize(self.me.device)

    def _ring(self, nbytes: int, sent: list[Transfer]) -> None:
        """Each rank to the next of its node, all at once."""
        ranks = next(ranks for ranks in self.nodes if self.me.rank in ranks)
        if len(ranks) < 2:
            return
        self.stage = f"{self.backend}: inside the node"
        at = ranks.index(self.me.rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
        out, into = (torch.empty(nbytes, dtype=torch.uint8, device=self.me.device) for _ in range(2))
        seconds = []
        for _ in range(1 + _REPEATS):  # the first makes connections
            began = time.perf_counter()
            self._all(
                [
                    dist.P2POp(dist.isend, out, self.members.index(after), group=self.group),
                    dist.P2POp(dist.irecv, into, self.members.index(before), group=self.group),
                ]
            )
            seconds.append(time.perf_counter() - began)
        sent.append(Transfer(source=self.me.rank, target=after, nbytes=nbytes, seconds=min(seconds[1:])))

    def _leave(self) -> None:
        self.stage = "leaving"
        dist.barrier()
        dist.destroy_process_group()

    def _nccl_network(self) -> str:
        if self._log is None:
            return ""
        try:
            return network_in("\n".join(file.read_text() for file in self._log.parent.glob("nccl.*")))
        except OSError:
            return ""
        finally:
            shutil.rmtree(self._log.parent, ignore_errors=True)


def set_nccl_log(environ: MutableMapping[str, str]) -> Path | None:
    """Have NCCL write what it chooses to a file, unless the user has it write elsewhere."""
    if "NCCL_DEBUG" in environ or "NCCL_DEBUG_FILE" in environ:
        return None
    file = Path(tempfile.mkdtemp(prefix="mics-doctor-")) / "nccl.%p"
    environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(file))
    return file


def able_nodes(nodes: Mapping[str, Sequence[int]], able: Sequence[int]) -> list[list[int]]:
    """Ranks of each node that can take part; nodes without any are left out."""
    found = [[rank for rank in ranks if rank in set(able)] for ranks in nodes.values()]
    return [ranks for ranks in found if ranks]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
