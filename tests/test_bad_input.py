"""What cannot be trained is refused, on every rank, saying what was expected, found and to do."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mics
from mics.errors import SettingsError
from tests import toys
from tests.ranks import GROUP_TIMEOUT_S, RankError, RankPool, run_expecting_error, run_ranks


def _assert_says(errors: list[RankError], *parts: str, by: str = "ValueError") -> None:
    """Every rank raised a subclass of `by` whose message holds all of `parts`."""
    for error in errors:
        assert error.is_a(by) or (by == "any" and (error.is_a("ValueError") or error.is_a("RuntimeError")))
        for part in parts:
            assert part.lower() in error.message.lower(), (error.rank, part, error.message)


def _says_expected_and_found(errors: list[RankError]) -> None:
    """The shape all of these messages have."""
    for error in errors:
        assert "expected" in error.message and "found" in error.message, error.message


# ---------------------------------------------------------------------------------------------
# Sizes and settings
# ---------------------------------------------------------------------------------------------


def _shard(**options: Any) -> None:
    mics.shard(toys.Chain(), **options)


def test_a_world_that_does_not_divide() -> None:
    """Four ranks in groups of three: the sizes that would fit are named."""
    errors = run_expecting_error(4, _shard, kwargs={"partition_size": 3})
    _assert_says(errors, "partition_size", "4", "3", "[1, 2, 4]")
    _says_expected_and_found(errors)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"partition_size": 0}, ("partition_size", "0")),
        ({"partition_size": -2}, ("partition_size", "-2")),
        ({"partition_size": 8}, ("partition_size", "8")),
        ({"partition_size": 2.0}, ("partition_size", "2.0")),
        ({"partition_size": True}, ("partition_size", "True")),
        ({"partition_size": 2, "optimizer_sharding": "replica"}, ("optimizer_sharding", "replica")),
        ({"partition_size": 2, "hierarchical": "yes"}, ("hierarchical", "yes")),
        ({"partition_size": 2, "precision": torch.bfloat16}, ("precision", "bfloat16")),
        ({"partition_size": 2, "units": ["blocks"]}, ("units", "blocks")),
        ({"partition_size": 2, "units": "blocks"}, ("units", "list", "'blocks'")),
        ({"partition_size": 2, "units": 3}, ("units", "list", "3")),
        ({"partition_size": 2, "units": [nn.Conv2d]}, ("units", "Conv2d")),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Sizes out of range and values of the wrong kind, each named with what was found."""
    errors = run_expecting_error(2, _shard, kwargs=options)
    _assert_says(errors, *parts)
    _says_expected_and_found(errors)


def test_precisions_that_make_no_sense() -> None:
    """A format that is no floating-point one is refused where the policy is made."""
    for field in ("param_dtype", "reduce_dtype", "master_dtype"):
        with pytest.raises(ValueError, match=f"Precision.{field}.*int64"):
            mics.Precision(**{field: torch.int64})
    with pytest.raises(ValueError, match=r"Precision\.reduce_dtype"):
        mics.Precision(reduce_dtype=None)  # type: ignore[arg-type]


def _shard_on_mesh(shape: tuple[int, ...], **options: Any) -> None:
    mesh = dist.init_device_mesh("cpu", shape)
    mics.shard(toys.Chain(), mesh=mesh, **options)


def test_meshes_that_do_not_fit() -> None:
    """A mesh of one axis, and a mesh beside a size."""
    _assert_says(run_expecting_error(4, _shard_on_mesh, (4,)), "mesh", "2", "1")
    errors = run_expecting_error(4, _shard_on_mesh, (2, 2), kwargs={"partition_size": 2})
    _assert_says(errors, "partition_size", "mesh")


def _train_on_mesh(given: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = toys.Chain()
    if given == "size":
        mics.shard(model, partition_size=2)
    else:
        mics.shard(model, mesh=dist.init_device_mesh("cpu", (2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    return mics.full_state_dict(model)


def test_a_mesh_is_the_same_as_a_size() -> None:
    """A 2 x 2 mesh trains to the bits of `partition_size=2`."""
    by_size = run_ranks(4, _train_on_mesh, "size")[0]
    by_mesh = run_ranks(4, _train_on_mesh, "mesh")[0]
    assert all(torch.equal(by_mesh[name], value) for name, value in by_size.items())


# ---------------------------------------------------------------------------------------------
# Ranks that disagree
# ---------------------------------------------------------------------------------------------


class _OtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = toys.Chain().blocks


def _disagree(what: str) -> None:
    odd = dist.get_rank() == 1
    options: dict[str, Any] = {"partition_size": 2}
    model: nn.Module = toys.Chain()
    if what == "partition_size" and odd:
        options["partition_size"] = 4
    if what == "optimizer_sharding" and odd:
        options["optimizer_sharding"] = "partition"
    if what == "precision" and odd:
        options["precision"] = mics.Precision(param_dtype=torch.bfloat16)
    if what == "hierarchical" and odd:
        options["hierarchical"] = False
    if what == "units" and odd:
        options["units"] = [nn.Linear]
    if what == "number of blocks" and odd:
        model = toys.Chain(num_blocks=4)
    if what == "width" and odd:
        model = toys.Chain(hidden=14)
    if what == "names" and odd:
        model = _OtherNames()
    if what == "dtype" and odd:
        model = model.double()
    if what == "frozen" and odd:
        model.blocks[1].requires_grad_(False)
    if what == "tied" and odd:
        model.blocks[1].up.weight = model.blocks[0].up.weight
    mics.shard(model, **options)


@pytest.mark.parametrize(
    "what",
    [
        "partition_size",
        "optimizer_sharding",
        "precision",
        "hierarchical",
        "units",
        "number of blocks",
        "width",
        "names",
        "dtype",
        "frozen",
        "tied",
    ],
)
def test_ranks_that_disagree(what: str) -> None:
    """One rank with another model or setting: all ranks raise at once and name a rank."""
    start = time.monotonic()
    errors = run_expecting_error(4, _disagree, what)
    assert time.monotonic() - start < GROUP_TIMEOUT_S / 2
    _assert_says(errors, "rank 0", "rank 1", by="any")
    _says_expected_and_found(errors)


def _one_rank_fails() -> None:
    model = toys.Chain()
    units = [nn.Linear(2, 2)] if dist.get_rank() == 2 else None
    mics.shard(model, partition_size=2, units=units)


def test_one_rank_that_fails_tells_the_others() -> None:
    """Only rank 2 has a wrong setting: the others do not wait for it, and say that it was rank 2."""
    start = time.monotonic()
    errors = run_expecting_error(4, _one_rank_fails)
    assert time.monotonic() - start < GROUP_TIMEOUT_S / 2
    assert errors[2].is_a("ValueError") and "units" in errors[2].message
    _assert_says([errors[0], errors[1], errors[3]], "rank 2", "units", by="any")


# ---------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------


def _shard_model(what: str) -> None:
    model: Any = toys.Chain()
    options: dict[str, Any] = {"partition_size": 2}
    if what == "meta and cpu":
        model.blocks[1].up.weight = nn.Parameter(torch.empty(13, 7, device="meta"))
    if what == "twice":
        mics.shard(model, **options)
    if what == "inner twice":
        mics.shard(model.blocks[0], **options)
    if what == "unit outside":
        options["units"] = [model.blocks[0], toys.Block()]
    if what == "no module":
        model = [nn.Linear(2, 2)]
    if what == "complex":
        model.blocks[2].gain = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    if what == "meta without initialiser":
        model = _NoInitialiser(device="meta")
    mics.shard(model, **options)


class _NoInitialiser(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device=device))


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("meta and cpu", ("blocks.1.up.weight", "meta", "cpu", "one device")),
        ("twice", ("already sharded", "once")),
        ("inner twice", ("blocks.0", "already sharded")),
        ("unit outside", ("units", "Block", "Chain")),
        ("no module", ("nn.Module", "list")),
        ("complex", ("blocks.2.gain", "complex64")),
        ("meta without initialiser", ("meta", "weight", "reset_parameters")),
    ],
)
def test_models_that_cannot_be_sharded(what: str, parts: tuple[str, ...]) -> None:
    """Wrong devices, sharding twice, units that are not the model's, and what is not a model."""
    errors = run_expecting_error(2, _shard_model, what)
    _assert_says(errors, *parts)
    _says_expected_and_found(errors)


def _thaw() -> None:
    model = toys.Chain()
    model.blocks[1].requires_grad_(False)
    mics.shard(model, partition_size=2)
    model.requires_grad_(True)
    model(*toys.floats(0, 0, dist.get_rank())).backward()


def test_what_was_frozen_stays_frozen() -> None:
    """Parameters frozen at `mics.shard` have no masters; thawing them later is refused by name."""
    errors = run_expecting_error(2, _thaw)
    _assert_says(errors, "blocks.1", "frozen", "requires_grad")
    _says_expected_and_found(errors)


@pytest.mark.parametrize("copies", [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("build", [toys.Chain, partial(nn.Linear, 4, 4)])
def test_copies_of_a_sharded_model(
    build: Callable[[], nn.Module], copies: Callable[[object], object]
) -> None:
    """Of all of it or a part."""
    model = mics.shard(build(), partition_size=1)
    for module in (model, *model.children()):
        if any(True for _ in module.parameters()):
            with pytest.raises(mics.MicsError, match=r"expected a plain model .* mics\.full_state_dict"):
                copies(module)


def test_micro_batches_that_are_none() -> None:
    model = mics.shard(nn.Linear(4, 4), partition_size=1)
    with pytest.raises(SettingsError, match=r"microsteps: expected the micro-batches .* found 3"):
        list(mics.microsteps(model, 3))  # type: ignore[arg-type]


def _unsharded(call: str) -> None:
    model = toys.Chain()
    calls = {
        "clip_grad_norm_": lambda: mics.clip_grad_norm_(model, 1.0),
        "microsteps": lambda: list(mics.microsteps(model, [1, 2])),
        "full_state_dict": lambda: mics.full_state_dict(model),
        "full_gradients": lambda: mics.full_gradients(model),
        "traffic": lambda: mics.traffic(model),
        "load_full_state_dict": lambda: mics.load_full_state_dict(model, {}),
        "summon": lambda: mics.summon_full_params(model).__enter__(),
    }
    calls[call]()


@pytest.mark.parametrize(
    "call",
    [
        "clip_grad_norm_",
        "microsteps",
        "full_state_dict",
        "full_gradients",
        "traffic",
        "load_full_state_dict",
        "summon",
    ],
)
def test_calls_on_a_model_that_is_not_sharded(call: str) -> None:
    """Every public call says that `mics.shard` comes first."""
    errors = run_expecting_error(1, _unsharded, call)
    _assert_says(errors, "mics.shard", "Chain")


def test_several_ranks_without_a_process_group() -> None:
    """Under a launcher, but before `init_process_group`: the missing call is named."""
    errors = run_expecting_error(2, _shard, launch="variables", kwargs={"partition_size": 1})
    _assert_says(errors, "WORLD_SIZE", "2", "init_process_group")
    _says_expected_and_found(errors)


# ---------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------


class _Unknown(torch.optim.SGD.__bases__[0]):  # type: ignore[misc]
    """An optimizer mics has never heard of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("refused before it runs")


def _step_with(name: str) -> None:
    model = mics.shard(toys.Chain(), partition_size=2)
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim == 2]
    makers = {
        "Adafactor": partial(torch.optim.Adafactor, parameters),
        "Muon": partial(torch.optim.Muon, matrices),
        "LBFGS": partial(torch.optim.LBFGS, parameters),
        "SparseAdam": partial(torch.optim.SparseAdam, parameters),
        "_Unknown": partial(_Unknown, parameters),
    }
    optimizer = makers[name]()
    loss = model(*toys.floats(0, 0, dist.get_rank()))
    loss.backward()
    before = [p.detach().clone() for p in parameters]
    try:
        optimizer.step(lambda: loss) if name == "LBFGS" else optimizer.step()
    finally:
        assert all(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adafactor", "whole matri"),
        ("Muon", "whole matri"),
        ("LBFGS", "all parameters"),
        ("SparseAdam", "sparse"),
        ("_Unknown", "allow_optimizer"),
    ],
)
def test_optimizers_that_would_be_wrong_on_shards(name: str, reason: str) -> None:
    """Those that need whole matrices or global state are refused with the reason; nothing moves."""
    _assert_says(run_expecting_error(2, _step_with, name), name, reason)


def _stale_optimizer(forward: bool) -> None:
    model = toys.Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mics.shard(model, partition_size=2)
    if forward:
        model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()


@pytest.mark.parametrize("forward", [True, False])
def test_an_optimizer_built_before_sharding(forward: bool) -> None:
    """Its step would change nothing, so it says so and what to do."""
    errors = run_expecting_error(2, _stale_optimizer, forward)
    _assert_says(errors, "before", "mics.shard", "model.parameters()")


def _optimizer_that_stepped_before() -> None:
    mics.shard(toys.Chain(), partition_size=2)  # from here on steps of all optimizers are looked at
    model = toys.Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    mics.shard(model, partition_size=2)
    optimizer.step()


def test_an_optimizer_that_stepped_before_sharding() -> None:
    """What was found out about its parameters at the first step does not hold at the second."""
    errors = run_expecting_error(2, _optimizer_that_stepped_before)
    _assert_says(errors, "before", "mics.shard", "model.parameters()")


def _allow(what: Any) -> None:
    mics.allow_optimizer(what)


def test_allowing_what_is_no_optimizer() -> None:
    """Only optimizer classes can be declared elementwise."""
    _assert_says(run_expecting_error(1, _allow, nn.Linear), "allow_optimizer", "Linear")


def _clip(max_norm: Any) -> None:
    model = mics.shard(toys.Chain(), partition_size=2)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    mics.clip_grad_norm_(model, max_norm)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), "1"])
def test_bounds_of_clipping(max_norm: Any) -> None:
    """A negative bound, NaN and a string are refused."""
    _assert_says(run_expecting_error(2, _clip, max_norm), "max_norm")


# ---------------------------------------------------------------------------------------------
# While training
# ---------------------------------------------------------------------------------------------


def _train_differently(partition_size: int, batch: Any, build: Any) -> None:
    model = mics.shard(build(), partition_size=partition_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(*batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("partition_size", [1, 4])
@pytest.mark.full
def test_ranks_that_call_different_units(partition_size: int) -> None:
    """A block skipped on some ranks only: an error on every rank within the timeout, never a hang."""
    with RankPool(4, timeout_s=3.0) as pool:
        errors = pool.run_expecting_error(
            4, _train_differently, partition_size, toys.skip_by_rank, toys.SkippedBlock
        )
    _assert_says(errors, by="RuntimeError")


def _skip_another(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Even ranks leave out block 1, odd ones block 2: as many collectives of the same sizes."""
    return (*toys.floats(step, micro, rank), 1 + rank % 2)


@pytest.mark.full  # test_diverging_ranks.py has ranks that part by one unit
@pytest.mark.parametrize("partition_size", [1, 2])
def test_ranks_that_swap_units(partition_size: int) -> None:
    """Collectives of different units that fit each other: found out before the optimizer steps."""
    start = time.monotonic()
    errors = run_expecting_error(4, _train_differently, partition_size, _skip_another, toys.SkippedBlock)
    assert time.monotonic() - start < GROUP_TIMEOUT_S, "only the timeout told"  # 10 s alone, with their start
    _assert_says(errors, "different", "same", by="RuntimeError")


def _forward_that_raises() -> list[bool]:
    """A forward, and then a backward, that raise half-way; afterwards the model works."""
    torch.manual_seed(0)
    model = mics.shard(_Explosive(), partition_size=2)
    results = []
    batch = toys.floats(0, 0, dist.get_rank())
    before = model(*batch).item()
    for moment in ("forward", "backward"):
        model.moment = moment
        try:
            model(*batch).backward()
        except ArithmeticError:
            results.append(True)
        model.moment = ""
        results.append(model(*batch).item() == before)
        model.zero_grad()
    model(*batch).backward()
    full = mics.full_gradients(model, rank0_only=False)
    torch.manual_seed(0)
    plain = _Explosive()
    for rank in range(dist.get_world_size()):
        (plain(*toys.floats(0, 0, rank)) / dist.get_world_size()).backward()
    results += [
        torch.allclose(full[name], p.grad, rtol=1e-5, atol=1e-6)
        for name, p in plain.named_parameters()
        if p.grad is not None
    ]
    return results


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("backward")


class _Explosive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(3))
        self.moment = ""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.moment == "forward":
                raise ArithmeticError("forward")
            if index == 0 and self.moment == "backward":
                x = _Raises.apply(x)
        return toys.mse(x, target)


def test_an_exception_in_forward_or_backward_can_be_caught() -> None:
    """After a forward or a backward that raised on all ranks, the model computes and trains on."""
    for results in run_ranks(4, _forward_that_raises):
        assert all(results) and len(results) > 4
