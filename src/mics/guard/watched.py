"""A function of torch, run on pieces under a :class:`~mics.guard.rules.Watch`, and what users get of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics.errors import MicsError, SettingsError
from mics.guard.answers import AllReduces, Answered, Entry
from mics.guard.layout import Layout
from mics.guard.rules import Watch, refusal
from mics.guard.tensors import ShardParameter, ShardTensor, pieces_in, plainly
from mics.utils.tensor_trees import put_together, replace_tensors, take_apart

_READS_ONE = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
              "is_nonzero", "__format__"}  # fmt: skip


def norms(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of each tensor, over all ranks: one small all-reduce for all of them. ``[len(tensors)]``.

    Takes parameters and gradients of sharded models, in any mixture with plain tensors. Differentiable in
    the parameters: ``mics.norms(model.parameters()).square().sum()`` is an L2 penalty,
    ``mics.norms(model.parameters(), 1).sum()`` an L1 penalty. All ranks must call it.
    """
    found = [each.current() if isinstance(each, ShardTensor) else each for each in tensors]
    pieces = list(pieces_in(found))
    if not found:
        raise SettingsError("mics.norms: expected tensors, found none")
    if not pieces:
        return torch.stack(torch._foreach_norm(found, norm_type))
    for piece in pieces:
        piece.prepare()
    watch, result = _run(torch._foreach_norm, "norms", pieces, (found, norm_type), {})
    with plainly():
        answer = torch.stack([value.to(result[0].dtype) for value in result])
    return _answered(answer, watch, pieces[0], "norms")


def run_watched(
    func: Any, name: str, pieces: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layout = pieces[0].shard_layout
    if func is torch.autograd.grad:
        raise MicsError(
            "torch.autograd.grad of sharded parameters: expected tensors of the graph, found this "
            "rank's pieces, "
            "which no loss is made of; call loss.backward() and read p.grad or mics.full_gradients(model)"
        )
    if name in _READS_ONE and layout.whole_numel == 1:
        return func(pieces[0].full_tensor(), *args[1:], **kwargs)
    numbers = {} if is_write(func, name, kwargs) else _single_numbers(args, kwargs)
    try:
        if numbers:
            return func(*replace_tensors(args, numbers), **replace_tensors(kwargs, numbers))
        args, kwargs = _cut(args, pieces), _cut(kwargs, pieces)
        watch, result = _run(func, name, pieces, args, kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, MicsError) or (is_write(func, name, kwargs) and "grad" in str(error)):
            raise  # what torch says of a graph is true of the whole tensor, too
        # A piece has another shape than the whole: what torch says may be true of one rank alone.
        raise refusal(name, layout, f"torch says: {error}") from error
    for tensor, found in watch.written:
        if type(tensor) is Tensor:
            ShardTensor.guard(tensor, found, pieces[0].shard_owner)
    shown = _shown(result, watch, pieces, args, name)
    if isinstance(shown, ShardTensor) and shown.root is None and all(shown is not each for each in pieces):
        with plainly():
            sharing = [each for each in pieces if each.data_ptr() == shown.data_ptr() != 0]
        for piece in sharing[:1]:
            piece.share_with(shown)
    return shown


# -- inside ------------------------------------------------------------------------------------------


def _single_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """Pieces of one number that meet plain tensors, as plain tensors: a learned scale in a loss."""
    values = (*args, *kwargs.values())
    if not any(isinstance(value, Tensor) and not isinstance(value, ShardTensor) for value in values):
        return {}
    return {
        id(value): value.sum().reshape(value.shard_layout.whole_shape)
        for value in values
        if isinstance(value, ShardTensor) and value.shard_layout.whole_numel == 1
    }


def _cut(value: Any, pieces: Sequence[ShardTensor]) -> Any:
    """Arguments with this rank's elements in place of whole plain tensors; in lists by the n-th piece."""
    if isinstance(value, Tensor):
        layout, owner = pieces[0].shard_layout, pieces[0].shard_owner
        is_whole = not isinstance(value, ShardTensor) and value.dim() > 0 and layout.is_whole(value)
        return ShardTensor.guard(layout.own_part_of(value), layout, owner) if is_whole else value
    if type(value) in (list, tuple):
        by_number = len(value) == len(pieces)
        return type(value)(
            _cut(item, [pieces[number]] if by_number else pieces) for number, item in enumerate(value)
        )
    if type(value) is dict:
        return {key: _cut(item, pieces) for key, item in value.items()}
    return value


def _run(
    func: Any, name: str, pieces: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Watch, Any]:
    """Call ``func`` on the pieces, watched; parameters begin a graph where there may be a backward."""
    if torch.is_grad_enabled() and not is_write(func, name, kwargs):
        entries = {id(p): enter(p) for p in pieces if isinstance(p, ShardParameter) and needs_grad(p)}
        if entries:
            args, kwargs = replace_tensors(args, entries), replace_tensors(kwargs, entries)
    world: AllReduces = pieces[0].owner()
    tiny = _tiny_pieces(args, kwargs)
    if tiny and not is_write(func, name, kwargs):
        # Functions of torch may go other ways with one element or none, and so may the ranks: all go the way
        # of larger pieces.
        padded = _padded((args, kwargs), tiny)
        rehearsal = Watch(name, _layout_of, _Alone())
        try:
            with plainly(), torch.no_grad(), rehearsal:
                func(*padded[0], **padded[1])
        except MicsError:
            if not rehearsal.num_answers:
                raise
        if rehearsal.num_answers:  # also of what is refused after one: the others have asked by then
            args, kwargs = padded
        else:
            world = _Alone()  # pieces lead to pieces: they share memory, and nobody needs to be asked
    watch = Watch(name, _layout_of, world)
    with plainly(), watch:
        return watch, func(*args, **kwargs)


class _Alone:
    """A world of one rank."""

    size: int = 1

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        pass


def _tiny_pieces(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, ShardTensor]:
    """Pieces of fewer than two elements among the arguments themselves (functions of lists do not look)."""
    with plainly():
        return {
            id(value): value
            for value in (*args, *kwargs.values())
            if isinstance(value, ShardTensor) and len(value.shard_layout.parts) == 1 and value.shape[0] < 2
        }


def _padded(value: Any, tiny: dict[int, ShardTensor]) -> Any:
    """Arguments with two elements more in each of these pieces, and in tensors of their shape."""
    shape = next(iter(tiny.values())).shape

    def pad(tensor: Tensor) -> Tensor:
        if not tensor.dim() or (id(tensor) not in tiny and tensor.shape != shape):
            return tensor
        with plainly():
            more = torch.cat([tensor, tensor.new_ones(2, *tensor.shape[1:])])
        if isinstance(tensor, ShardTensor):
            return ShardTensor.guard(more, tensor.shard_layout.padded(2), tensor.shard_owner)
        return more

    rest, tensors = take_apart(value)
    return put_together(rest, [pad(tensor) for tensor in tensors])


def _layout_of(tensor: Tensor) -> Layout | None:
    return tensor.shard_layout if isinstance(tensor, ShardTensor) else None


def _shown(result: Any, watch: Watch, pieces: list[ShardTensor], args: tuple[Any, ...], name: str) -> Any:
    """The result as the user gets it. What is neither a piece nor an answer is refused."""
    if isinstance(result, list | tuple) and any(isinstance(item, Tensor) for item in result):
        kind = type(result)
        items = [_shown(item, watch, pieces, args, name) for item in result]
        return (
            kind(items)
            if kind in (list, tuple)
            else kind(*items)
            if hasattr(kind, "_fields")
            else kind(items)
        )
    if isinstance(result, ShardTensor):
        return _unpadded(result)
    if result is None:
        return result
    if not isinstance(result, Tensor):
        if not watch.num_answers:
            raise refusal(name, pieces[0].shard_layout, "a number of one rank would be read")
        return result
    with plainly():
        layout = watch.layout_of(result)
    if layout is not None:
        return _unpadded(ShardTensor.guard(result, layout, pieces[0].shard_owner))
    if watch.num_ops == 0:
        raise refusal(name, pieces[0].shard_layout, "it reads the piece's memory")
    return _answered(result, watch, pieces[0], name)


def _unpadded(piece: ShardTensor) -> ShardTensor:
    layout = piece.shard_layout
    if not layout.padding:
        return piece
    with plainly():
        return ShardTensor.guard(piece[: layout.local_numel], layout.padded(0), piece.shard_owner)


def _answered(answer: Tensor, watch: Watch, piece: ShardTensor, name: str) -> Tensor:
    if not answer.requires_grad or not watch.num_answers:
        return answer
    found: Tensor = Answered.apply(answer, piece.owner(), watch.gradient_scale, name)  # type: ignore[no-untyped-call]
    return found


def is_write(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if name == "detach":
        return True  # it leaves the graph
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__i", "__set")) or kwargs.get("out") is not None


def needs_grad(param: ShardParameter) -> bool:
    with plainly():
        return param.requires_grad


def enter(param: ShardParameter) -> Tensor:
    owner = param.owner()
    with plainly():
        anchor = torch.zeros((), dtype=torch.float32, device=param.device, requires_grad=True)
        take = partial(owner.take_gradient, param.shard_layout.parts[0].name)
        entry: Tensor = Entry.apply(anchor, param, take)  # type: ignore[no-untyped-call]
    return ShardTensor.guard(entry, param.shard_layout, param.shard_owner)
