"""``MicsTrainer`` trains, evaluates, saves and resumes as the plain ``Trainer`` does in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from mics.integrations.transformers import MicsConfig, MicsTrainer
from tests.integrations.hugging_face import arguments, fresh_accelerate, gpt2, tokens

GLOBAL_BATCH = 8


def _trainer(
    folder: str,
    partition_size: int | None,
    world_size: int,
    *,
    build: Callable[[], nn.Module] = gpt2,
    **options: Any,
) -> Any:
    """A trainer of eight samples per micro-step; with partition_size=None, the plain one."""
    fresh_accelerate()
    given = {name: options.pop(name) for name in ("compute_metrics", "callbacks") if name in options}
    options.setdefault("per_device_train_batch_size", GLOBAL_BATCH // world_size)
    options.setdefault("per_device_eval_batch_size", 2)
    given |= {"train_dataset": tokens(96), "eval_dataset": tokens(19, seed=1)}
    args = arguments(folder, **options)
    if partition_size is None:
        return Trainer(build(), args, **given)
    return MicsTrainer(build(), args, mics_config=MicsConfig(partition_size=partition_size), **given)


def _history(trainer: Any) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def _train(
    folder: str, partition_size: int | None, world_size: int, **options: Any
) -> list[dict[str, float]]:
    resume = options.pop("resume", None)
    trainer = _trainer(folder, partition_size, world_size, **options)
    trainer.train(resume_from_checkpoint=resume)
    return _history(trainer)


def _plain(folder: str | Path, **options: Any) -> list[dict[str, float]]:
    return run_ranks(1, _train, str(folder), None, 1, launch="none", kwargs=options)[0]


def _assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("partition_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_norms_and_evaluation_of_one_process(
    partition_size: int, accumulation: int, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2}
    expected = _plain(tmp_path, **options)
    for found in run_ranks(4, _train, str(tmp_path), partition_size, 4, kwargs=options):
        _assert_same(found, expected)
