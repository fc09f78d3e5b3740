"""torchtitan's Trainer with only its config passed through ``with_mics``: the numbers of one process."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mics
from tests.ranks import run_expecting_error, run_ranks
from tests.tiers import some

if find_spec("torchtitan") is None or find_spec("triton") is None:
    pytest.skip("needs torchtitan, whose models import triton", allow_module_level=True)

from tests.integrations import torchtitan_runs as runs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, first_weights: Path) -> Any:
    @cache
    def found(**options: Any) -> dict[str, list[float]]:
        found.folder = folder = tmp_path_factory.mktemp("plain")  # of the last one
        return run_ranks(1, runs.one_process, folder, first_weights, kwargs=options)[0]

    return found


def check(found: list[dict[str, list[float]]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert values, name
        for rank in found:
            assert rank[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_norms_and_validation_are_those_of_one_process(
    accumulation: int, plain: Any, first_weights: Path, tmp_path: Path
) -> None:
    """Over partition sizes."""
    options = {"accumulation": accumulation}
    expected = plain(**options)
    for size in some([1, 2, 4]):
        check(
            run_ranks(4, runs.with_partitions, tmp_path / str(size), size, first_weights, options), expected
        )


@pytest.mark.full
def test_the_loss_may_call_the_head_by_itself(plain: Any, first_weights: Path, tmp_path: Path) -> None:
    """A chunked loss runs backwards of the head before that of the model; blocks are recomputed."""
    options = {"accumulation": 3, "chunked": True}
    expected = plain(accumulation=3)
    for size in (1, 2):
        found = run_ranks(2, runs.with_partitions, tmp_path / str(size), size, first_weights, options)
        check(found, expected)


def test_resume_on_other_ranks_and_export(plain: Any, first_weights: Path, tmp_path: Path) -> None:
    """Two steps on four ranks and one on two; the last one exports for Hugging Face."""
    plain.cache_clear()
    expected = plain()
    options = {"checkpoint__interval": 2, "lr_scheduler__total_steps": 3}
    run_ranks(4, runs.with_partitions, tmp_path, 2, first_weights, {**options, "training__steps": 2})
    options |= {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
    found = run_ranks(2, runs.with_partitions, tmp_path, 1, first_weights, options)
    check(found, {name: values[2:] for name, values in expected.items() if name != "val"})
    assert found[0]["val"][-1] == pytest.approx(expected["val"][-1], rel=1e-5)
    weights = load_file(tmp_path / "checkpoint" / "step-3-hf" / "model.safetensors")
    torch.testing.assert_close(weights, load_file(plain.folder / "last.safetensors"), rtol=1e-4, atol=1e-5)


def test_the_model_has_torchtitans_initial_values(tmp_path: Path) -> None:
    """Each parameter is drawn as torchtitan draws it, one unit at a time; buffers are the same."""
    (ours, theirs), other = run_ranks(2, runs.first_values, tmp_path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], other[0][name]) for name in ours)
    for name, value in theirs.items():
        if value.is_complex() or value.std() == 0:
            assert torch.equal(ours[name], value), name
        else:
            assert float(ours[name].std()) == pytest.approx(float(value.std()), rel=0.1), name


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("training__dtype", "bfloat16"),
        ("training__enable_cpu_offload", True),
        ("training__disable_cuda_graphs", False),
        ("parallelism__spmd_backend", "full_dtensor"),
        ("parallelism__fsdp_reshard_after_forward", "never"),
        ("parallelism__enable_fsdp_symm_mem", True),
        ("parallelism__tensor_parallel_degree", 2),
        ("checkpoint__create_seed_checkpoint", True),
        ("checkpoint__initial_load_in_hf", True),
        ("checkpoint__export_dtype", "bfloat16"),
        ("optimizer__implementation", "fused_opt_states_bf16"),
    ],
)
def test_what_is_refused(option: str, value: Any, tmp_path: Path) -> None:
    """When the trainer is built, by its name."""
    changed = {option: value}
    if option == "parallelism__tensor_parallel_degree":
        changed |= {"parallelism__data_parallel_shard_degree": 1}
    for error in run_expecting_error(2, runs.refused, tmp_path, changed):
        assert error.type_name == "SettingsError", error.trace
        assert error.message.startswith(option.replace("__", ".")), error.message


def test_what_with_mics_refuses() -> None:
    with pytest.raises(mics.SettingsError, match=r"MicsConfig\.partition_size: expected None"):
        runs.refused_before({"partition_size": 2})
    with pytest.raises(mics.SettingsError, match=r"MicsConfig\.optimizer_state: expected 'device'"):
        runs.refused_before({"optimizer_state": "host"})
    with pytest.raises(mics.SettingsError, match=r"checkpoint\.async_mode: expected 'disabled'"):
        runs.refused_before({"config": {"checkpoint__async_mode": "async"}})
    with pytest.raises(mics.SettingsError, match=r"with_mics: config: expected a Trainer\.Config"):
        runs.with_mics(None)
