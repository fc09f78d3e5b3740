"""Cross-entropy that works through the logits a piece at a time.

torch's own makes three float32 tensors of the logits' size, which for a large vocabulary are the peak of a
step. Here the logits are kept in their own format, and float32 exists for one piece at a time.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_PIECE_NUMEL: Final = 1 << 26  # float32: 256 MiB


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    divisor: Tensor | None = None,
    piece_numel: int = _PIECE_NUMEL,
) -> Tensor:
    """The mean cross-entropy of logits [row, class] in any format, in float32.

    As ``F.cross_entropy(logits.float(), targets)``, with a gradient in the logits' format. With ``divisor``,
    the sum is divided by it and not by the number of targets that count.
    """
    num_rows = max(1, piece_numel // logits.shape[-1])
    loss: Tensor = _InPieces.apply(  # type: ignore[no-untyped-call]
        logits, targets, ignore_index, num_rows, divisor
    )
    return loss


class _InPieces(torch.autograd.Function):
    """Keeps the logits and the logarithm of each row's sum; the softmax is made again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, num_rows: int, divisor: Tensor | None
    ) -> Tensor:
        sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        losses = torch.empty_like(sums)
        counts = targets != ignore_index
        chosen = targets.where(counts, 0)[:, None]
        for start in range(0, logits.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            piece = logits[rows].float()
            sums[rows] = piece.logsumexp(-1)
            losses[rows] = sums[rows] - piece.gather(-1, chosen[rows])[:, 0]
        num_counted = counts.sum() if divisor is None else divisor
        ctx.save_for_backward(logits, chosen, counts, sums, num_counted)
        ctx.num_rows = num_rows
        return losses.where(counts, 0.0).sum() / num_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, chosen, counts, sums, num_counted = ctx.saved_tensors
        scales = (counts * (grad / num_counted))[:, None]
        found = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.num_rows):
            rows = slice(start, start + ctx.num_rows)
            piece = logits[rows].float().sub_(sums[rows, None]).exp_()
            piece.scatter_add_(-1, chosen[rows], piece.new_full((1, 1), -1.0).expand_as(chosen[rows]))
            found[rows] = piece.mul_(scales[rows])
        return found, None, None, None, None
