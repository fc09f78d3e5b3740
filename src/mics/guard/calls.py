"""What becomes of a call of torch with pieces among its arguments, and of their attributes.

What only describes a tensor is answered at once, and what concerns the graph is left to torch. All other
functions get the values that a user may see, on one device, and run watched: see ``watched.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mics.errors import MicsError, SettingsError
from mics.guard.rules import refusal
from mics.guard.tensors import (
    HostParameter,
    HostTensor,
    ShardParameter,
    ShardTensor,
    pieces_in,
    plainly,
    unsaved,
)
from mics.guard.watched import enter, is_write, needs_grad, run_watched
from mics.utils.tensor_trees import put_together, replace_tensors, take_apart

# What these say of a piece is true of it as a tensor; all other functions are watched.
_DESCRIBE = {
    "size", "dim", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous", "__len__",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared", "is_set_to",
    "is_same_size", "get_device", "dim_order", "untyped_storage", "has_names", "_is_view", "is_conj",
    "is_neg", "result_type", "can_cast", "promote_types",
}  # fmt: skip
_GRAPH = {
    "requires_grad_", "detach_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "backward", "__delete__",
}  # fmt: skip
_OF_THE_GRAPH = (Tensor.grad, Tensor._base)  # attributes that are tensors and no views
_COUNTS = {"numel", "nelement"}
_ZEROING = {"zero_", "_foreach_zero_"}
_LIKE_ANOTHER = {"to", "type_as"}  # take a tensor for its device and format alone


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func(*args, **kwargs)`` gives, or the error that says why it would be wrong."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _get(func, args)
    if name in _DESCRIBE:
        with plainly():
            return func(*_described(name, args), **kwargs)
    pieces = list(pieces_in((args, kwargs)))
    if not pieces:  # it came with a list that has none
        with plainly():
            return func(*args, **kwargs)
    if name in _COUNTS:
        return pieces[0].shard_layout.whole_numel
    if name == "data_ptr" and not pieces[0].shard_layout.parts[0].alone:  # safetensors asks for it first
        raise unsaved(pieces[0].shard_layout)
    if name == "__set__":
        return _set(func, *args)
    if name in _GRAPH:
        return _change_graph(func, name, args, kwargs)
    if name in _LIKE_ANOTHER and not isinstance(args[0], ShardTensor):
        return args[0].to(device=pieces[0].device, dtype=pieces[0].dtype)
    for piece in pieces:
        piece.current().check_kept()
    for piece in pieces:
        piece.current().prepare()
    if any(piece.current() is not piece for piece in pieces):
        args, kwargs = _with_current(args, kwargs)
        pieces = list(pieces_in((args, kwargs)))
    if any(map(_is_away, pieces)):
        args, kwargs = _on_one_device(name, args, kwargs)
        pieces = list(pieces_in((args, kwargs)))
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, pieces[0], args)
    run = _run_whole if all(piece.shard_layout.parts[0].alone for piece in pieces) else run_watched
    result = run(func, name, pieces, args, kwargs)
    _note_write(name, args)
    return result


# -- inside ------------------------------------------------------------------------------------------


def _described(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a function that describes a piece: of its memory, but for the device."""
    here = isinstance(args[0], ShardParameter) and name != "get_device"
    return (args[0].current(), *args[1:]) if here else args


def _is_away(piece: ShardTensor) -> bool:
    """Whether it is in host memory, of a model on a device."""
    root = piece if piece.root is None else piece.root
    owner = piece.shard_owner() if isinstance(root, HostTensor | HostParameter) else None
    return owner is not None and owner.device.type != "cpu"


def _on_one_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with copies of pieces in host memory for what is on the device, or the other way round.

    What is written to stays where it is. The others come to it, or to the device. What is copied to the host
    is a copy there, too, as it is of any tensor on the device.
    """
    if name == "copy_":
        return args, kwargs
    if name in ("cpu", "to"):
        with plainly():
            copied = args[0].clone().as_subclass(Tensor)
        return (ShardTensor.guard(copied, args[0].shard_layout, args[0].shard_owner), *args[1:]), kwargs
    rest, tensors = take_apart((args, kwargs))
    with plainly():
        devices = [tensor.device for tensor in tensors if tensor.dim()]
    if len(set(devices)) < 2:
        return args, kwargs
    written = kwargs.get("out", tensors[0]) if is_write(None, name, kwargs) else None
    with plainly():
        on_device = next(each for each in devices if each.type != "cpu")
        target = written.device if isinstance(written, Tensor) else on_device
    return put_together(rest, [_moved(tensor, target) for tensor in tensors])


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    with plainly():
        if not tensor.dim() or tensor.device == device:
            return tensor
    if not isinstance(tensor, ShardTensor):
        return tensor.to(device)
    enters = isinstance(tensor, ShardParameter) and torch.is_grad_enabled() and needs_grad(tensor)
    entry = enter(tensor) if enters and isinstance(tensor, ShardParameter) else tensor
    with plainly():
        moved = entry.to(device).as_subclass(Tensor)
    return ShardTensor.guard(moved, tensor.shard_layout, tensor.shard_owner)


def _with_current(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with gradients in place of what the user assigned for them, and values of parameters."""
    rest, tensors = take_apart((args, kwargs))
    return put_together(
        rest, [tensor.current() if isinstance(tensor, ShardTensor) else tensor for tensor in tensors]
    )


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    """An attribute. ``data`` and ``grad`` are what they should be; other tensors are views, and watched."""
    piece: ShardTensor = args[0]
    attribute = func.__self__
    if attribute is Tensor.data:
        piece = piece.current()
        piece.prepare()
        with plainly():
            # Unlike ``.data`` it counts edits together with the parameter: they reach all copies.
            data = ShardTensor.guard(piece.detach(), piece.shard_layout, piece.shard_owner)
        piece.share_with(data)
        return data
    with plainly():
        result = func(*args)
    if not isinstance(result, Tensor) or isinstance(result, ShardTensor) or attribute in _OF_THE_GRAPH:
        return result
    piece = piece.current()
    piece.prepare()
    return run_watched(func, attribute.__name__, [piece], (piece, *args[1:]), {})


def _set(func: Any, target: Tensor, value: Any) -> None:
    """``p.data = ...`` writes to the piece's memory; of a whole tensor this rank's elements are taken."""
    attribute = func.__self__
    if attribute is Tensor.requires_grad and isinstance(target, ShardParameter):
        _check_trainable(target, value)
    if isinstance(target, ShardTensor) and isinstance(value, Tensor) and attribute is Tensor.data:
        _write_data(target, value)
        return
    is_plain = isinstance(value, Tensor) and not isinstance(value, ShardTensor)
    if attribute is Tensor.grad and isinstance(target, ShardParameter) and is_plain:
        layout = target.shard_layout
        if not layout.parts[0].alone:
            value = ShardTensor.guard(_own_part(target, value, "grad").clone(), layout, target.shard_owner)
    with plainly():
        func(target, value)


def _write_data(target: ShardTensor, value: Tensor) -> None:
    shown, target = target, target.current()
    value = value.current() if isinstance(value, ShardTensor) else value
    for piece in pieces_in([target, value]):
        piece.prepare()
    layout = target.shard_layout
    with plainly(), torch.no_grad():
        if value.dtype is not target.dtype or value.device not in (target.device, shown.device):
            raise MicsError(
                f"{layout.label}: expected data of format {target.dtype} on {shown.device}, found "
                f"{value.dtype} on {value.device}; do not call model.to(), .half() or .float() after "
                "mics.shard(): choose formats with mics.shard(model, precision=mics.Precision(...))"
            )
        value = _own_part(target, value, "data")
        if value.numel() and value.data_ptr() == target.data_ptr():
            return
        target.part_from_aliases()
        target.copy_(value)  # also of no elements: it counts as an edit, as on the other ranks


def _own_part(target: ShardTensor, value: Tensor, attribute: str) -> Tensor:
    """This rank's elements of a value for ``target``: a piece of the same elements, or the whole tensor."""
    layout = target.shard_layout
    with plainly():
        if isinstance(value, ShardTensor) and value.shard_layout == layout:
            return value
        if not isinstance(value, ShardTensor) and layout.is_whole(value):
            return layout.own_part_of(value)
    raise MicsError(
        f"{layout.label}.{attribute}: expected the whole tensor of shape {list(layout.whole_shape)}, or a "
        f"piece of the same elements, found a tensor of shape {list(value.shape)}; torch.zeros_like(p) and "
        "other functions of p make pieces. p.to_local() is this rank's memory, to write what only this rank "
        "knows"
    )


def _note_write(name: str, args: tuple[Any, ...]) -> None:
    """Count what torch's functions of lists write, which it does not everywhere. Remember what is zeroed."""
    if not name.endswith("_"):
        return
    if name.startswith("_foreach_"):
        with plainly():
            torch.autograd.graph.increment_version(list(pieces_in(args[:1])))
    if name in _ZEROING or (name == "fill_" and type(args[-1]) in (int, float) and args[-1] == 0):
        for piece in pieces_in(args[:1]):
            piece.note_zeroed()


def _change_graph(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "requires_grad_" and isinstance(args[0], ShardParameter):
        _check_trainable(args[0], kwargs.get("requires_grad", (*args[1:], True)[0]))
    if name == "backward" and isinstance(args[0], ShardTensor) and not args[0].shard_layout.parts[0].alone:
        raise refusal(name, args[0].shard_layout, "a loss is one number, the same kind on every rank")
    with plainly():
        return func(*args, **kwargs)


def _check_trainable(param: ShardParameter, wanted: bool) -> None:
    if wanted and not param.shard_trainable:
        raise SettingsError(
            f"requires_grad_(True) of {param.shard_layout.label}: expected it to stay frozen, found "
            f"it frozen when "
            "mics.shard() ran, so there is no room for its gradient; set requires_grad before sharding, and "
            "freeze it afterwards"
        )


def _unscale(func: Any, piece: ShardTensor, args: tuple[Any, ...]) -> None:
    """torch's GradScaler: a rank that overflowed must make every rank skip the step."""
    with plainly():
        func(*args)
    piece.owner().all_reduce(args[1], "the gradient scaler's overflow flag", maximum=True)


def _run_whole(
    func: Any, name: str, pieces: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One rank is the world: its pieces are whole tensors."""
    if torch.is_grad_enabled() and not is_write(func, name, kwargs) and func is not torch.autograd.grad:
        entries = {id(p): enter(p) for p in pieces if isinstance(p, ShardParameter) and needs_grad(p)}
        args, kwargs = replace_tensors(args, entries), replace_tensors(kwargs, entries)
    if func is torch.autograd.grad:
        return run_watched(func, name, pieces, args, kwargs)
    with plainly():
        result = func(*args, **kwargs)
        return result.as_subclass(Tensor) if type(result) is ShardTensor else result
