"""The collectives of ``torch.distributed`` over a group whose other members are imagined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics.cost.collectives import Kind, Span
from mics.emulator.charging import ChargedGroup, nbytes_of
from mics.emulator.fabric import Fabric
from mics.emulator.imagined import ImaginedMembers, fill, like, own_part, pretend_object, reduce


class EmulatedGroup(ChargedGroup):
    """Each says what it moves, and how its result is made from what this rank holds.

    torch 2.13 renamed the single-tensor forms; both names are here.
    """

    def __init__(self, fabric: Fabric, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(fabric, ranks, rank, timeout)
        self._sent: dict[tuple[torch.dtype, int], Tensor] = {}  # small host tensors: pickled objects

    @property
    def _members(self) -> ImaginedMembers:
        return ImaginedMembers(self.size(), self.rank(), self.fabric.imagined)

    # -- gathers ----------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        _check("all-gather", output, input, self.size())
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._members.spread(output, own)

        return self._run(Kind.ALL_GATHER, outputs, write, outputs, inputs, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(like(own, part))

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
        nbytes = self.size() * nbytes_of(inputs)
        return self._run(Kind.GATHER, nbytes, write, flat, inputs, opts)

    # -- reductions -------------------------------------------------------------------------------

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        _check("reduce-scatter", input, output, self.size())
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                reduce(output, own_part(whole, output, self.rank()), self.size(), opts)

        return self._run(Kind.REDUCE_SCATTER, inputs, write, outputs, inputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        def write() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                reduce(output, parts[self.rank()], self.size(), opts)

        flat = [part for parts in inputs for part in parts]
        return self._run(Kind.REDUCE_SCATTER, flat, write, outputs, flat, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            for tensor in tensors:
                reduce(tensor, tensor, self.size(), opts)

        return self._run(Kind.ALL_REDUCE, tensors, write, tensors, [], opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            if opts is None or opts.rootRank == self.rank():
                for tensor in tensors:
                    reduce(tensor, tensor, self.size(), opts)

        return self._run(Kind.REDUCE, tensors, write, tensors, [], opts)

    # -- the rest ---------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            if opts is not None and opts.rootRank != self.rank():
                for tensor in tensors:
                    pretend_object(tensor)

        return self._run(Kind.BROADCAST, tensors, write, tensors, [], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        def write() -> None:
            if not inputs:  # another rank is the root
                for output in outputs:
                    pretend_object(output.zero_())
            for output, parts in zip(outputs, inputs, strict=False):
                output.copy_(parts[self.rank()])

        nbytes = self.size() * nbytes_of(outputs)
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
            fill(output, input[first : first + rows[self.rank()]])

        return self._run(Kind.ALL_TO_ALL, input, write, [output], [input], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def write() -> None:
            own = inputs[self.rank()]
            sent = own if own.numel() else max(inputs, key=Tensor.numel)  # nothing to itself: it has that
            written = [output for output in outputs if output.numel()]
            if written and all(output.numel() == sent.numel() for output in written):
                self._members.write_each(written, sent)
            else:
                for output in written:
                    fill(output, sent)

        nbytes = self.size() * max(nbytes_of([tensor]) for tensor in inputs)
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
                    pretend_object(tensor.zero_())
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


def _nothing() -> None:
    pass


def _check(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Real backends refuse buffers that do not fit, and so must this one."""
    if whole.numel() != size * part.numel() or whole.dtype is not part.dtype:
        raise ValueError(
            f"{what} over {size} ranks: expected a whole of {size} x {part.numel()} {part.dtype}, "
            f"found {whole.numel()} {whole.dtype}"
        )
