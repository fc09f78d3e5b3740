"""What an operation makes of pieces: another piece, an answer about the whole, or an error.

A function of torch is run as it is, and this mode sees the operators it consists of. Their schemas and tags
decide, not their names: an operator that is tagged pointwise works on pieces as on whole tensors.
Everything else is refused, but for views of all elements in order and for the reductions in ``answers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mics.errors import MicsError
from mics.guard.answers import ANSWERS, AllReduces, Question, norms
from mics.guard.layout import Layout

# Operators that move or fill memory element by element. torch does not tag these.
_ELEMENTWISE = {"copy", "fill", "zero", "_to_copy", "lift_fresh"}
_CONSTANT = {"zeros_like", "ones_like", "full_like", "empty_like"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}  # take a device and a format
_GRADIENT_IS_RIGHT = {"sum", "nansum", "norm", "linalg_vector_norm", "_foreach_norm"}


class Watch(TorchDispatchMode):
    """Follows pieces through the operators of one function."""

    def __init__(self, name: str, layout_of: Callable[[Tensor], Layout | None], world: AllReduces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0  # that took a piece
        self.written: list[tuple[Tensor, Layout]] = []  # tensors that pieces were written to
        self.num_answers = 0
        self.gradient_scale: float | None = 1.0  # of the answers, see ``Answered``
        self._name = name
        self._layout_of = layout_of
        self._world = world
        self._made: dict[Any, tuple[Tensor, Layout]] = {}  # by id, and by memory

    def layout_of(self, value: Any) -> Layout | None:
        """The layout of a piece, or None for what is no piece."""
        if not isinstance(value, Tensor):
            return None
        found = self._layout_of(value)
        if found is not None or not self._made:
            return found
        # Autograd may hand a view on as another object.
        made = self._made.get(id(value)) or self._made.get(_memory(value))
        return None if made is None else made[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        pieces = [tensor for tensor in _tensors((args, kwargs)) if self.layout_of(tensor) is not None]
        if not pieces:
            return func(*args, **kwargs)
        self.num_ops += 1
        name = func._overloadpacket.__name__
        if name.startswith("_foreach_"):
            return self._run_foreach(func, name, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(pieces[0], "random numbers for this rank's piece would not be those of one process")
        if name in _NEW:
            return func(*args, **kwargs)
        self._check_targets(func, pieces[0], args, kwargs)
        if name in _CONSTANT or is_elementwise(func):
            return self._run_elementwise(func, args, kwargs)
        if _is_view(func):
            return self._run_view(func, pieces, args, kwargs)
        if name == "cat":
            return self._run_cat(func, pieces, args, kwargs)
        answered, answer = self._answer(func, name, pieces, args, kwargs)
        if answered:
            return answer
        with self:  # in inference mode torch leaves it to us to take an operator apart
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            self._refuse(pieces[0], f"{name} needs elements of other ranks")
        return result

    # -- pieces -------------------------------------------------------------------------------------

    def _run_elementwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        layout = self._common_layout(tensors, _targets(func, args, kwargs))
        result = func(*args, **kwargs)
        shape = next(tensor.shape for tensor in tensors if self.layout_of(tensor) is not None)
        for made in _tensors(result):
            if made.shape != shape:
                self._refuse(tensors[0], f"its result has the shape {list(made.shape)}")
            self._keep(made, layout)
        return result

    def _check_targets(self, func: Any, piece: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A plain tensor that a piece is written to becomes a piece: no part of something larger may."""
        for target in _targets(func, args, kwargs):
            alone = type(target) is Tensor and target.untyped_storage().nbytes() == target.nbytes
            if self.layout_of(target) is None and not alone:
                self._refuse(piece, "it would be written to a plain parameter, or into a larger tensor")

    def _common_layout(self, tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> Layout:
        """The layout of the pieces among ``tensors``. Raises if the others do not match it.

        Plain tensors do not: nobody knows which elements they stand for, nor whether ranks agree on them.
        Single numbers are fine, and so are targets of the right size, which become pieces.
        """
        pieces = [(tensor, self.layout_of(tensor)) for tensor in tensors]
        first, layout = next((tensor, found) for tensor, found in pieces if found is not None)
        assert layout is not None
        for tensor, found in pieces:
            if found is None:
                is_target = tensor.shape == first.shape and any(tensor is each for each in targets)
                if tensor.numel() != 1 and not is_target:
                    self._refuse(
                        first,
                        f"the other tensor, of shape {list(tensor.shape)}, is neither a piece nor whole; "
                        "make pieces with torch.zeros_like(p) and the like",
                    )
            elif found != layout or tensor.shape != first.shape:
                self._refuse(
                    first,
                    f"the piece of {found.label} holds other elements; shard both models with the "
                    f"same settings",
                )
        return layout

    def _run_view(
        self, func: Any, pieces: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        piece = pieces[0]
        layout = self.layout_of(piece)
        assert layout is not None
        if isinstance(result, Tensor) and result.dim() == 0:
            result = result.view(1)  # squeezed: flat on all ranks, however few elements each has
        whole = (
            isinstance(result, Tensor)
            and len(pieces) == 1
            and result.dtype is piece.dtype
            and layout.keeps(tuple(result.shape))
            and (result.numel() == 0 or result.data_ptr() == piece.data_ptr())
        )
        if not whole:
            self._refuse(piece, "a part of it lies on other ranks")
        self._keep(result, layout)
        return result

    def _run_cat(self, func: Any, pieces: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0]
        layouts = [self.layout_of(tensor) for tensor in tensors]
        if any(layout is None for layout in layouts) or any(tensor.dim() != 1 for tensor in tensors):
            self._refuse(pieces[0], "cat joins flat pieces alone")
        layout = Layout(tuple(part for found in layouts if found is not None for part in found.parts))
        if len({part.counts for part in layout.parts}) > 1:
            self._refuse(pieces[0], "the pieces are spread over ranks in different ways")
        result = func(*args, **kwargs)
        self._keep(result, layout)
        return result

    def _run_foreach(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
        alone = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        first = next(tensor for tensor in _tensors((args, kwargs)) if self.layout_of(tensor) is not None)
        self._check_targets(func, first, args, kwargs)
        if name == "_foreach_norm":
            return self._answer_norms(func, args, kwargs)
        if not is_elementwise(func):
            self._refuse(first, f"{name} needs elements of other ranks")
        layouts: list[Layout | None] = []
        targets = _targets(func, args, kwargs)
        for tensors in zip_longest(*lists):
            found = [tensor for tensor in (*tensors, *alone) if tensor is not None]
            is_piece = any(self.layout_of(tensor) is not None for tensor in found)
            layouts.append(self._common_layout(found, targets) if is_piece else None)
        result = func(*args, **kwargs)
        for made in [result] if _is_tensor_list(result) else lists[: int(func._schema.is_mutable)]:
            for tensor, layout in zip(made, layouts, strict=True):
                if layout is not None:
                    self._keep(tensor, layout)
        return result

    def _keep(self, tensor: Tensor, layout: Layout) -> None:
        if self._layout_of(tensor) is None:
            self.written.append((tensor, layout))
        self._made[id(tensor)] = self._made[_memory(tensor)] = (tensor, layout)

    # -- answers ------------------------------------------------------------------------------------

    def _answer(
        self, func: Any, name: str, pieces: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        piece = pieces[0]
        if name in ("equal", "allclose") and not func._schema.is_mutable:
            self.num_answers += 1
            return True, self._compare(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            layout = self.layout_of(piece)
            assert layout is not None
            if layout.whole_numel == 1:
                self.num_answers += 1
                return True, ANSWERS["sum"](self._question(piece, {})).item()
            self._refuse(piece, "a number of one rank would be read")
        bound = _bind(func, args, kwargs)
        if (
            name not in ANSWERS
            or func._schema.is_mutable
            or len(func._schema.returns) != 1
            or len(pieces) > 1
        ):
            return False, None
        if not _is_full(bound.get("dim"), piece.dim()):
            self._refuse(piece, "it reduces some dims, and rows and columns are spread over ranks")
        answer = ANSWERS[name](self._question(piece, bound))
        if bound.get("keepdim"):
            answer = answer.reshape([1] * piece.dim())
        self._count_answer(name, piece, bound)
        return True, answer

    def _count_answer(self, name: str, piece: Tensor, bound: dict[str, Any]) -> None:
        layout = self.layout_of(piece)
        assert layout is not None
        order = bound.get("ord", bound.get("p"))
        scale: float | None = 1.0
        if name == "mean":
            scale = piece.numel() / layout.whole_numel if layout.whole_numel else 1.0
        elif name not in _GRADIENT_IS_RIGHT or abs(float(2 if order is None else order)) == float("inf"):
            scale = None
        self.gradient_scale = scale if self.num_answers == 0 or scale == self.gradient_scale == 1.0 else None
        self.num_answers += 1

    def _answer_norms(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        bound = _bind(func, args, kwargs)
        tensors = bound["self"]
        order = float(bound.get("ord", 2.0))
        found = [number for number, tensor in enumerate(tensors) if self.layout_of(tensor) is not None]
        pieces = [tensors[number] for number in found]
        answers = dict(zip(found, norms([self._question(p, bound) for p in pieces], order), strict=True))
        for piece in pieces[:1]:
            self._count_answer("_foreach_norm", piece, bound)
        dtype = bound.get("dtype")
        return [
            answers[number] if number in answers else torch.linalg.vector_norm(tensor, order, dtype=dtype)
            for number, tensor in enumerate(tensors)
        ]

    def _compare(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = list(_tensors((args, kwargs)))
        layout = self._common_layout(tensors)
        same = args[0].eq(args[1]) if name == "equal" else torch.isclose(*args, **kwargs)
        piece = same.reshape(-1)[: layout.local_numel if layout.counts else 0]
        different = Question(piece, piece, layout.whole_numel, self._world, self._label(layout), {})
        return bool(ANSWERS["all"](different).item())

    def _question(self, piece: Tensor, bound: dict[str, Any]) -> Question:
        layout = self.layout_of(piece)
        assert layout is not None
        counted = piece.reshape(-1)[: layout.local_numel if layout.counts else 0]
        return Question(counted, piece, layout.whole_numel, self._world, self._label(layout), bound)

    def _label(self, layout: Layout) -> str:
        return f"{self._name} of {layout.label}"

    def _refuse(self, piece: Tensor, reason: str) -> None:
        layout = self.layout_of(piece)
        raise refusal(self._name, layout, reason)


def refusal(name: str, layout: Layout | None, reason: str) -> MicsError:
    """The error for an operation that one rank's piece cannot answer."""
    found = "one rank's piece"
    label = "a sharded tensor"
    if layout is not None:
        label = f"the sharded tensor {layout.label}"
        found = f"this rank's {layout.local_numel:,} of its {layout.whole_numel:,} elements"
    return MicsError(
        f"{name} of {label}: expected the whole tensor, found {found} ({reason}). Call "
        f"tensor.full_tensor() on "
        "all ranks for the whole one, mics.full_state_dict(model) or mics.full_gradients(model) for all of "
        "them, and mics.clip_grad_norm_(model, max_norm) to clip; write to parameters inside `with "
        "mics.summon_full_params(model, write=True)`. A method of the model other than forward needs "
        "mics.register_forward_method(model, name)"
    )


@cache
def is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends on the same element of the operands alone."""
    base = func._overloadpacket.__name__.removeprefix("_foreach_")
    if base == "equal":  # tagged, and yet one answer about all elements
        return False
    if torch.Tag.pointwise in func.tags or base in ANSWERS:  # some reductions have elementwise overloads
        return torch.Tag.pointwise in func.tags
    packets = [getattr(torch.ops.aten, name, None) for name in {base, base.removesuffix("_")}]
    if base.removesuffix("_") in _ELEMENTWISE:
        return True
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


def _is_view(func: Any) -> bool:
    """Whether the result shares memory with an operand, and nothing is written."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    bound = _bind(func, args, kwargs)
    return list(_tensors([bound.get(each.name) for each in func._schema.arguments if _is_written(each)]))


def _is_full(dim: Any, num_dims: int) -> bool:
    """Whether a reduction over ``dim`` is one over all dims."""
    if dim is None:
        return True
    dims = [dim] if isinstance(dim, int) else list(dim)
    return not dims or len({each % max(num_dims, 1) for each in dims}) == num_dims


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel())


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Tensor) for each in value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
