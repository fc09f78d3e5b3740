"""A program written for FSDP2 runs on mics with other import lines, and trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as of_torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mics
from mics.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_state_dict,
    register_fsdp_forward_method,
    set_state_dict,
)
from mics.fsdp.waiting import find_root
from tests import tiers
from tests.ranks import run_ranks

WORLD, WIDTH, WORDS, LENGTH, ROWS = 4, 16, 24, 6, 2
MESHES = {1: (4, 1), 2: (2, 2), 4: (4,)}
"""By partition size."""


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()


class Decoder(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(tokens)

    def score(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def reset_parameters(self) -> None:
        for layer in (self.words, self.places, *self.layers, self.norm, self.head):
            layer.reset_parameters()


def build(num_layers: int = 3) -> Decoder:
    torch.manual_seed(3)
    return Decoder(num_layers)


def batch_of(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def mesh_for(partition_size: int) -> Any:
    shape = MESHES[partition_size]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


@cache
def plain(
    accumulation: int, num_steps: int = 4, factor: float = WORLD, num_layers: int = 3
) -> tuple[list[float], list[float]]:
    """Losses and norms of one process over all ranks' batches."""
    model = build(num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(num_steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(WORLD):
                tokens = batch_of(step, micro, rank)
                loss = loss_of(model(tokens), tokens) / accumulation
                (loss / factor).backward()
                total += loss.item() / WORLD
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def shard_layers(model: Decoder, **settings: Any) -> Decoder:
    """What FSDP2 programs write."""
    for layer in model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation: int,
    steps: range,
    announces: str = "set_requires_gradient_sync",
    by_torch: bool = True,
) -> tuple[list[float], list[float]]:
    """Losses of all ranks and norms, with micro-steps announced by one of FSDP2's setters, or not.

    Clipped `by_torch`, which asks for the norm of each parameter, or by mics: that is several times faster.
    """
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for micro in range(accumulation):
            if announces:
                getattr(model, announces)(micro == accumulation - 1)
            tokens = batch_of(step, micro, dist.get_rank())
            loss = loss_of(model(tokens), tokens) / accumulation
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
        if by_torch:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            norm = mics.clip_grad_norm_(model, 0.5)
        norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def assert_like_one_process(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# -- the example's program ----------------------------------------------------------------------------


def look_ahead(model: Decoder, count: int) -> None:
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + count])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - count) : number][::-1])


class OfMics:
    """Whole state dicts by the functions of ``mics.fsdp``."""

    functions: Any = mics.fsdp
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        asked = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return (
            self.functions.get_model_state_dict(model, options=asked),
            self.functions.get_optimizer_state_dict(model, optimizer, options=asked),
        )

    def load_model(self, model: nn.Module, whole: Any) -> None:
        self.functions.set_model_state_dict(model, whole, options=self.sent)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, whole: Any) -> None:
        self.functions.set_optimizer_state_dict(model, optimizer, whole, options=self.sent)


class OfTorch(OfMics):
    """By those of torch, which a program has imported already."""

    functions = of_torch


class ByHand(OfMics):
    """From and into the DTensors of ``state_dict()``, tensor by tensor."""

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        found = optimizer.state_dict()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        state = {
            number: {
                key: value.full_tensor() if isinstance(value, DTensor) else value
                for key, value in entries.items()
            }
            for number, entries in found["state"].items()
        }
        first = dist.get_rank() == 0
        return (whole, {**found, "state": state}) if first else ({}, {})

    def load_model(self, model: nn.Module, whole: Any) -> None:
        current = model.state_dict()
        divided = {
            name: nn.Parameter(distribute_tensor(value, current[name].device_mesh, current[name].placements))
            for name, value in whole.items()
        }
        model.load_state_dict(divided, strict=False, assign=True)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, whole: Any) -> None:
        of_torch._init_optim_state(optimizer)
        current = optimizer.state_dict()["state"]
        state = {
            number: {
                key: distribute_tensor(value, now.device_mesh, now.placements)
                if isinstance(now := current[number][key], DTensor)
                else value
                for key, value in entries.items()
            }
            for number, entries in whole["state"].items()
        }
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def example(
    folder: str, partition_size: int, accumulation: int, states: type[OfMics]
) -> tuple[list[float], list[float]]:
    """Two lives of a program: from meta, prefetching by hand, clipped, saved; then loaded and trained on."""
    mesh = mesh_for(partition_size)
    losses, norms = [], []
    for life in range(2):
        with torch.device("meta"):
            model = Decoder()
        shard_layers(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        assert isinstance(model, FSDPModule) and isinstance(model.layers[1], FSDPModule)
        for param in model.parameters():
            assert param.placements == (Replicate(), Shard(0))[-mesh.ndim :] and param.device_mesh == mesh
            assert param.dtype is torch.float32
        look_ahead(model, 2)
        files = [Path(folder) / name for name in ("model.pt", "optimizer.pt")]
        if life == 0:
            model.to_empty(device="cpu")
            torch.manual_seed(3)
            model.reset_parameters()
        else:
            states().load_model(model, torch.load(files[0], mmap=True, weights_only=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if life == 1:
            saved = torch.load(files[1], mmap=True, weights_only=True)
            states().load_optimizer(model, optimizer, saved)
        model.unshard()
        found = train(model, optimizer, accumulation, range(2 * life, 2 * life + 2))
        losses += found[0]
        norms += found[1]
        for file, state in zip(files, states().take(model, optimizer), strict=True):
            assert bool(state) == (dist.get_rank() == 0)
            if state:
                torch.save(state, file)
        dist.barrier()
    return losses, norms


_CASES = [(2, 3, OfTorch), (4, 1, ByHand), (2, 3, OfMics)]
_REST = [case for case in product((1, 2, 4), (1, 3), (OfTorch,)) if case not in _CASES]
_REST += [(1, 1, ByHand), (2, 3, ByHand), (4, 1, OfMics)]


@pytest.mark.parametrize(
    ("partition_size", "accumulation", "states"),
    tiers.first([*_CASES, *_REST], 1, len(_CASES)),
)
def test_the_examples_program(
    partition_size: int, accumulation: int, states: type[OfMics], tmp_path: Path
) -> None:
    """Its calls run as they are, and losses and norms are those of one process."""
    for found in run_ranks(WORLD, example, str(tmp_path), partition_size, accumulation, states):
        assert_like_one_process(found, plain(accumulation))


# -- gradients ----------------------------------------------------------------------------------------


def train_with(partition_size: int, accumulation: int, announces: str, **settings: Any) -> Any:
    model = shard_layers(build(), mesh=mesh_for(partition_size), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(model, optimizer, accumulation, range(4), announces, by_torch=False)


_MORE = ("set_requires_all_reduce", "set_is_last_backward", "set_requires_gradient_sync")


@pytest.mark.parametrize("announces", ["", *(pytest.param(name, marks=pytest.mark.full) for name in _MORE)])
def test_micro_steps(announces: str) -> None:
    """Announced by any setter, or not at all."""
    for found in run_ranks(WORLD, train_with, 2, 3, announces):
        assert_like_one_process(found, plain(3))


def train_astray(partition_size: int) -> Any:
    """What setters say is wrong: never the last one, and each but the last one."""
    found = []
    for flags in ((False, False, False), (True, True, False)):
        model = shard_layers(build(), mesh=mesh_for(partition_size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        said = iter(flags * 4)
        setter = model.set_requires_gradient_sync
        model.__dict__["wrong"] = lambda _, setter=setter, said=said: setter(next(said))
        found.append(train(model, optimizer, 3, range(4), "wrong", by_torch=False))
    return found


@pytest.mark.parametrize("partition_size", tiers.first([2, 1, 4], 0, 1))
def test_gradients_are_right_whatever_is_said(partition_size: int) -> None:
    """A micro-step that nobody announced, or that was announced too early, costs time alone."""
    for found in run_ranks(WORLD, train_astray, partition_size):
        for each in found:
            assert_like_one_process(each, plain(3))


def hop_2_calls(says: bool) -> list[int]:
    """Collectives between replicas at the end of each backward of a step of three."""
    model = shard_layers(build(), mesh=mesh_for(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = []
    for micro in range(3):
        if says:
            model.set_requires_gradient_sync(micro == 2)
        tokens = batch_of(0, micro, dist.get_rank())
        loss_of(model(tokens), tokens).backward()
        found = mics.traffic(model).calls
        calls.append(sum(count for (axis, _), count in found.items() if axis == "replication"))
    optimizer.step()
    return calls


def test_the_last_micro_step_is_announced() -> None:
    """Hop 2 runs in the backward that ``set_requires_gradient_sync(True)`` came before, and in no other."""
    for announced, silent in zip(
        run_ranks(WORLD, hop_2_calls, True), run_ranks(WORLD, hop_2_calls, False), strict=True
    ):
        assert announced[0] == announced[1] < announced[2]
        assert silent[0] == silent[2]


def train_with_factor(factor: float) -> Any:
    model = shard_layers(build(), mesh=mesh_for(2))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 1, range(4))


@pytest.mark.full
def test_gradients_divided_by_another_number() -> None:
    for found in run_ranks(WORLD, train_with_factor, 1.5):
        assert_like_one_process(found, plain(1, factor=1.5))


# -- memory -------------------------------------------------------------------------------------------


def gathers_a_step(num_steps: int, first: bool | int, others: bool | int, changes_to: bool | None) -> Any:
    """Bytes gathered in each step, with ``reshard_after_forward`` for one layer and for all other modules."""
    model = build(num_layers=9)
    for number, layer in enumerate(model.layers):
        fully_shard(layer, reshard_after_forward=first if number == 4 else others)
    fully_shard(model, reshard_after_forward=others)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gathered: list[int] = []
    found: Any = ([], [])
    for step in range(num_steps):
        if step == 4 and changes_to is not None:
            model.set_reshard_after_forward(changes_to)
        before = mics.traffic(model).nbytes
        values = train(model, optimizer, 1, range(step, step + 1), by_torch=False)
        found[0].extend(values[0])
        found[1].extend(values[1])
        after = mics.traffic(model).nbytes
        gathered.append(after[_GATHERS] - before.get(_GATHERS, 0))
    return gathered, found


_GATHERS = "partition", "all_gather"


def test_units_stay_where_they_are_not_resharded() -> None:
    """``reshard_after_forward=False`` spares the gathers of backward, of these units; numbers stay."""
    gathered, found = run_ranks(WORLD, gathers_a_step, 7, True, True, False)[0]
    assert_like_one_process(found, plain(1, num_steps=7, num_layers=9))
    none, all_of_them = gathered[3], gathered[6]
    one = run_ranks(WORLD, gathers_a_step, 4, 1, WORLD, None)[0][0][3]  # 1 is False, all of them True
    block = sum(param.numel() for param in Block().parameters()) * 4 * (WORLD - 1) / WORLD
    assert none - one == pytest.approx(block, rel=0.05), (none, one, all_of_them)
    assert all_of_them < one


# -- formats ------------------------------------------------------------------------------------------

_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_HALF_INSIDE = replace(_HALF, output_dtype=torch.float32)


def train_half(by_mics: bool, partition_size: int) -> Any:
    model, call, mesh = build(), fully_shard if by_mics else fsdp2, mesh_for(partition_size)
    for layer in model.layers:
        call(layer, mesh=mesh, mp_policy=_HALF)
    call(model, mesh=mesh, mp_policy=_HALF_INSIDE)
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, range(3), "")
    kinds = []
    model.layers[1].register_forward_hook(lambda module, args, output: kinds.append(args[0].dtype))
    kinds.append(model(batch_of(0, 0, 0)).dtype)
    return found, kinds


def test_mixed_precision_is_that_of_fsdp2() -> None:
    """The same formats inside and outside, and losses as near as two orders of sums in bfloat16 are."""
    ours, theirs = run_ranks(WORLD, train_half, True, 2)[0], run_ranks(WORLD, train_half, False, 2)[0]
    assert ours[1] == theirs[1] == [torch.bfloat16, torch.float32]
    for found, expected in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


# -- state dicts --------------------------------------------------------------------------------------


def train_in_two_lives(folder: str, partition_sizes: tuple[int, int], by_functions: bool) -> Any:
    """The second life has another mesh, and loads what the first wrote with DCP."""
    found: Any = ([], [])
    for life, partition_size in enumerate(partition_sizes):
        model = shard_layers(build(), mesh=mesh_for(partition_size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if life:
            optimizer.param_groups[0]["lr"] = 0.5  # what is loaded counts
            with torch.no_grad():
                model.head.weight.zero_()
            states = get_state_dict(model, optimizer) if by_functions else (model.state_dict(), {})
            state = {"model": states[0], **({"optimizer": states[1]} if by_functions else {})}
            dcp.load(state, checkpoint_id=folder)
            if by_functions:
                set_state_dict(
                    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
            else:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(torch.load(f"{folder}/own_{dist.get_rank()}", weights_only=False))
        steps = range(2 * life, 2 * life + 2)
        for into, values in zip(found, train(model, optimizer, 1, steps), strict=True):
            into += values
        if not life:
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
            torch.save(optimizer.state_dict(), f"{folder}/own_{dist.get_rank()}")
    return found


@pytest.mark.parametrize(
    ("partition_sizes", "by_functions"),
    tiers.first([((2, 4), True), ((2, 2), False), ((4, 1), True)], 0, 2),
)
def test_dcp_takes_sharded_state_dicts(
    partition_sizes: tuple[int, int], by_functions: bool, tmp_path: Path
) -> None:
    """Of the functions on any mesh, and of model and optimizer themselves as FSDP2's are."""
    for found in run_ranks(WORLD, train_in_two_lives, str(tmp_path), partition_sizes, by_functions):
        assert_like_one_process(found, plain(1))


def write_to_copies(folder: str) -> list[str]:
    """State dicts are copies: what is written to them must be loaded, or the next use raises."""
    messages = []
    model = shard_layers(build(), mesh=mesh_for(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1, range(1))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    messages.append(error_of(lambda: model(batch_of(0, 0, 0))))
    state = get_model_state_dict(model)
    state["head.weight"].zero_()
    messages.append(error_of(lambda: model(batch_of(0, 0, 0))))
    next(iter(optimizer.state_dict()["state"].values()))["exp_avg"].zero_()
    messages.append(error_of(optimizer.step))
    state = model.state_dict()
    state["head.weight"].zero_()
    model.load_state_dict(state)
    clone = {name: value.clone() for name, value in model.state_dict().items()}
    clone["norm.bias"].add_(1)
    messages.append(error_of(lambda: model(batch_of(0, 0, 0))))
    assert not mics.full_state_dict(model, rank0_only=False)["head.weight"].any()
    train(model, optimizer, 1, range(1))
    return messages


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except mics.MicsError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_what_is_written_to_state_dicts_must_be_loaded(tmp_path: Path) -> None:
    """In FSDP2 they are the parameters' memory; nothing written here is lost without a word."""
    for messages in run_ranks(WORLD, write_to_copies, str(tmp_path)):
        expected = "model.load_state_dict(state)", "model.load_state_dict(state)", "optimizer.load_state_dict"
        for message, way_out in zip(messages, expected, strict=False):
            assert "written to" in message and way_out in message
        assert messages[3] == ""


# -- which module is the root -------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Holds a model, as trainers' modules do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def train_by(kind: str) -> Any:
    model = build()
    if kind == "nested":  # a module in a recorded module in a recorded module
        fully_shard(model.layers[0].qkv)
        fully_shard([model.layers[0], model.layers[1]])
        fully_shard([model.norm, model.head])
        fully_shard(model)
    elif kind == "alone":
        fully_shard(model)
    else:
        shard_layers(model)
    trained: nn.Module = model
    if kind == "wrapped":  # parameters are taken by the module around the root
        trained = Wrapper(model)
    if kind == "loaded":  # whole tensors are loaded before anything else
        saved = {name: value.clone() for name, value in build().state_dict().items()}
        model.load_state_dict(saved)
    if kind == "added":  # a module that came after the module around it was recorded
        model = build()
        fully_shard(model.layers[0])
        model.layers[0].up = model.layers[0].up.__class__(WIDTH, 2 * WIDTH)
        model.layers[0].up.load_state_dict(build().layers[0].up.state_dict())
        fully_shard(model.layers[0].up)
        trained = fully_shard(model)
    if kind == "initialised":  # by attribute, before and after
        with torch.no_grad():
            model.head.weight.copy_(2 * model.head.weight)
            values = list(model.parameters())
            values[0].mul_(1.0)
            model.head.weight.div_(2)
    if kind == "method":
        register_fsdp_forward_method(model, "score")
        assert len(list(model.parameters())) == len(list(build().parameters()))
        model.forward = None  # type: ignore[assignment]
        called = model.score
        trained = Wrapper(model)
        trained.forward = called  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    return train(trained, optimizer, 1, range(4), "")


@pytest.mark.parametrize(
    "kind", tiers.first(["nested", "wrapped", "method", "loaded", "added", "initialised", "alone"], 1, 4)
)
def test_the_outermost_module_is_the_root(kind: str) -> None:
    """However the modules were recorded, and whoever takes the parameters first."""
    for found in run_ranks(WORLD, train_by, kind):
        assert_like_one_process(found, plain(1))


# -- what is refused ----------------------------------------------------------------------------------


class TwoRoots(nn.Module):
    """No module around them is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.above = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.below(x))


def train_two_roots(ranks: list[int] | None) -> list[float]:
    """Norms of steps, on all ranks' batches or on this rank's. State dicts leave and come back between."""
    model = TwoRoots()
    if ranks is None:
        fully_shard(model.below)
        fully_shard(model.above)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, own = [], ranks or [dist.get_rank()]
    for step in range(4):
        for rank in own:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x).square().mean() / len(own)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if ranks is None and step == 1:
            asked = StateDictOptions(full_state_dict=True)
            states = of_torch.get_state_dict(model, optimizer, options=asked)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
                    optimizer.state[param].get("exp_avg", param).zero_()
            of_torch.set_state_dict(
                model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=asked
            )
    return norms


def test_several_roots() -> None:
    """One optimizer, one norm and one state dict over models that were sharded apart."""
    expected = train_two_roots(list(range(WORLD)))
    for found in run_ranks(WORLD, train_two_roots, None):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def train_tied(kind: str, ranks: list[int] | None) -> list[float]:
    """Norms of steps of a model whose modules share a parameter, with state dicts taken amid a step."""
    model = build()
    if kind == "head":
        model.head.weight = model.words.weight
    elif kind == "parameter":
        model.layers[2].up.weight = model.layers[0].up.weight
    else:
        model.layers[2].up = model.layers[0].up
    if ranks is None:
        shard_layers(model, mesh=mesh_for(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, own = [], ranks or [dist.get_rank()]
    for step in range(3):
        for rank in own:
            tokens = batch_of(step, 0, rank)
            (loss_of(model(tokens), tokens) / len(own)).backward()
        if ranks is None:
            whole = of_torch.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            assert whole.keys() == model.state_dict().keys() == model.state_dict(keep_vars=True).keys()
            assert torch.equal(whole["head.weight"], model.head.weight.full_tensor())
            assert len(optimizer.state_dict()["state"]) == (step > 0) * len(list(model.parameters()))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("kind", tiers.first(["head", "parameter", "module"], 0, 2))
def test_shared_parameters(kind: str) -> None:
    """Of modules in one unit or in several; state dicts amid a step change nothing."""
    expected = train_tied(kind, list(range(WORLD)))
    for found in run_ranks(WORLD, train_tied, kind, None):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_many_modules_are_recorded_in_linear_time() -> None:
    """Calls of fully_shard look at the modules they are given, not at all that were given before."""
    looked = 0

    class Leaf(nn.Linear):
        def modules(self) -> Any:
            nonlocal looked
            looked += 1
            return super().modules()

    blocks = [nn.Sequential(Leaf(1, 1), Leaf(1, 1)) for _ in range(60)]
    for block in blocks:
        fully_shard(block)
    model = fully_shard(nn.Sequential(*blocks))
    counted, looked = looked, 0
    assert find_root(blocks[3][0]) is model
    assert counted <= 20 * len(blocks) and looked <= 20 * len(blocks)


def refusals(model: Decoder) -> dict[str, Callable[[], Any]]:
    """By what the error must name."""
    return {
        "reshard_after_forward": lambda: fully_shard(model, reshard_after_forward=2),
        "offload_policy": lambda: fully_shard(model, offload_policy=CPUOffloadPolicy()),
        "ignored_params": lambda: fully_shard(model, ignored_params={model.head.weight}),
        "shard_placement_fn": lambda: fully_shard(model, shard_placement_fn=lambda param: None),
        "mesh": lambda: fully_shard(model, mesh=mesh_for(2)["shards"]),
        "which is never called": lambda: fully_shard(model.layers),
        "Decoder again": lambda: fully_shard(fully_shard(model)),
        "bottom-up": lambda: (fully_shard(model), fully_shard(model.layers[0])),
        "mp_policy": lambda: (fully_shard(model.layers[0], mp_policy=_HALF), fully_shard(model)),
        "the same for": lambda: (fully_shard(model.layers[0], mesh=mesh_for(4)), fully_shard(model)),
        "'layers.0' in use": lambda: (
            list(fully_shard(model.layers[0]).parameters()),
            fully_shard(model),
        ),
        "'layers.0' in use: its": lambda: (
            [fully_shard(layer) for layer in model.layers],
            model(batch_of(0, 0, 0)),
            fully_shard(model),
        ),
        "before mics.shard()": lambda: train(
            model, (torch.optim.SGD(model.parameters()), shard_layers(model))[0], 1, range(1), ""
        ),
        "which share it": lambda: use_first(fully_shard(Wrapper(model)), fully_shard(Wrapper(model))),
        "for FSDP": lambda: FullyShardedDataParallel((list(shard_layers(model).parameters()), model)[1]),
        "for fully_shard": lambda: fsdp2((list(shard_layers(model).parameters()), model)[1]),
        "DTensor; shard the plain": lambda: (fsdp2(model.layers[0]), list(fully_shard(model).parameters())),
        "mics.full_state_dict(model) and": lambda: of_torch.get_model_state_dict(
            mics.shard(model, partition_size=2)
        ),
        "dp_mesh_dims": lambda: fully_shard(model, dp_mesh_dims=("a", "b")),
        "expected True, False, None, 1 or 4": lambda: fully_shard(model, reshard_after_forward=3),
        "the first use of it": lambda: shard_layers(model).layers[0](torch.zeros(1, 2, WIDTH)),
        "set_custom_all_gather": lambda: fully_shard(model).set_custom_all_gather(None),
        "set_requires_gradient_sync": lambda: fully_shard(model).set_requires_gradient_sync(1),
        "set_gradient_divide_factor": lambda: fully_shard(model).set_gradient_divide_factor(0),
        "set_modules_to_forward_prefetch": lambda: fully_shard(model).set_modules_to_forward_prefetch(
            [model.head]
        ),
        "method_name": lambda: register_fsdp_forward_method(fully_shard(model), "encode"),
        "cast_forward_inputs": lambda: list(
            fully_shard(
                model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
            ).parameters()
        ),
        "a module inside it": lambda: get_model_state_dict(
            (list(shard_layers(model).parameters()), model.layers[0])[1]
        ),
        "flatten_optimizer_state_dict": lambda: get_model_state_dict(
            fully_shard(model), options=StateDictOptions(flatten_optimizer_state_dict=True)
        ),
    }


def use_first(*models: nn.Module) -> None:
    """While the others are there."""
    list(models[0].parameters())


def refused() -> list[str]:
    """What was raised, case by case, on models of their own."""
    messages = []
    for case in refusals(build()):
        try:
            refusals(build())[case]()
        except mics.SettingsError as error:
            messages.append(str(error))
        else:
            messages.append(f"{case}: nothing was raised")
    return messages


def test_what_mics_does_not_have_is_refused_by_name() -> None:
    """On all ranks, at the call that asks for it."""
    for messages in run_ranks(WORLD, refused):
        for case, message in zip(refusals(build()), messages, strict=True):
            assert case in message and "nothing was raised" not in message, message
