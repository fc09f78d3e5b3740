"""``torch.set_default_device`` and ``torch.set_default_dtype``: the user's choice, never the engine's.

The default device is a GPU in many scripts. Here it is ``meta``, which holds no numbers: whatever takes it by
mistake fails, or shows at once in the result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import toys
from tests.ranks import run_ranks
from tests.reference import adamw, sgd

WORLD_SIZE = 4
NUM_STEPS = 3
SOURCES = Path(__file__).resolve().parents[1] / "src"


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _model(dtype: torch.dtype) -> nn.Module:
    """The toy, with the same numbers whatever the defaults are."""
    torch.manual_seed(0)
    with torch.device("cpu"), _default_dtype(torch.float32):
        return toys.Chain().to(dtype)


def _batch(step: int, micro: int, rank: int, dtype: torch.dtype, place: str = "cpu") -> list[Tensor]:
    with torch.device("cpu"), _default_dtype(torch.float32):
        return [tensor.to(place, dtype) for tensor in toys.floats(step, micro, rank)]


def _plain(dtype: torch.dtype, optimize: Any) -> dict[str, Any]:
    """One process with the batches of all ranks."""
    model = _model(dtype)
    optimizer = optimize(model)
    norms = []
    for step in range(NUM_STEPS):
        for micro in range(2):
            for rank in range(WORLD_SIZE):
                (model(*_batch(step, micro, rank, dtype)) / WORLD_SIZE).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "state": model.state_dict()}


def _sharded(
    dtype: torch.dtype,
    optimize: Any,
    folder: str,
    partition_size: int,
    options: dict[str, Any],
    device: str | None = None,
    default: torch.dtype | None = None,
) -> dict[str, Any]:
    """The same on a rank with these defaults."""
    torch.set_default_device(device)
    try:
        with _default_dtype(default):
            return _trained(dtype, optimize, folder, partition_size, options)
    finally:
        torch.set_default_device(None)


def _trained(
    dtype: torch.dtype, optimize: Any, folder: str, partition_size: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Trained, saved and loaded after the first step, audited at every one."""
    import mics

    place = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model = mics.shard(_model(dtype).to(place), partition_size=partition_size, audit_interval=1, **options)
    optimizer = optimize(model)
    norms = []
    for step in range(NUM_STEPS):
        batches = [_batch(step, micro, dist.get_rank(), dtype, place) for micro in range(2)]
        for batch in mics.microsteps(model, batches):
            model(*batch).backward()
        assert mics.nonfinite_units(model) == []
        norms.append(mics.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            mics.save(folder, model, optimizer, step=step)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            mics.load(folder, model, optimizer)
    assert mics.audit_replicas(model).ranks
    return {"norms": norms, "state": mics.full_state_dict(model)}


@pytest.mark.parametrize(
    "partition_size", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_default_device_of_no_use(tmp_path: Path, partition_size: int) -> None:
    """With ``meta`` as the default device a model on the CPU trains, saves, loads and is audited as ever."""
    import mics

    options = {"activations": mics.Activations(offload=True)} if partition_size == 2 else {}
    args = (torch.float32, sgd, str(tmp_path), partition_size, options, "meta")
    found = run_ranks(WORLD_SIZE, _sharded, *args, ranks_per_node=2)
    torch.testing.assert_close(found[0], _plain(torch.float32, sgd), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("built", "default"),
    [
        (torch.float32, torch.bfloat16),
        pytest.param(torch.float32, torch.float64, marks=pytest.mark.full),
        pytest.param(torch.float64, torch.float64, marks=pytest.mark.full),
        pytest.param(torch.float64, torch.bfloat16, marks=pytest.mark.full),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_a_default_format(tmp_path: Path, built: torch.dtype, default: torch.dtype) -> None:
    """A model trains like the plain one in its own format, whatever new tensors are made in."""
    found = run_ranks(
        WORLD_SIZE, _sharded, built, adamw, str(tmp_path), 2, {}, None, default, ranks_per_node=2
    )
    tolerance = 1e-12 if built is torch.float64 else 1e-5
    torch.testing.assert_close(found[0], _plain(built, adamw), rtol=tolerance, atol=0.1 * tolerance)


def test_a_model_in_the_default_format(tmp_path: Path) -> None:
    """A bfloat16 model under a bfloat16 default trains to the bit as it does under float32's."""
    args = (torch.bfloat16, adamw, str(tmp_path), 2, {}, None)
    usual, found = (
        run_ranks(WORLD_SIZE, _sharded, *args, default, ranks_per_node=2)
        for default in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_gpu_by_default(tmp_path: Path) -> None:
    """With a GPU as the default device and bfloat16 as the default format: the same bits as without."""
    import mics

    options = {
        "precision": mics.Precision(param_dtype=torch.float32),
        "activations": mics.Activations(offload=True),
    }
    args = (torch.float32, adamw, str(tmp_path), 2, options)
    usual = run_ranks(2, _sharded, *args, None, None, backend="nccl")
    found = run_ranks(2, _sharded, *args, "cuda", torch.bfloat16, backend="nccl")
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


def test_every_tensor_of_ours_names_its_device_and_format() -> None:
    """No call in src/ makes a tensor where and in what the user's defaults say."""
    makers = {
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
        *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
    }
    found = [
        f"{file.relative_to(SOURCES)}:{node.lineno}: torch.{node.func.attr} without {keyword}="
        for file in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in makers
        for keyword in ("device", "dtype")
        if keyword not in {given.arg for given in node.keywords}
    ]
    assert found == []
