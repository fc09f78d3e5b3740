"""Recorded modules wait for their root, and are sharded with it.

FSDP2 shards in each call of ``fully_shard``. mics shards a model once, as a whole, and no call says that it
is the last. So calls record, and the first use shards: the *root* of a module is the outermost recorded
module that contains it. A use is whatever needs sharded parameters:

- parameters or a state dict are taken, of the root or of any module around or inside it;
- a recorded module is called, or a state dict is loaded.

Reading one parameter by its attribute is no use: it is a whole plain tensor up to then, and code that
initialises it is right.

If a module is used before ``fully_shard`` is called on the module around it, it has become a root of its own:
that later call raises and says so. So does a call of an inner module as the very first use: parameters of
the root may be part of its inputs' graph, and would be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, ValuesView
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any, Final
from weakref import WeakSet, ref

import torch.nn as nn

from mics.api import shard
from mics.engine import engine_of
from mics.errors import SettingsError
from mics.fsdp.dtensors import show_dtensors
from mics.fsdp.module import FSDPModule
from mics.fsdp.records import (
    ModuleRecord,
    announce,
    apply_residency,
    find_record,
    float_dtypes,
    groups_for,
    precision_for,
    prefetch_for,
    put_record,
    recorded,
)
from mics.schedule.autograd import UserHooks
from mics.state_dict import summon_full_params
from mics.utils.tensor_trees import cast_floats

# What authors call the methods that give a module's parameters their first values.
_INITIALISERS: Final = ("reset_parameters", "init_weights")

_waiting: WeakSet[nn.Module] = WeakSet()
_inside: WeakSet[nn.Module] = WeakSet()  # these, and what is in them
_classes: dict[tuple[type, ...], type] = {}


class _WaitingTable(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``. Who takes all of them gets them sharded."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self._module = ref(module)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return self._settled().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return self._settled().values()

    def _settled(self) -> dict[str, nn.Parameter | None]:
        module = self._module()
        if module is None:
            return dict(self)
        settle(module)
        return module._parameters


class _WaitingModule(FSDPModule):
    """A recorded module that is not sharded yet."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = find_root(self)
        if root is not self:
            raise SettingsError(
                f"forward of {_path(root, self)!r}: expected {type(root).__name__} to be sharded, found this "
                "the first use of it; build the optimizer from its parameters first, or call the whole model"
            )
        settle(self)
        return self(*args, **kwargs)

    def unshard(self: Any, async_op: bool = False) -> Any:
        settle(self)
        return self.unshard(async_op)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle(self)
        return self.state_dict(*args, **kwargs)

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle(self)
        return self.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle(self)
        return self._load_from_state_dict(*args, **kwargs)

    def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``to()``, ``cuda()`` and ``to_empty()`` change a plain model, as they do before ``mics.shard``."""
        with plain_tables(self):
            return self._plain_class._apply(self, fn, recurse)


def wait_for_root(module: nn.Module, record: ModuleRecord) -> None:
    """Let ``module`` wait to be sharded."""
    put_record(module, record)
    _waiting.add(module)
    _let_wait(module)
    _change_class(module, _WaitingModule)


def settle(module: nn.Module) -> None:
    """Shard the root of ``module``, unless it is sharded."""
    root = find_root(module)
    if root is None:
        return
    found = [(inner, record) for inner, record in recorded(root) if inner in _waiting]
    with plain_tables(root, once=True):
        _cast_outputs(root)
        shard(
            root,
            units=[inner for inner, _ in found if inner is not root],
            precision=precision_for(found[0][1].policy, root),
            prefetch=prefetch_for([record for _, record in found]),
            **groups_for(found[0][1].mesh),
        )
    for inner in root.modules():
        _inside.discard(inner)
    for inner, record in found:
        _waiting.discard(inner)
        record.root = ref(root)
        _change_class(inner, FSDPModule)
        _initialise_whole(root, inner)
    show_dtensors(root)
    apply_residency(root)
    if found[0][1].says:
        announce(root, found[0][1].says)
    for _, record in found:
        later, record.later = record.later, []
        for action in later:
            action()


@contextmanager
def plain_tables(module: nn.Module, *, once: bool = False) -> Iterator[None]:
    """Inside, nobody notices that parameters are taken; with ``once`` nor afterwards, unless this fails."""
    tables = [inner for inner in module.modules() if isinstance(inner._parameters, _WaitingTable)]
    for inner in tables:
        inner.__dict__["_parameters"] = dict.copy(inner._parameters)
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and once):
            for inner in tables:
                inner.__dict__["_parameters"] = _WaitingTable(inner)


def _let_wait(module: nn.Module) -> None:
    for inner in module.modules():
        _inside.add(inner)
        if inner._parameters and not isinstance(inner._parameters, _WaitingTable):
            inner.__dict__["_parameters"] = _WaitingTable(inner)


def is_inside(module: nn.Module) -> bool:
    """Whether a waiting module contained ``module`` when it was recorded."""
    return module in _inside


def find_root(module: nn.Module) -> Any:
    """The outermost waiting module that contains ``module``."""
    waiting = list(_waiting)
    inside = {inner for each in waiting for inner in each.modules() if inner is not each}
    outermost = [each for each in waiting if each not in inside]
    roots = [each for each in outermost if any(inner is module for inner in each.modules())]
    if len(roots) > 1:
        names = " and ".join(sorted(type(each).__name__ for each in roots))
        raise SettingsError(
            f"fully_shard: expected one root around {type(module).__name__}, found {names}, which share it; "
            "call fully_shard on the module around both"
        )
    return roots[0] if roots else None


def _change_class(module: nn.Module, base: type[FSDPModule]) -> None:
    kind = type(module)
    plain = kind._plain_class if issubclass(kind, FSDPModule) else kind
    if (base, plain) not in _classes:
        _classes[base, plain] = type(f"FSDP{plain.__name__}", (base, plain), {"_plain_class": plain})
    module.__class__ = _classes[base, plain]


def _path(root: nn.Module, module: nn.Module) -> str:
    return next(str(name) for name, inner in root.named_modules() if inner is module)


# -- formats and first values -------------------------------------------------------------------------


def _cast_outputs(root: nn.Module) -> None:
    """Cast what modules take and return as FSDP2 does where ``mics.shard`` does not."""
    dtypes = float_dtypes(root)
    for module, record in recorded(root):
        policy = record.policy
        # Units cast their inputs to a format that they lower parameters to.
        casts = policy.param_dtype is not None and policy.cast_forward_inputs
        if casts and (module is root or dtypes == {policy.param_dtype}):
            before = partial(_cast_inputs, policy.param_dtype)
            UserHooks.skip(before)
            module.register_forward_pre_hook(before, with_kwargs=True)
        if policy.output_dtype is not None:
            after = partial(_cast_output, policy.output_dtype)
            UserHooks.skip(after)
            module.register_forward_hook(after)


def _cast_inputs(dtype: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_floats((args, kwargs), dtype)


def _cast_output(dtype: Any, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def _initialise_whole(root: nn.Module, module: nn.Module) -> None:
    """Let the initialisers of a sharded module work on whole parameters; rank 0's are kept."""
    for name in _INITIALISERS:
        method = getattr(module, name, None)
        if callable(method) and hasattr(type(module), name):
            run = partial(_run_on_whole, ref(root), method)
            module.__dict__[name] = update_wrapper(run, method)


def _run_on_whole(root: ref[nn.Module], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = root()
    assert model is not None, "it holds the module"
    if engine_of(model).progress.suspended:
        return method(*args, **kwargs)
    with summon_full_params(model, write=True):
        return method(*args, **kwargs)


def is_waiting(module: nn.Module) -> bool:
    return find_record(module) is not None and module in _waiting
