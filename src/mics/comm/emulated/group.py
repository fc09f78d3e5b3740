"""A process group whose other members are imagined.

Each of them is taken to hold much the same as this rank: a gather repeats this rank's part, times a factor
near plus or minus one where that makes sense; a sum multiplies it. What comes from one particular other rank
is a copy of this rank's own where there is one, else zeros.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp

from mics.comm.emulated.fabric import Call, Fabric
from mics.cost import FREE, Cost, Kind, Span

NAME = "emulated"
_FACTORS = (-1.0625, 0.9375, -0.96875, 1.03125)  # of one set of imagined members to the next

_ProcessGroup: Any = dist.ProcessGroup  # its annotations list every form of every call


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """The collectives of ``torch.distributed`` over an emulated cluster.

    torch 2.13 renamed the single-tensor forms; both names are here.
    """

    def __init__(self, fabric: Fabric, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self.fabric = fabric
        self._ranks = list(ranks)
        self._span = Span.of(fabric.cluster, ranks)
        # Asynchronous collectives run on these, in order.
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._gathering: list[_Pending] | None = None  # calls of a coalesced region
        self._sent: dict[tuple[torch.dtype, int], Tensor] = {}  # small host tensors: pickled objects
        self.options = SimpleNamespace(_timeout=timeout)
        self.supports_splitting = False
        self.supports_coalescing = True
        self.bound_device_id = None

    # -- what torch asks of a group ---------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> EmulatedGroup:
        return self

    def shutdown(self) -> None:
        """Let the thread end; nothing else is open."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def abort(self) -> None:
        """Nothing is open."""

    # -- gathers ----------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        _check("all-gather", output, input, self.size())
        return self._run(
            Kind.ALL_GATHER, output, lambda: self._spread(output, input), [output], [input], opts
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._spread(output, own)

        return self._run(Kind.ALL_GATHER, outputs, write, outputs, inputs, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(_like(own, part))

        flat = [part for parts in outputs for part in parts]
        return self._run(Kind.ALL_GATHER, flat, write, flat, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        # Here each inner list is one rank's, not one tensor's.
        def write() -> None:
            for parts in outputs:
                for part, own in zip(parts, inputs, strict=True):
                    part.copy_(own)

        flat = [part for parts in outputs for part in parts]
        return self._run(Kind.ALL_GATHER, flat, write, flat, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            for parts, own in zip(outputs, inputs, strict=False):
                for part in parts:
                    part.copy_(own)

        flat = [part for parts in outputs for part in parts]
        nbytes = self.size() * _nbytes(inputs)
        return self._run(Kind.GATHER, nbytes, write, flat, inputs, opts)

    # -- reductions -------------------------------------------------------------------------------

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        _check("reduce-scatter", input, output, self.size())

        def write() -> None:
            _reduce(output, _own_part(input, output, self.rank()), self.size(), opts)

        return self._run(Kind.REDUCE_SCATTER, input, write, [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                _reduce(output, _own_part(whole, output, self.rank()), self.size(), opts)

        return self._run(Kind.REDUCE_SCATTER, inputs, write, outputs, inputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                _reduce(output, parts[self.rank()], self.size(), opts)

        flat = [part for parts in inputs for part in parts]
        return self._run(Kind.REDUCE_SCATTER, flat, write, outputs, flat, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            for tensor in tensors:
                _reduce(tensor, tensor, self.size(), opts)

        return self._run(Kind.ALL_REDUCE, tensors, write, tensors, [], opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            if opts is None or opts.rootRank == self.rank():
                for tensor in tensors:
                    _reduce(tensor, tensor, self.size(), opts)

        return self._run(Kind.REDUCE, tensors, write, tensors, [], opts)

    # -- the rest ---------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            if opts is not None and opts.rootRank != self.rank():
                for tensor in tensors:
                    _pretend_object(tensor)

        return self._run(Kind.BROADCAST, tensors, write, tensors, [], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        def write() -> None:
            if not inputs:  # another rank is the root
                for output in outputs:
                    _pretend_object(output.zero_())
            for output, parts in zip(outputs, inputs, strict=False):
                output.copy_(parts[self.rank()])

        nbytes = self.size() * _nbytes(outputs)
        return self._run(Kind.SCATTER, nbytes, write, outputs, [], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        def write() -> None:
            rows = input_splits or [input.shape[0] // self.size()] * self.size()
            first = sum(rows[: self.rank()])
            _fill(output, input[first : first + rows[self.rank()]])

        return self._run(Kind.ALL_TO_ALL, input, write, [output], [input], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            own = inputs[self.rank()]
            sent = own if own.numel() else max(inputs, key=Tensor.numel)  # nothing to itself: it has that
            if all(output.numel() in (0, sent.numel()) for output in outputs):
                self._write_each_like([output for output in outputs if output.numel()], sent)
            else:
                for output in outputs:
                    _fill(output, sent)

        nbytes = self.size() * max(_nbytes([tensor]) for tensor in inputs)
        return self._run(Kind.ALL_TO_ALL, nbytes, write, outputs, inputs, opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._sent[tensor.dtype, tensor.numel()] = tensor.detach().clone()
        return self._run(Kind.SEND, tensors, _nothing, tensors, [], None, self._pair(dst))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        def write() -> None:
            for tensor in tensors:
                sent = self._sent.get((tensor.dtype, tensor.numel()))
                if sent is None:
                    _pretend_object(tensor.zero_())
                else:
                    tensor.copy_(sent.view_as(tensor))

        return self._run(Kind.RECV, tensors, write, tensors, [], None, self._pair(src))

    def _pair(self, peer: int) -> Span:
        return Span.of(self.fabric.cluster, {self._ranks[self.rank()], self._ranks[peer]})

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self.recv(tensors, (self.rank() + 1) % self.size(), tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        token = torch.zeros(1, dtype=torch.float32, device="cpu")
        return self._run(Kind.BARRIER, 0, _nothing, [token], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- running ----------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._gathering = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One collective for all that were called since the start."""
        calls, self._gathering = self._gathering or [], None
        if not calls:
            return self.barrier()

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
        nbytes = size if isinstance(size, int) else _nbytes([size] if isinstance(size, Tensor) else size)
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
        call = Call(kind=kind, group=self._desc, span=self._span, nbytes=nbytes, cost=price)
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

    def _spread(self, output: Tensor, own: Tensor) -> None:
        """``output`` = ``own`` at this rank's place, and at the others' places something like it."""
        if own.numel() == 0:
            return
        rows, part = output.view(self.size(), -1), own.reshape(-1)
        here = self.rank()
        if rows[here].data_ptr() != part.data_ptr():
            rows[here].copy_(part)
        if self.fabric.imagined == "zeros":
            rows[:here].zero_()
            rows[here + 1 :].zero_()
            return
        # Twice as many rows with every kernel: few, long and contiguous, so that they take little of the GPU
        # from the computation. The rows after this rank's own, then those before it.
        done, number = 1, 0
        while done < self.size():
            after = self.size() - here
            if done < after:
                count = min(done, after - done)
                source, target = rows[here : here + count], rows[here + done : here + done + count]
            else:
                start = self.size() - done  # rows from here on are written
                count = min(done, start)
                source, target = rows[start : start + count], rows[start - count : start]
            self._write_like(target, source, number)
            done, number = done + count, number + 1

    def _write_like(self, target: Tensor, source: Tensor, number: int) -> None:
        # Equal rows of a weight would cancel to zeros, which multiply faster.
        if self._varies(target):
            torch.mul(source, _FACTORS[number % len(_FACTORS)], out=target)
        else:
            target.copy_(source)

    def _write_each_like(self, targets: list[Tensor], source: Tensor) -> None:
        torch._foreach_copy_(targets, [source.reshape(-1).view(target.shape) for target in targets])
        if self._varies(source):
            others = [target for target in targets if target.data_ptr() != source.data_ptr()]
            factors = [_FACTORS[number % len(_FACTORS)] for number in range(len(others))]
            torch._foreach_mul_(others, factors)

    def _varies(self, tensor: Tensor) -> bool:
        """Whether imagined members have something else than this one in its place."""
        return (
            tensor.dtype.is_floating_point
            and tensor.dtype.itemsize > 1
            and self.fabric.imagined == "different"
        )

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


def _nothing() -> None:
    pass


def _check(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Real backends refuse buffers that do not fit, and so must this one."""
    if whole.numel() != size * part.numel() or whole.dtype is not part.dtype:
        raise ValueError(
            f"{what} over {size} ranks: expected a whole of {size} x {part.numel()} {part.dtype}, "
            f"found {whole.numel()} {whole.dtype}"
        )


_NONE = torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)


def _pretend_object(tensor: Tensor) -> None:
    """What another rank's pickled object looks like here: None. Objects come as a length and as bytes."""
    if tensor.device.type != "cpu":
        return
    if tensor.dtype is torch.int64:
        tensor.fill_(_NONE.numel())
    elif tensor.dtype is torch.uint8:
        _fill(tensor, _NONE)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _fill(output: Tensor, source: Tensor) -> None:
    """Fill ``output`` with what is in ``source``, repeated or cut to fit."""
    part = source.reshape(-1)
    if part.numel() == 0 or output.numel() == 0:
        output.zero_()
        return
    if output.is_contiguous() and output.numel() % part.numel() == 0:
        output.view(-1, part.numel()).copy_(
            part
        )  # with no memory of its own: that would count for the system
        return
    count = -(-output.numel() // part.numel())
    output.copy_(part.repeat(count)[: output.numel()].view(output.shape))


def _like(own: Tensor, part: Tensor) -> Tensor:
    """``own``, or zeros, in the shape of ``part``: members may contribute different sizes."""
    return own if own.numel() == part.numel() else torch.zeros_like(part)


def _own_part(whole: Tensor, output: Tensor, rank: int) -> Tensor:
    numel = output.numel()
    return whole.reshape(-1)[rank * numel : (rank + 1) * numel].view(output.shape)


def _reduce(output: Tensor, own: Tensor, size: int, opts: Any) -> None:
    """``output`` = ``own`` reduced over ``size`` equal members."""
    op = getattr(opts, "reduceOp", ReduceOp.SUM)
    if own.dtype is torch.bool or (own.dtype.is_floating_point and own.dtype.itemsize == 1):
        op = ReduceOp.MAX  # no arithmetic in these formats
    if op == ReduceOp.SUM:
        torch.mul(own, size, out=output)
    elif op == ReduceOp.PRODUCT:
        torch.pow(own, size, out=output)
    elif op == ReduceOp.BXOR:
        torch.mul(own, size % 2, out=output)
    elif output.data_ptr() != own.data_ptr():
        output.copy_(own)  # average, minimum, maximum, and, or: of equals
