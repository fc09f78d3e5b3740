"""The cluster that this process is rank 0 of: its links, and the log of what used them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mics.cost.clusters import Cluster
from mics.cost.collectives import FREE, Cost, Kind, Span, cost
from mics.emulator.device_links import CAPACITY, DeviceLinks
from mics.emulator.host_links import HostLinks
from mics.emulator.log import Collective, Times

# What the imagined ranks hold: something like what this one does, just the same, or nothing.
Imagined = Literal["different", "copies", "zeros"]


@dataclass(frozen=True, kw_only=True)
class EmulatedCall:
    """One collective as it is issued."""

    kind: Kind
    group: str
    span: Span
    nbytes: int
    cost: Cost
    stride: int = 1


class Fabric:
    """Takes calls, charges their time, and remembers them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free = False  # collectives take no time
        self.imagined: Imagined = "different"
        self.dilation = 1.0  # seconds of the cluster in one of this machine
        self._host = HostLinks()
        self._device: DeviceLinks | None = None
        self._host_log: deque[tuple[EmulatedCall, Times]] = deque(maxlen=CAPACITY)
        self._device_log: deque[EmulatedCall] = deque(maxlen=CAPACITY)
        self._issuing = threading.Lock()  # autograd's threads issue collectives too
        self._in_flight: deque[_DeviceWork] = deque()  # on side streams, perhaps never waited for
        self._blocked: deque[tuple[float, float]] = deque(
            maxlen=CAPACITY
        )  # when the host waited for a collective of the CPU

    def price(self, kind: Kind, span: Span, nbytes: int) -> Cost:
        return FREE if self.free else cost(self.cluster, kind, span, nbytes).divided(self.dilation)

    def on_host(
        self, call: EmulatedCall, write: Callable[[], None], outputs: list[Tensor], side: Executor | None
    ) -> dist.Work:
        """Run a collective on CPU tensors: here, or by the thread ``side`` in the order of issue."""
        times = self._host.reserve(call.cost)
        self._host_log.append((call, times))
        if side is None:
            write()
            return _HostWork(self, times.end, outputs, None)
        return _HostWork(self, times.end, outputs, side.submit(write))

    def on_device(
        self,
        call: EmulatedCall,
        write: Callable[[], None],
        outputs: list[Tensor],
        inputs: list[Tensor],
        device: torch.device,
        side: torch.cuda.Stream | None,
    ) -> dist.Work:
        """Run a collective on CUDA tensors: on the current stream, or on ``side`` after what is there now."""
        links = self._device_links(device)
        current = torch.cuda.current_stream(device)
        stream = side or current
        if side is not None:
            side.wait_stream(current)
        with torch.cuda.stream(stream):
            with self._issuing:
                number = links.reserve(call.cost, stream.cuda_stream)
                self._device_log.append(call)
            write()
            links.wait(number, stream.cuda_stream)
        if side is None:
            return _DeviceWork(stream, None, outputs)
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft().forget()
        work = _DeviceWork(stream, side.record_event(), outputs, inputs)
        self._in_flight.append(work)
        return work

    def clear(self) -> None:
        """Forget what has happened so far."""
        self._host_log.clear()
        self._blocked.clear()
        self._device_log.clear()

    def collectives(self) -> list[Collective]:
        """What has happened since the last ``clear``: on the device if anything did, else on the host."""
        if self._device_log:
            assert self._device is not None
            pairs = list(zip(self._device_log, self._device.times(len(self._device_log)), strict=True))
        else:
            pairs = list(self._host_log)
        return [
            Collective(
                kind=call.kind,
                group=call.group,
                group_size=call.span.size,
                stride=call.stride,
                nbytes=call.nbytes,
                cost=call.cost,
                times=times,
            )
            for call, times in pairs
        ]

    def blocked(self) -> list[tuple[float, float]]:
        """When the thread that computes stood still for a collective on CPU tensors."""
        return list(self._blocked)

    def wait_on_host(self, end: float) -> None:
        began = time.perf_counter()
        if began < end:
            self._host.wait_until(end)
            if (
                threading.current_thread() is threading.main_thread()
            ):  # a lane's thread waits beside the computation
                self._blocked.append((began, time.perf_counter()))

    def _device_links(self, device: torch.device) -> DeviceLinks:
        if self._device is None:
            self._device = DeviceLinks(device)
        return self._device


class _HostWork(dist.Work):
    """A collective on the CPU: over when the clock says so."""

    def __init__(
        self, fabric: Fabric, end: float, outputs: list[Tensor], written: Future[None] | None
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self._end = end
        self._outputs = outputs
        self._written = written

    def wait(self, timeout: object = None) -> bool:
        if self._written is not None:
            self._written.result()
        self._fabric.wait_on_host(self._end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end and (self._written is None or self._written.done())

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def complete() -> None:
            try:
                if self._written is not None:
                    self._written.result()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(self._outputs)

        timer = threading.Timer(max(0.0, self._end - time.perf_counter()), complete)
        timer.daemon = True
        timer.start()
        return future


class _DeviceWork(dist.Work):
    """A collective on the GPU. Waiting for it makes the current stream wait, not the host."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        done: torch.cuda.Event | None,
        outputs: list[Tensor],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._stream = stream
        self._done = done  # None: it is on the stream that issued it
        self._outputs = outputs
        self._inputs = inputs

    def wait(self, timeout: object = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
        self.forget()
        return True

    def forget(self) -> None:
        """Let go of the tensors: whoever waited keeps the memory in order from here on, as under NCCL."""
        self._outputs, self._inputs = [], ()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future
