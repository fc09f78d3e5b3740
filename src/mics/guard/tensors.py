"""The tensors of a sharded model that users see: this rank's pieces, behind a guard.

``model.parameters()``, the values of ``model.state_dict()``, ``parameter.grad`` and optimizer state are
pieces of whole tensors. What user code computes with them is right or raises: see ``rules.py``. While an
optimizer steps, it sees plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import MicsError, SettingsError
from mics.guard.answers import AllReduces, Answered, Entry
from mics.guard.layout import Layout, ShardOwner
from mics.guard.rules import Watch, refusal
from mics.utils.tensor_trees import put_together, take_apart

P = ParamSpec("P")
R = TypeVar("R")
AnyParameter = TypeVar("AnyParameter", bound="ShardParameter")

plainly = torch._C.DisableTorchFunctionSubclass
"""A context in which pieces are plain tensors: for our own code, which knows that they are pieces."""


def run_plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` in that context."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with plainly():
            return function(*args, **kwargs)

    return run


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
_LIKE_ANOTHER = {"to", "type_as"}  # take a tensor for its device and format alone
_READS_ONE = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
              "is_nonzero", "__format__"}  # fmt: skip


class ShardTensor(Tensor):
    """This rank's piece of a whole tensor."""

    shard_layout: Layout
    # Weak: Python's collector does not see what a parameter holds as its ``grad``, so a strong reference
    # back would keep every model alive whose gradients were not cleared at the end.
    shard_owner: ref[ShardOwner]
    _root: ShardTensor | None = None  # the piece whose memory this one shares
    _aliases: list[ref[ShardTensor]] | None = None  # pieces that share this one's memory
    became: ShardTensor | None = None  # the gradient that it is, since the user assigned it

    @classmethod
    def guard(cls, piece: Tensor, layout: Layout, owner: ref[ShardOwner]) -> ShardTensor:
        """``piece`` itself, behind the guard."""
        guarded: Any = piece if type(piece) is Tensor else Tensor.as_subclass(piece, Tensor)
        guarded.__class__ = cls
        guarded.shard_layout, guarded.shard_owner = layout, owner
        return guarded  # type: ignore[no-any-return]

    def unguard(self) -> None:
        """Be a plain tensor, for an optimizer at work."""
        self.__class__ = Tensor  # type: ignore[assignment]

    def to_local(self) -> Tensor:
        """This rank's elements as a plain tensor, in the same memory: ``[n, 1, ...]`` of the flat order."""
        values = self.current()
        values._prepare()
        with plainly():
            return values.detach().as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank. All ranks must call it: one all-reduce of its size."""
        values = self.current()
        values._prepare()
        owner, layout = self._owner(), self.shard_layout
        with plainly(), torch.no_grad():
            local = values.detach().as_subclass(Tensor).reshape(-1)
            pieces = []
            for part in layout.parts:
                whole = local.new_zeros(part.whole_numel)
                piece, local = local[: part.stop - part.start], local[part.stop - part.start :]
                if part.counts:
                    whole[part.start : part.stop] = piece
                if part.whole_numel:
                    # Bytes: a sum of one value and zeros, to the bit.
                    owner.all_reduce(whole.view(torch.uint8), f"full_tensor of {part.name!r}")
                pieces.append(whole)
            return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(layout.whole_shape)

    def check_kept(self) -> None:
        """Raise if its values are gone. Only gradients that were put aside may be."""
        if self._root is not None:
            self._root.check_kept()

    def part_from_aliases(self) -> None:
        """Give all that shares this piece's memory a copy: the piece is about to get other values.

        As in torch, where ``p.data = x`` and a gradient after ``zero_grad()`` are other memory.
        """
        aliases, self._aliases = self._aliases or [], None
        with plainly(), torch.no_grad():
            for alias in (found for each in aliases if (found := each()) is not None):
                alias.data = alias.as_subclass(Tensor).clone()
                alias._root = None

    def _share_with(self, alias: ShardTensor) -> None:
        root = self if self._root is None else self._root
        alias._root = root
        root._aliases = [each for each in root._aliases or [] if each() is not None]
        root._aliases.append(ref(alias))

    def current(self) -> ShardTensor:
        """Itself, or the gradient that it became: ``p.grad = g`` makes the two one, as in torch."""
        return self if self.became is None else self.became.current()

    def _prepare(self) -> None:
        """Have the values that a user may see."""
        if self._root is not None:
            self._root._prepare()

    def _owner(self) -> ShardOwner:
        owner = self.shard_owner()
        if owner is None:
            raise MicsError(
                f"{self.shard_layout.label}: expected its sharded model to exist, found it gone; "
                f"keep the model, "
                "or take tensor.to_local()"
            )
        return owner

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with plainly():
            local = repr(self.current().detach().as_subclass(Tensor))
        layout = self.shard_layout
        return (
            f"{type(self).__name__}({local}, this rank's {layout.local_numel:,} of {layout.whole_numel:,} "
            f"elements of {layout.label})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _unsaved(self.shard_layout)

    def as_subclass(self, cls: Any) -> Any:
        """Like ``torch.Tensor.as_subclass``, which would take the guard off."""
        if torch._C._is_torch_function_enabled():
            raise refusal("as_subclass", self.shard_layout, "the result would pass for a whole tensor")
        return super().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        values = self.current()
        values._prepare()
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with plainly():
            copied = values.detach().as_subclass(Tensor).clone()
        memo[id(self)] = found = ShardTensor.guard(copied, self.shard_layout, self.shard_owner)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
            raise _unsaved(pieces[0].shard_layout)
        if name == "__set__":
            return _set(func, *args)
        if name in _GRAPH:
            return _change_graph(func, name, args, kwargs)
        if name in _LIKE_ANOTHER and not isinstance(args[0], ShardTensor):
            return args[0].to(device=pieces[0].device, dtype=pieces[0].dtype)
        for piece in pieces:
            piece.current().check_kept()
        for piece in pieces:
            piece.current()._prepare()
        if any(piece.current() is not piece for piece in pieces):
            args, kwargs = _with_current(args, kwargs)
            pieces = list(pieces_in((args, kwargs)))
        if any(map(_is_away, pieces)):
            args, kwargs = _on_one_device(name, args, kwargs)
            pieces = list(pieces_in((args, kwargs)))
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, pieces[0], args)
        if all(piece.shard_layout.parts[0].alone for piece in pieces):
            return _run_whole(func, name, pieces, args, kwargs)
        return _watch(func, name, pieces, args, kwargs)


class ShardParameter(ShardTensor, nn.Parameter):
    """This rank's piece of a parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        super().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return super().__repr__()

    @staticmethod
    def of(piece: Tensor, layout: Layout, owner: ref[ShardOwner], *, trainable: bool) -> ShardParameter:
        """A parameter whose memory is ``piece``."""
        return ShardParameter._made(ShardParameter, piece, layout, owner, trainable)

    @staticmethod
    def standing_for(values: Tensor, at: Tensor, layout: Layout, owner: ref[ShardOwner]) -> ShardParameter:
        """A parameter that is trained, in the place of ``values`` on the host. ``at`` has its shape."""
        param = ShardParameter._made(ShardParameter, at, layout, owner, True)
        param.on_host = ShardParameter._made(HostParameter, values, layout, owner, True)
        return param

    @staticmethod
    def _made(
        kind: type[AnyParameter], piece: Tensor, layout: Layout, owner: ref[ShardOwner], trainable: bool
    ) -> AnyParameter:
        param: Any = Tensor._make_subclass(kind, piece, trainable)
        param.shard_layout, param.shard_owner, param.shard_trainable = layout, owner, trainable
        return param  # type: ignore[no-any-return]

    shard_trainable: bool  # whether there is room for its gradient
    on_host: HostParameter | None = None  # has its values, where this one only stands for them

    def current(self) -> ShardTensor:
        """Where its values are."""
        values = self.on_host
        if values is None:
            return self
        with plainly():
            if values.requires_grad != self.requires_grad:
                values.requires_grad_(self.requires_grad)
        return values


class HostTensor(ShardTensor):
    """This rank's piece of optimizer state, in host memory. Copies to it may be under way."""

    def _prepare(self) -> None:
        _settle_host(self)


class HostParameter(ShardParameter):
    """The values of a parameter whose master is in host memory. Modules and optimizers hold another one,
    without memory, on the device: users find its device, and its gradient, where they expect them.
    """

    def _prepare(self) -> None:
        _settle_host(self)


class ShardGrad(ShardTensor):
    """This rank's piece of a parameter's gradient. Whoever uses it gets hop 2 first."""

    is_lost: bool = False  # its memory was freed while it had had hop 1 alone

    @staticmethod
    def of(gradient: Tensor, layout: Layout, owner: ref[ShardOwner]) -> ShardGrad:
        """A guarded gradient in the memory of ``gradient``, which stays plain."""
        guarded: Any = ShardGrad.guard(gradient.detach(), layout, owner)
        return guarded  # type: ignore[no-any-return]

    def check_kept(self) -> None:
        if self.is_lost:
            raise MicsError(
                "a gradient that was cleared and kept aside: expected it to be used before the next forward, "
                "found it afterwards, when it can no longer be added up over the replicas; clone() it before "
                "zero_grad()"
            )

    def keep_for_user(self) -> None:
        """Have memory of its own from here on: the user holds it, and the next backward needs the memory."""
        self.part_from_aliases()
        with plainly(), torch.no_grad():
            self.data = self.as_subclass(Tensor).clone()

    def _prepare(self) -> None:
        self.check_kept()
        owner = self.shard_owner()
        if owner is not None:
            owner.synchronize()


def show_plain(param: nn.Parameter) -> None:
    """Let ``param`` be a plain parameter, for an optimizer at work."""
    param.__class__ = nn.Parameter


def show_guarded(param: nn.Parameter) -> None:
    param.__class__ = ShardParameter


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
        piece._prepare()
    watch, result = _run(torch._foreach_norm, "norms", pieces, (found, norm_type), {})
    with plainly():
        answer = torch.stack([value.to(result[0].dtype) for value in result])
    return _answered(answer, watch, pieces[0], "norms")


def pieces_in(value: Any) -> Iterator[ShardTensor]:
    """All pieces among arguments."""
    if isinstance(value, ShardTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from pieces_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from pieces_in(item)


# -- inside -----------------------------------------------------------------------------------------


def _described(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a function that describes a piece: of its memory, but for the device."""
    here = isinstance(args[0], ShardParameter) and name != "get_device"
    return (args[0].current(), *args[1:]) if here else args


def _settle_host(piece: ShardTensor) -> None:
    owner = piece.shard_owner()
    if owner is not None:
        owner.settle_host()


def _is_away(piece: ShardTensor) -> bool:
    """Whether it is in host memory, of a model on a device."""
    root = piece if piece._root is None else piece._root
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
    written = kwargs.get("out", tensors[0]) if _is_write(None, name, kwargs) else None
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
    enters = isinstance(tensor, ShardParameter) and torch.is_grad_enabled() and _needs_grad(tensor)
    entry = _enter(tensor) if enters and isinstance(tensor, ShardParameter) else tensor
    with plainly():
        moved = entry.to(device).as_subclass(Tensor)
    return ShardTensor.guard(moved, tensor.shard_layout, tensor.shard_owner)


def _with_current(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with gradients in place of what the user assigned for them, and values of parameters."""
    rest, tensors = take_apart((args, kwargs))
    return put_together(
        rest, [tensor.current() if isinstance(tensor, ShardTensor) else tensor for tensor in tensors]
    )


def _unsaved(layout: Layout) -> MicsError:
    return MicsError(
        f"saving {layout.label}: expected whole tensors, found this rank's {layout.local_numel:,} of "
        f"{layout.whole_numel:,} elements, which no other rank or program could use; call "
        "mics.save(path, model, optimizer) on all ranks, or save mics.full_state_dict(model) "
        "(model.save_pretrained(folder, state_dict=mics.full_state_dict(model))). p.to_local() is this "
        "rank's memory"
    )


def _get(func: Any, args: tuple[Any, ...]) -> Any:
    """An attribute. ``data`` and ``grad`` are what they should be; other tensors are views, and watched."""
    piece: ShardTensor = args[0]
    attribute = func.__self__
    if attribute is Tensor.data:
        piece = piece.current()
        piece._prepare()
        with plainly():
            # Unlike ``.data`` it counts edits together with the parameter: they reach all copies.
            data = ShardTensor.guard(piece.detach(), piece.shard_layout, piece.shard_owner)
        piece._share_with(data)
        return data
    with plainly():
        result = func(*args)
    if not isinstance(result, Tensor) or isinstance(result, ShardTensor) or attribute in _OF_THE_GRAPH:
        return result
    piece = piece.current()
    piece._prepare()
    return _watch(func, attribute.__name__, [piece], (piece, *args[1:]), {})


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
        piece._prepare()
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
    piece._owner().all_reduce(args[1], "the gradient scaler's overflow flag", maximum=True)


def _run_whole(
    func: Any, name: str, pieces: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One rank is the world: its pieces are whole tensors."""
    if torch.is_grad_enabled() and not _is_write(func, name, kwargs) and func is not torch.autograd.grad:
        entries = {id(p): _enter(p) for p in pieces if isinstance(p, ShardParameter) and _needs_grad(p)}
        args, kwargs = _replaced(args, entries), _replaced(kwargs, entries)
    if func is torch.autograd.grad:
        return _watch(func, name, pieces, args, kwargs)
    with plainly():
        result = func(*args, **kwargs)
        return result.as_subclass(Tensor) if type(result) is ShardTensor else result


def _watch(
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
    numbers = {} if _is_write(func, name, kwargs) else _single_numbers(args, kwargs)
    try:
        if numbers:
            return func(*_replaced(args, numbers), **_replaced(kwargs, numbers))
        args, kwargs = _cut(args, pieces), _cut(kwargs, pieces)
        watch, result = _run(func, name, pieces, args, kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, MicsError) or (_is_write(func, name, kwargs) and "grad" in str(error)):
            raise  # what torch says of a graph is true of the whole tensor, too
        # A piece has another shape than the whole: what torch says may be true of one rank alone.
        raise refusal(name, layout, f"torch says: {error}") from error
    for tensor, found in watch.written:
        if type(tensor) is Tensor:
            ShardTensor.guard(tensor, found, pieces[0].shard_owner)
    shown = _shown(result, watch, pieces, args, name)
    if isinstance(shown, ShardTensor) and shown._root is None and all(shown is not each for each in pieces):
        with plainly():
            sharing = [each for each in pieces if each.data_ptr() == shown.data_ptr() != 0]
        for piece in sharing[:1]:
            piece._share_with(shown)
    return shown


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
    if torch.is_grad_enabled() and not _is_write(func, name, kwargs):
        entries = {id(p): _enter(p) for p in pieces if isinstance(p, ShardParameter) and _needs_grad(p)}
        if entries:
            args, kwargs = _replaced(args, entries), _replaced(kwargs, entries)
    world: AllReduces = pieces[0]._owner()
    tiny = _tiny_pieces(args, kwargs)
    if tiny and not _is_write(func, name, kwargs):
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

    return _mapped(value, pad)


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
    found: Tensor = Answered.apply(answer, piece._owner(), watch.gradient_scale, name)  # type: ignore[no-untyped-call]
    return found


def _is_write(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if name == "detach":
        return True  # it leaves the graph
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__i", "__set")) or kwargs.get("out") is not None


def _needs_grad(param: ShardParameter) -> bool:
    with plainly():
        return param.requires_grad


def _enter(param: ShardParameter) -> Tensor:
    owner = param._owner()
    with plainly():
        anchor = torch.zeros((), dtype=torch.float32, device=param.device, requires_grad=True)
        take = partial(owner.take_gradient, param.shard_layout.parts[0].name)
        entry: Tensor = Entry.apply(anchor, param, take)  # type: ignore[no-untyped-call]
    return ShardTensor.guard(entry, param.shard_layout, param.shard_owner)


def _replaced(value: Any, entries: dict[int, Tensor]) -> Any:
    return _mapped(value, lambda tensor: entries.get(id(tensor), tensor))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with ``change(tensor)`` in place of each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
