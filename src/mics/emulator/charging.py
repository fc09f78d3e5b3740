"""A process group that takes as long as one of an emulated cluster: how its collectives are charged.

Its collectives say what they move and how the data comes about (``group.py``). Here they are given a price,
alone or as one of a coalesced region, and run on the host or on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics.cost.clusters import Cluster
from mics.cost.collectives import FREE, Cost, Kind, Span
from mics.emulator.fabric import EmulatedCall, Fabric
from mics.utils.emulated_backend import NAME
from mics.utils.python_group import PythonGroup


class ChargedGroup(PythonGroup):
    """How a call is charged."""

    def __init__(self, fabric: Fabric, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(NAME, rank, len(ranks), timeout)
        self.fabric = fabric
        self._ranks = list(ranks)
        self._span = Span.of(fabric.cluster, ranks)
        self._stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        # Asynchronous collectives run on these, in order.
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._gathering: list[_Pending] | None = None  # calls of a coalesced region

    @property
    def imagined_cluster(self) -> Cluster:
        """What ``World.imagined`` finds: this process plays all of it."""
        return self.fabric.cluster

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def shutdown(self) -> None:
        """Let the thread end; nothing else is open."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    # -- charging ---------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._gathering = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One collective for all that were called since the start."""
        calls, self._gathering = self._gathering or [], None
        if not calls:
            nothing: dist.Work = self.barrier()
            return nothing

        def write() -> None:
            for call in calls:
                call.write()

        outputs = [tensor for call in calls for tensor in call.outputs]
        inputs = [tensor for call in calls for tensor in call.inputs]
        largest = max(calls, key=lambda call: call.nbytes)
        nbytes = sum(call.nbytes for call in calls)
        return self._issue(largest.kind, nbytes, self._price_together(calls), write, outputs, inputs, True)

    def _price_together(self, calls: Sequence[_Pending]) -> Cost:
        """Calls of one kind are one message. Sends and receives use both directions of a link at once."""
        price, both_ways = FREE, [FREE]
        for kind, span in dict.fromkeys((call.kind, call.span) for call in calls):
            nbytes = sum(call.nbytes for call in calls if (call.kind, call.span) == (kind, span))
            found = self.fabric.price(kind, span, nbytes)
            if kind in (Kind.SEND, Kind.RECV):
                both_ways.append(found)
            else:
                price = price + found
        return price + max(both_ways, key=lambda found: found.seconds)

    def _run(
        self,
        kind: Kind,
        size: Tensor | Sequence[Tensor] | int,
        write: Callable[[], None],
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        span: Span | None = None,
    ) -> dist.Work:
        """Charge ``kind`` over ``size`` (bytes, or tensors that have them); ``write`` brings the data."""
        nbytes = size if isinstance(size, int) else nbytes_of([size] if isinstance(size, Tensor) else size)
        span = span or self._span
        if self._gathering is not None:
            self._gathering.append(_Pending(kind, nbytes, span, write, outputs, inputs))
            return _Later()
        price = self.fabric.price(kind, span, nbytes)
        return self._issue(kind, nbytes, price, write, outputs, inputs, getattr(opts, "asyncOp", True))

    def _issue(
        self,
        kind: Kind,
        nbytes: int,
        price: Cost,
        write: Callable[[], None],
        outputs: list[Tensor],
        inputs: list[Tensor],
        asynchronous: bool,
    ) -> dist.Work:
        call = EmulatedCall(
            kind=kind, group=self._desc, span=self._span, nbytes=nbytes, cost=price, stride=self._stride
        )
        device = next(tensor.device for tensor in (*outputs, *inputs))
        inference = torch.is_inference_mode_enabled()

        def write_data() -> None:  # perhaps in a thread, where torch's modes are the default ones
            with torch.inference_mode(inference), torch.no_grad():
                write()

        if device.type != "cuda":
            thread = self._side_thread() if asynchronous else None
            return self.fabric.on_host(call, write_data, outputs, thread)
        side = self._side_stream(device) if asynchronous else None
        return self.fabric.on_device(call, write_data, outputs, inputs, device, side)

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _side_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mics-emulated")
        return self._thread


@dataclass(frozen=True)
class _Pending:
    """A call inside a coalesced region."""

    kind: Kind
    nbytes: int
    span: Span
    write: Callable[[], None]
    outputs: list[Tensor]
    inputs: list[Tensor]


class _Later(dist.Work):
    """Stands for a call inside a coalesced region: the region's own work is the one to wait for."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: object = None) -> bool:
        return True


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
