"""Trainers of TRL with the mixin train as they do in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("trl")

from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from mics.engine import is_sharded
from mics.integrations.transformers import MicsConfig, MicsTrainerMixin
from tests.integrations.hugging_face import arguments, fresh_accelerate, gpt2, text, tokenizer


class _MySFTTrainer(MicsTrainerMixin, SFTTrainer):
    """What the docs show."""


class _MyDPOTrainer(MicsTrainerMixin, DPOTrainer):
    """The same for preferences."""


def _sft(folder: str, world_size: int | None) -> list[dict[str, float]]:
    from datasets import Dataset

    rows = [{"text": text(number, 3 + number % 5)} for number in range(48)]
    return _train(SFTTrainer, _MySFTTrainer, SFTConfig, folder, world_size, Dataset.from_list(rows))


def _dpo(folder: str, world_size: int | None) -> list[dict[str, float]]:
    from datasets import Dataset

    rows = [
        {"prompt": text(n, 2), "chosen": " " + text(n + 1, 3), "rejected": " " + text(n + 2, 3)}
        for n in range(48)
    ]
    return _train(DPOTrainer, _MyDPOTrainer, DPOConfig, folder, world_size, Dataset.from_list(rows))


def _train(
    plain: Any, ours: Any, config: Any, folder: str, world_size: int | None, data: Any
) -> list[dict[str, float]]:
    fresh_accelerate()
    args = arguments(
        folder,
        config=config,
        max_steps=3,
        per_device_train_batch_size=8 // (world_size or 1),
        gradient_accumulation_steps=2,
        bf16=False,
    )
    given = {"train_dataset": data, "processing_class": tokenizer()}
    if plain is DPOTrainer:
        given["ref_model"] = gpt2()
    if world_size is None:
        trainer = plain(model=gpt2(), args=args, **given)
    else:
        trainer = ours(model=gpt2(), args=args, mics_config=MicsConfig(partition_size=2), **given)
    trainer.train()
    names = ("loss", "grad_norm", "rewards/margins")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


@pytest.mark.parametrize("train", tiers.first([_dpo, _sft], 0, 1))
def test_losses_and_norms_of_one_process(train: Any, tmp_path: Path) -> None:
    """Supervised fine-tuning, and preferences against a reference model that is sharded too."""
    (expected,) = run_ranks(1, train, str(tmp_path), None, launch="none")
    assert len([entry for entry in expected if "loss" in entry]) == 3
    for found in run_ranks(4, train, str(tmp_path), 4):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)  # rewards are differences


def _before_training(folder: str, world_size: int | None) -> dict[str, float]:
    """Losses of models that run before they train: evaluated, or for the log-probabilities of a reference."""
    from datasets import Dataset

    data = Dataset.from_json(f"{folder}/rows.json", cache_dir=folder)  # ranks share what TRL computes of it
    found = {}
    for is_precomputed in (False, True):
        fresh_accelerate()
        args = arguments(
            folder,
            config=DPOConfig,
            max_steps=2,
            per_device_train_batch_size=8 // (world_size or 1),
            per_device_eval_batch_size=8 // (world_size or 1),
            precompute_ref_log_probs=is_precomputed,
            bf16=False,
        )
        given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer()}
        given["ref_model"] = None if is_precomputed else gpt2()
        trainer: Any
        if world_size is None:
            trainer = DPOTrainer(gpt2(), args=args, **given)
        else:
            trainer = _MyDPOTrainer(gpt2(), args=args, mics_config=MicsConfig(partition_size=2), **given)
            assert is_sharded(trainer.model) == is_precomputed
        found[f"before, {is_precomputed}"] = trainer.evaluate()["eval_loss"]
        assert world_size is None or is_sharded(trainer.model)
        found[f"trained, {is_precomputed}"] = trainer.train().training_loss
    return found


@pytest.mark.full
def test_models_that_run_before_they_train_are_sharded(tmp_path: Path) -> None:
    """Else they would be on the host, and their inputs on a GPU."""
    rows = [
        {"prompt": text(n, 2), "chosen": " " + text(n + 1, 3), "rejected": " " + text(n + 2, 3)}
        for n in range(16)
    ]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (expected,) = run_ranks(1, _before_training, str(tmp_path), None, launch="none")
    for found in run_ranks(4, _before_training, str(tmp_path), 4):
        assert found == pytest.approx(expected, rel=1e-5)
