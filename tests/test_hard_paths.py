"""Paths that once went wrong: odd meshes, leaf inputs, assigned gradients, failed backwards, tied holders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

import mics
from mics.errors import SettingsError
from tests import tiers, toys
from tests.ranks import run_expecting_error, run_ranks

WORLD_SIZE = 4
WIDTH = 6


class Block(nn.Module):
    """A residual block with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x)) * self.gain


class Chain(nn.Module):
    """A layer, three blocks, a layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).pow(2).mean()


def _chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


Update = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def _plain_update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _largest_difference(update: Update, *, leaf_inputs: bool = False, **settings: Any) -> float:
    """Between parameters after four steps sharded over the ranks and in this process alone."""
    rank = dist.get_rank()
    sharded, plain = mics.shard(_chain(), **settings), _chain()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, plain)]
    for step in range(4):
        mine = _batch(step, rank).requires_grad_(leaf_inputs)
        everyone = torch.cat([_batch(step, r) for r in range(WORLD_SIZE)])
        for model, optimizer, batch in zip((sharded, plain), optimizers, (mine, everyone), strict=True):
            model(batch).backward()
            update(model, optimizer, step)
    whole = mics.full_state_dict(sharded, rank0_only=False)
    return max((whole[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def _on_mesh(rows: list[list[int]]) -> float:
    return _largest_difference(_plain_update, mesh=DeviceMesh("cpu", torch.tensor(rows)))


@pytest.mark.parametrize(
    "rows",
    tiers.first(
        [[[3, 1], [2, 0]], [[1], [0], [3], [2]], [[2, 3], [0, 1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]], 2
    ),
)
def test_meshes_in_any_order(rows: list[list[int]]) -> None:
    """Rows and columns of a mesh may list ranks in any order."""
    assert max(run_ranks(WORLD_SIZE, _on_mesh, rows)) < 1e-6


def _on_interleaved_nodes() -> float:
    os.environ["GROUP_RANK"] = str([0, 1, 1, 0][dist.get_rank()])
    return _largest_difference(_plain_update, partition_size=4)


def test_nodes_whose_ranks_interleave() -> None:
    """Ranks 0 and 3 on one node, 1 and 2 on the other: one stage, right values."""
    assert max(run_ranks(WORLD_SIZE, _on_interleaved_nodes)) < 1e-6


def _evaluate_then_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    _plain_update(model, optimizer, step)


def _clamp_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clamp(-0.01, 0.01)
    _plain_update(model, optimizer, step)


def _scale_and_accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5
    if step % 2:
        _plain_update(model, optimizer, step)


@pytest.mark.parametrize("update", [_evaluate_then_step, _clamp_gradients, _scale_and_accumulate])
@pytest.mark.parametrize("leaf_inputs", tiers.first([True, False]))
def test_odd_loops_equal_plain_training(update: Update, leaf_inputs: bool) -> None:
    """Evaluation between backward and step, gradients that the user puts in place of ours, leaf inputs."""
    kwargs = {"leaf_inputs": leaf_inputs, "partition_size": 2}
    assert max(run_ranks(WORLD_SIZE, _largest_difference, update, kwargs=kwargs)) < 1e-6


def _second_backward_after_a_failed_one() -> float:
    model = mics.shard(_chain(), partition_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(_batch(0, dist.get_rank()))

    def fail(*_: object) -> None:
        raise ValueError("of the user")

    handle = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        model(_batch(1, dist.get_rank())).backward()
    handle.remove()
    optimizer.zero_grad()
    loss.backward()
    found = mics.full_gradients(model, rank0_only=False)
    plain = _chain()
    plain(torch.cat([_batch(0, r) for r in range(WORLD_SIZE)])).backward()
    return max((found[name] - p.grad).abs().max().item() for name, p in plain.named_parameters())


def test_a_failed_backward_does_not_spoil_the_next() -> None:
    """A backward that raised half-way is forgotten; the graph of another forward still works."""
    assert max(run_ranks(WORLD_SIZE, _second_backward_after_a_failed_one)) < 1e-6


class Tied(nn.Module):
    """An embedding tied to the head, used by a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))


def _edit_after_a_failed_backward() -> tuple[bool, float]:
    model = mics.shard(Tied(), partition_size=2)
    tokens = torch.arange(9)

    def fail(*_: object) -> None:
        raise ValueError("of the user")

    handle = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        model(tokens).sum().backward()
    handle.remove()
    for param in model.parameters():
        param.data.fill_(0.5)
    whole = all((value == 0.5).all() for _, value in mics.iter_full_params(model))
    plain = Tied()
    for param in plain.parameters():
        param.data.fill_(0.5)
    return bool(whole), (model(tokens) - plain(tokens)).abs().max().item()


def test_an_edit_after_a_failed_backward_counts() -> None:
    """The failure is over with the exception: also the weights of the model itself are shards again."""
    for whole, difference in run_ranks(WORLD_SIZE, _edit_after_a_failed_backward):
        assert whole and difference < 1e-5


def _encode() -> float:
    torch.manual_seed(0)
    plain = Tied()
    torch.manual_seed(0)
    sharded = mics.shard(Tied(), partition_size=2)
    tokens = torch.arange(9)
    outputs = [model.encode(tokens) for model in (sharded, plain)]
    for output in outputs:
        output.pow(2).sum().backward()
    grads = mics.full_gradients(sharded, rank0_only=False)
    differences = [(grads[name] - p.grad).abs().max().item() for name, p in plain.named_parameters()]
    return max((outputs[0] - outputs[1]).abs().max().item(), *differences)


def test_tied_weights_outside_forward() -> None:
    """A method that calls the holder of a tied weight, without the module that owns it."""
    assert max(run_ranks(WORLD_SIZE, _encode)) < 1e-6


def _step_between() -> None:
    model = mics.shard(_chain(), partition_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    early = model(_batch(0, dist.get_rank()))
    model(_batch(1, dist.get_rank())).backward()
    optimizer.step()
    early.backward()


def test_a_step_between_forward_and_backward_is_refused() -> None:
    """Plain torch says that a saved tensor was modified; so do we."""
    for error in run_expecting_error(WORLD_SIZE, _step_between):
        assert "changed by an optimizer step" in error.message


def _batch_norm_in_bf16() -> list[str]:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    model = mics.shard(nn.Sequential(*layers), precision=mics.Precision(param_dtype=torch.bfloat16))
    model(_batch(0, dist.get_rank())).float().pow(2).mean().backward()
    assert mics.clip_grad_norm_(model, 1.0).isfinite()
    return [str(value.dtype) for value in mics.full_state_dict(model, rank0_only=False).values()]


def test_batch_norm_with_bf16_parameters() -> None:
    """Norms keep the format of their running statistics and train beside bf16 layers."""
    assert "torch.float32" in run_ranks(2, _batch_norm_in_bf16)[0]


@pytest.mark.parametrize("family", ["GPT2LMHead", "T5ForConditionalGeneration"])
def test_meta_initialisation_of_hugging_face_models(family: str) -> None:
    """Initialisers that a parent or the whole model runs for its children also run on meta."""
    transformers = pytest.importorskip("transformers")
    if family == "T5ForConditionalGeneration":
        config = transformers.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100
        )
        build = transformers.T5ForConditionalGeneration
    else:
        config = transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        build = transformers.GPT2LMHeadModel
    plain = build(config)
    with torch.device("meta"):
        model = build(config)
    if family == "GPT2LMHead" and int(transformers.__version__.split(".")[0]) < 5:
        # There its constructor alone fills the causal mask.
        with pytest.raises(
            SettingsError, match="an initialiser for every buffer, found none that writes bias"
        ):
            mics.shard(model)
        return
    whole = mics.full_state_dict(mics.shard(model))
    for name, value in plain.state_dict().items():
        if value.numel() > 1000:
            assert whole[name].std().item() == pytest.approx(value.std().item(), rel=0.2), name


class _Scaled(nn.Module):
    """Its initialiser writes through ``.data``, as many do, and forgets one if told to."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.forgets = forgets

    def reset_parameters(self) -> None:
        self.scale.data.fill_(2.0)
        if not self.forgets:
            self.shift.data.zero_()


def test_initialisers_that_write_through_data() -> None:
    """On meta they count as initialisers, and a parameter that nobody writes is still named."""
    with torch.device("meta"):
        complete, lacking = _Scaled(forgets=False), _Scaled(forgets=True)
    assert mics.full_state_dict(mics.shard(complete))["scale"].tolist() == [2.0] * WIDTH
    with pytest.raises(SettingsError, match="found none that writes shift;"):
        mics.shard(lacking)


def _interrupted(never: bool = False) -> list[float]:
    """Ctrl-C inside a block, then training goes on, as in a notebook. Buffers stay those of rank 0."""
    torch.manual_seed(0)
    model = toys.Chain()
    model.register_buffer("steps", torch.zeros(()))
    mics.shard(model, partition_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    for step in range(4):
        if step == 2 and not never:
            block = next(module for module in model.modules() if isinstance(module, nn.Linear))
            hook = block.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(*toys.floats(step, 0, dist.get_rank()))
            hook.remove()
        model.steps.fill_(step + dist.get_rank())
        loss = model(*toys.floats(step, 0, dist.get_rank()))
        assert model.steps.item() == step, "buffers were not brought to all ranks"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_on_after_an_interrupt() -> None:
    """No hook of torch tells that a forward ended by KeyboardInterrupt."""
    assert run_ranks(4, _interrupted) == run_ranks(4, _interrupted, True)


class Probing(Chain):
    """Asks for a gradient inside its forward, which fails, and goes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        probe = x * 1.0
        probe.register_hook(_refuse)
        with contextlib.suppress(ArithmeticError):
            torch.autograd.grad(self.blocks[1](probe).sum(), x)
        return self.last(self.blocks[2](self.blocks[1](x))).pow(2).mean()


def _refuse(grad: torch.Tensor) -> None:
    raise ArithmeticError("a gradient that is not wanted")


def _losses_of_probing(sharded: bool) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Probing()
    if sharded:
        mics.shard(model, partition_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        loss = model(_batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_backward_that_fails_inside_a_forward() -> None:
    plain = run_ranks(1, _losses_of_probing, False)[0]
    for losses in run_ranks(WORLD_SIZE, _losses_of_probing, True, ranks_per_node=2):
        assert losses == pytest.approx(plain, rel=1e-5)
