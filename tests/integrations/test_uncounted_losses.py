"""Models that take the number of tokens of a step and do not divide their loss by it, and those without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from datasets import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2LMHeadModel,
    Trainer,
)

from mics.integrations.losses import num_items
from mics.integrations.transformers import MicsConfig, MicsTrainerMixin, _can_be_cut
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, gpt2, t5, tokens

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
    given: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples[:16]}
    given["compute_loss_func"] = options.pop("compute_loss_func", None)
    kind = options.pop("kind", Trainer)
    args = arguments(folder, **batch, **options)
    if ours:
        kind = type("Ours", (MicsTrainerMixin, kind), {})
        return kind(model, args, mics_config=MicsConfig(partition_size=2), **given)
    return kind(model, args, **given)


class _OwnLoss(Trainer):
    """Of a user: a mean, whatever the number of items."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs, labels = model(input_ids=inputs["input_ids"]), inputs["labels"]
        if isinstance(self.model, GPT2LMHeadModel):
            labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = _mean(outputs, labels, None)
        return (loss, outputs) if return_outputs else loss


class _CallsHost(Trainer):
    """Of a user: the host's, and more."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **options)


class _ForgetsNumber(Trainer):
    """Of a user: it does not hand on the number of items."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class _LeavesEarly(Trainer):
    """Of a user: a share, or nothing where there are no labels."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.sum() * 0
        if inputs["labels"].ne(-100).any():
            loss = _share(outputs, inputs["labels"], num_items_in_batch) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def _mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def _share(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    logits = outputs.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def _tagger() -> nn.Module:
    return _bert(BertForTokenClassification, num_labels=VOCAB)


_TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens": (_tagger, {}),
    "masked": (lambda: _bert(BertForMaskedLM), {}),
    "both ways": (t5, {}),
    "smoothed": (_tagger, {"label_smoothing_factor": 0.1}),
    "own loss": (_tagger, {"kind": _OwnLoss}),
    "own loss of a model that counts": (gpt2, {"kind": _OwnLoss}),
    "calls the host": (_tagger, {"kind": _CallsHost}),
    "forgets the number": (gpt2, {"kind": _ForgetsNumber}),
    "leaves early": (_tagger, {"kind": _LeavesEarly}),
    "a function's mean": (_tagger, {"compute_loss_func": _mean}),
    "a function's share": (_tagger, {"compute_loss_func": _share}),
    "compiled": (_tagger, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "compiled, counts": (gpt2, {"torch_compile": True, "torch_compile_backend": "eager"}),
}


def _train(folder: str, ours: bool) -> dict[str, list[dict[str, float]]]:
    samples = [{"input_ids": each["input_ids"], "labels": each["labels"].clone()} for each in tokens(64)]
    for number, sample in enumerate(samples):
        if number % 8 in (2, 3) or number % 16 == 6:
            sample["labels"][:] = -100  # a rank without any, in each micro-step
    steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    found = {}
    for name, (model, options) in _TRAINED.items():
        trainer = _trainer(folder, ours, model(), samples, **steps, **options)
        trainer.train()
        found[name] = [
            {key: entry[key] for key in ("loss", "grad_norm", "eval_loss") if key in entry}
            for entry in trainer.state.log_history
        ]
    return found


def test_losses_and_norms_of_one_process(tmp_path: Path) -> None:
    """Made with the number of items or without; ranks have labels of other numbers, one has none."""
    (expected,) = run_ranks(1, _train, str(tmp_path), False, launch="none")
    for found in run_ranks(4, _train, str(tmp_path), True):
        for name, entries in expected.items():
            for ours, theirs in zip(found[name], entries, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), name


def test_what_is_counted() -> None:
    def count(labels: Any, **options: Any) -> int | None:
        found = num_items(
            {"labels": labels},
            ["labels"],
            **{"is_shifted": False, "per_row": False, "ignored": -100} | options,
        )
        return None if found is None else int(found)

    tokens = torch.tensor([[1, -100, 255], [2, 3, 255]])
    assert count(tokens) == 5
    assert count(tokens, is_shifted=True) == 3
    assert count(tokens, ignored=255) == 3
    assert count(tokens, per_row=True) == 2
    assert count(torch.tensor([-100.0, 1.0])) == 2  # targets of a regression
    assert count([tokens]) is None
    assert count(torch.tensor(1)) is None


def test_inputs_that_can_be_cut() -> None:
    """An uneven last batch is cut down to a rank's own samples, where every input has a row for each."""
    rows = torch.zeros(4, 3)
    assert _can_be_cut({"labels": rows, "names": ["a"] * 4, "scale": torch.tensor(2.0), "flag": True}, 4)
    for other in ({"text": rows}, ["a"] * 3, torch.zeros(12, 8)):
        assert not _can_be_cut({"labels": rows, "other": other}, 4)


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
        streamed = [IterableDataset.from_generator(partial(iter, samples[:size])) for size in sizes]
        found[name] += [trainer.evaluate(each)["eval_loss"] for each in streamed]
        trainer.compute_metrics = _mean_score
        metrics = trainer.evaluate(samples[: sizes[0]])
        found[name] += [metrics["eval_loss"], metrics["eval_score"]]
    return found


@pytest.mark.full
def test_evaluation_with_an_uneven_last_batch(tmp_path: Path) -> None:
    """Means over samples and over tokens: on some ranks less than a batch, and on some no sample at all."""
    sizes = [19, 3, 16, 13, 7]
    (expected,) = run_ranks(1, _evaluate, str(tmp_path), False, sizes, launch="none")
    for found in run_ranks(4, _evaluate, str(tmp_path), True, sizes):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5), name
