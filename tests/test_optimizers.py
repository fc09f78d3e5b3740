"""Plain `torch.optim` optimizers, schedulers and gradient scalers on a sharded model."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mics
from mics.engine import engine_of
from tests import pairwise, toys
from tests.compare import SHARDINGS, assert_trains_like_plain
from tests.ranks import run_ranks
from tests.reference import EXACT, Recipe, Tolerance, adamw, elementwise_alike, sgd

LAST_BITS = Tolerance(rtol=2e-6)
"""For kernels that round an element differently by where it lies in a tensor."""


def _make(name: str, options: tuple[tuple[str, Any], ...], model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return getattr(torch.optim, name)(trained, **dict(options))


def _recipe(optimizer: Any, **options: Any) -> Recipe:
    options = {"accumulation": 2, **options}
    return Recipe(build=toys.Chain, batch=toys.floats, optimizer=optimizer, **options)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr": 0.1}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("Adadelta", {"lr": 1.0}),
    ("ASGD", {"lr": 0.1}),
    ("Rprop", {"lr": 0.01}),
]
_QUICK = {
    ("SGD", "lr", "momentum", "fused"),
    ("Adam", "lr", "amsgrad", "maximize"),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            *(name, options),
            id=f"{name}-{'-'.join(options)}",
            marks=() if (name, *options) in _QUICK else pytest.mark.full,
        )
        for name, options in OPTIMIZERS
    ],
)
def test_optimizers_step_as_in_one_process(name: str, options: dict[str, Any]) -> None:
    """Parameters and the whole optimizer state after three steps, for both optimizer shardings."""
    optimizer = partial(_make, name, tuple(options.items()))
    tolerance = EXACT if elementwise_alike(optimizer) else LAST_BITS
    outcomes = assert_trains_like_plain(_recipe(optimizer), tolerance=tolerance)
    assert all(outcome.optimizer_state for outcome in outcomes)


def _schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)


def _decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _half)


def _half(step: int) -> float:
    return 0.5**step


@pairwise.parametrize(strength=1, optimizer=[adamw, sgd], scheduler=[_schedule, _decay])
def test_learning_rate_schedulers(optimizer: Any, scheduler: Any) -> None:
    """Schedulers that change the rate, and the betas, between steps."""
    recipe = _recipe(optimizer, scheduler=scheduler, num_steps=4)
    assert_trains_like_plain(recipe, shardings=SHARDINGS[:1])


def test_parameter_groups_by_number_of_dimensions() -> None:
    """A shard has as many dimensions as its parameter, so the usual groups come out the same."""
    groups = run_ranks(4, _dimensions)
    plain = {name: p.ndim for name, p in toys.Language().named_parameters()}
    for found in groups:
        assert {name: ndim for name, (ndim, _) in found.items()} == plain
        assert all(tail == [1] * max(0, ndim - 1) for ndim, tail in found.values())


def _dimensions() -> dict[str, tuple[int, list[int]]]:
    import mics

    model = mics.shard(toys.Language(), partition_size=2)
    return {name: (p.ndim, list(p.shape[1:])) for name, p in model.named_parameters()}


def test_zero_grad_without_none() -> None:
    """`zero_grad(set_to_none=False)`: a parameter used once keeps a zero gradient, so it decays."""
    recipe = toys.language_recipe(set_to_none=False, num_steps=3, accumulation=2)
    assert_trains_like_plain(recipe)
    sometimes = Recipe(build=toys.Branches, batch=toys.which_by_step, num_steps=4, set_to_none=False)
    assert_trains_like_plain(sometimes, record_gradients=False)


# ---------------------------------------------------------------------------------------------
# Uses of an optimizer
# ---------------------------------------------------------------------------------------------


def _two_optimizers(sharded: bool) -> dict[str, torch.Tensor]:
    """Biases and matrices in optimizers of their own, one stepping every second time."""
    torch.manual_seed(0)
    model = toys.Chain()
    world_size = dist.get_world_size()
    if sharded:
        import mics

        mics.shard(model, partition_size=2)
    first = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.ndim >= 2], lr=0.01, eps=1e-3)
    for step in range(4):
        ranks = [dist.get_rank()] if sharded else range(world_size)
        for rank in ranks:
            (model(*toys.floats(step, 0, rank)) / len(ranks)).backward()
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    return mics.full_state_dict(model) if sharded else model.state_dict()


def test_two_optimizers_on_one_model() -> None:
    """Each steps its own parameters; gradients of the other's go on adding up over steps."""
    found = run_ranks(4, _two_optimizers, True)[0]
    expected = run_ranks(4, _two_optimizers, False)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def _doubles(step: int, number: int, rank: int) -> list[torch.Tensor]:
    return [tensor.double() for tensor in toys.floats(step, number, rank)]


def _closure(sharded: bool, habit: str, partition_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = toys.Chain().double()
    if sharded:
        mics.shard(model, partition_size=partition_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ranks = [dist.get_rank()] if sharded else range(dist.get_world_size())

    def go_back(step: int, number: int) -> torch.Tensor:
        losses = [model(*_doubles(step, number, rank)) for rank in ranks]
        loss: torch.Tensor = sum(losses) / len(losses)  # type: ignore[assignment]
        loss.backward()
        return loss

    for step in range(4):
        if habit == "accumulates":
            go_back(step, 0)

        def closure(step: int = step) -> torch.Tensor:
            if habit == "clears":
                optimizer.zero_grad()
            elif habit == "zeroes":
                optimizer.zero_grad(set_to_none=False)
            elif habit == "fails" and step == 1:
                raise ValueError("no more data")
            return go_back(step, 1)

        with suppress(ValueError):
            optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        if habit == "accumulates":
            optimizer.zero_grad()
        elif habit == "fails":  # and goes on as others do
            optimizer.zero_grad()
            go_back(step, 2)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return mics.full_state_dict(model) if sharded else dict(model.state_dict())


@pairwise.parametrize(strength=1, habit=["clears", "zeroes", "accumulates", "fails"], partition_size=[2, 4])
def test_a_closure_given_to_step(habit: str, partition_size: int) -> None:
    """The step uses the closure's gradients, and those from before it."""
    found = run_ranks(4, _closure, True, habit, partition_size)[0]
    expected = run_ranks(4, _closure, False, habit, partition_size)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int | None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = torch.tanh(block(x))
        return x.square().mean()


def _replace_gradients() -> list[Any]:
    torch.manual_seed(0)
    model = mics.shard(_Blocks(), partition_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for skip in (None, 0, None):
        model(torch.ones(2, 6), skip).backward()
        before = mics.traffic(model).calls.get(("world", "all_reduce"), 0)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clamp(-1, 1)
        found.append(mics.traffic(model).calls.get(("world", "all_reduce"), 0) - before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return found


def test_gradients_are_there_on_all_ranks_or_on_none() -> None:
    """Also of parameters so small that some ranks have nothing of them, and with one agreement a step."""
    assert run_ranks(4, _replace_gradients) == [[1, 1, 1]] * 4


def _norm_of_doubles() -> tuple[float, float]:
    torch.manual_seed(0)
    model = toys.Chain().double()
    loss = model(*_doubles(0, 0, 0))
    loss.backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    model.zero_grad()
    mics.shard(model, partition_size=2)
    model(*_doubles(0, 0, 0)).backward()
    return mics.clip_grad_norm_(model, 1.0).item(), expected


def test_norms_of_doubles_are_doubles() -> None:
    for found, expected in run_ranks(2, _norm_of_doubles):
        assert found == pytest.approx(expected, rel=1e-12)


class _Signed(torch.optim.Optimizer):
    """An optimizer from elsewhere: moves by the gradient's sign."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def _signed(model: nn.Module) -> torch.optim.Optimizer:
    return _Signed([p for p in model.parameters() if p.requires_grad])


def _allow_and_train(recipe: Recipe) -> dict[str, torch.Tensor]:
    import mics

    mics.allow_optimizer(_Signed)
    from tests.reference import train_sharded

    return train_sharded(recipe, SHARDINGS[0]).state_dict


def test_an_allowed_optimizer_from_elsewhere() -> None:
    """Once declared elementwise, a third-party optimizer trains as in one process."""
    from tests.reference import train_ordered

    recipe = _recipe(_signed)
    found = run_ranks(4, _allow_and_train, recipe, ranks_per_node=2)[0]
    expected = train_ordered(recipe, world_size=4, partition_size=2, ranks_per_node=2).state_dict
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---------------------------------------------------------------------------------------------
# Gradients as users see them
# ---------------------------------------------------------------------------------------------


def _seen_gradients() -> dict[str, Any]:
    import mics

    torch.manual_seed(0)
    model = mics.shard(toys.Chain(), partition_size=2)
    optimizer = sgd(model)
    seen: dict[str, Any] = {"first": all(p.grad is None for p in model.parameters())}
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    seen["shapes"] = all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    before = mics.traffic(model).calls.get(("replication", "reduce_scatter"), 0)
    values = {name: (p.grad * 1.0).clone() for name, p in model.named_parameters()}
    again = {name: p.grad + 0.0 for name, p in model.named_parameters()}
    seen["hop 2"] = mics.traffic(model).calls[("replication", "reduce_scatter")] - before
    seen["same"] = all(torch.equal(torch.as_tensor(values[n]), torch.as_tensor(again[n])) for n in values)
    seen["numel"] = sum(p.grad.shape.numel() for p in model.parameters() if p.grad is not None)
    seen["squares"] = sum((v**2).sum().item() for v in values.values())
    full = mics.full_gradients(model)
    seen["full squares"] = sum((g.double() ** 2).sum().item() for g in full.values() if g is not None)
    optimizer.zero_grad()
    seen["last"] = all(p.grad is None for p in model.parameters())
    return seen


def test_gradients_are_guarded() -> None:
    """`.grad` is None, then this rank's piece; using it runs hop 2 once."""
    for seen in run_ranks(4, _seen_gradients, ranks_per_node=2):
        assert seen["first"] and seen["shapes"] and seen["same"] and seen["last"]
        assert seen["hop 2"] == 3
    first = run_ranks(4, _seen_gradients, ranks_per_node=2)[0]
    assert first["squares"] == pytest.approx(first["full squares"], rel=1e-5)
    assert first["numel"] < sum(p.numel() for p in toys.Chain().parameters())


def _norms(norm_type: Any) -> list[float]:
    import mics

    torch.manual_seed(0)
    model = mics.shard(toys.Language(), partition_size=2)
    for micro in range(2):
        model(*toys.language_batch(1, micro, dist.get_rank())).backward()
    first = mics.clip_grad_norm_(model, 0.01, norm_type)
    assert isinstance(first, torch.Tensor) and first.shape == ()
    return [first.item(), mics.clip_grad_norm_(model, 1e9, norm_type).item()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf"), "inf"])
def test_clipping_with_any_norm(norm_type: Any) -> None:
    """The norm equals the whole gradient's, on every rank, and clipping brings it to the bound."""
    torch.manual_seed(0)
    model = toys.Language()
    for micro in range(2):
        for rank in range(4):
            (model(*toys.language_batch(1, micro, rank)) / 4).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type).item()
    for before, after in run_ranks(4, _norms, norm_type):
        assert before == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)


# ---------------------------------------------------------------------------------------------
# fp16 with a gradient scaler
# ---------------------------------------------------------------------------------------------


def _scaled_training(
    rank: int | None, world_size: int, poisoned: tuple[int, int], unscale: bool
) -> dict[str, Any]:
    """fp16 parameters with `torch.amp.GradScaler`; `rank` None is one process with all batches.

    `poisoned` is the (step, rank) whose loss overflows.
    """
    torch.manual_seed(0)
    model = toys.Chain()
    if rank is not None:
        import mics

        mics.shard(model, partition_size=2, precision=mics.Precision(param_dtype=torch.float16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales, values = [], []
    for step in range(4):
        ranks = range(world_size) if rank is None else [rank]
        for one in ranks:
            x, target = toys.floats(step, 0, one)
            loss = model(x if rank is None else x.half(), target) / len(ranks)
            if (step, one) == poisoned:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            if rank is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                mics.clip_grad_norm_(model, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        state = model.state_dict() if rank is None else mics.full_state_dict(model, rank0_only=False)
        values.append({name: value.clone() for name, value in state.items()})
    return {"scales": scales, "values": values}


def _scaled_rank(poisoned: tuple[int, int], unscale: bool) -> dict[str, Any]:
    return _scaled_training(dist.get_rank(), dist.get_world_size(), poisoned, unscale)


@pairwise.parametrize(strength=1, poisoned=[(9, 9), (1, 0), (1, 3), (2, 2)], unscale=[False, True])
def test_the_scaler_skips_a_step_on_all_ranks_or_none(poisoned: tuple[int, int], unscale: bool) -> None:
    """One rank's overflow makes every rank skip and halve its scale; the rest equals one process."""
    expected = _scaled_training(None, 4, poisoned, unscale)
    found = run_ranks(4, _scaled_rank, poisoned, unscale, ranks_per_node=2)
    for rank in found:
        assert rank["scales"] == expected["scales"]
    for step in range(4):
        for name, value in expected["values"][step].items():
            first = found[0]["values"][step][name]
            assert all(torch.equal(rank["values"][step][name], first) for rank in found)
            assert torch.isfinite(first).all()
            torch.testing.assert_close(first, value, rtol=0.05, atol=0.01)
    if poisoned[0] < 4:
        step = poisoned[0]
        before, after = (found[0]["values"][index] for index in (step - 1, step))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert expected["scales"][step] < expected["scales"][step - 1]


class _WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x).square().mean()
        return out


def _assign_late(ranks: list[int]) -> tuple[int, float]:
    """A gradient for what nobody used, after the ranks have agreed: exchanges, and how far it moved."""
    torch.manual_seed(0)
    model = mics.shard(_WithSpare(), partition_size=2, units=[nn.Linear])
    before = mics.full_state_dict(model, rank0_only=False)["spare.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).backward()
    mics.clip_grad_norm_(model, 1.0)
    agreement = engine_of(model).step._agreement
    num_exchanges = agreement._num_exchanges
    if dist.get_rank() in ranks:
        weight = model.spare.weight
        weight.grad = torch.ones(8, 8)
    optimizer.step()
    after = mics.full_state_dict(model, rank0_only=False)["spare.weight"]
    return agreement._num_exchanges - num_exchanges, (before - after).sub(0.1).abs().max().item()


def test_a_gradient_that_is_news_to_the_ranks_is_agreed_on() -> None:
    for num_exchanges, off in run_ranks(4, _assign_late, [0, 1, 2, 3], ranks_per_node=2):
        assert num_exchanges == 1
        assert off < 1e-6


def _gathers(num_optimizers: int) -> int:
    """Of one step, with the parameters spread over so many optimizers."""
    torch.manual_seed(0)
    model = mics.shard(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))),
        partition_size=2,
        prefetch=2,
        precision=mics.Precision(param_dtype=torch.bfloat16),
    )
    params, size = list(model.parameters()), 16 // num_optimizers
    optimizers = [torch.optim.SGD(params[n : n + size], lr=0.1) for n in range(0, 16, size)]
    found = []
    for _ in range(6):
        model(torch.ones(2, 8)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append(mics.traffic(model).calls["partition", "all_gather"])
    return found[-1] - found[-2]


def test_one_optimizer_leaves_what_another_has_prefetched() -> None:
    one, four = run_ranks(2, _gathers, 1)[0], run_ranks(2, _gathers, 4)[0]
    assert four <= one + 2
