"""FSDP2's ``unshard()`` and ``reshard()`` on mics: who reads in between finds whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import mics
from mics.fsdp import FSDPModule, MixedPrecisionPolicy
from tests.ranks import run_ranks
from tests.test_fsdp import (
    WIDTH,
    WORLD,
    Decoder,
    assert_like_one_process,
    batch_of,
    build,
    mesh_for,
    plain,
    shard_layers,
    train,
)

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def assert_whole(model: Decoder, reference: Decoder, dtype: torch.dtype = torch.float32) -> None:
    """All parameters are plain tensors with the values of `reference`, whatever is done with them."""
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(found) is nn.Parameter and found.shape == expected.shape and found.dtype == dtype, name
        assert torch.equal(found, expected.to(dtype)), name
    weight, expected = model.layers[1].up.weight, reference.layers[1].up.weight.to(dtype)
    assert weight.view(-1)[:3].tolist() == expected.view(-1)[:3].tolist()


def read(partition_size: int) -> None:
    reference = build()
    model = shard_layers(build(), mesh=mesh_for(partition_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shards = list(model.parameters())
    for module in fsdp_modules(model):
        module.unshard()
    assert_whole(model, reference)
    for module in fsdp_modules(model):
        module.reshard()
    assert all(found is shard for found, shard in zip(model.parameters(), shards, strict=True))

    # One module's own parameters, and not those of the layers inside.
    handle = model.unshard(async_op=True)
    handle.wait()
    whole = model.head.weight
    assert whole.shape == reference.head.weight.shape and model.layers[0].up.weight is not whole
    assert torch.equal(whole, reference.head.weight)
    assert any(model.layers[0].up.weight is shard for shard in shards)

    # A layer is called by itself; what the others hold stays.
    x = torch.ones(1, 2, WIDTH)
    with torch.inference_mode():
        expected = F.linear(reference.layers[0](x), reference.head.weight)
        assert torch.allclose(F.linear(model.layers[0](x), model.head.weight), expected)
        model.layers[1].unshard()
        assert torch.equal(model.layers[1].up(x), reference.layers[1].up(x))

    # State dicts are DTensors, as always, and the step is seen.
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.unshard()
    found = train(model, optimizer, 1, range(2), by_torch=False)
    assert_like_one_process(found, plain(1, num_steps=2))
    assert all(found is shard for found, shard in zip(model.parameters(), shards, strict=True))


def test_parameters_are_whole_between_unshard_and_reshard() -> None:
    """Of each module its own; a forward, a step and a state dict put the shards back."""
    run_ranks(WORLD, read, 2)


def update_between() -> None:
    model = shard_layers(build(), mesh=mesh_for(2), mp_policy=BFLOAT16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        train(model, optimizer, 1, range(step, step + 1), by_torch=False)
        model(batch_of(0, 0, 0)).float().sum().backward()
        for module in fsdp_modules(model):
            module.unshard()
        optimizer.step()  # nobody has used the units in between
        reference = build()
        reference.load_state_dict(mics.full_state_dict(model, rank0_only=False))
        for module in fsdp_modules(model):
            module.unshard()
        assert_whole(model, reference, torch.bfloat16)
        model.load_state_dict(build().state_dict())
        for module in fsdp_modules(model):
            module.unshard()
        assert_whole(model, build(), torch.bfloat16)


def test_new_values_are_seen() -> None:
    """After a step and after a load, in the format that modules compute in."""
    run_ranks(WORLD, update_between)


def refused() -> None:
    model = shard_layers(build(), mesh=mesh_for(2))
    list(model.parameters())
    model.unshard()
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(mics.MicsError, match=r"head\.weight: .* found it written to"):
        model.reshard()
    model.unshard()
    with pytest.raises(mics.MicsError, match="gradient of an unsharded parameter"):
        model.head.weight.square().sum().backward()
    optimizer = torch.optim.SGD([model.head.weight], lr=1.0)
    model.reshard()
    with pytest.raises(mics.SettingsError, match="or while unsharded"):
        optimizer.step()
    assert torch.equal(model.head.weight.full_tensor(), build().head.weight)  # type: ignore[operator]


def test_what_would_be_lost_is_refused() -> None:
    """Writes, gradients, and optimizers over whole parameters."""
    run_ranks(WORLD, refused)
