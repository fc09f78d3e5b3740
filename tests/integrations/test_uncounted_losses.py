"""Models that take the number of tokens of a step and do not divide their loss by it, and those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
)

from mics.integrations.transformers import MicsConfig, MicsTrainer
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, gpt2, tokens

_LABELS = 5


def _bert(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(BertConfig(vocab_size=VOCAB, **sizes, **rates, **options))


class _OneHot(nn.Module):
    """A model of a user: any other label is an error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, _LABELS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids).mean(1))
        target = nn.functional.one_hot(labels, _LABELS).float()
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def _cases() -> dict[str, tuple[nn.Module, Any]]:
    """Models, and what a sample of them has beside ``input_ids``."""
    return {
        "tokens": (
            _bert(BertForTokenClassification, num_labels=VOCAB),
            lambda number, sample: {"labels": sample["labels"]},  # some have fewer than others
        ),
        "classes": (
            _bert(BertForSequenceClassification, num_labels=_LABELS),
            lambda number, sample: {"labels": number % _LABELS},
        ),
        "regression": (
            _bert(BertForSequenceClassification, num_labels=1),
            lambda number, sample: {"labels": number / 7},
        ),
        "answers": (
            _bert(BertForQuestionAnswering),
            lambda number, sample: {"start_positions": number % 3, "end_positions": number % 3 + 2},
        ),
        "one hot": (_OneHot(), lambda number, sample: {"labels": number % _LABELS}),
        "counted": (gpt2(), lambda number, sample: {"labels": sample["labels"]}),
    }


def _trainer(folder: str, ours: bool, model: nn.Module, samples: Any, **options: Any) -> Any:
    fresh_accelerate()
    batch = {f"per_device_{kind}_batch_size": 2 if ours else 8 for kind in ("train", "eval")}
    args = arguments(folder, **batch, **options)
    given: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples[:16]}
    if ours:
        return MicsTrainer(model, args, mics_config=MicsConfig(partition_size=2), **given)
    return Trainer(model, args, **given)


def _train(folder: str, ours: bool) -> list[dict[str, float]]:
    samples = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in tokens(64)]
    model = _bert(BertForTokenClassification, num_labels=VOCAB)
    options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    trainer = _trainer(folder, ours, model, samples, **options)
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history]


def test_losses_and_norms_of_one_process(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, _train, str(tmp_path), False, launch="none")
    for found in run_ranks(4, _train, str(tmp_path), True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def _mean_score(prediction: Any) -> dict[str, float]:
    scores = prediction.predictions
    return {"score": float(sum(each.sum() for each in (scores if isinstance(scores, tuple) else (scores,))))}


def _evaluate(folder: str, ours: bool, sizes: list[int]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, (model, labels_of) in _cases().items():
        samples = [
            {"input_ids": sample["input_ids"], **labels_of(number, sample)}
            for number, sample in enumerate(tokens(max(sizes)))
        ]
        trainer = _trainer(folder, ours, model, samples)
        found[name] = [trainer.evaluate(samples[:size])["eval_loss"] for size in sizes]
        trainer.compute_metrics = _mean_score
        metrics = trainer.evaluate(samples[: sizes[0]])
        found[name] += [metrics["eval_loss"], metrics["eval_score"]]
    return found


def test_evaluation_with_an_uneven_last_batch(tmp_path: Path) -> None:
    """Means over samples and over tokens: on some ranks less than a batch, and on some no sample at all."""
    sizes = [19, 3, 16, 13, 7]
    (expected,) = run_ranks(1, _evaluate, str(tmp_path), False, sizes, launch="none")
    for found in run_ranks(4, _evaluate, str(tmp_path), True, sizes):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name
