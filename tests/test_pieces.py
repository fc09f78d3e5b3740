"""Programs that use the pieces of a sharded model directly: penalties, averages, edits, state."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import mics
from mics.errors import MicsError, SettingsError
from tests import tiers, toys
from tests.ranks import run_ranks
from tests.reference import sgd
from tests.test_user_habits import Run, _assert_same, _loss

Penalty = Callable[[nn.Module], Tensor]

# Whole plain tensors, the same in every process.
ANCHORS = {n: torch.linspace(0, 1, p.numel()).view(p.shape) for n, p in toys.Chain().named_parameters()}

PENALTIES: dict[str, Penalty] = {
    "anchors": lambda model: (
        1e-2 * sum(((p - ANCHORS[n]) * ANCHORS[n]).square().sum() for n, p in model.named_parameters())
    ),
    "squares": lambda model: 1e-2 * sum(p.pow(2).sum() for p in model.parameters()),
    "magnitudes": lambda model: 1e-2 * sum(p.abs().sum() for p in model.parameters()),
    "norms": lambda model: 1e-2 * sum(p.norm() for p in model.parameters()),
    "means": lambda model: sum(p.square().mean() for p in model.parameters()),
    "one parameter": lambda model: model.blocks[0].gain.sum(),
    "all at once": lambda model: 1e-2 * mics.norms(model.parameters()).square().sum(),
    "distance": lambda model: 1e-2 * sum((p - p.detach() * 0.5).square().sum() for p in model.parameters()),
}


def _penalised(run: Run, name: str) -> list[Any]:
    """A penalty in the loss, over two micro-steps: before the forward in one, after it in the other."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    losses = []
    for step in range(2):
        first, second = _loss(model, step), _loss(model, step, 1)
        run.backward(lambda rank, loss=first: PENALTIES[name](model) * (1 + rank) + loss(rank))
        run.backward(lambda rank, loss=second: loss(rank) + PENALTIES[name](model))
        losses.append(mics.norms(p.grad for p in model.parameters() if p.grad is not None).tolist())
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), losses]


class _Penalised:
    """The script for one penalty, by name: scripts travel by pickle."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, run: Run) -> list[Any]:
        return _penalised(run, self.name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full)
        if name in ("squares", "magnitudes", "means", "distance", "anchors", "one parameter")
        else name
        for name in PENALTIES
    ],
)
def test_penalties_on_parameters(name: str) -> None:
    """A penalty on `model.parameters()`, weighted otherwise on each rank: the gradients of one process."""
    _assert_same(_Penalised(name))


def _average_by_lerp(run: Run) -> list[Any]:
    """An average of the weights in a copy that was made before sharding, frozen, and sharded alike."""
    model = toys.Chain()
    average = copy.deepcopy(model).requires_grad_(False)
    model, average = run.shard(model), run.shard(average)
    optimizer = sgd(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.25)
    with torch.no_grad():
        value = _loss(average, 9)(0)
    return [*run.state(model), *run.state(average), value]


def _average_by_data(run: Run) -> list[Any]:
    """The same through `.data`, in a copy that is not frozen."""
    model = toys.Chain()
    average = copy.deepcopy(model)
    model, average = run.shard(model), run.shard(average)
    optimizer = sgd(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        for mean, new in zip(average.parameters(), model.parameters(), strict=True):
            mean.data = 0.75 * mean.data + 0.25 * new.data
    with torch.no_grad():
        value = _loss(average, 9)(0)
    return [*run.state(model), *run.state(average), value]


def _averaged_model(run: Run) -> list[Any]:
    """torch's own AveragedModel, made before sharding."""
    model = toys.Chain()
    average = torch.optim.swa_utils.AveragedModel(model)
    model = run.shard(model)
    run.shard(average)
    optimizer = sgd(model)
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [*run.state(model), *run.state(average)]


def _written_whole(run: Run) -> list[Any]:
    """Whole values assigned to `.data`, between steps."""
    model = run.shard(toys.Chain())
    whole = toys.Chain()
    optimizer = sgd(model)
    for step in range(2):
        for param, value in zip(model.parameters(), whole.parameters(), strict=True):
            param.data = value.detach() * (step + 1)
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _clipped_by_torch(run: Run) -> list[Any]:
    """torch's own clipping, by norm and by value, and a look at the gradients after it."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    norms = []
    for step in range(3):
        run.backward(_loss(model, step))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        norms.append(max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), norms]


def _best_so_far(run: Run) -> list[Any]:
    """A copy of the state dict kept aside and loaded again, and the optimizer's."""
    model = run.shard(toys.Chain())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = None
    for step in range(4):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert best is not None
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    run.backward(_loss(model, 7))
    optimizer.step()
    return run.state(model)


def _logged_in_hooks(run: Run) -> list[Any]:
    """Hooks of the optimizer that read gradients and parameters before and after a step."""
    model = run.shard(toys.Chain())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: list[float] = []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            seen.append(param.norm().item())
            if param.grad is not None:
                seen.append(param.grad.norm().item())

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for step in range(2):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), seen]


def _gradients_kept(run: Run) -> list[Any]:
    """Gradients of two tasks, each held beyond `zero_grad()` as they are, as `.data` and as `detach()`."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    params = list(model.parameters())
    found = []
    for step in range(2):
        run.backward(_loss(model, step))
        first = [p.grad for p in params]
        views = [p.grad.data if index % 2 else p.grad.detach() for index, p in enumerate(params)]
        optimizer.zero_grad()
        run.backward(_loss(model, step, 1))
        for param, one, view in zip(params, first, views, strict=True):
            found += [one.norm().item(), view.norm().item(), (one * param.grad).sum().item()]
            param.grad = one - 0.5 * param.grad
        found.append(run.clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), found]


def _swapped_weights(run: Run) -> list[Any]:
    """The weights of an average put in their place by `.data`, and the old ones back, without copies."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    average = [p.data.clone() for p in model.parameters()]
    losses = []
    for step in range(3):
        run.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)
        kept = [p.data for p in model.parameters()]
        for mean, p in zip(average, model.parameters(), strict=True):
            p.data = mean
        with torch.no_grad():
            losses.append(_loss(model, 9)(0).item())
        for old, p in zip(kept, model.parameters(), strict=True):
            p.data = old
    return [*run.state(model), losses]


def _whole_operands(run: Run) -> list[Any]:
    """Masks, targets and gradients as whole plain tensors, the same on every rank."""
    model = run.shard(toys.Chain())
    plain = {name: p.detach() for name, p in toys.Chain().named_parameters()}
    optimizer = sgd(model)
    found = []
    for step in range(2):
        run.backward(_loss(model, step))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad.add_(plain[name], alpha=0.1)
                p.mul_((plain[name] > 0).to(p))
                found.append((p - plain[name]).norm().item())
                found.append(torch.equal(p, plain[name]))
        optimizer.step()
        for name, p in model.named_parameters():
            p.grad = plain[name] * 0.5
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return [*run.state(model), found]


def _learned_weight(run: Run) -> list[Any]:
    """A parameter of one number weighs the loss outside of any forward."""
    model = toys.Chain()
    model.scale = nn.Parameter(torch.tensor(0.3))
    model = run.shard(model)
    optimizer = sgd(model)
    for step in range(3):
        loss = _loss(model, step)
        run.backward(lambda rank, loss=loss: loss(rank) * torch.exp(-model.scale) + model.scale)
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _frozen_later(run: Run) -> list[Any]:
    """A parameter frozen after sharding has no gradient, and weight decay leaves it alone."""
    model = run.shard(toys.Chain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    frozen = next(model.parameters()).requires_grad_(False)
    for step in range(2):
        run.backward(_loss(model, step))
        assert frozen.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def _assigned_and_scaled(run: Run) -> list[Any]:
    """Some gradients are the user's own tensors when all of them are changed in place by one operator."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        loss = _loss(model, step)
        run.backward(lambda rank, loss=loss: scaler.scale(loss(rank)))
        for p in list(model.parameters())[-2:]:
            p.grad = p.grad * 0.5
        scaler.unscale_(optimizer)
        for p in list(model.parameters())[-1:]:
            p.grad = p.grad + 0.01
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run.state(model)


def _assigned_and_held(run: Run) -> list[Any]:
    """What was assigned to ``p.grad`` is the gradient from there on, whoever changes which of the two."""
    model = run.shard(toys.Chain())
    optimizer = sgd(model)
    averages: dict[str, Tensor] = {}
    found: list[Any] = []
    for step in range(4):
        run.backward(_loss(model, step))
        for name, p in model.named_parameters():  # a momentum by hand
            if name not in averages:
                averages[name] = torch.zeros_like(p)
            averages[name].mul_(0.9).add_(p.grad)
            p.grad = averages[name]
        for grad in [p.grad for p in model.parameters()]:
            grad.mul_(0.5)
        found.append([averages[name].norm().item() for name in averages])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([averages[name].sum().item() for name in averages])
        if step == 1:
            optimizer.zero_grad(set_to_none=False)
            found.append([averages[name].abs().sum().item() for name in averages])
        optimizer.zero_grad()
        found.append([averages[name].square().sum().item() for name in averages])
    return [*run.state(model), found]


SCRIPTS = [
    _assigned_and_held,
    _gradients_kept,
    _swapped_weights,
    _learned_weight,
    # These in `make test-all`.
    _frozen_later,
    _average_by_lerp,
    _written_whole,
    _clipped_by_torch,
    _assigned_and_scaled,
    _whole_operands,
    _average_by_data,
    _averaged_model,
    _best_so_far,
    _logged_in_hooks,
]


@pytest.mark.parametrize("script", tiers.first(SCRIPTS, 4), ids=[s.__name__.strip("_") for s in SCRIPTS])
def test_programs_with_pieces(script: Callable[[Run], list[Any]]) -> None:
    """See the script's docstring; sharded three ways, each ends where plain training ends."""
    _assert_same(script)


def _refusals() -> None:
    """Everything here would be one rank's numbers, and is refused with the way out."""
    torch.manual_seed(dist.get_rank())
    model = mics.shard(toys.Chain(), partition_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    state = model.state_dict()
    weight = next(p for p in model.parameters() if p.dim() == 2)
    saves: list[Callable[[], Any]] = [
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: torch.save(list(model.parameters()), io.BytesIO()),
        lambda: safetensors.torch.save(dict(state)),
        lambda: safetensors.torch.save({k: v.clone().contiguous() for k, v in state.items()}),
    ]
    for save in saves:
        with pytest.raises(MicsError, match=r"mics\.save|full_state_dict"):
            save()
    for init in ("xavier_uniform_", "orthogonal_", "kaiming_normal_", "trunc_normal_", "normal_", "uniform_"):
        with pytest.raises(MicsError, match=r"summon_full_params\(model, write=True\)"):
            getattr(nn.init, init)(weight)
    plain_pieces: list[Callable[[], Any]] = [
        lambda: weight.data.add_(torch.randn(weight.shape)),
        lambda: weight + torch.randn(weight.shape),
        lambda: setattr(weight, "data", torch.randn(weight.shape)),
        lambda: setattr(weight, "grad", torch.randn(weight.shape)),
        lambda: weight.as_subclass(Tensor),
        lambda: weight.square().backward(),
    ]
    for use in plain_pieces:
        with pytest.raises(MicsError, match="expected"):
            use()
    assert torch.ones(3, dtype=torch.float64).to(weight).dtype is torch.float32
    with pytest.raises(SettingsError, match="piece"):
        mics.save(tempfile.mkdtemp(), model, extra_state={"best": state})
    model.zero_grad()
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    with pytest.raises(MicsError, match=r"clone\(\) it before zero_grad"):
        held[0].norm()
    with pytest.raises(MicsError, match="backward"):
        torch.autograd.grad(model(*toys.floats(0, 0, 0)), list(model.parameters()))
    with pytest.raises(SettingsError, match="AdamW"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict())
    with pytest.raises(SettingsError, match="decoupled_weight_decay"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(SettingsError, match="param_groups"):
        optimizer.load_state_dict(mics.full_optimizer_state_dict(model, optimizer))
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(SettingsError, match="groups"):
        optimizer.load_state_dict(torch.optim.AdamW(groups).state_dict())
    with pytest.raises(SettingsError, match="whole tensor"):
        model.load_state_dict({name: value.to_local() for name, value in state.items()})
    assert "of" in repr(weight) and "ShardParameter" in repr(weight)


def test_what_one_rank_cannot_answer_is_refused() -> None:
    """Saving pieces, initialising them, differentiating by them, state of another optimizer."""
    run_ranks(4, _refusals)


def _initialised() -> dict[str, Tensor]:
    """Initialisers inside the context, with another seed on each rank."""
    torch.manual_seed(17 + dist.get_rank())
    model = mics.shard(toys.Chain(), partition_size=2)
    with mics.summon_full_params(model, write=True):
        for param in model.parameters():
            if param.dim() == 2:
                nn.init.orthogonal_(param)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                nn.init.constant_(param, 0.5)
    mics.audit_replicas(model)
    return mics.full_state_dict(model, rank0_only=False)


def test_initialisers_in_the_context_of_whole_parameters() -> None:
    """All ranks get what rank 0 drew: orthogonal matrices, equal on all; constants need no context."""
    states = run_ranks(4, _initialised)
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    for name, _ in toys.Chain().named_parameters():
        value = states[0][name]
        if value.dim() == 2:
            gram = value @ value.T if value.shape[0] <= value.shape[1] else value.T @ value
            torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-5, rtol=1e-5)
        if value.dim() == 1:
            assert (value == 0.5).all()


def _different_states() -> list[str]:
    """What ranks say that load other whole tensors than their neighbours, and whether anything was loaded."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = mics.shard(toys.Chain(), partition_size=2)
    before = mics.full_state_dict(model, rank0_only=False)
    torch.manual_seed(rank)
    said = []
    for state in (toys.Chain().state_dict(), mics.full_state_dict(model)):
        for strict in (True, False):
            with pytest.raises(SettingsError) as caught:
                model.load_state_dict(state, strict=strict)
            said.append(str(caught.value))
    after = mics.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return said


def test_whole_tensors_that_differ_between_ranks_are_not_loaded() -> None:
    """They would become a model that is nobody's: a piece of each."""
    for said in run_ranks(4, _different_states):
        assert all("rank0_only=False" in each and "mics.load_full_state_dict" in each for each in said)
        assert "on some ranks" in said[0] and "missing on ranks 1, 2 and 3" in said[2]


def _average_in_float32() -> list[Tensor]:
    model = toys.Chain()
    average = copy.deepcopy(model).requires_grad_(False)
    mics.shard(model, partition_size=2, precision=mics.Precision(param_dtype=torch.bfloat16))
    mics.shard(average, partition_size=2, precision=mics.Precision(param_dtype=torch.float32))
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            p.mul_(2)
            mean.lerp_(p, 0.5)
    return [p.full_tensor() for p in average.parameters()]


def test_an_average_in_float32_of_a_model_in_bfloat16() -> None:
    """Both have one layout, whatever their formats."""
    torch.manual_seed(1000)
    expected = [1.5 * p.detach() for p in toys.Chain().parameters()]
    torch.testing.assert_close(run_ranks(4, _average_in_float32)[0], expected)


def _counts() -> tuple[int, int, int]:
    model = mics.shard(toys.Chain(), partition_size=2)
    return (
        mics.num_parameters(model),
        sum(p.numel() for p in model.parameters()),
        sum(p.to_local().numel() for p in model.parameters()),
    )


def test_counting_parameters() -> None:
    """`numel()` and `mics.num_parameters` count the whole model; the pieces of all ranks make it up."""
    expected = sum(p.numel() for p in toys.Chain().parameters())
    found = run_ranks(4, _counts)
    assert {(whole, by_numel) for whole, by_numel, _ in found} == {(expected, expected)}
    assert sum(local for _, _, local in found) == expected
