"""Models that take the number of tokens of a step and do not divide their loss by it, as taggers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import BertConfig, BertForTokenClassification, Trainer

from mics.integrations.transformers import MicsConfig, MicsTrainer
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, tokens


def _train(folder: str, partition_size: int | None, world_size: int) -> tuple[list[dict[str, float]], float]:
    """Losses, norms and evaluations; and the loss of an evaluation whose last batch is not full."""
    fresh_accelerate()
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForTokenClassification(BertConfig(vocab_size=VOCAB, num_labels=VOCAB, **sizes, **rates))
    samples = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in tokens(64)]
    batch = {f"per_device_{kind}_batch_size": 8 // world_size for kind in ("train", "eval")}
    args = arguments(folder, eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2, **batch)
    given: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples[:16]}
    if partition_size is None:
        trainer: Any = Trainer(model, args, **given)
    else:
        trainer = MicsTrainer(model, args, mics_config=MicsConfig(partition_size=partition_size), **given)
    uneven = trainer.evaluate(samples[:3])["eval_loss"]
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    history = [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history[1:]]
    return history, uneven


def test_losses_and_norms_of_one_process(tmp_path: Path) -> None:
    ((expected, _),) = run_ranks(1, _train, str(tmp_path), None, 1, launch="none")
    for found, uneven in run_ranks(4, _train, str(tmp_path), 2, 4):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert math.isfinite(uneven)
