"""The gradients users see: guarded views of this rank's shard.

After a backward, ``parameter.grad`` is a :class:`ShardGrad`. Whoever uses it gets hop 2 first, so the
values are always those of the whole world. A rank has only a part of each gradient, so a norm of it
would be silently wrong: that raises instead. While an optimizer steps, it sees plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mics.errors import MicsError

_LOCAL_ONLY = {
    "_foreach_norm",
    "linalg_vector_norm",
    "linalg_norm",
    "linalg_matrix_norm",
    "norm",
    "sum",
    "nansum",
    "mean",
    "dot",
    "vdot",
    "std",
    "var",
    "max",
    "min",
    "amax",
    "amin",
    "aminmax",
    "prod",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "mv",
    "einsum",
    "inner",
    "tensordot",
    "median",
    "quantile",
    "count_nonzero",
    "logsumexp",
}
# Results that still are a part of one gradient, so that ``grad.detach().norm()`` is caught too.
_STAYS_GUARDED = {
    "detach", "clone", "float", "double", "to", "view", "reshape", "flatten", "abs", "square", "pow",
    "__pow__", "mul", "__mul__", "__rmul__", "div", "__truediv__", "neg", "sqrt", "clamp", "cat", "stack",
    "cpu", "cuda",
}  # fmt: skip
_ABOUT_SHAPE = {"size", "dim", "numel", "nelement", "element_size", "stride", "data_ptr", "is_floating_point"}
_ABOUT_GRAPH = {"requires_grad_", "detach_", "register_hook", "retain_grad"}


@dataclass(frozen=True, kw_only=True)
class GradientOwner:
    """What a guarded gradient may ask for."""

    synchronize: Callable[[], None]  # run hop 2 if it has not run
    agree_found_inf: Callable[[Tensor], None]  # maximum over the world, in place


class ShardGrad(Tensor):
    """This rank's part of one parameter's gradient."""

    # Weak: Python's collector does not see what a parameter holds as its ``grad``, so a strong reference
    # back would keep every model alive whose gradients were not cleared at the end.
    owner: ref[GradientOwner]
    is_lost: bool = False  # its memory was lent while it had had hop 1 alone

    @staticmethod
    def guard(view: Tensor, owner: GradientOwner) -> ShardGrad:
        """``view`` itself, behind the guard."""
        guarded = view.as_subclass(ShardGrad)
        guarded.owner = ref(owner)
        return guarded

    def check_kept(self) -> None:
        """Raise if a forward has come since the user cleared this gradient, before hop 2."""
        if self.is_lost:
            raise MicsError(
                "a gradient that was cleared and kept aside: expected it to be used before the next forward, "
                "found it afterwards, when it can no longer be added up over the replicas; clone() it before "
                "zero_grad(), or shard the model with lean=False"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = next((g.owner() for g in _guards((args, kwargs)) if hasattr(g, "owner")), None)
        describes = name in _ABOUT_SHAPE or name in _ABOUT_GRAPH or name == "__get__"
        if owner is not None and name in _LOCAL_ONLY:
            raise MicsError(
                f"{name} of a sharded gradient: expected the whole gradient, found this rank's part of it; "
                "use mics.clip_grad_norm_(model, max_norm) for norms and clipping, "
                "or mics.full_gradients(model) for whole gradients"
            )
        if owner is not None and not describes:
            for guard in _guards((args, kwargs)):
                guard.check_kept()
            owner.synchronize()
        if owner is not None and getattr(func, "__self__", None) is Tensor.data and name == "__set__":
            _check_shape(*args)
            func = Tensor.copy_  # p.grad.data = ...: other memory would be nobody's gradient
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if owner is not None and name == "_amp_foreach_non_finite_check_and_unscale_":
            # torch's GradScaler: a rank that overflowed must make every rank skip the step.
            owner.agree_found_inf(args[1])
        if owner is None or not isinstance(result, Tensor):
            return result
        if name == "__get__":  # .data, .T and the like: another view of the same values
            owner.synchronize()
        return ShardGrad.guard(result, owner) if name in _STAYS_GUARDED or name == "__get__" else result


def _check_shape(grad: Tensor, value: Tensor) -> None:
    if value.shape != grad.shape:
        raise MicsError(
            f"p.grad.data: expected the shape {list(grad.shape)} of this rank's part of the gradient, found "
            f"{list(value.shape)}"
        )


def _guards(value: Any) -> Iterator[ShardGrad]:
    if isinstance(value, ShardGrad):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _guards(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guards(item)
