"""Whole tensors out of and into a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests import pairwise, toys
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import adamw


def _sharded(partition_size: int = 2, seed: int = 0, **options: Any) -> nn.Module:
    import mics

    torch.manual_seed(seed)
    return mics.shard(toys.Language(), partition_size=partition_size, **options)


def _plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return toys.Language()


def _loss(model: nn.Module, step: int = 0) -> float:
    with torch.no_grad():
        return model(*toys.language_batch(step, 0, 0)).item()


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def _names() -> dict[str, Any]:
    model = _sharded()
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "with tied": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "state": list(model.state_dict()),
        "trainable": [p.requires_grad for p in model.parameters()],
        "types": all(isinstance(p, nn.Parameter) for p in model.parameters()),
        "dtypes": {str(p.dtype) for p in model.parameters()},
        "text": str(model),
    }


def test_names_and_modules_do_not_change() -> None:
    """Parameters, modules, state-dict keys and the printed model are those of the plain model."""
    model = _plain()
    for found in run_ranks(4, _names):
        assert found["parameters"] == [name for name, _ in model.named_parameters()]
        duplicates = model.named_parameters(remove_duplicate=False)
        assert found["with tied"] == [name for name, _ in duplicates]
        assert found["modules"] == [(n, type(m).__name__) for n, m in model.named_modules()]
        assert found["state"] == list(model.state_dict())
        assert found["trainable"] == [p.requires_grad for p in model.parameters()]
        assert found["types"] and found["dtypes"] == {"torch.float32"}
        assert found["text"] == str(model)


def _num_elements(partition_size: int, optimizer_sharding: str) -> dict[str, int]:
    model = _sharded(partition_size, optimizer_sharding=optimizer_sharding)
    return {name: p.shape.numel() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer_sharding", ["world", "partition"])
@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_every_element_is_on_the_ranks_it_should_be_on(partition_size: int, optimizer_sharding: str) -> None:
    """Elements are shown on one rank (or on one per replica)."""
    ranks = run_ranks(4, _num_elements, partition_size, optimizer_sharding)
    for name, parameter in _plain().named_parameters():
        copies = 1 if optimizer_sharding == "world" else 4 // partition_size
        assert sum(numel[name] for numel in ranks) == copies * parameter.numel(), name


# ---------------------------------------------------------------------------------------------
# Out
# ---------------------------------------------------------------------------------------------


def _full_states(partition_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import mics

    model = _sharded(partition_size)
    return mics.full_state_dict(model), mics.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_full_state_dict_is_the_plain_models(partition_size: int) -> None:
    """Rank 0 gets every tensor of the model it was built from; the others only when they ask."""
    expected = _plain().state_dict()
    for rank, (first, everywhere) in enumerate(run_ranks(4, _full_states, partition_size, ranks_per_node=2)):
        assert _equal(first, expected) if rank == 0 else first == {}
        assert _equal(everywhere, expected)


class _Fused(nn.Module):
    """Computes with one matrix and saves it as three, as fused projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5))
        self.register_buffer("scale", torch.ones(1))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T).sum() * self.scale

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, part in zip("qkv", state.pop(prefix + "weight").reshape(3, 4, 5), strict=True):
            state[prefix + name] = part.contiguous()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "q" in state:
            state[prefix + "weight"] = torch.cat([state.pop(prefix + name) for name in "qkv"])


def _save_fused(folder: str) -> tuple[bool, bool, bool]:
    import mics

    torch.manual_seed(0)
    plain = nn.Sequential(checkpoint_wrapper(_Fused()), _Fused())
    plain[0].scale.fill_(3)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = mics.shard(plain, partition_size=2)
    is_plain = _equal(mics.full_state_dict(model, rank0_only=False), expected)
    mics.save(folder, model)
    model = mics.shard(nn.Sequential(_Fused(), _Fused()), partition_size=4)
    mics.load(folder, model)
    is_loaded = _equal(mics.full_state_dict(model, rank0_only=False), expected)
    doubled = {name: 2 * value for name, value in expected.items()}
    model.load_state_dict(doubled)
    return is_plain, is_loaded, _equal(mics.full_state_dict(model, rank0_only=False), doubled)


def test_hooks_may_split_parameters(tmp_path: Path) -> None:
    """They see whole ones: state dicts have the plain model's names and values, and checkpoints work.

    torch's wrapper for activation checkpointing, which has such hooks too, is in no name.
    """
    assert run_ranks(4, _save_fused, str(tmp_path)) == [(True, True, True)] * 4


def _edits_reach_the_model() -> bool:
    import mics

    model = _sharded()
    full = mics.full_state_dict(model, rank0_only=False)
    before = {name: value.clone() for name, value in full.items()}
    for value in full.values():
        value.zero_()
    return _equal(mics.full_state_dict(model, rank0_only=False), before)


def test_a_full_state_dict_is_a_copy() -> None:
    """Writing to it, also in a world of one where nothing needs gathering, changes no parameter."""
    assert all(run_ranks(2, _edits_reach_the_model))


def _in_evaluation() -> bool:
    import mics

    model = _sharded(partition_size=1)
    optimizer = adamw(model)
    model(*toys.language_batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = mics.full_state_dict(model, rank0_only=False)
    moments = mics.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    with torch.inference_mode():
        found = mics.full_state_dict(model, rank0_only=False)
        again = mics.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        with mics.summon_full_params(model):
            whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    model(*toys.language_batch(1, 0, 0)).backward()  # goes on
    assert all(torch.equal(again[name]["exp_avg"], entry["exp_avg"]) for name, entry in moments.items())
    return _equal(found, expected) and all(torch.equal(whole[name], expected[name]) for name in whole)


def test_full_state_dict_in_inference_mode() -> None:
    assert run_ranks(2, _in_evaluation) == [True, True]


def _alone() -> bool:
    import mics

    model = _sharded(1)
    full = mics.full_state_dict(model)
    before = {name: value.clone() for name, value in full.items()}
    for value in full.values():
        value.zero_()
    return _equal(mics.full_state_dict(model), before)


def test_a_full_state_dict_of_one_process_is_a_copy() -> None:
    """In a world of one the shard is the whole; the state dict still must not share its memory."""
    assert run_ranks(1, _alone) == [True]
    assert run_ranks(1, _alone, launch="none") == [True]


def _bf16_state() -> dict[str, torch.Tensor]:
    import mics

    return mics.full_state_dict(_sharded(2, precision=mics.Precision(param_dtype=torch.bfloat16)))


def test_full_state_dict_holds_the_masters() -> None:
    """With bf16 parameters the trained tensors come out in fp32, unrounded."""
    full = run_ranks(4, _bf16_state)[0]
    for name, parameter in _plain().named_parameters():
        if parameter.requires_grad:
            assert torch.equal(full[name], parameter.detach()), name


# ---------------------------------------------------------------------------------------------
# In
# ---------------------------------------------------------------------------------------------


def _load(how: str, optimizer_sharding: str, bf16: bool) -> tuple[dict[str, Any], float, float]:
    import mics

    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else None)
    model = _sharded(2, seed=1, optimizer_sharding=optimizer_sharding, precision=precision)
    _loss(model)  # the old values have been gathered once: the new ones must not be confused with them
    source = _plain().state_dict()
    if how == "load_state_dict":
        result = model.load_state_dict(source)
        assert not result.missing_keys and not result.unexpected_keys
    elif how == "everybody":
        mics.load_full_state_dict(model, source)
    else:
        mics.load_full_state_dict(model, source if dist.get_rank() == 0 else None)
    loss = _loss(model)
    return mics.full_state_dict(model, rank0_only=False), loss, loss


@pairwise.parametrize(
    strength=1,
    how=["load_state_dict", "everybody", "rank 0"],
    optimizer_sharding=["world", "partition"],
    bf16=[False, True],
)
def test_a_full_state_dict_loads(how: str, optimizer_sharding: str, bf16: bool) -> None:
    """Loaded three ways: the model then holds the values and computes with them on every rank."""
    expected = _plain()
    loss = _loss(expected)
    for full, found, _ in run_ranks(4, _load, how, optimizer_sharding, bf16, ranks_per_node=2):
        assert list(full) == list(expected.state_dict())
        for name, parameter in expected.named_parameters():
            if parameter.requires_grad or not bf16:
                assert torch.equal(full[name], parameter.detach()), name
        assert found == pytest.approx(loss, rel=2e-2 if bf16 else 1e-6)


def _roundtrip() -> tuple[bool, bool]:
    """Train, save, train on; load into a fresh model and train on from there: the same end."""
    import mics

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(*toys.language_batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = _sharded(2)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    whole, local = mics.full_state_dict(model, rank0_only=False), model.state_dict()
    local = {name: value.clone() for name, value in local.items()}
    state = optimizer.state_dict()
    import copy

    state = copy.deepcopy(state)
    train(model, optimizer, range(2, 4))
    expected = mics.full_state_dict(model, rank0_only=False)
    ends = []
    for saved in (whole, local):
        fresh = _sharded(2, seed=5)
        again = adamw(fresh)
        fresh.load_state_dict(saved)
        again.load_state_dict(copy.deepcopy(state))
        train(fresh, again, range(2, 4))
        ends.append(_equal(mics.full_state_dict(fresh, rank0_only=False), expected))
    return ends[0], ends[1]


def test_training_goes_on_from_a_saved_state() -> None:
    """From whole tensors and from a rank's own shards, with the optimizer's own state dict."""
    assert all(run_ranks(4, _roundtrip, ranks_per_node=2))


def _load_wrong(what: str) -> None:
    model = _sharded()
    source = _plain().state_dict()
    if what == "missing":
        del source["norm.weight"]
    elif what == "unexpected":
        source["other"] = torch.zeros(1)
    else:
        source["norm.weight"] = torch.zeros(5)
    model.load_state_dict(source)


@pytest.mark.parametrize(
    ("what", "message"),
    [("missing", "norm.weight"), ("unexpected", "other"), ("shape", "norm.weight")],
)
def test_a_wrong_state_dict_is_refused(what: str, message: str) -> None:
    """Missing and unexpected keys and wrong shapes raise, naming the key, on every rank."""
    for error in run_expecting_error(2, _load_wrong, what):
        assert message in error.message
        assert error.is_a("RuntimeError") or error.is_a("ValueError")


def _load_lenient() -> list[list[str]]:
    source = _plain().state_dict()
    del source["norm.weight"]
    source["other"] = torch.zeros(1)
    result = _sharded().load_state_dict(source, strict=False)
    return [list(result.missing_keys), list(result.unexpected_keys)]


def test_loading_without_strictness_reports_keys() -> None:
    """`strict=False` loads what there is and names the rest."""
    assert run_ranks(2, _load_lenient) == [[["norm.weight"], ["other"]]] * 2


def _edit_in_place(together: bool) -> tuple[float, float]:
    """Halve the shards in place, as an exponential average or an initialiser would."""
    model = _sharded(2)
    _loss(model)
    with torch.no_grad():
        if together:
            torch._foreach_mul_(list(model.parameters()), 0.5)
        else:
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return _loss(model), _loss(model)


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.full)])
def test_in_place_edits_of_shards_are_seen(together: bool) -> None:
    """What is written to `model.parameters()` without gradients is what the next forward uses."""
    model = _plain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    expected = _loss(model)
    assert all(pair == (expected, expected) for pair in run_ranks(4, _edit_in_place, together))


# ---------------------------------------------------------------------------------------------
# Summon
# ---------------------------------------------------------------------------------------------


def _summon() -> dict[str, Any]:
    import mics

    model = _sharded(2)
    seen: dict[str, Any] = {}
    shapes = [tuple(p.shape) for p in model.parameters()]
    with mics.summon_full_params(model):
        seen["values"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen["tied"] = model.head.weight is model.embedding.weight
        seen["loss"] = _loss(model)
        with torch.no_grad():
            model.norm.weight.fill_(3.0)
    seen["back"] = [tuple(p.shape) for p in model.parameters()] == shapes
    seen["kept"] = mics.full_state_dict(model, rank0_only=False)["norm.weight"]
    with mics.summon_full_params(model, write=True), torch.no_grad():
        model.norm.weight.fill_(3.0)
        model.embedding.weight[2].add_(1.0)
        model.blocks[1].up.bias.zero_()
    seen["written"] = mics.full_state_dict(model, rank0_only=False)
    seen["loss after"] = _loss(model)
    optimizer = adamw(model)
    model(*toys.language_batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    seen["trained"] = mics.full_state_dict(model, rank0_only=False)["norm.weight"]
    return seen


def test_summon_reads_and_writes_back() -> None:
    """Full parameters inside the context; edits are dropped, or kept and trained on with `write`."""
    plain = _plain()
    changed = _plain()
    with torch.no_grad():
        changed.norm.weight.fill_(3.0)
        changed.embedding.weight[2].add_(1.0)
        changed.blocks[1].up.bias.zero_()
    for seen in run_ranks(4, _summon, ranks_per_node=2):
        assert _equal(seen["values"], dict(plain.named_parameters()))
        assert seen["tied"] and seen["back"]
        assert seen["loss"] == _loss(plain)
        assert torch.equal(seen["kept"], torch.ones(toys.DIM))
        assert _equal(seen["written"], changed.state_dict())
        assert seen["loss after"] == _loss(changed)
        assert 2.9 < seen["trained"].mean().item() < 3.1
        assert not torch.equal(seen["trained"], seen["written"]["norm.weight"])


def _summon_and_raise() -> float:
    import mics

    model = _sharded(2)
    try:
        with mics.summon_full_params(model):
            raise KeyError("inside")
    except KeyError:
        pass
    return _loss(model)


def test_an_exception_inside_summon_leaves_the_model_usable() -> None:
    """The context ends as any other: the model is sharded again and computes the same."""
    assert run_ranks(2, _summon_and_raise) == [_loss(_plain())] * 2


def _train_inside_summon() -> None:
    import mics

    model = _sharded(2)
    with mics.summon_full_params(model):
        model(*toys.language_batch(0, 0, 0)).backward()


def test_training_inside_summon_is_refused() -> None:
    """Gradients of summoned parameters would be lost, so the forward says so."""
    for error in run_expecting_error(2, _train_inside_summon):
        assert "summon" in error.message


# ---------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------


def _gradients(everybody: bool) -> dict[str, Any]:
    import mics

    model = _sharded(2)
    model(*toys.language_batch(1, 0, dist.get_rank())).backward()
    full = mics.full_gradients(model, rank0_only=not everybody)
    model.zero_grad()
    cleared = mics.full_gradients(model, rank0_only=not everybody)
    return {"full": full, "cleared": cleared}


def test_full_gradients() -> None:
    """The mean over ranks of every parameter's gradient, None for frozen ones and after zero_grad."""
    model = _plain()
    for rank in range(4):
        (model(*toys.language_batch(1, 0, rank)) / 4).backward()
    answers = run_ranks(4, _gradients, False)
    assert all(answer["full"] == {} for answer in answers[1:])
    answers[1:] = run_ranks(4, _gradients, True)[1:]
    for answer in answers:
        for name, parameter in model.named_parameters():
            found = answer["full"].get(name)
            assert (found is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6)
        assert all(value is None for value in answer["cleared"].values())
