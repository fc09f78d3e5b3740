"""Ranks that share a GPU, without sockets: torch's collectives through memory that all of them see.

NCCL lets ranks share a GPU only as if each were a host of its own, over sockets. Here each rank copies what
it sends into memory that the others have mapped, waits for all of them, and reads. The host waits in every
collective, so nothing overlaps: this is for studies of accuracy, not of speed.

    dist.init_process_group(one_gpu.register())
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mics.utils.python_group import PythonGroup

NAME: Final = "one_gpu"
_CAPACITY: Final = {"cuda": 256 << 20, "cpu": 1 << 20}  # bytes that a rank sends in one collective
_ALIGNMENT: Final = 512


def register() -> str:
    """Let torch know of the backend, whose name this is."""
    if not hasattr(dist.Backend, NAME.upper()):
        devices = ["cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    return NAME


def _create(options: Any, backend_options: Any) -> OneGpuGroup:
    return OneGpuGroup(options.store, options.group_rank, options.group_size, options.timeout)


class _Done(dist.Work):
    """Of a collective that is over."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


Opens = partial[Tensor]


def _on_host(nbytes: int) -> tuple[Tensor, Opens]:
    """Zeros in a file without a disk, and how others open them."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        file.truncate(nbytes)
    opens = partial(torch.from_file, file.name, shared=True, size=nbytes, dtype=torch.uint8)
    return opens(), opens


def _on_gpu(nbytes: int) -> tuple[Tensor, Opens]:
    """Memory of a GPU, and how others open it."""
    own = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rebuild, arguments = reduce_tensor(own)
    return own, partial(rebuild, *arguments)


class Memory:
    """Two halves of each member, used in turn, that all members see; and how far each of them is."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self._rank, self._device, self._timeout = rank, device, timeout
        self._capacity = _CAPACITY[device.type]
        self._turn = 0
        own_turn, opens_turn = _on_host(8)
        own, opens = (_on_gpu if device.type == "cuda" else _on_host)(2 * self._capacity)
        store.set(f"memory of {rank}", pickle.dumps((opens_turn, opens)))
        self._turns, self._members = [], []
        for member in range(size):
            turn, memory = own_turn, own
            if member != rank:
                turn, memory = (each() for each in pickle.loads(store.get(f"memory of {member}")))
            self._turns.append(turn.view(torch.int64).numpy())
            self._members.append(memory.view(2, -1))
        self._meet()
        for each in (opens_turn, opens):  # everybody has them open
            if each.func is torch.from_file:
                Path(each.args[0]).unlink()

    def exchange(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each member has sent, which is the same number of tensors of one size. To be read at once."""
        half = self._turn % 2
        stride = max(math.ceil(each.nbytes / _ALIGNMENT) * _ALIGNMENT for each in sent)
        if stride * len(sent) > self._capacity:
            raise RuntimeError(f"expected at most {self._capacity} bytes, found {len(sent)} times {stride}")
        largest = max(sent, key=Tensor.numel)

        def views(member: int) -> list[Tensor]:
            slots = self._members[member][half, : stride * len(sent)].view(len(sent), stride)
            return [slot[: largest.nbytes].view(largest.dtype) for slot in slots]

        for view, each in zip(views(self._rank), sent, strict=True):
            view[: each.numel()].copy_(each.reshape(-1))
        self.settle()
        self._meet()
        return [views(member) for member in range(len(self._members))]

    def settle(self) -> None:
        """Wait for copies on this stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _meet(self) -> None:
        """Wait until all members have come so far. Then nobody reads any more what was sent before."""
        self._turn += 1
        self._turns[self._rank][0] = self._turn
        until = time.monotonic() + self._timeout.total_seconds()
        while min(turn[0] for turn in self._turns) < self._turn:
            if time.monotonic() > until:
                where = [int(turn[0]) for turn in self._turns]
                raise RuntimeError(f"waited {self._timeout} for all to come to {self._turn}, found {where}")
            os.sched_yield()


class OneGpuGroup(PythonGroup):
    """What torch asks of a group, each collective by one exchange."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(NAME, rank, size, timeout)
        self._store, self._timeout = store, timeout
        self._memory: Memory | None = None
        self.supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]

    # -- collectives --------------------------------------------------------------------------------

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        for part, (sent,) in zip(output.view(self.size(), -1), self._exchange([input]), strict=True):
            part.copy_(sent)
        return self._over()

    @torch.no_grad()
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=True):
            for part, (sent,) in zip(parts, self._exchange([own]), strict=True):
                part.view(-1).copy_(sent)
        return self._over()

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        sent = [each.view(self.size(), -1)[self.rank()] for (each,) in self._exchange([input])]
        output.view(-1).copy_(self._reduced(sent, opts))
        return self._over()

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.view(-1).copy_(self._reduced([each for (each,) in self._exchange([tensor])], opts))
        return self._over()

    @torch.no_grad()
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.view(-1).copy_(self._exchange([tensor])[opts.rootRank][0])
        return self._over()

    @torch.no_grad()
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        if output_splits or input_splits:
            raise NotImplementedError("all_to_all_single: expected equal parts, found sizes")
        sent = [each.view(self.size(), -1)[self.rank()] for (each,) in self._exchange([input])]
        for part, each in zip(output.view(self.size(), -1), sent, strict=True):
            part.copy_(each)
        return self._over()

    @torch.no_grad()
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, sent in zip(outputs, self._exchange(inputs), strict=True):
            output.view(-1).copy_(sent[self.rank()][: output.numel()])
        return self._over()

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own, opts)
        return _Done()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1, device=self._device_types[0])])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce
    alltoall_base = all_to_all_single

    def _exchange(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        if self._memory is None:
            self._memory = Memory(self._store, self.rank(), self.size(), sent[0].device, self._timeout)
        return self._memory.exchange(sent)

    def _over(self) -> dist.Work:
        assert self._memory is not None
        self._memory.settle()
        return _Done()

    def _reduced(self, sent: Sequence[Tensor], opts: Any) -> Tensor:
        stacked = torch.stack(list(sent))
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG:
            total = stacked.sum(0, dtype=stacked.dtype)
            return total / self.size() if op == dist.ReduceOp.AVG else total
        if op == dist.ReduceOp.MAX:
            return stacked.amax(0)
        raise NotImplementedError(f"{op}: expected a sum, an average or a maximum")
