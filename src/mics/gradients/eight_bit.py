"""Adam with 8-bit state on shards: ``Adam8bit`` and ``AdamW8bit`` of torchao and of bitsandbytes.

Both keep a code of 8 bits for each element, and a scale for each block of a parameter's elements. Units cut
large parameters between blocks only (``layout/flat.py``), so a piece has the blocks of the whole parameter,
and the library's own step on a piece rounds as it does in one process, on any number of ranks.

A library quantises tensors of 4,096 elements or more. It sees a piece, and ranks would decide differently.
So state is made here, before the library steps, as it would be made for the whole parameter.

=============  =========================================  ================================================
library        state of a large parameter                 taken apart, as in a checkpoint
=============  =========================================  ================================================
torchao        ``exp_avg``: codes, scale, qmap            ``exp_avg_codes``, ``exp_avg_scale`` per block
bitsandbytes   ``state1``, ``absmax1``, ``qmap1``         ``state1``, ``absmax1`` per block
=============  =========================================  ================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from inspect import unwrap
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mics.errors import SettingsError
from mics.guard import Layout
from mics.layout.flat import BLOCK_NUMEL, LARGE_NUMEL
from mics.sharding.unit import Unit
from mics.utils.dtensors import is_dtensor

State = dict[str, Any]


class EightBit(ABC):
    """How a library keeps the state of one optimizer."""

    block_numel: int  # elements that share a scale

    def __init__(self, optimizer: Optimizer, base: type[Optimizer]) -> None:
        self.optimizer: Any = optimizer
        self._kind = base

    def problem(self) -> str | None:
        """Why this optimizer cannot train a sharded model."""
        if unwrap(type(self.optimizer).step) is not unwrap(self._kind.step):
            return f"expected the step of {self._kind.__name__}, found another one"
        return None

    @abstractmethod
    def make(self, param: Tensor, whole_numel: int) -> State:
        """The state that the library makes for a parameter of ``whole_numel``, for the piece ``param``."""

    @abstractmethod
    def take_apart(self, state: State) -> State:
        """Plain tensors and numbers: what training changes, without tables."""

    @abstractmethod
    def put_together(self, entries: State, dtype: torch.dtype) -> State:
        """The state that was taken apart, in the same memory. ``dtype``: of the parameter."""

    @abstractmethod
    def is_per_block(self, entry: str) -> bool:
        """Whether an entry has a value for each block, and not one for each element."""

    @abstractmethod
    def expected_nbytes(self, param: Tensor, whole_numel: int) -> float:
        """Bytes of the whole state of a parameter."""

    def prepare(self, members: Sequence[tuple[Unit, int]]) -> None:
        """Before a step, on plain pieces: make state, and cut what was loaded for whole parameters."""
        for unit, index in members:
            param, layout = unit.shards[index], unit.layouts[index]
            state = self.optimizer.state.get(param)
            if state and not param.numel():
                del self.optimizer.state[param]  # of a whole parameter, of which this rank has nothing
            elif state and self._is_whole(state, param, layout):
                self.optimizer.state[param] = self._cut(state, param, layout)
            elif state:
                self.pieces(param, layout)
            elif param.grad is not None:
                self.optimizer.state[param] = self.make(param, layout.whole_numel)

    def pieces(self, param: Tensor, layout: Layout) -> State:
        """State of a piece taken apart. Raises if it is that of other elements."""
        entries = self.take_apart(self.optimizer.state.get(param, {}))
        for entry, value in self.elementwise(entries).items():
            if value.shape != param.shape:
                raise SettingsError(
                    f"optimizer state {entry!r} of {layout.label}: expected the piece of it that this rank "
                    f"has, found {list(value.shape)}; load state of another number of ranks with mics.load"
                )
        return entries

    def elementwise(self, entries: State) -> dict[str, Tensor]:
        """Those with a value for each element."""
        return {
            entry: value
            for entry, value in entries.items()
            if isinstance(value, Tensor) and value.dim() and not self.is_per_block(entry)
        }

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block_numel)

    def _is_whole(self, state: State, param: Tensor, layout: Layout) -> bool:
        values = self.elementwise(self.take_apart(state)).values()
        return all(value.shape != param.shape and layout.is_whole(value) for value in values)

    def _cut(self, state: State, param: Tensor, layout: Layout) -> State:
        """This rank's blocks of whole state."""
        (part,) = layout.parts
        found: State = {}
        for entry, value in self.take_apart(state).items():
            if isinstance(value, Tensor) and value.dim() and self.is_per_block(entry):
                if part.start % self.block_numel or len(value) != self.num_blocks(part.whole_numel):
                    raise SettingsError(
                        f"optimizer state {entry!r} of {layout.label}: expected "
                        f"{self.num_blocks(part.whole_numel)} blocks of {self.block_numel}, found "
                        f"{len(value)}; build the optimizer with the settings that it was saved with"
                    )
                value = value[part.start // self.block_numel : self.num_blocks(part.stop)].clone()
            elif isinstance(value, Tensor) and layout.is_whole(value):
                value = layout.own_part_of(value).clone()
            found[entry] = value
        return self.put_together(found, param.dtype)

    def _group_of(self, param: Tensor) -> tuple[int, int]:
        """Its group, and its place there."""
        return next(
            (group, place)
            for group, settings in enumerate(self.optimizer.param_groups)
            for place, each in enumerate(settings["params"])
            if each is param
        )


class _Torchao(EightBit):
    """``exp_avg`` and ``exp_avg_sq`` are tensors that look like the parameter, and hold codes and scales."""

    def __init__(self, optimizer: Optimizer, base: type[Optimizer]) -> None:
        super().__init__(optimizer, base)
        self.block_numel = self.optimizer.block_size

    def problem(self) -> str | None:
        if BLOCK_NUMEL % self.block_numel:
            return f"block_size: expected a divisor of {BLOCK_NUMEL}, found {self.block_numel}"
        return super().problem()

    def make(self, param: Tensor, whole_numel: int) -> State:
        entries: State = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
        for entry in self._moments(param):
            if self._quantises(whole_numel):
                entries[entry + _CODES] = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
                num_blocks = self.num_blocks(param.numel())
                entries[entry + _SCALE] = torch.zeros(num_blocks, dtype=torch.float32, device=param.device)
            else:
                entries[entry] = torch.zeros_like(param, requires_grad=False)
        return self.put_together(entries, param.dtype)

    def take_apart(self, state: State) -> State:
        entries: State = {}
        for entry, value in state.items():
            if is_packed(value):
                entries[entry + _CODES], entries[entry + _SCALE] = value.codes, value.scale
            else:
                entries[entry] = value
        return entries

    def put_together(self, entries: State, dtype: torch.dtype) -> State:
        from torchao.optim.subclass_8bit import OptimState8bit

        state: State = {}
        for entry, value in entries.items():
            if entry.endswith(_CODES):
                name = entry.removesuffix(_CODES)
                scale, signed = entries[name + _SCALE], name == "exp_avg"
                qmap = _torchao_qmap(name, signed, value.device)
                state[name] = OptimState8bit(value, scale, qmap, signed, dtype=dtype)
            elif not entry.endswith(_SCALE):
                state[entry] = value
        return state

    def is_per_block(self, entry: str) -> bool:
        return entry.endswith(_SCALE)

    def expected_nbytes(self, param: Tensor, whole_numel: int) -> float:
        each = 1 + 4 / self.block_numel if self._quantises(whole_numel) else param.element_size()
        return len(self._moments(param)) * each * whole_numel

    def _moments(self, param: Tensor) -> list[str]:
        group = self.optimizer.param_groups[self._group_of(param)[0]]
        return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])

    def _quantises(self, whole_numel: int) -> bool:
        """Torchao's own rule."""
        return whole_numel >= LARGE_NUMEL and whole_numel % self.block_numel == 0


_CODES: Final = "_codes"
_SCALE: Final = "_scale"


@lru_cache(maxsize=64)
def _torchao_qmap(entry: str, signed: bool, device: torch.device) -> Tensor:
    """What codes stand for: [256]. One for each entry, not for each parameter."""
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros((1,), signed, 1, device).qmap  # type: ignore[no-any-return]


class _BitsAndBytes(EightBit):
    """``state1`` and ``state2`` are codes, with ``absmax1`` and ``absmax2`` for their blocks, or float32."""

    block_numel = 256

    def problem(self) -> str | None:
        args = self.optimizer.args
        if self.optimizer.optimizer_name != "adam" or args.max_unorm > 0:
            return f"expected Adam or AdamW, found {self.optimizer.optimizer_name!r}"
        if getattr(args, "percentile_clipping", 100) != 100 or not getattr(args, "block_wise", True):
            return "percentile_clipping, block_wise: expected their defaults, found others"
        if self.optimizer.is_paged:
            return "is_paged: expected False, found True; the state is sharded, and 8-bit state is small"
        if args.min_8bit_size < LARGE_NUMEL:
            return f"min_8bit_size: expected {LARGE_NUMEL} or more, found {args.min_8bit_size}"
        return super().problem()

    def make(self, param: Tensor, whole_numel: int) -> State:
        optimizer = self.optimizer
        if not optimizer.initialized:
            optimizer.check_overrides()  # as its first step does before it makes state
        group, place = self._group_of(param)
        given = optimizer.args.min_8bit_size
        # It compares the piece with this.
        optimizer.args.min_8bit_size = 0 if whole_numel >= given else 1 + param.numel()
        try:
            optimizer.init_state(optimizer.param_groups[group], param, group, place)
        finally:
            optimizer.args.min_8bit_size = given
        state: State = optimizer.state.pop(param)
        if "absmax1" in state and len(state["absmax1"]) != self.num_blocks(param.numel()):
            raise SettingsError(
                f"bitsandbytes: expected blocks of {self.block_numel} elements, found others; install "
                "another version"
            )
        return state

    def take_apart(self, state: State) -> State:
        return {entry: value for entry, value in state.items() if not entry.startswith("qmap")}

    def put_together(self, entries: State, dtype: torch.dtype) -> State:
        state = {**entries, "step": int(entries["step"])}
        for number, name in ("1", "dynamic"), ("2", "udynamic"):
            if "absmax" + number in entries:
                if name not in self.optimizer.name2qmap:
                    self.optimizer.fill_qmap()
                state["qmap" + number] = self.optimizer.name2qmap[name].to(entries["absmax" + number].device)
        return state

    def is_per_block(self, entry: str) -> bool:
        return entry.startswith("absmax")

    def expected_nbytes(self, param: Tensor, whole_numel: int) -> float:
        group, place = self._group_of(param)
        config = self.optimizer.get_config(group, place, self.optimizer.param_groups[group])
        is_narrow = config["optim_bits"] == 8 and whole_numel >= config["min_8bit_size"]
        return 2 * (1 + 4 / self.block_numel if is_narrow else 4) * whole_numel


def eight_bit_of(optimizer: Optimizer) -> EightBit | None:
    """How the optimizer's library keeps its state, if it is one of those."""
    kind: Any = type(optimizer)
    found = _library_of(kind)
    return None if found is None else found[0](optimizer, found[1])


@lru_cache(maxsize=64)
def _library_of(kind: type[Optimizer]) -> tuple[type[EightBit], type[Optimizer]] | None:
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library == "torchao" and base.__name__ in ("Adam8bit", "AdamW8bit"):
            return _Torchao, base
        if library == "bitsandbytes" and base.__name__ == "Optimizer2State":
            return _BitsAndBytes, base
    return None


def plain_tensors(value: Tensor) -> list[Tensor]:
    """The memory behind a tensor of a library's own class, or the tensor itself."""
    if not is_packed(value):
        return [value]
    packed: Any = value
    return [getattr(packed, name) for name in packed.__tensor_flatten__()[0]]


def is_packed(value: Any) -> bool:
    """Whether it is a tensor made of others, such as torchao's."""
    return is_traceable_wrapper_subclass(value) and not is_dtensor(value)
