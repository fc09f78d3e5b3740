"""``Seq2SeqTrainer`` generates in its evaluation, from a model that is sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from mics.integrations.transformers import MicsConfig, MicsTrainerMixin
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, t5, tokens


class _Trainer(MicsTrainerMixin, Seq2SeqTrainer):
    pass


def _lengths(folder: str, rank_ends_early: int) -> list[int]:
    """How often the decoder of this rank ran for each batch. On one rank any token ends a sequence."""
    fresh_accelerate()
    args = arguments(
        folder, config=Seq2SeqTrainingArguments, predict_with_generate=True, per_device_eval_batch_size=2
    )
    model = t5()
    trainer = _Trainer(model, args, eval_dataset=tokens(4), mics_config=MicsConfig(partition_size=2))
    ends = list(range(1, VOCAB)) if trainer.args.process_index == rank_ends_early else [VOCAB - 1]
    model.generation_config.eos_token_id, model.generation_config.max_length = ends, 8
    found = trainer.predict(tokens(4))
    return [int((row > 0).sum()) for row in torch.as_tensor(found.predictions)]


def test_ranks_end_at_other_tokens(tmp_path: Path) -> None:
    """One that has ended goes on with the others, and keeps the tokens that it had."""
    for found in run_ranks(2, _lengths, str(tmp_path), 1):
        assert len(found) == 4 and max(found[:2]) > max(found[2:])
