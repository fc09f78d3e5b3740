"""Things people do to models, gradients and parameters while they train, next to plain training.

Every test runs one small script twice: on four ranks with the model sharded, and in one process
with the plain model and the batches of all ranks. A script gets a `Run` and never asks which.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics.errors import MicsError
from mics.guard import ShardParameter
from tests import tiers, toys
from tests.ranks import POOL, RankError, run_expecting_error, run_ranks
from tests.reference import adamw, sgd

WORLD_SIZE = 4


@dataclass
class Run:
    """One process's part in a script: sharded on a rank, or all ranks' batches in one process."""

    sharded: bool
    partition_size: int = 2
    optimizer_sharding: str = "world"
    ranks: list[int] = field(default_factory=list)

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        if self.sharded:
            import mics

            options = {"partition_size": self.partition_size, **options}
            mics.shard(model, optimizer_sharding=self.optimizer_sharding, **options)
        return model

    def backward(self, loss: Callable[[int], Tensor]) -> None:
        """Backward of the mean over ranks of `loss(rank)`."""
        for rank in self.ranks:
            (loss(rank) / len(self.ranks)).backward()

    def clip(self, model: nn.Module, max_norm: float) -> float:
        if self.sharded:
            import mics

            return mics.clip_grad_norm_(model, max_norm).item()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        if self.sharded:
            import mics

            return mics.full_gradients(model)
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}

    def state(self, *models: nn.Module) -> list[dict[str, Tensor]]:
        if self.sharded:
            import mics

            return [mics.full_state_dict(model) for model in models]
        return [{n: v.clone() for n, v in model.state_dict().items()} for model in models]


Script = Callable[[Run], list[Any]]


def _on_rank(script: Script, partition_size: int, optimizer_sharding: str) -> list[Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    return script(Run(True, partition_size, optimizer_sharding, [rank]))


def _assert_same(script: Script, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """The script's result, a list of state dicts and numbers, is the same sharded and plain.

    In three layouts on two nodes of two ranks: two replicas, one group over both nodes, four replicas.
    """
    torch.manual_seed(0)
    expected = script(Run(False, ranks=list(range(WORLD_SIZE))))
    for partition_size, optimizer_sharding in tiers.some([(2, "world"), (4, "partition"), (1, "world")]):
        found = run_ranks(WORLD_SIZE, _on_rank, script, partition_size, optimizer_sharding, ranks_per_node=2)
        torch.testing.assert_close(found[0], expected, rtol=rtol, atol=atol)


def _loss(model: nn.Module, step: int, micro: int = 0) -> Callable[[int], Tensor]:
    return lambda rank: model(*toys.floats(step, micro, rank))


# ---------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------


def _never_zeroed(run: Run) -> list[Any]:
    """Gradients go on adding up over three optimizer steps, clipped twice on the way."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    norms = []
    for step in range(3):
        run.backward(_loss(model, step))
        if step:
            norms.append(run.clip(model, 0.3))
        optimizer.step()
    return [*run.state(model), norms]


def _edited(run: Run) -> list[Any]:
    """Gradients scaled in place, one dropped, one changed through `.data`, one added to."""
    model = run.shard(toys.Chain())
    optimizer = adamw(model)
    for step in range(3):
        run.backward(_loss(model, step))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        model.blocks[1].up.weight.grad = None
        model.blocks[1].down.weight.grad.data = model.blocks[1].down.weight.grad.data * 0.25
        with torch.no_grad():
            model.blocks[0].up.weight.grad.add_(model.blocks[0].up.weight, alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _dropped_between(run: Run) -> list[Any]:
    """Gradients of a micro-step thrown away, of all parameters and of some, before the real one."""
    model = run.shard(toys.Chain())
    optimizer = adamw(model)
    for step in range(3):
        run.backward(_loss(model, step))
        if step == 1:
            model.blocks[2].zero_grad()
        else:
            model.zero_grad()
        run.backward(_loss(model, step, 1))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _step_without_gradients(run: Run) -> list[Any]:
    """Steps and clipping with no gradient at all do nothing."""
    model = run.shard(toys.Chain())
    optimizer = adamw(model)
    optimizer.step()
    norm = run.clip(model, 1.0)
    run.backward(_loss(model, 0))
    optimizer.zero_grad()
    optimizer.step()
    return [*run.state(model), norm]


def _announced_then_broken_off(run: Run) -> list[Any]:
    """A loop over `microsteps` that ends early; the rest of the gradients come without it."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    for step in range(2):
        batches: Any = range(3)
        if run.sharded:
            import mics

            batches = mics.microsteps(model, range(3))
        for micro in batches:
            run.backward(_loss(model, step, micro))
            if micro == 1:
                break
        run.backward(_loss(model, step, 2))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _more_after_the_announced_one(run: Run) -> list[Any]:
    """Another backward after the announced last one still counts, once."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    for step in range(2):
        batches: Any = range(2)
        if run.sharded:
            import mics

            batches = mics.microsteps(model, range(2))
        for micro in batches:
            run.backward(_loss(model, step, micro))
        run.backward(_loss(model, step, 2))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


# ---------------------------------------------------------------------------------------------
# Forwards and backwards
# ---------------------------------------------------------------------------------------------


def _evaluate_before_backward(run: Run) -> list[Any]:
    """An evaluation between a forward and its backward."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    values = []
    for step in range(2):
        losses = [_loss(model, step)(rank) / len(run.ranks) for rank in run.ranks]
        with torch.no_grad():
            values.append(model(*toys.floats(9, 9, 9)).item())
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), values]


def _teacher_of_itself(run: Run) -> list[Any]:
    """The same model without gradients as its own target."""
    model = run.shard(toys.Plain())
    optimizer = sgd(model)

    def loss(step: int, rank: int) -> Tensor:
        x, y = toys.floats(step, 0, rank)
        with torch.no_grad():
            target = model(x)
        return toys.mse(model(y), target)

    for step in range(3):
        run.backward(partial(loss, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


class _StopGradient(nn.Module):
    """Nothing flows back past the second block; the first block's output is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = self.blocks[1](first).detach()
        x = self.blocks[3](self.blocks[2](x).add_(1.0))
        return toys.mse(x + 0.1 * first, target)


def _gradients_after_the_step(run: Run) -> list[Any]:
    """Whole gradients, read once the optimizer has used them; some ranks have no part of the unit."""
    model = run.shard(toys.Tiny())
    optimizer = adamw(model)
    found = []
    for step in range(2):
        run.backward(_loss(model, step))
        optimizer.step()
        found.append(run.gradients(model))
        optimizer.zero_grad()
    return [*run.state(model), found]


def _norms_before_backward(run: Run) -> list[Any]:
    """Two forwards and an evaluation before a backward, through norms with running statistics."""
    model = run.shard(toys.Convolutional())
    optimizer = adamw(model)
    for step in range(3):
        for rank in run.ranks:
            losses = [model(*toys.images(step, micro, rank)) for micro in range(2)]
            model.eval()
            with torch.no_grad():
                model(*toys.images(step, 2, rank))
            model.train()
            (sum(losses) / len(run.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {name for name, _ in model.named_parameters()}  # statistics are those of rank 0
    return [{name: value for name, value in run.state(model)[0].items() if name in names}]


def _stop_gradient(run: Run) -> list[Any]:
    """A detached part of the graph, and in-place operations on a unit's output."""
    model = run.shard(_StopGradient())
    optimizer = adamw(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _gradient_of_the_input(run: Run) -> list[Any]:
    """Inputs that need gradients get them, and the parameters theirs."""
    model = run.shard(toys.Chain())
    x, target = (t.requires_grad_() for t in toys.floats(0, 0, 0))
    for _ in run.ranks:
        (model(x, target) / len(run.ranks)).backward()
    assert x.grad is not None and target.grad is not None
    optimizer = sgd(model)
    optimizer.step()
    return [*run.state(model), x.grad, target.grad]


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(toys.DIM, toys.DIM)
        self.second = nn.Linear(toys.DIM, toys.DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.first(x)), self.second(x)


class _LateOutputs(nn.Module):
    """Second outputs of early blocks are used at the very end, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_TwoOutputs() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        late = []
        for block in self.blocks:
            x, other = block(x)
            late.append(other)
        return toys.mse(x * late[0] + late[2], target)


def _late_outputs(run: Run) -> list[Any]:
    """Blocks whose backward begins early and ends late."""
    model = run.shard(_LateOutputs())
    optimizer = adamw(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _autocast(run: Run) -> list[Any]:
    """Forwards under `torch.autocast`, which casts and remembers weights."""
    model = run.shard(toys.Plain())
    optimizer = sgd(model)

    def loss(step: int, rank: int) -> Tensor:
        x, target = toys.floats(step, 0, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(model(x))
        return toys.mse(y, target)

    for step in range(3):
        run.backward(partial(loss, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _submodules_called_directly(run: Run, *, tied: bool = False) -> list[Any]:
    """Submodules of a sharded model called without calling the model."""
    model = toys.Language()
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(toys.VOCAB, toys.DIM))
    run.shard(model)
    optimizer = sgd(model)

    def loss(step: int, rank: int) -> Tensor:
        ids, targets, _ = toys.language_batch(step, 0, rank)
        x = model.embedding(ids)
        for block in model.blocks:
            x = block(x)
        return nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())

    for step in range(2):
        run.backward(partial(loss, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


# ---------------------------------------------------------------------------------------------
# Parameters and models
# ---------------------------------------------------------------------------------------------


def _freeze_for_a_while(run: Run) -> list[Any]:
    """Parameters frozen after the first step and thawed after the second."""
    model = run.shard(toys.Chain())
    optimizer = adamw(model)
    for step in range(4):
        model.blocks[0].requires_grad_(step not in (1, 2))
        model.blocks[1].up.weight.requires_grad_(step != 1)
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _only_some_trained(run: Run) -> list[Any]:
    """An optimizer over some parameters; the others have gradients that nobody uses."""
    model = run.shard(toys.Chain())
    optimizer = torch.optim.SGD(model.blocks[1].parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [model.blocks[0].up.weight], "lr": 0.01})
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        if step == 1:
            optimizer.add_param_group({"params": list(model.blocks[2].parameters()), "lr": 0.05})
        model.zero_grad()
    return run.state(model)


def _updated_by_hand(run: Run) -> list[Any]:
    """No optimizer: parameters move by their gradients in place, and an average of them is kept."""
    model = run.shard(toys.Chain())
    averages = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        run.backward(_loss(model, step))
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.1)
                average.lerp_(parameter, 0.5)
        model.zero_grad()
    states = run.state(model)
    with torch.no_grad():
        for average, parameter in zip(averages, model.parameters(), strict=True):
            parameter.copy_(average)
    return [*states, *run.state(model), model(*toys.floats(0, 0, 0)).item()]


def _clamped_through_data(run: Run) -> list[Any]:
    """Weights clamped after each step through `.data`: they count as edits here."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)
    return run.state(model)


class _Scaled(nn.Module):
    """A buffer in the way of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = toys.Chain()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.chain(x * self.scale, target)


def _buffers_written(run: Run) -> list[Any]:
    """A buffer that the training loop itself changes, on every rank."""
    model = run.shard(_Scaled())
    optimizer = sgd(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        model.scale.mul_(1.5)
    return run.state(model)


def _adversaries(run: Run) -> list[Any]:
    """A generator and a critic, sharded each in its own way, that train through one another."""
    generator = run.shard(toys.Plain(), partition_size=2 if run.partition_size == 4 else 4)
    critic = run.shard(toys.Plain())
    optimizers = [sgd(generator), sgd(critic)]
    for step in range(2):

        def critic_loss(rank: int, step: int = step) -> Tensor:
            x, real = toys.floats(step, 0, rank)
            return critic(generator(x).detach()).mean() - critic(real).mean()

        def generator_loss(rank: int, step: int = step) -> Tensor:
            return -critic(generator(toys.floats(step, 1, rank)[0])).mean()

        run.backward(critic_loss)
        optimizers[1].step()
        critic.zero_grad()
        critic.requires_grad_(False)
        run.backward(generator_loss)
        optimizers[0].step()
        generator.zero_grad()
        critic.requires_grad_(True)
    return run.state(generator, critic)


class _Odd(nn.Module):
    """Parameters of odd kinds: 0-d, empty, transposed, integer, and a channels-last filter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(toys.DIM, toys.HIDDEN).t())
        self.counts = nn.Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False)
        self.filter = nn.Parameter(torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.transposed) * self.scalar
        images = x[:, :3, None, None].expand(-1, 3, 4, 4)
        filtered = nn.functional.conv2d(images, self.filter).mean(dim=(2, 3))
        total = y.sum(-1) + filtered.sum(-1) + self.counts.sum() + self.empty.sum()
        return ((total - target.sum(-1)) ** 2).mean()


def _odd_parameters(run: Run) -> list[Any]:
    """Every element finds its place whatever its parameter's shape, strides or dtype."""
    model = run.shard(_Odd())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    (state,) = run.state(model)
    return [{name: value.contiguous() for name, value in state.items()}]


class _OldNorms(nn.Module):
    """Weights that a hook computes before each forward, in the old style of `torch.nn.utils`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(toys.DIM, toys.DIM)) for _ in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return toys.mse(x, target)


def _spectral_norm(run: Run) -> list[Any]:
    """Parametrizations with buffers that every forward changes; one batch, so that they agree."""
    model = run.shard(_OldNorms())
    optimizer = sgd(model)
    for _ in range(2):
        for _ in run.ranks[:1]:
            model(*toys.floats(0, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


SCRIPTS = [
    _never_zeroed,
    _edited,
    _dropped_between,
    _step_without_gradients,
    _announced_then_broken_off,
    _more_after_the_announced_one,
    _evaluate_before_backward,
    _teacher_of_itself,
    _submodules_called_directly,
    _freeze_for_a_while,
    _only_some_trained,
    _buffers_written,
    _odd_parameters,
    _spectral_norm,
    _clamped_through_data,
    # These in `make test-all`.
    _gradients_after_the_step,
    _norms_before_backward,
    _stop_gradient,
    _gradient_of_the_input,
    _late_outputs,
    _updated_by_hand,
    _adversaries,
]


@pytest.mark.parametrize("script", tiers.first(SCRIPTS, 8), ids=[s.__name__.strip("_") for s in SCRIPTS])
def test_habits_work_as_in_plain_training(script: Script) -> None:
    """See the script's docstring; sharded three ways, each ends where plain training ends."""
    _assert_same(script)


def test_autocast() -> None:
    """Under autocast to bf16: the same up to bf16's rounding of sums over ranks."""
    _assert_same(_autocast, rtol=2e-2, atol=2e-3)


# ---------------------------------------------------------------------------------------------
# What cannot work must say so, not train on silently
# ---------------------------------------------------------------------------------------------


def _converted(how: str) -> None:
    """A sharded model converted to another dtype: its shards would no longer be the engine's."""
    import mics

    model = mics.shard(toys.Chain(), partition_size=2)
    optimizer = sgd(model)
    getattr(model, how)()
    before = mics.full_state_dict(model, rank0_only=False)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    after = mics.full_state_dict(model, rank0_only=False)
    assert not all(torch.equal(before[name], after[name]) for name in before), "trained nothing"
    raise KeyError("it trained")


def _assigned() -> None:
    """`load_state_dict(assign=True)` would put plain tensors where shards were."""
    import mics

    model = mics.shard(toys.Chain(), partition_size=2)
    model.load_state_dict(toys.Chain().state_dict(), assign=True)
    before = mics.full_state_dict(model, rank0_only=False)
    optimizer = sgd(model)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    after = mics.full_state_dict(model, rank0_only=False)
    assert not all(torch.equal(before[name], after[name]) for name in before), "trained nothing"
    raise KeyError("it trained")


def _refused(errors: list[RankError], *parts: str) -> None:
    for error in errors:
        assert error.is_a("ValueError") or error.is_a("RuntimeError"), error
        for part in parts:
            assert part in error.message, error.message


class Locked:
    """More than its items."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsLocked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(toys.DIM))

    def forward(self) -> Locked:
        return Locked(self.gain)


def _parameter_in_an_object() -> None:
    """A module returns its parameter in an object, whose owner would not see it replaced by a copy."""
    import mics

    model = nn.Sequential(ReturnsLocked(), nn.Linear(3, 3))
    mics.shard(model, partition_size=2, units=[ReturnsLocked])
    with pytest.raises(MicsError, match=r"parameter\.clone\(\)"):
        model[0]()
    assert isinstance(model[0].gain, ShardParameter)  # the forward is over all the same
    model[0]()


def test_a_parameter_in_an_object_of_unknown_kind_is_refused() -> None:
    _refused(run_expecting_error(4, _parameter_in_an_object), "parameter.clone()")


def _hooked_before() -> None:
    """A gradient hook on a parameter that sharding replaces."""
    import mics

    model = toys.Chain()
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    _train_one_step(mics.shard(model, partition_size=2))


def _hooked_after() -> None:
    """A gradient hook on a shard, through which no gradient flows."""
    import mics

    model = mics.shard(toys.Chain(), partition_size=2)
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    _train_one_step(model)


def _gradients_before() -> None:
    """Gradients that exist when the model is sharded."""
    import mics

    model = toys.Chain()
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    mics.shard(model, partition_size=2)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _replaced_parameter() -> None:
    """A parameter of a sharded model replaced by a new one, which no unit knows."""
    import mics

    model = mics.shard(toys.Chain(), partition_size=2)
    model.blocks[0].gain = nn.Parameter(torch.ones(1))
    _train_one_step(model)


class _ClampsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                block.up.weight.clamp_(-0.05, 0.05)
            x = block(x)
        return toys.mse(x, target)


def _edited_inside_forward() -> None:
    """Parameters changed in place inside a forward: the gathered copy changes, the shards do not."""
    import mics

    _train_one_step(mics.shard(_ClampsItself(), partition_size=2))


def _train_one_step(model: nn.Module) -> None:
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


_IGNORED = [_hooked_before, _hooked_after, _gradients_before, _replaced_parameter, _edited_inside_forward]


@pytest.mark.parametrize("script", _IGNORED, ids=[s.__name__.strip("_") for s in _IGNORED])
def test_what_has_no_effect_is_refused(script: Callable[[], None]) -> None:
    """Things that work on a plain model and would do nothing on a sharded one say so."""
    _refused(run_expecting_error(2, script))


@pytest.mark.parametrize("how", ["double", "bfloat16"])
def test_a_converted_model_still_trains_or_says_no(how: str) -> None:
    """Converting after sharding must not leave the optimizer with tensors nobody reads."""
    for error in run_expecting_error(2, _converted, how):
        trained = error.is_a("KeyError") and "it trained" in error.message
        assert trained or error.is_a("ValueError") or error.is_a("RuntimeError"), error


def test_assigning_a_state_dict_still_trains_or_says_no() -> None:
    """The same for `load_state_dict(assign=True)`."""
    for error in run_expecting_error(2, _assigned):
        trained = error.is_a("KeyError") and "it trained" in error.message
        assert trained or error.is_a("ValueError") or error.is_a("RuntimeError"), error


def _penalised(run: Run) -> list[Any]:
    """A gradient penalty: the backward of a gradient."""
    model = run.shard(toys.Plain())
    optimizer = sgd(model)

    def loss(rank: int) -> Tensor:
        x, target = toys.floats(0, 0, rank)
        x.requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return toys.mse(y, target) + slope.pow(2).mean()

    run.backward(loss)
    optimizer.step()
    return run.state(model)


@pytest.mark.parametrize(
    "script", [_penalised, partial(_submodules_called_directly, tied=True)], ids=["penalty", "tied parts"]
)
def test_what_is_hard_works_or_says_no(script: Script) -> None:
    """Double backward, and tied parts called without the model: right or refused, never a crash."""
    torch.manual_seed(0)
    expected = script(Run(False, ranks=list(range(WORLD_SIZE))))
    answers = POOL.answers(WORLD_SIZE, _on_rank, script, 2, "world", grace_s=40.0)
    if any(answer.error for answer in answers):
        _refused([answer.error for answer in answers if answer.error])
        assert all(answer.error for answer in answers)
    else:
        torch.testing.assert_close(answers[0].value, expected, rtol=1e-4, atol=1e-6)


class _SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(toys.VOCAB, toys.DIM, sparse=True)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.embedding(ids).pow(2).mean()


def _sparse(run: Run) -> list[Any]:
    model = run.shard(_SparseEmbedding())
    run.backward(lambda rank: model(*toys.tokens(0, 0, rank)))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return run.state(model)


def test_sparse_gradients_work_or_say_no() -> None:
    """`Embedding(sparse=True)`: right, or refused by name."""
    torch.manual_seed(0)
    expected = _sparse(Run(False, ranks=list(range(WORLD_SIZE))))
    answers = POOL.answers(WORLD_SIZE, _on_rank, _sparse, 2, "world", grace_s=40.0)
    if any(answer.error for answer in answers):
        _refused([answer.error for answer in answers if answer.error], "parse")
    else:
        torch.testing.assert_close(answers[0].value, expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# Life and death of a model
# ---------------------------------------------------------------------------------------------


def _forgotten(trained: bool) -> bool:
    import mics

    model = mics.shard(toys.Chain(), partition_size=2)
    if trained:
        optimizer = adamw(model)
        model(*toys.floats(0, 0, dist.get_rank())).backward()
        optimizer.step()
        del optimizer
    watch = weakref.ref(model)
    del model
    for _ in range(3):  # autograd's nodes take part in cycles and go a layer at a time
        gc.collect()
    return watch() is None


@pytest.mark.parametrize("trained", [False, True])
def test_a_sharded_model_can_be_forgotten(trained: bool) -> None:
    """Nothing keeps a model alive that its user has dropped."""
    assert run_ranks(2, partial(_forgotten, trained)) == [True, True]


def _growth_nbytes(sharded: bool) -> int:
    """How much memory forwards whose loss is dropped leave behind before the garbage collector runs."""
    import mics

    model: nn.Module = toys.Chain()
    if sharded:
        mics.shard(model, partition_size=1)
    batch = toys.floats(0, 0, 0, batch=20_000)
    gc.collect()
    gc.disable()
    try:
        model(*batch)
        before = _resident_nbytes()
        for _ in range(20):
            model(*batch)
        return _resident_nbytes() - before
    finally:
        gc.enable()


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_dropped_forward_is_freed_at_once() -> None:
    """Activations go when their loss goes; waiting for the garbage collector would fill a GPU."""
    plain, sharded = (run_ranks(1, _growth_nbytes, which)[0] for which in (False, True))
    assert sharded < plain + 40e6
