"""Right answers about whole tensors, from every rank's piece: one small all-reduce over the world each.

All ranks must ask. What the gradient of an answer is, see :class:`Answered`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mics.errors import MicsError


class AllReduces(Protocol):
    """Ranks that answer together."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        """Sum (or maximum) over ranks, in place."""
        ...


@dataclass(frozen=True)
class Question:
    """One reduction over all elements of a whole tensor."""

    piece: Tensor  # flat; empty where another rank counts these elements
    like: Tensor  # the piece as the user has it
    whole_numel: int
    world: AllReduces
    label: str
    args: dict[str, Any]  # of the operator, by name

    def dtype(self) -> torch.dtype:
        """Of the answer, where the operator lets the user choose it."""
        wanted = self.args.get("dtype")
        return self.like.dtype if wanted is None else wanted

    def sum(self, *locals_: Tensor) -> Tensor:
        """Sums over all ranks, exact enough for any format: [len(locals_)]."""
        numbers = torch.stack([_wide(value) for value in locals_])
        self.world.all_reduce(numbers, self.label)
        return numbers

    def maximum(self, values: Tensor) -> Tensor:
        """The largest of all ranks' ``values``; NaN if there is one, as torch's own maximum."""
        if not values.dtype.is_floating_point:
            wide = values.to(torch.int64)
            lowest = torch.iinfo(torch.int64).min
            local = wide.amax() if values.numel() else wide.new_full((), lowest)
            self.world.all_reduce(local, self.label, maximum=True)
            return local
        wide = values.to(torch.float64)
        if wide.numel() == 0:
            wide = wide.new_full((1,), -math.inf)
        is_nan = wide.isnan()
        pair = torch.stack([wide.masked_fill(is_nan, -math.inf).amax(), is_nan.any().to(torch.float64)])
        self.world.all_reduce(pair, self.label, maximum=True)
        return torch.where(pair[1] > 0, math.nan, pair[0])


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float64 if value.dtype.is_floating_point else torch.int64)


def _sum(question: Question) -> Tensor:
    dtype = question.dtype()
    if not (dtype.is_floating_point or question.args.get("dtype") is not None):
        dtype = torch.int64
    return question.sum(_wide(question.piece).sum())[0].to(dtype)


def _nansum(question: Question) -> Tensor:
    return question.sum(_wide(question.piece).nansum())[0].to(question.dtype())


def _mean(question: Question) -> Tensor:
    if not question.dtype().is_floating_point:
        raise MicsError(f"{question.label}: expected a floating-point tensor, found {question.dtype()}")
    return (question.sum(_wide(question.piece).sum())[0] / question.whole_numel).to(question.dtype())


def _count_nonzero(question: Question) -> Tensor:
    return question.sum(question.piece.count_nonzero())[0]


def _any(question: Question) -> Tensor:
    return question.maximum(question.piece.ne(0).to(torch.int64)).gt(0).to(_flag_dtype(question))


def _all(question: Question) -> Tensor:
    return question.maximum(question.piece.eq(0).to(torch.int64)).le(0).to(_flag_dtype(question))


def _flag_dtype(question: Question) -> torch.dtype:
    return torch.uint8 if question.like.dtype is torch.uint8 else torch.bool


def _max(question: Question) -> Tensor:
    return question.maximum(question.piece).to(question.like.dtype)


def _min(question: Question) -> Tensor:
    floating = question.piece.dtype.is_floating_point
    turned = -_wide(question.piece) if floating else ~question.piece.to(torch.int64)
    found = question.maximum(turned)
    return (-found if floating else ~found).to(question.like.dtype)


def _var(question: Question) -> Tensor:
    # As torch: without an argument of either kind the variance is that of a sample.
    given = question.args.get("correction")
    correction = (1.0 if question.args.get("unbiased", True) else 0.0) if given is None else float(given)
    wide = question.piece.to(torch.float64)
    mean = question.sum(wide.sum())[0] / question.whole_numel
    total = question.sum((wide - mean).square().sum())[0]
    divisor = max(question.whole_numel - correction, 0.0)
    variance = total / divisor if divisor else total / total.new_zeros(())
    return variance.to(question.like.dtype)


def _std(question: Question) -> Tensor:
    wide = replace(question, like=question.like.to(torch.float64))
    return _var(wide).sqrt().to(question.like.dtype)


def _norm(question: Question) -> Tensor:
    order = question.args.get("ord", question.args.get("p"))
    return norms([question], 2.0 if order is None else float(order))[0]


def norms(questions: Sequence[Question], order: float) -> list[Tensor]:
    """The norm of each whole tensor: one all-reduce for all of them."""
    if not questions:
        return []
    first = questions[0]
    dtypes = [question.dtype() for question in questions]
    if order == -math.inf:
        return [
            _min(_magnitude(question)).to(dtype) for question, dtype in zip(questions, dtypes, strict=True)
        ]
    pieces = [question.piece.to(torch.float64) for question in questions]
    if order == math.inf:
        largest = torch.stack([piece.abs().amax() if piece.numel() else piece.sum() for piece in pieces])
        is_nan = largest.isnan()
        numbers = torch.cat([largest.masked_fill(is_nan, 0.0), is_nan.to(torch.float64)])
        first.world.all_reduce(numbers, first.label, maximum=True)
        values, has_nan = numbers.chunk(2)
        found = torch.where(has_nan > 0, math.nan, values)
    elif order == 0:
        found = first.sum(*[piece.ne(0).sum(dtype=torch.float64) for piece in pieces])
    else:
        powers = first.sum(*[piece.abs().pow(order).sum() for piece in pieces])
        found = powers.pow(1.0 / order)
    return [value.to(dtype) for value, dtype in zip(found, dtypes, strict=True)]


def _magnitude(question: Question) -> Question:
    return replace(question, piece=question.piece.abs().to(torch.float64), like=question.like.double())


ANSWERS: dict[str, Callable[[Question], Tensor]] = {
    "sum": _sum,
    "nansum": _nansum,
    "mean": _mean,
    "count_nonzero": _count_nonzero,
    "any": _any,
    "all": _all,
    "max": _max,
    "amax": _max,
    "min": _min,
    "amin": _min,
    "var": _var,
    "std": _std,
    "norm": _norm,
    "linalg_vector_norm": _norm,
}


class Answered(torch.autograd.Function):
    """An answer about whole tensors as part of a loss.

    Autograd's own formulas run on the piece, with the right answer in them: for sums and norms they give
    the right gradient of the piece. The mean divides by the piece's size: ``scale`` mends that. For
    other reductions ``scale`` is None, and a backward through them is refused.

    Every rank counts the answer in its loss, and losses are averaged over ranks, as under DDP: so the
    gradient that arrives is averaged, too.
    """

    @staticmethod
    def forward(ctx: Any, answer: Tensor, world: AllReduces, scale: float | None, name: str) -> Tensor:
        ctx.world, ctx.scale, ctx.name = world, scale, name
        return answer.view_as(answer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.scale is None:
            raise MicsError(
                f"backward through {ctx.name} of a sharded tensor: expected sums, means and norms in a loss, "
                f"found {ctx.name}, whose gradient needs the whole tensor; compute it inside a "
                f"module's forward"
            )
        numbers = grads[0].to(torch.float64, copy=True)
        ctx.world.all_reduce(numbers, "the gradient of a penalty")
        numbers *= ctx.scale / ctx.world.size
        return numbers.to(grads[0].dtype), None, None, None


class Entry(torch.autograd.Function):
    """A parameter's piece as the beginning of a graph: its gradient goes to whoever adds up gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, piece: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return piece.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise MicsError(
                "backward with create_graph=True through a sharded parameter: expected first-order "
                "gradients, "
                "found a request for gradients of gradients; compute that term inside a module's forward"
            )
        ctx.take(grads[0])
        return None, None, None
