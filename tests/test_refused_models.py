"""Models and conversions that `mics.shard` cannot take: refused by name, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.errors import MicsError, SettingsError
from tests import toys
from tests.ranks import run_expecting_error, run_ranks

# ---------------------------------------------------------------------------------------------
# Before sharding
# ---------------------------------------------------------------------------------------------


class _Scaled(Tensor):
    """A tensor whose numbers mean something else."""


class _Marked(nn.Parameter):
    """A parameter that does something when it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _with(change: Callable[[toys.Chain], None]) -> nn.Module:
    model = toys.Chain()
    change(model)
    return model


def _assign(attribute: str, value: Callable[[nn.Linear], Any]) -> nn.Module:
    return _with(lambda model: setattr(model.blocks[1].up, attribute, value(model.blocks[1].up)))


def _tie(one: Tensor, other: Tensor) -> None:
    one.data = other


def _in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return toys.Chain()


def _lazy() -> nn.Module:
    return _with(lambda model: model.blocks.append(nn.LazyLinear(3)))


def _sparse() -> nn.Module:
    return _assign("weight", lambda up: nn.Parameter(torch.eye(3).to_sparse()))


def _overlapping() -> nn.Module:
    memory = torch.randn(toys.DIM * (toys.HIDDEN + 1))

    def change(model: toys.Chain) -> None:
        _tie(model.blocks[0].up.weight, memory[: -toys.DIM].view(toys.HIDDEN, toys.DIM))
        _tie(model.blocks[1].up.weight, memory[toys.DIM :].view(toys.HIDDEN, toys.DIM))

    return _with(change)


def _buffer_of_a_parameter() -> nn.Module:
    return _with(lambda model: model.register_buffer("copy", model.blocks[0].gain.data))


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "sparse": (_sparse, ("blocks.1.up.weight", "sparse", "dense")),
    "inference": (_in_inference_mode, ("blocks.0.gain", "inference_mode")),
    "lazy": (_lazy, ("blocks.3.weight", "without a shape", "forward")),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))), ("the model", "ScriptModule")),
    "subclass": (
        lambda: _assign("weight", lambda up: nn.Parameter(up.weight.data.as_subclass(_Scaled))),
        ("blocks.1.up.weight", "_Scaled", "plain tensors"),
    ),
    "parameter": (
        lambda: _assign("weight", lambda up: _Marked(up.weight.data)),
        ("blocks.1.up.weight", "_Marked", "nn.Parameter"),
    ),
    "same memory": (
        lambda: _with(lambda m: _tie(m.blocks[2].up.weight, m.blocks[0].up.weight.data)),
        ("blocks.0.up.weight", "blocks.2.up.weight", "same memory", "one nn.Parameter"),
    ),
    "transposed": (
        lambda: _with(lambda m: _tie(m.blocks[2].down.weight, m.blocks[0].up.weight.data.t())),
        ("blocks.0.up.weight", "blocks.2.down.weight", "same memory"),
    ),
    "overlapping": (_overlapping, ("blocks.0.up.weight", "blocks.1.up.weight", "same memory")),
    "buffer": (_buffer_of_a_parameter, ("blocks.0.gain", "copy", "same memory")),
}


def _snapshot(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    return [
        [(module, type(module._parameters), list(module.__dict__)) for module in modules],
        [(name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [len(module._forward_hooks) for module in modules],
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_models_that_would_lose_something(what: str) -> None:
    """By name and with what to do; the model is as it was, to the last attribute."""
    build, parts = REFUSED[what]
    model = build()
    before = _snapshot(model)
    with pytest.raises(SettingsError, match=r"mics\.shard: expected") as caught:
        mics.shard(model, partition_size=1)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert _snapshot(model) == before


def _columns() -> None:
    """Views of one memory that share no element."""
    torch.manual_seed(0)
    model, memory = toys.Chain(), torch.randn(toys.HIDDEN, 3 * toys.DIM)
    for number, block in enumerate(model.blocks):
        block.up.weight.data = memory[:, number * toys.DIM : (number + 1) * toys.DIM]
    expected = model(*toys.floats(0, 0, 0))
    mics.shard(model, partition_size=2)
    torch.testing.assert_close(model(*toys.floats(0, 0, 0)), expected)


def test_parts_of_one_memory_are_taken() -> None:
    """Between each other, as columns of a matrix are."""
    run_ranks(2, _columns)


class _Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(2, 2, device="meta")
        self.norm = nn.BatchNorm1d(2, device="meta")
        self.last = nn.Linear(2, 2, device="meta")
        self.weight = nn.Parameter(torch.empty(2, device="meta"))  # that nobody fills


def test_a_model_that_cannot_be_initialised_stays_on_meta() -> None:
    """Found out when other parts of it have their values already."""
    model = _Meta()
    before = _snapshot(model)
    with pytest.raises(SettingsError, match="initialiser"):
        mics.shard(model, partition_size=1, units=[nn.LSTM, nn.Linear])
    assert _snapshot(model) == before
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert "flatten_parameters" not in model.first.__dict__


def _bad_on_one() -> None:
    model = _sparse() if dist.get_rank() == 2 else toys.Chain()
    before = _snapshot(model)
    try:
        mics.shard(model, partition_size=2)
    finally:
        assert _snapshot(model) == before


def test_a_model_that_is_bad_on_one_rank() -> None:
    """All ranks raise, and name it; none has begun."""
    errors = run_expecting_error(4, _bad_on_one)
    assert errors[2].is_a("SettingsError")
    assert all("rank 2" in e.message and "sparse" in e.message for e in errors if e.rank != 2)


# ---------------------------------------------------------------------------------------------
# After sharding
# ---------------------------------------------------------------------------------------------


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.float16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "of a part": lambda model: model.blocks[1].up.double(),
    "script": torch.jit.script,
    "script of a part": lambda model: torch.jit.script(model.blocks[0]),
    "trace": lambda model: torch.jit.trace(model, toys.floats(0, 0, 0)),
    "export": lambda model: torch.export.export(model, toys.floats(0, 0, 0)),
}


def _steps(model: nn.Module, conversion: Callable[[nn.Module], Any] | None) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if conversion is not None:
            with pytest.raises(MicsError, match=r"expected .* found"):
                conversion(model)
        model(*toys.floats(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return mics.full_state_dict(model)


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    return mics.shard(toys.Chain(), partition_size=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("what", CONVERSIONS)
def test_conversions_are_refused_and_change_nothing(what: str) -> None:
    """Training goes on as if nothing had been tried."""
    torch.testing.assert_close(
        _steps(_sharded(), CONVERSIONS[what]), _steps(_sharded(), None), rtol=0, atol=0
    )


def test_conversions_that_change_nothing() -> None:
    """To the format and device that parameters have; buffers follow."""
    model = toys.Convolutional()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
    mics.shard(model, partition_size=1)
    model(*toys.images(0, 0, 0)).backward()
    before = list(model.parameters())
    for same in (model.float(), model.cpu(), model.to("cpu"), model.to(torch.float32)):
        assert same is model
    assert model.wide.dtype is torch.float32
    assert all(
        old is new and new.grad is not None for old, new in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("write", [True, False])
def test_a_step_while_parameters_are_summoned(write: bool) -> None:
    """It would be undone, or not be seen."""
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*toys.floats(0, 0, 0)).backward()
    before = mics.full_state_dict(model)
    with (
        mics.summon_full_params(model, write=write),
        pytest.raises(MicsError, match=r"step\(\).*leave the context"),
    ):
        optimizer.step()
    torch.testing.assert_close(mics.full_state_dict(model), before, rtol=0, atol=0)
    optimizer.step()
    assert not torch.equal(mics.full_state_dict(model)["blocks.0.up.weight"], before["blocks.0.up.weight"])


class AdamW8bit(torch.optim.AdamW):
    """Named as those that keep their state in a few bits."""


def test_optimizers_with_quantized_state() -> None:
    """Also where somebody says that they are elementwise."""
    mics.allow_optimizer(AdamW8bit)
    model = _sharded()
    optimizer = AdamW8bit(model.parameters())
    model(*toys.floats(0, 0, 0)).backward()
    with pytest.raises(SettingsError, match=r"AdamW8bit cannot train a sharded model: it keeps its state"):
        optimizer.step()
