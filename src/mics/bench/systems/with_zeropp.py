"""ZeRO++: DeepSpeed's schedule on FSDP2, so that it runs on any backend.

As ``zero_quantized_weights``, ``zero_hpz_partition_size`` (the ranks of a node) and
``zero_quantized_gradients`` make it of ZeRO-3:

- Parameters, gradients and optimizer state are divided over the world. There are no replicas, and so no
  refresh after a step.
- The forward gathers parameters over the world in int8, and keeps what it gathered divided over the node.
  The backward gathers that, in int8 again, inside the node.
- Every micro-step reduces gradients in two all-to-alls, inside the node and between nodes. Both send int4;
  sums are made in float32, and rounded once more between the two.

Kinder than DeepSpeed in three ways: scales are finer (a bfloat16 for each 64 values, 3% more bytes in int8),
vectors travel quantised together with matrices, and a unit is one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics.bench.job import Job
from mics.bench.systems.loop import Loop
from mics.bench.systems.mesh import node_mesh, ranks_per_node, world_mesh
from mics.bench.systems.with_fsdp import build_sharded
from mics.bench.systems.with_zero2 import all_gather
from mics.comm.quantized import Quantized

_WEIGHTS: Final = Quantized(8)
_GRADIENTS: Final = Quantized(4)


def build_zeropp(job: Job) -> Loop:
    """All three parts of it."""
    world_size, here = dist.get_world_size(), ranks_per_node()
    # A copy divided over one rank would be no division, and one over the world is the first one.
    secondary: bool | int = here if 1 < here < world_size else True
    nodes = node_mesh(job, here)
    stages = _Stages(nodes.get_group("ranks"), nodes.get_group("nodes"))

    def use(model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                sharded: Any = module  # torch's base classes of such collectives are not public
                sharded.set_custom_all_gather(_Gather())
                sharded.set_custom_reduce_scatter(_Reduce(stages))

    return build_sharded(job, world_mesh(job), reshard_after_forward=secondary, use=use)


class _Stages:
    """The groups of the two all-to-alls: ranks of this node, and those of equal place on other nodes."""

    def __init__(self, intra: dist.ProcessGroup, inter: dist.ProcessGroup) -> None:
        self.intra = intra
        self.inter = inter


class _Comm:
    """What FSDP2 wants of a collective of one's own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    """In int8. FSDP2 calls it on a stream of its own, or lets the computation wait for it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if group.size() == 1 or not _WEIGHTS.changes(input_tensor.dtype):
            all_gather(output_tensor, input_tensor, group)
            return
        numel = input_tensor.numel()
        own = input_tensor.new_empty(_WEIGHTS.wire_nbytes(numel, input_tensor.dtype), dtype=torch.uint8)
        _WEIGHTS.encode(own.unsqueeze(0), input_tensor.reshape(1, -1))
        wires = own.new_empty(group.size() * own.numel())
        all_gather(wires.view(torch.int8), own.view(torch.int8), group)  # imagined members have other numbers
        _WEIGHTS.decode(output_tensor.view(group.size(), -1), wires.view(group.size(), -1))


class _Reduce(_Comm):
    """In int4, in two stages."""

    def __init__(self, stages: _Stages) -> None:
        self._stages = stages

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        intra, inter = self._stages.intra, self._stages.inter
        # Ranks are numbered node by node: chunks for one place on all nodes come together.
        chunks = input_tensor.view(inter.size(), intra.size(), -1).transpose(0, 1)
        of_node = _exchanged(chunks.reshape(intra.size(), -1), intra)
        total = _exchanged(of_node.view(inter.size(), -1), inter)
        if op == dist.ReduceOp.AVG:
            total = total / group.size()
        output_tensor.copy_(total.view_as(output_tensor))


def _exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row for each member goes there in int4; the sum of what comes, in float32."""
    if group.size() == 1:
        return rows[0].float()
    numel = rows.shape[1]
    sent = rows.new_empty(group.size(), _GRADIENTS.wire_nbytes(numel, rows.dtype), dtype=torch.uint8)
    _GRADIENTS.encode(sent, rows)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    total = torch.empty(numel, dtype=torch.float32, device=rows.device)
    _GRADIENTS.add_up(total, received)
    return total
