"""Checkpoints that somebody altered on purpose, with digests that fit, and what a load of one may do."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import mics
from mics.errors import CheckpointError


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


Trained = tuple[nn.Module, torch.optim.Optimizer, Counter]


def trained(kind: str = "AdamW", *, seed: int = 0, shard: bool = True) -> Trained:
    """A small model after one step, alone in its world."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(3, 2)
    if shard:
        model = mics.shard(model, partition_size=1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, Counter()


def save(folder: Path) -> Path:
    model, optimizer, counter = trained()
    mics.save(folder, model, optimizer, {"counter": counter, "n": 1})
    return folder


def save_stock(folder: Path, kind: str = "AdamW") -> Path:
    """What torch.distributed.checkpoint makes of the same."""
    state = dict(zip(("model", "optimizer"), get_state_dict(*trained(kind, shard=False)[:2]), strict=True))
    dcp_save(state, checkpoint_id=folder, no_dist=True)
    return folder


def sign(folder: Path, index: dict[str, Any]) -> None:
    """Write an index with its digest."""
    text = json.dumps(index).encode()
    (folder / "mics.json").write_bytes(text)
    (folder / "mics.json.sha256").write_text(hashlib.sha256(text).hexdigest())


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "mics.json").read_bytes())


def sign_own(folder: Path, content: bytes, rank: int = 0) -> None:
    """Write what a rank has to itself, with its digests."""
    index = index_of(folder)
    name = f"rank-{rank}.json"
    (folder / name).write_bytes(content)
    entry = index["files"][name]
    size = entry["block_nbytes"]
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    digests = [xxhash.xxh3_128(block).hexdigest() for block in blocks]
    index["files"][name] = {
        **entry,
        "nbytes": len(content),
        "digest": "xxh3_128",
        "digests": digests,
    }
    sign(folder, index)


def alter_own(folder: Path, change: Callable[[dict[str, Any]], None], rank: int = 0) -> None:
    own = json.loads((folder / f"rank-{rank}.json").read_bytes())
    change(own)
    sign_own(folder, json.dumps(own).encode(), rank)


def everything(trained: Trained) -> list[Any]:
    """All that a load may change, with copies of all tensors."""
    model, optimizer, counter = trained
    numpy = np.random.get_state(legacy=False)
    return [
        copy.deepcopy({name: value.detach() for name, value in model.named_parameters()}),
        copy.deepcopy([dict(optimizer.state.get(param, {})) for param in model.parameters()]),
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        counter.count,
        torch.get_rng_state(),
        (numpy["state"]["key"].tolist(), numpy["state"]["pos"]),
        random.getstate(),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def refuses(folder: Path, match: str, target: Trained) -> None:
    """A load is a CheckpointError, and everything is as it was."""
    before = everything(target)
    given = {"counter": target[2]} if (folder / "mics.json").exists() else None
    with pytest.raises(CheckpointError, match=match):
        mics.load(folder, target[0], target[1], given)
    assert same(everything(target), before)


def loads_or_refuses(folder: Path, target: Trained, given: dict[str, Any] | None = None) -> bool:
    """Whether it loads; if not, it is a CheckpointError with a name of the folder, and all is as it was."""
    before = everything(target)
    try:
        mics.load(folder, target[0], target[1], given)
    except CheckpointError as error:
        said = str(error)
    else:
        return True
    assert str(folder) in said
    assert same(everything(target), before)
    return False


def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy to alter."""
    shutil.copytree(folder, tmp_path / "c", dirs_exist_ok=True)
    return tmp_path / "c"
