"""Plain single-process training that sharded training is compared with.

A `Recipe` says what is trained: how the model is built, its loss, its batches, its optimizer. Three
trainers follow it and return the same `Outcome`:

`train_plain`    ordinary PyTorch: every micro-step runs the whole global batch through the model
                 once. Gradient = mean over ranks, summed over micro-steps. Nothing of the engine's
                 structure is in it, so agreement is up to rounding.
`train_ordered`  the same mathematics in the engine's order of summation, so that agreement in fp32
                 can be asked to the last bit. Each rank's gradient is computed from its own
                 micro-batch; see "Order of summation".
`train_sharded`  the engine, on the calling rank of a process group.

Order of summation
------------------
All sums run left to right: `((g0 + g1) + g2) + ...`.

hop 1   In every micro-step, inside each partition group (`p` consecutive ranks). If the group lies
        on `N > 1` nodes with the same number, more than one, of its ranks on each, the sum has two
        stages: over the ranks of each node, then over nodes. Otherwise it is one sum in rank order.
        The result, times `1 / world`, is added to the accumulator of the group.
hop 2   At the boundary: the sum of the accumulators over partition groups, in order of the groups.

The optimizer then runs on whole tensors. The engine runs it on shards; that is the same to the bit
if the kernels treat an element alike wherever it lies in a tensor. `elementwise_alike` looks
whether that holds for an optimizer on this machine (it fails where the vectorised loop fuses a
multiply and an add and the scalar tail does not; fused SGD on aarch64 is one).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

Gradients = dict[str, Tensor | None]
State = dict[str, dict[str, Tensor]]

SEED = 7
"""The seed of the weights that count: the reference's, and rank 0's."""


# ---------------------------------------------------------------------------------------------
# What is trained, and what comes out
# ---------------------------------------------------------------------------------------------


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that returns its loss."""
    return model(*batch)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, the usual two groups by number of dimensions."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained. All callables are module-level functions (they travel to the ranks).

    `batch(step, micro, rank)` is one rank's micro-batch, a tree of tensors whose first dimension is
    the batch's; `loss` must be a mean over it. `max_norm` clips the gradient at the boundary.
    `param_dtype` is the dtype parameters are computed in; masters stay in the dtype they have.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor] = call_model
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    num_steps: int = 3
    accumulation: int = 1
    max_norm: float | None = None
    param_dtype: torch.dtype | None = None
    set_to_none: bool = True
    between_steps: Callable[[nn.Module, int], Any] | None = None


@dataclass
class Outcome:
    """What training led to. Tensors are whole, on the CPU.

    losses     [step][micro][rank] (`train_plain`: one entry instead of one per rank)
    norms      [step], the gradient's norm before clipping
    gradients  [step], by parameter name, before clipping, where they were recorded
    num_decoded    how often moves of new parameters were decoded
    """

    losses: list[list[list[float]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state_dict: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: State = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)
    num_decoded: int = 0


# ---------------------------------------------------------------------------------------------
# Groups of ranks
# ---------------------------------------------------------------------------------------------


def partition_groups(world_size: int, partition_size: int) -> list[list[int]]:
    """`world / p` groups of `p` consecutive ranks."""
    assert world_size % partition_size == 0
    firsts = range(0, world_size, partition_size)
    return [list(range(first, first + partition_size)) for first in firsts]


def stages(world_size: int, partition_size: int, ranks_per_node: int) -> list[list[list[int]]]:
    """For each partition group, its ranks in lists that are summed first, then across the lists.

    A group on several nodes with equally many, more than one, ranks on each gives one list per node;
    any other group, such as one that a ragged node cuts, gives one list.
    """
    plan = []
    for group in partition_groups(world_size, partition_size):
        nodes = _split_by_node(group, ranks_per_node)
        sizes = {len(node) for node in nodes}
        two_stage = len(nodes) > 1 and len(sizes) == 1 and sizes != {1}
        plan.append(nodes if two_stage else [group])
    return plan


def _split_by_node(group: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


def _sum(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Left to right; a missing gradient counts as zero, and all missing give none."""
    total: Tensor | None = None
    for tensor in tensors:
        if tensor is not None:
            total = tensor.clone() if total is None else total.add_(tensor)
    return total


# ---------------------------------------------------------------------------------------------
# The single-process trainers
# ---------------------------------------------------------------------------------------------


def join(batches: Sequence[Any]) -> Any:
    """One global batch from the ranks' batches; what is not a tensor must be the same in all."""

    def cat(*leaves: Any) -> Any:
        if isinstance(leaves[0], Tensor):
            return torch.cat(leaves)
        assert all(leaf == leaves[0] for leaf in leaves)
        return leaves[0]

    return tree_map(cat, *batches)


class _Plain:
    """A model in the dtypes it computes in, and beside it, where those differ, one of fp32 masters."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(SEED)
        self.recipe = recipe
        self.masters = self.compute = recipe.build()
        dtypes = {p.dtype for p in self.compute.parameters()} | {recipe.param_dtype}
        if not dtypes <= {torch.float32, torch.float64, None}:
            self.masters = copy.deepcopy(self.compute)
            _cast_parameters(self.masters, torch.float32, keep=torch.float64)
            if recipe.param_dtype is not None:
                _cast_parameters(self.masters, recipe.param_dtype, frozen=True)
            if recipe.param_dtype is not None:
                _cast_parameters(self.compute, recipe.param_dtype)
        self.optimizer = recipe.optimizer(self.masters)
        self.scheduler = recipe.scheduler(self.optimizer) if recipe.scheduler else None
        self.kept: set[str] = set()  # whose gradients zero_grad set to zero instead of none

    def refresh(self) -> None:
        """Copy the masters into the model that computes."""
        if self.compute is self.masters:
            return
        pairs = zip(self.compute.parameters(), self.masters.parameters(), strict=True)
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)

    def gradients(self, batch: Any) -> tuple[float, Gradients]:
        """The loss of one batch and its gradient by name, in the masters' dtype."""
        self.compute.zero_grad()
        loss = self.recipe.loss(self.compute, batch) / self.recipe.accumulation
        loss.backward()
        masters = dict(self.masters.named_parameters())
        found: Gradients = {
            name: None if p.grad is None else p.grad.to(masters[name].dtype)
            for name, p in self.compute.named_parameters()
        }
        return loss.item(), found

    def step(self, gradients: Gradients, outcome: Outcome, norm: float | None) -> None:
        """Clip, step, and note the norm. `norm`, if given, is the one to clip by."""
        outcome.gradients.append({n: None if g is None else g.clone() for n, g in gradients.items()})
        present = [g for g in gradients.values() if g is not None]
        own_norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g.double()) for g in present])
        ).float()
        outcome.norms.append(own_norm.item())
        if self.recipe.max_norm is not None:
            by = own_norm if norm is None else torch.tensor(norm)
            coefficient = (self.recipe.max_norm / (by + 1e-6)).clamp(max=1.0)
            for gradient in present:
                gradient.mul_(coefficient)
        for name, parameter in self.masters.named_parameters():
            parameter.grad = gradients[name]
            if gradients[name] is not None and not self.recipe.set_to_none:
                self.kept.add(name)
            elif name in self.kept:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none)
        self.refresh()

    def finish(self, outcome: Outcome) -> Outcome:
        outcome.parameters = {n: p.detach().clone() for n, p in self.masters.named_parameters()}
        outcome.state_dict = {n: t.detach().clone() for n, t in self.masters.state_dict().items()}
        for name, parameter in self.masters.named_parameters():
            if parameter in self.optimizer.state:
                state = self.optimizer.state[parameter]
                outcome.optimizer_state[name] = plain_state(state)
        return outcome


def _cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, keep: torch.dtype | None = None, frozen: bool = False
) -> None:
    """Cast in place: all parameters but those of dtype `keep`, or the frozen ones alone."""
    for parameter in model.parameters():
        chosen = parameter.is_floating_point() and parameter.dtype is not keep
        if chosen and not (frozen and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


def train_plain(recipe: Recipe, *, world_size: int) -> Outcome:
    """Ordinary training with the whole global batch in every micro-step."""
    plain, outcome = _Plain(recipe), Outcome()
    for step in range(recipe.num_steps):
        total: Gradients = dict.fromkeys(dict(plain.masters.named_parameters()))
        outcome.losses.append([])
        for micro in range(recipe.accumulation):
            batch = join([recipe.batch(step, micro, rank) for rank in range(world_size)])
            loss, found = plain.gradients(batch)
            outcome.losses[-1].append([loss])
            total = {name: _sum([total[name], found[name]]) for name in total}
        plain.step(total, outcome, None)
        if recipe.between_steps is not None:
            outcome.extra.append(recipe.between_steps(plain.compute, step))
    return plain.finish(outcome)


def train_ordered(
    recipe: Recipe,
    *,
    world_size: int,
    partition_size: int,
    ranks_per_node: int,
    norms: Sequence[float] | None = None,
) -> Outcome:
    """Training in the engine's order of summation; see the module's docstring.

    `norms`, one per step, replace this reference's own norms where it clips: a norm depends on the
    order in which squares are summed over shards, so it is compared within a tolerance, and then
    given here so that everything after it can still be compared to the last bit.
    """
    plain, outcome = _Plain(recipe), Outcome()
    plan = stages(world_size, partition_size, ranks_per_node)
    buffers = _RankBuffers(plain, world_size)
    for step in range(recipe.num_steps):
        accumulators: list[Gradients] = [{} for _ in plan]
        outcome.losses.append([])
        for micro in range(recipe.accumulation):
            losses, found = [], []
            for rank in range(world_size):
                with buffers.of(rank):
                    loss, gradients = plain.gradients(recipe.batch(step, micro, rank))
                losses.append(loss)
                found.append(gradients)
            outcome.losses[-1].append(losses)
            for accumulator, nodes in zip(accumulators, plan, strict=True):
                _hop_1(accumulator, nodes, found, alpha=1.0 / world_size)
        names = found[0]
        summed = {name: _sum([acc.get(name) for acc in accumulators]) for name in names}
        plain.step(summed, outcome, None if norms is None else norms[step])
        if recipe.between_steps is not None:
            with buffers.of(0):
                outcome.extra.append(recipe.between_steps(plain.compute, step))
    buffers.load(0)
    return plain.finish(outcome)


def _hop_1(accumulator: Gradients, nodes: list[list[int]], found: list[Gradients], *, alpha: float) -> None:
    """Add one micro-step's gradient of one partition group to its accumulator."""
    for name in found[0]:
        gradient = _sum([_sum([found[rank][name] for rank in node]) for node in nodes])
        if gradient is None:
            continue
        so_far = accumulator.get(name)
        if so_far is None:
            accumulator[name] = gradient * alpha
        else:
            so_far.add_(gradient, alpha=alpha)


class _RankBuffers:
    """Each rank's own buffers (running statistics follow the data a rank has seen)."""

    def __init__(self, plain: _Plain, world_size: int) -> None:
        self._models = {id(m): m for m in (plain.compute, plain.masters)}.values()
        first = {n: b.clone() for n, b in plain.compute.named_buffers()}
        self._kept = [{n: b.clone() for n, b in first.items()} for _ in range(world_size)]
        self._rank = 0

    def load(self, rank: int) -> None:
        for model in self._models:
            for name, buffer in model.named_buffers():
                buffer.copy_(self._kept[rank][name])

    def of(self, rank: int) -> _RankBuffers:
        self._rank = rank
        return self

    def __enter__(self) -> None:
        self.load(self._rank)

    def __exit__(self, *exc: object) -> None:
        (model, *_) = self._models
        for name, buffer in model.named_buffers():
            self._kept[self._rank][name].copy_(buffer)


# ---------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the engine is asked to train a recipe."""

    partition_size: int
    optimizer_sharding: str = "world"
    announced: bool = True
    record_gradients: bool = False
    units: tuple[type[nn.Module], ...] | None = None
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)


def train_sharded(recipe: Recipe, sharding: Sharding) -> Outcome:
    """Train on the calling rank. Rank 0's outcome holds the whole tensors, the others' none."""
    from mics.comm.moves import Moves
    from mics.sharding import refresh

    with (
        patch.object(refresh, "_WORTHWHILE", math.inf),  # toys are too small for moves to save bytes
        patch.object(Moves, "decode", autospec=True, side_effect=Moves.decode) as decode,
    ):
        outcome = _train_sharded(recipe, sharding)
    return replace(outcome, num_decoded=decode.call_count)


def _train_sharded(recipe: Recipe, sharding: Sharding) -> Outcome:
    import mics

    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(SEED if rank == 0 else SEED + 100 + rank)
    model = shard_model(recipe, sharding)
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    outcome = Outcome()
    for step in range(recipe.num_steps):
        batches = [recipe.batch(step, micro, rank) for micro in range(recipe.accumulation)]
        batches = tree_map(lambda leaf: to_device(leaf, sharding.device), batches)
        losses = []
        for batch in mics.microsteps(model, batches) if sharding.announced else batches:
            loss = recipe.loss(model, batch) / recipe.accumulation
            loss.backward()
            losses.append(loss.detach())
        outcome.losses.append([[loss.item()] for loss in losses])
        if sharding.record_gradients:
            outcome.gradients.append(dict(mics.full_gradients(model)))
        if recipe.max_norm is not None:
            outcome.norms.append(mics.clip_grad_norm_(model, recipe.max_norm).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        if recipe.between_steps is not None:
            outcome.extra.append(recipe.between_steps(model, step))
    outcome.state_dict = _cloned(mics.full_state_dict(model))
    state = mics.full_optimizer_state_dict(model, optimizer)
    outcome.optimizer_state = {name: plain_state(values) for name, values in state.items()}
    names = [name for name, _ in model.named_parameters()]
    outcome.parameters = {n: outcome.state_dict[n] for n in names if n in outcome.state_dict}
    return outcome


def shard_model(recipe: Recipe, sharding: Sharding) -> nn.Module:
    """The recipe's model, built on this rank's seed and sharded as asked."""
    import mics

    model = recipe.build().to(sharding.device)
    options = dict(sharding.options)
    if sharding.units is not None:
        options["units"] = sharding.units
    dtype = recipe.param_dtype
    if dtype is None and sharding.device != "cpu":
        dtype = torch.float32
    if dtype is not None:
        options["precision"] = mics.Precision(param_dtype=dtype)
    return mics.shard(
        model,
        partition_size=sharding.partition_size,
        optimizer_sharding=sharding.optimizer_sharding,
        **options,
    )


def to_device(leaf: Any, device: str) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def plain_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """An optimizer's state of one parameter; a number becomes a tensor, nothing is left out."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):  # torchao's 8-bit state
            plain |= {f"{key}.{name}": getattr(value, name) for name in value.__tensor_flatten__()[0]}
        else:
            plain[key] = value
    return {k: torch.as_tensor(v).detach().cpu().clone() for k, v in plain.items() if v is not None}


def _cloned(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks: rank 0's tensors and everybody's losses. The rest must agree."""
    for outcome in outcomes[1:]:
        assert outcome.norms == outcomes[0].norms, "ranks disagree on the gradient's norm"
        assert outcome.extra == outcomes[0].extra, "ranks disagree on what happened between steps"
    losses = [
        [[o.losses[step][micro][0] for o in outcomes] for micro in range(len(row))]
        for step, row in enumerate(outcomes[0].losses)
    ]
    return replace(outcomes[0], losses=losses)


# ---------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart two tensors may be: `atol + rtol * max(abs(expected))`, element by element.

    Relative to the largest element, since rounding in a sum is relative to its largest terms.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def differ(self, found: Tensor, expected: Tensor) -> str | None:
        """What differs, or None."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{found.dtype} {tuple(found.shape)} for {expected.dtype} {expected.shape}"
        if torch.equal(found, expected):
            return None
        error = (found.double() - expected.double()).abs().max().item()
        allowed = self.atol + self.rtol * expected.double().abs().max().item()
        if error <= allowed:
            return None
        num_wrong = int((found != expected).sum())
        return f"off by {error:.3g}, allowed {allowed:.3g} ({num_wrong} of {found.numel()} differ)"


EXACT = Tolerance()
NORM = Tolerance(rtol=2e-6)
"""A norm sums squares shard by shard, in another order than the reference."""


def differences(
    found: Outcome, expected: Outcome, tolerance: Tolerance = EXACT, norm: Tolerance = NORM
) -> list[str]:
    """Everything in which `found` is not `expected`; gradients only where they were recorded."""
    problems = _differ("losses", _means(found, expected), _means(expected, found), tolerance)
    if found.norms:
        problems += _differ("norms", found.norms, expected.norms, norm)
    for step, gradients in enumerate(found.gradients):
        if gradients:
            wanted = dict(expected.gradients[step])
            given = dict.fromkeys(wanted) | gradients  # one left out is one that is none
            problems += _differ_by_name(f"step {step} gradient", given, wanted, tolerance)
    problems += _differ_by_name("parameter", found.parameters, expected.parameters, tolerance)
    problems += _differ_by_name("state dict", found.state_dict, expected.state_dict, tolerance)
    if sorted(found.optimizer_state) != sorted(expected.optimizer_state):
        problems.append(
            "optimizer state of other parameters: found only "
            f"{sorted(set(found.optimizer_state) - set(expected.optimizer_state))}, missing "
            f"{sorted(set(expected.optimizer_state) - set(found.optimizer_state))}"
        )
    for name in set(found.optimizer_state) & set(expected.optimizer_state):
        given = dict(sorted(found.optimizer_state[name].items()))
        wanted = dict(sorted(expected.optimizer_state[name].items()))
        problems += _differ_by_name(f"optimizer state of {name}:", given, wanted, tolerance)
    return problems


def _means(outcome: Outcome, other: Outcome) -> list[float]:
    """The losses in a row; the mean over ranks where `other` has only the global batch's."""
    rows: list[float] = []
    for step, other_step in zip(outcome.losses, other.losses, strict=True):
        for ranks, other_ranks in zip(step, other_step, strict=True):
            same = len(ranks) == len(other_ranks)
            rows += ranks if same else [sum(ranks) / len(ranks)]
    return rows


def _differ(what: str, found: list[float], expected: list[float], tolerance: Tolerance) -> list[str]:
    problem = tolerance.differ(torch.tensor(found), torch.tensor(expected))
    return [] if problem is None else [f"{what}: {problem}\n  {found}\n  {expected}"]


def _differ_by_name(
    what: str, found: dict[str, Any], expected: dict[str, Any], tolerance: Tolerance
) -> list[str]:
    if list(found) != list(expected):
        return [f"{what} names: {list(found)} for {list(expected)}"]
    problems = []
    for name, value in found.items():
        if (value is None) != (expected[name] is None):
            problems.append(f"{what} {name}: {_brief(value)} for {_brief(expected[name])}")
        elif value is not None:
            problem = tolerance.differ(torch.as_tensor(value), expected[name])
            if problem is not None:
                problems.append(f"{what} {name}: {problem}")
    return problems


def _brief(value: Tensor | None) -> str:
    return "none" if value is None else f"a tensor {tuple(value.shape)}"


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


class _OneTensor(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


@cache
def elementwise_alike(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> bool:
    """Whether `optimizer` gives an element the same bits wherever it lies in a tensor, here."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(203, generator=generator)
    gradients = [torch.randn(203, generator=generator) * 0.1 for _ in range(4)]

    def trained(pieces: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        models = [_OneTensor(piece.clone()) for piece in pieces(value)]
        optimizers = [optimizer(model) for model in models]
        for gradient in gradients:
            for model, opt, piece in zip(models, optimizers, pieces(gradient), strict=True):
                model.weight.grad = piece.clone()
                opt.step()
        return torch.cat([model.weight.detach() for model in models])

    whole = trained(lambda tensor: [tensor])
    return all(
        torch.equal(whole, trained(lambda tensor, size=size: tensor.split(size)))
        for size in (1, 3, 7, 16, 37)
    )


def iterate_divisors(number: int) -> Iterator[int]:
    """The divisors of `number`, ascending."""
    yield from (divisor for divisor in range(1, number + 1) if number % divisor == 0)
