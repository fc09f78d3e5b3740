"""One flat torch.distributed group: NCCL as it is, gloo with a true and ordered reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mics.comm.emulated.group import EmulatedGroup
from mics.comm.liveness import Liveness
from mics.comm.protocol import Job
from mics.comm.traffic import TrafficCounter
from mics.errors import CollectiveError

# torch 2.13 renamed the single-tensor forms and warns about the old names, which are all that 2.11 has.
_all_gather = cast(
    Callable[..., Any], getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter = cast(
    Callable[..., Any], getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class GroupCollectives:
    """Collectives over one process group whose members are in ownership order.

    gloo's own reduce-scatter sends as much as an all-reduce and adds in an order of its own. Over gloo
    this class exchanges chunks and adds them in the order of the members: half the bytes, and a sum that
    a single process can reproduce to the bit. See "Reduction order" in docs/design.md.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        axis: str,
        counter: TrafficCounter,
        liveness: Liveness | None,
    ) -> None:
        self._group = group  # None: a world of one process that never called init_process_group
        self._axis = axis
        self._counter = counter
        self._liveness = liveness
        self._size = 1 if group is None else dist.get_world_size(group)
        self._position = 0 if group is None else dist.get_rank(group)
        self._over_gloo = not isinstance(group, EmulatedGroup)  # as far as CPU tensors go
        self._staging: Tensor | None = None  # uint8 [largest buffer exchanged], gloo only

    @property
    def size(self) -> int:
        return self._size

    @property
    def position(self) -> int:
        return self._position

    @property
    def staging_nbytes(self) -> int:
        """Bytes kept for incoming chunks (gloo only)."""
        return 0 if self._staging is None else self._staging.numel()

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return
        self._count("all_gather", (self._size - 1) * _nbytes(shard))
        if self._is_gloo(out):
            self._gather_bytes(_bytes(out), _bytes(shard), label)
        else:
            self._call("all-gather", label, _all_gather, out, shard)

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != buffer.data_ptr():
                out.copy_(buffer)
            return
        self._count("reduce_scatter", (self._size - 1) * _nbytes(out))
        if self._is_gloo(buffer):
            self._ordered_reduce_scatter(out, buffer, label)
        else:
            self._call("reduce-scatter", label, _reduce_scatter, out, buffer)

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        if self._size == 1:
            return
        self._count("all_reduce", 2 * (self._size - 1) * _nbytes(tensor) // self._size)
        if self._is_gloo(tensor) and not maximum and tensor.numel() % self._size == 0:
            own = tensor.view(self._size, -1)[self._position]
            self._ordered_reduce_scatter(own, tensor, label)
            self._gather_bytes(_bytes(tensor), _bytes(own), label)
            return
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        self._call("all-reduce", label, dist.all_reduce, tensor, op=op)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        if self._size == 1 or tensor.numel() == 0:
            return
        self._count("broadcast", _nbytes(tensor) if self._position == 0 else 0)
        data = _bytes(tensor) if self._is_gloo(tensor) else tensor
        self._call("broadcast", label, dist.broadcast, data, group_src=0)

    def gather_stages(self, out: Tensor, shard: Tensor, label: str) -> Sequence[tuple[str, Job]]:
        return (("", partial(self.all_gather, out, shard, label)),)

    def reduce_stages(self, out: Tensor, buffer: Tensor, label: str) -> Sequence[tuple[str, Job]]:
        return (("", partial(self.reduce_scatter, out, buffer, label)),)

    def _gather_bytes(self, out: Tensor, shard: Tensor, label: str) -> None:
        """Gather over gloo. As bytes: it does not know every format, and moving data needs none."""
        chunks = list(out.view(self._size, -1).unbind())
        if chunks[self._position].data_ptr() != shard.data_ptr():
            self._call("all-gather", label, _all_gather, out, shard)
            return
        # In place. gloo would write this rank's own chunk back when it is done, over what an optimizer or a
        # user has written there meanwhile.
        chunks[self._position] = self._staged(shard)
        self._call("all-gather", label, dist.all_gather, chunks, shard)

    def _ordered_reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        """Exchange chunks, then add them member by member. ``buffer``: [size * out.numel()]."""
        staging = self._staged(buffer)
        self._call("reduce-scatter", label, dist.all_to_all_single, _bytes(staging), _bytes(buffer))
        first, *others = staging.view(self._size, -1).unbind()
        # Formats narrower than float32 are added in float32: a sum over many ranks would drown in rounding.
        total = first if out.dtype.itemsize >= 4 else first.float()
        for chunk in others:
            total += chunk
        out.copy_(total)

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._over_gloo and tensor.device.type == "cpu"

    def _staged(self, like: Tensor) -> Tensor:
        nbytes = _nbytes(like)
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes].view(like.dtype)

    def _count(self, kind: str, nbytes: int) -> None:
        self._counter.add(self._axis, kind, nbytes)

    def _call(self, kind: str, label: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._liveness is not None:
            self._liveness.enter(kind, label)
        try:
            collective(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            culprits = "" if self._liveness is None else self._liveness.explain()
            members = dist.get_process_group_ranks(self._group) if self._group is not None else [0]
            raise CollectiveError(
                f"{kind} of {label} failed in the {self._axis} group of ranks {members}. {culprits}"
                f"The backend said: {error}"
            ) from error


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dim() == 1 else tensor.reshape(-1)).view(torch.uint8)
