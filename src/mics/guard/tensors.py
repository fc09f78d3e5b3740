"""The tensors of a sharded model that users see: this rank's pieces, behind a guard.

``model.parameters()``, the values of ``model.state_dict()``, ``parameter.grad`` and optimizer state are
pieces of whole tensors. What user code computes with them is right or raises: see ``calls.py``. While an
optimizer steps, it sees plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import MicsError
from mics.guard.layout import Layout, ShardOwner
from mics.guard.rules import refusal

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


class ShardTensor(Tensor):
    """This rank's piece of a whole tensor."""

    shard_layout: Layout
    # Weak: Python's collector does not see what a parameter holds as its ``grad``, so a strong reference
    # back would keep every model alive whose gradients were not cleared at the end.
    shard_owner: ref[ShardOwner]
    root: ShardTensor | None = None  # the piece whose memory this one shares
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
        values.prepare()
        with plainly():
            return values.detach().as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank. All ranks must call it: one all-reduce of its size."""
        values = self.current()
        values.prepare()
        owner, layout = self.owner(), self.shard_layout
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
        if self.root is not None:
            self.root.check_kept()

    def part_from_aliases(self) -> None:
        """Give all that shares this piece's memory a copy: the piece is about to get other values.

        As in torch, where ``p.data = x`` and a gradient after ``zero_grad()`` are other memory.
        """
        aliases, self._aliases = self._aliases or [], None
        with plainly(), torch.no_grad():
            for alias in (found for each in aliases if (found := each()) is not None):
                alias.data = alias.as_subclass(Tensor).clone()
                alias.root = None

    def share_with(self, alias: ShardTensor) -> None:
        root = self if self.root is None else self.root
        alias.root = root
        root._aliases = [each for each in root._aliases or [] if each() is not None]
        root._aliases.append(ref(alias))

    def current(self) -> ShardTensor:
        """Itself, or the gradient that it became: ``p.grad = g`` makes the two one, as in torch."""
        return self if self.became is None else self.became.current()

    def prepare(self) -> None:
        """Have the values that a user may see."""
        if self.root is not None:
            self.root.prepare()

    def note_zeroed(self) -> None:
        """The user has filled it with zeros."""
        if self.root is not None:
            self.root.note_zeroed()

    def owner(self) -> ShardOwner:
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
        raise unsaved(self.shard_layout)

    def as_subclass(self, cls: Any) -> Any:
        """Like ``torch.Tensor.as_subclass``, which would take the guard off."""
        if torch._C._is_torch_function_enabled():
            raise refusal("as_subclass", self.shard_layout, "the result would pass for a whole tensor")
        return super().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        values = self.current()
        values.prepare()
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
        from mics.guard.calls import call  # it knows what there is here

        return call(func, args, kwargs or {})


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

    def prepare(self) -> None:
        _settle_host(self)


class HostParameter(ShardParameter):
    """The values of a parameter whose master is in host memory. Modules and optimizers hold another one,
    without memory, on the device: users find its device, and its gradient, where they expect them.
    """

    def prepare(self) -> None:
        _settle_host(self)


class ShardGrad(ShardTensor):
    """This rank's piece of a parameter's gradient. Whoever uses it gets hop 2 first."""

    is_lost: bool = False  # its memory was freed while it had had hop 1 alone
    is_zeroed: bool = False  # by the user: all ranks know, also those whose piece was zero before

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

    def note_zeroed(self) -> None:
        self.is_zeroed = True

    def prepare(self) -> None:
        self.check_kept()
        owner = self.shard_owner()
        if owner is not None:
            owner.synchronize()


def show_plain(param: nn.Parameter) -> None:
    """Let ``param`` be a plain parameter, for an optimizer at work."""
    param.__class__ = nn.Parameter


def show_guarded(param: nn.Parameter) -> None:
    param.__class__ = ShardParameter


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


def _settle_host(piece: ShardTensor) -> None:
    owner = piece.shard_owner()
    if owner is not None:
        owner.settle_host()


def unsaved(layout: Layout) -> MicsError:
    return MicsError(
        f"saving {layout.label}: expected whole tensors, found this rank's {layout.local_numel:,} of "
        f"{layout.whole_numel:,} elements, which no other rank or program could use; call "
        "mics.save(path, model, optimizer) on all ranks, or save mics.full_state_dict(model) "
        "(model.save_pretrained(folder, state_dict=mics.full_state_dict(model))). p.to_local() is this "
        "rank's memory"
    )
