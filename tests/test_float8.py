"""Weights of torchao's Float8Linear that are gathered in 8 bits: one process's losses in fewer bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.layout.order import Prefetch
from tests import tiers, toys
from tests.compare import train_all
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import EXACT, Recipe, Sharding, differences, merge, train_ordered

pytest.importorskip("torchao")

_DIM, _HIDDEN, _BLOCKS = 24, 40, 3
_NUM_WEIGHTS, _NUMEL = 2 * _BLOCKS, 2 * _BLOCKS * _DIM * _HIDDEN


class Block(nn.Module):
    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_DIM), nn.Linear(_DIM, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _DIM, bias=False)
        self.size = size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The largest element of a weight is in one place, so on one rank."""
        with torch.no_grad():
            self.up.weight.view(-1)[int(self.size) * 7] = self.size

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for size in (1.0, 3.0, 0.5))
        self.head = nn.Linear(_DIM, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x).to(target), target)  # torch 2.11: of one dtype


def build(
    gathers: bool, *, emulate: bool = True, model: nn.Module | None = None, **options: Any
) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=emulate, **options)
    return convert_to_float8_training(
        Model() if model is None else model,
        module_filter_fn=lambda module, name: not name.endswith("head"),
        config=config,
    )


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = toys.seeded(step, micro, rank)
    return torch.randn(4, _DIM, generator=generator), torch.randn(4, 5, generator=generator)


_SHARDINGS = [
    Sharding(partition_size=2, options={"audit_interval": 1}),
    Sharding(partition_size=4, announced=False),
    Sharding(partition_size=1, options={"audit_interval": 1}),
    Sharding(partition_size=2, optimizer_sharding="partition", options={"audit_interval": 1}),
    Sharding(partition_size=4, options={"low_memory": True}),
    Sharding(partition_size=2, announced=False, options={"prefetch": Prefetch(units=2, stay_nbytes=1 << 30)}),
    Sharding(partition_size=4, options={"activations": mics.Activations(checkpoint="unit")}),
    Sharding(
        partition_size=2,
        options={"activations": mics.Activations(checkpoint="none", offload=True)},
    ),
    Sharding(partition_size=2, options={"prefetch": 0}),
]


@pytest.mark.parametrize(
    ("accumulation", "options", "shardings"),
    [
        (2, {}, _SHARDINGS[:3]),
        pytest.param(2, {}, _SHARDINGS[3:], marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param(1, {"round_scales_to_power_of_2": True}, _SHARDINGS[:3], marks=pytest.mark.full),
    ],
    ids=["some", "others", "powers of 2"],
)
def test_trains_as_in_one_process(
    accumulation: int, options: dict[str, bool], shardings: list[Sharding]
) -> None:
    """Losses, parameters and optimizer state of torchao's model that casts whole weights, to the bit."""
    recipe = Recipe(
        build=partial(build, True, **options),
        batch=batch,
        num_steps=6,
        accumulation=accumulation,
        max_norm=1.0,
    )
    ranks = run_ranks(4, train_all, recipe, shardings, ranks_per_node=2)
    for sharding, of_sharding in zip(shardings, zip(*ranks, strict=True), strict=True):
        found = merge(of_sharding)
        expected = train_ordered(
            Recipe(
                build=partial(build, False, **options),
                batch=batch,
                num_steps=6,
                accumulation=accumulation,
                max_norm=1.0,
            ),
            world_size=4,
            partition_size=sharding.partition_size,
            ranks_per_node=2,
            norms=found.norms,
        )
        problems = differences(found, expected, EXACT)
        assert not problems, f"{sharding}:\n" + "\n".join(problems)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Of one batch on all ranks: any number of them does the same."""
    losses = []
    for step in range(first, last):
        loss = model(*batch(step, 0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(gathers: bool = True, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = mics.shard(build(gathers), **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _count(gathers: bool, **settings: Any) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Calls and bytes of two steps once all is settled."""
    model, optimizer = _sharded(gathers, compression=None, audit_interval=0, **settings)
    _steps(model, optimizer, 0, 3)
    before = mics.traffic(model)
    _steps(model, optimizer, 3, 5)
    after = mics.traffic(model)
    for term in mics.memory_report(model, show=False).terms:
        if term.name in ("parameters", "gradients", "masters", "optimizer state"):
            assert term.measured == pytest.approx(term.predicted, rel=0.05), term
    return (
        {key: calls - before.calls[key] for key, calls in after.calls.items()},
        {key: nbytes - before.nbytes[key] for key, nbytes in after.nbytes.items()},
    )


@pytest.mark.parametrize("partition_size", [2, pytest.param(1, marks=pytest.mark.full)])
def test_one_byte_an_element_and_one_reduction_a_step(partition_size: int) -> None:
    """In gathers and in refreshes; gradients are as they were."""
    settings = {"partition_size": partition_size, "prefetch": 0}
    plain = run_ranks(4, _count, False, kwargs=settings, ranks_per_node=2)
    found = run_ranks(4, _count, True, kwargs=settings, ranks_per_node=2)
    replicas = 4 // partition_size
    for (calls, nbytes), (calls_before, nbytes_before) in zip(found, plain, strict=True):
        saved = {key: nbytes_before[key] - nbytes[key] for key in nbytes_before}
        narrower = 3 * _NUMEL // partition_size  # of a rank's chunks, in float8 in place of float32
        refreshed = 2 * narrower // replicas * (replicas - 1)
        assert saved["replication", "all_gather"] == refreshed
        assert saved["world", "all_reduce"] == -2 * 2 * 3 * 4 * _NUM_WEIGHTS // 4
        assert calls["world", "all_reduce"] - calls_before["world", "all_reduce"] == 2
        if partition_size > 1:
            num_gathers = saved["partition", "all_gather"] / (narrower * (partition_size - 1))
            assert num_gathers == int(num_gathers) >= 2
        others = [key for key in saved if key[1] == "reduce_scatter"]
        assert others and all(saved[key] == 0 for key in others)


def _weights_are_as_torchao_casts_them(dtype: torch.dtype) -> None:
    """While a unit is gathered: bits and scales of masters, and results in the dtype that was asked for."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    model, optimizer = _sharded(partition_size=2, precision=mics.Precision(param_dtype=dtype))
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        weight: Any = module.weight
        assert isinstance(weight, nn.Parameter) and weight.dtype is dtype and output.dtype is dtype
        seen[names[module]] = weight._data.view(torch.uint8).clone(), weight._scale.clone()

    names = {m: n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    for module in names:
        module.register_forward_hook(look)
    _steps(model, optimizer, 0, 3)
    with torch.no_grad():
        model(*batch(0, 0, 0))
    whole = mics.full_state_dict(model, rank0_only=False)
    for name, (data, scale) in seen.items():
        master = whole[f"{name}.weight"]
        assert type(master) is Tensor and master.dtype is torch.float32
        expected: Any = hp_tensor_to_float8_dynamic(master, torch.float8_e4m3fn, None)
        assert torch.equal(data, expected._data.view(torch.uint8)) and torch.equal(scale, expected._scale)
    for name, value in mics.iter_full_params(model, dtype=torch.bfloat16):
        assert torch.equal(value, whole[name].bfloat16())
    mics.audit_replicas(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
def test_weights_are_as_torchao_casts_them(dtype: torch.dtype) -> None:
    run_ranks(4, _weights_are_as_torchao_casts_them, dtype, ranks_per_node=2)


def _plain_loss(state: dict[str, Tensor]) -> float:
    plain = build(False)
    plain.load_state_dict(state)
    with torch.no_grad():
        return float(plain(*batch(9, 0, 0)))


def _edits() -> None:
    """What is read is in float32 and whole; what is written is cast anew, with the scale of all of it."""
    model, optimizer = _sharded(partition_size=2, optimizer_sharding="world")

    def is_right() -> None:
        with torch.no_grad():
            loss = model(*batch(9, 0, 0)).item()
        assert loss == _plain_loss(mics.full_state_dict(model, rank0_only=False))
        mics.audit_replicas(model)

    is_right()
    _steps(model, optimizer, 0, 2)
    is_right()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    is_right()
    with mics.summon_full_params(model, write=True):
        assert type(model.blocks[0].up.weight.data) is Tensor
        with torch.no_grad():
            model.blocks[0].up.weight[-1, -1] = 7.0
    is_right()
    torch.manual_seed(5)
    state = build(False).state_dict()
    mics.load_full_state_dict(model, state)
    is_right()
    assert all(torch.equal(v, state[n]) for n, v in mics.full_state_dict(model, rank0_only=False).items())
    first = _steps(model, optimizer, 0, 2)
    assert all(value == value for value in first)
    is_right()


def test_edits_are_cast_anew() -> None:
    run_ranks(4, _edits, ranks_per_node=2)


def _save(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = _sharded(partition_size=2)
    _steps(model, optimizer, 0, 3)
    mics.save(folder, model, optimizer)
    losses = _steps(model, optimizer, 3, 6)
    return losses, mics.full_state_dict(model, rank0_only=False)


def _resume(folder: str, gathers: bool, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = _sharded(gathers, **settings)
    mics.load(folder, model, optimizer)
    losses = _steps(model, optimizer, 3, 6)
    return losses, mics.full_state_dict(model, rank0_only=False)


def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A checkpoint has masters: the model may also be one that casts in its modules."""
    folder = str(tmp_path / "saved")
    expected, whole = run_ranks(4, _save, folder, ranks_per_node=2)[0]
    for world_size, gathers in tiers.some([(2, True), (1, True), (2, False)]):
        for losses, found in run_ranks(world_size, _resume, folder, gathers):
            assert losses == pytest.approx(expected, rel=1e-4)
            assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in whole.items())


def _compiled(when: str | None) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = build(True)
    for block in model.blocks if when == "before" else ():
        block.compile(backend="aot_eager")
    model = mics.shard(model, partition_size=2)
    for block in model.blocks if when == "after" else ():
        block.compile(backend="aot_eager")
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0, 7)


@pytest.mark.parametrize("when", tiers.first(["after", "before"], 0, 1))
def test_compiled_blocks(when: str) -> None:
    """Also once units have homes."""
    assert run_ranks(2, _compiled, when) == run_ranks(2, _compiled, None)


def _from_meta() -> None:
    with torch.device("meta"):
        model = build(True)
    model = mics.shard(model, partition_size=2)
    whole = mics.full_state_dict(model, rank0_only=False)
    with torch.no_grad():
        assert model(*batch(9, 0, 0)).item() == _plain_loss(whole)
    assert whole["blocks.1.up.weight"].view(-1)[21] == 3.0


def test_made_on_meta() -> None:
    run_ranks(2, _from_meta)


def _frozen() -> nn.Module:
    model = build(True)
    model.blocks[1].down.weight.requires_grad_(False)
    return model


def _elsewhere() -> nn.Module:
    model = build(True)
    model.copy = nn.Module()
    model.copy.weight = model.blocks[0].up.weight
    return model


def _tied() -> nn.Module:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return build(True, model=model)


def _rowwise() -> nn.Module:
    from torchao.float8 import Float8LinearConfig

    model = build(True)
    model.blocks[2].up.config = Float8LinearConfig.from_recipe_name("rowwise")
    return model


_REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "frozen": (_frozen, {}, r"'blocks.1.down.weight'.*trainable.*found it frozen"),
    "elsewhere": (_elsewhere, {}, r"'copy.weight'.*found it in a Module"),
    "tied": (_tied, {}, r"'blocks.0.up.weight' and 'blocks.1.up.weight' in the same memory"),
    "rowwise": (_rowwise, {}, r"'blocks.2.up.weight'.*dynamic axiswise scaling"),
    "host": (partial(build, True), {"optimizer_state": "host"}, r"'blocks.0.up.weight'.*on the device"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_by_name(name: str) -> None:
    """And the model is as it was."""
    make, settings, message = _REFUSED[name]
    model = make()
    before = [(id(param), type(param)) for param in model.parameters()]
    with pytest.raises(mics.SettingsError, match=message):
        mics.shard(model, **settings)
    assert [(id(param), type(param)) for param in model.parameters()] == before
    model(*batch(0, 0, 0)).backward()


def _shard_differently() -> None:
    mics.shard(build(dist.get_rank() == 0))


def test_ranks_must_gather_alike() -> None:
    for found in run_expecting_error(2, _shard_differently):
        assert "expected the same units, parameters and buffers" in found.message


def _on_gpu(gathers: bool) -> list[float]:
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    emulate = torch.cuda.get_device_capability() < (8, 9)
    model = mics.shard(
        build(gathers, emulate=emulate, model=nn.Sequential(*layers).to(device)),
        partition_size=dist.get_world_size(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(8):
        x = torch.randn(16, 64, generator=toys.seeded(step, 0, 0)).to(device)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        torch.cuda.set_sync_debug_mode("error" if step > 4 else "default")
        optimizer.step()  # the host does not wait for scales
        torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
def test_trains_under_nccl() -> None:
    """Close to a model that casts bfloat16 weights in its modules."""
    plain = run_ranks(2, _on_gpu, False, backend="nccl")
    for losses, expected in zip(run_ranks(2, _on_gpu, True, backend="nccl"), plain, strict=True):
        assert losses == pytest.approx(expected, rel=0.03)
        assert losses[-1] < losses[0]
