"""benchmarks/one_gpu.py: collectives through shared memory, here a host's."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks import one_gpu

_SIZE = 3


def _check(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, _SIZE, rank == 0)
    name, timeout = one_gpu.register(), timedelta(seconds=30)
    dist.init_process_group(name, store=store, rank=rank, world_size=_SIZE, timeout=timeout)
    pair = dist.new_group([0, 2])
    own = torch.arange(6.0) + 10 * rank
    every = torch.stack([torch.arange(6.0) + 10 * other for other in range(_SIZE)])
    for _ in range(3):  # halves are used again
        found = torch.empty(3 * 6)
        dist.all_gather_into_tensor(found, own)
        assert torch.equal(found, every.view(-1))
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, own)
        assert torch.equal(part, every.sum(0).view(3, 2)[rank])
        summed, largest = own.clone(), own.clone()
        dist.all_reduce(summed)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(summed, every.sum(0)) and torch.equal(largest, every.amax(0))
        swapped = torch.empty(6)
        dist.all_to_all_single(swapped, own)
        assert torch.equal(swapped, every.view(3, 3, 2)[:, rank].reshape(-1))
        sent = [own[:0] if other == rank else own for other in range(_SIZE)]
        parts = [torch.full((each.numel(),), -1.0) for each in sent]
        dist.all_to_all(parts, sent)
        assert all(torch.equal(parts[other], every[other]) for other in range(_SIZE) if other != rank)
        told = own.clone()
        dist.broadcast(told, src=1)
        assert torch.equal(told, every[1])
        objects: list[Any] = [None] * _SIZE
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        if rank != 1:
            both = own.clone()
            dist.all_reduce(both, group=pair)
            assert torch.equal(both, every[0] + every[2])
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full
def test_collectives() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_check, (port,), nprocs=_SIZE, start_method="spawn")
