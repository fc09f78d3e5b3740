"""Ways into and out of a model beside its forward: methods, hooks that keep what they see, inner tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mics
from mics.errors import SettingsError
from tests import toys
from tests.reference import adamw
from tests.test_user_habits import Run, _assert_same


class Vision(nn.Module):
    """Features and a head, as libraries of image models have them, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.full((1, toys.DIM), 0.3))
        self.temperature = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(toys.Block() for _ in range(2))
        self.norm = nn.LayerNorm(toys.DIM)
        self.head = nn.Linear(toys.DIM, toys.DIM)

    def forward_features(self, x: Tensor) -> Tensor:
        x = x * self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)) * self.temperature

    def loss(self, x: Tensor, *, target: Tensor) -> Tensor:
        return F.mse_loss(self(x), target)

    def similarity(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """A name that says nothing."""
        features, other = self.encode_image(x), F.linear(target, self.head.weight)
        return {
            "loss": -F.cosine_similarity(features * self.temperature, other).mean(),
            "weight": self.position,
        }

    def encode_image(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def _methods(run: Run, num_steps: int) -> list[Any]:
    """Losses from found, named and registered methods, from one module's features and another's forward."""
    model, critic = run.shard(Vision()), run.shard(nn.ModuleDict({"inner": Vision()}))
    if run.sharded:
        mics.register_forward_method(model, "similarity")
        mics.register_forward_method(model, "similarity")  # once is enough
        mics.register_forward_method(critic, "inner.similarity")
    optimizer = adamw(nn.ModuleList([model, critic]))

    def loss(rank: int, step: int) -> Tensor:
        x, target = toys.floats(step, 0, rank)
        found = model.similarity(x, target)["loss"] + critic["inner"].similarity(x, target)["loss"]
        if step % 2:
            found = found + model.loss(x, target=target) + model.forward_features(target).square().mean()
        return found

    for step in range(num_steps):
        run.backward(partial(loss, step=step))
        with torch.no_grad():
            model.encode_image(toys.floats(step, 1, 0)[0])
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model, critic)


class _Kept:
    """Hooks that keep what modules take and return."""

    def __init__(self, *modules: nn.Module) -> None:
        self.values: list[Tensor] = []
        for module in modules:
            module.register_forward_pre_hook(self.before)
            module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: Any) -> Any:
        self.values.append(args[0].square().mean())
        return (args[0] * 1.5,)

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.values.append(output.mean())
        return output * 0.5


def _hooks(run: Run, num_steps: int) -> list[Any]:
    """The loss is what hooks kept, of inner layers or a unit, from before sharding or after, alone or not."""
    found: list[Any] = []
    for where in ("inner", "unit"):
        model = Vision()
        modules = [model.blocks[1].down, model.blocks[0].norm] if where == "inner" else [model.blocks[0]]
        kept = _Kept(modules[0])
        run.shard(model)
        after = _Kept(*modules[1:])
        optimizer = adamw(model)

        def loss(rank: int, step: int, model: nn.Module, kept: _Kept, after: _Kept) -> Tensor:
            for each in (kept, after):
                each.values.clear()
            output = model(toys.floats(step, 0, rank)[0])
            total = torch.stack([*kept.values, *after.values]).sum()
            return total + output.mean() if step % 3 == 2 else total

        for step in range(num_steps):
            run.backward(partial(loss, step=step, model=model, kept=kept, after=after))
            optimizer.step()
            optimizer.zero_grad()
        found += run.state(model)
    return found


def _input_gradients(run: Run, num_steps: int) -> list[Any]:
    """An adversarial example, made by the gradient of an input alone, then training on it."""
    model = run.shard(Vision())
    optimizer = adamw(model)

    def loss(rank: int, step: int) -> Tensor:
        x, target = toys.floats(step, 0, rank)
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model.loss(x, target=target), x)
        assert all(p.grad is None for p in model.parameters()) or not run.sharded
        return model.loss((x + 0.1 * grad.sign()).detach(), target=target)

    for step in range(num_steps):
        run.backward(partial(loss, step=step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


@pytest.mark.parametrize("script", [_methods, _hooks, _input_gradients])
def test_other_ways_in_and_out(script: Callable[..., list[Any]]) -> None:
    """As in plain training, over six steps: every way has come twice."""
    _assert_same(partial(script, num_steps=6), rtol=1e-5, atol=1e-6)


def test_what_a_method_returns_is_no_view_of_parameters() -> None:
    """As with a forward: their memory is another unit's soon after."""
    model = mics.shard(Vision(), partition_size=1)
    mics.register_forward_method(model, "similarity")
    position = mics.full_state_dict(model)["position"]
    returned = model.similarity(*toys.floats(0, 0, 0))["weight"]
    assert returned.shape == (1, toys.DIM) and torch.equal(returned, position)
    assert returned.untyped_storage().data_ptr() != model.position.untyped_storage().data_ptr()


def test_a_method_that_raises_leaves_the_model_usable() -> None:
    """The next forward and backward go through."""
    model = mics.shard(Vision(), partition_size=1)
    with pytest.raises(RuntimeError, match="must match"):
        model.forward_features(torch.ones(2, 3))
    model.loss(*toys.floats(0, 0, 0)[:1], target=toys.floats(0, 0, 0)[1]).backward()
    assert mics.full_gradients(model)["position"] is not None


@pytest.mark.parametrize("name", ["nothing", "inner.forward_features", "forward", "zero_grad", "norm", 3])
def test_methods_that_are_none(name: Any) -> None:
    """Refused by name; so are attributes, `forward`, and methods of every module."""
    model = mics.shard(Vision(), partition_size=1)
    with pytest.raises(SettingsError, match=r"register_forward_method: expected.*found"):
        mics.register_forward_method(model, name)


def _padded(run: Run) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = run.shard(nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2)}))["encoder"].eval()
    found = []
    for step in range(3):
        x = torch.randn(3, 5, 8, generator=toys.seeded(step))
        mask = torch.arange(5).expand(3, 5) > torch.tensor([[2], [4], [3]])
        with torch.no_grad() if step % 2 else torch.inference_mode():
            found.append(model(x, src_key_padding_mask=mask).clone())
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_with_a_padding_mask_in_evaluation() -> None:
    """torch packs the sequences into nested tensors there."""
    _assert_same(_padded)
