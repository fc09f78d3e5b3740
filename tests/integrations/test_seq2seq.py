"""``Seq2SeqTrainer`` generates in its evaluation, from a model that is sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from mics.integrations.transformers import MicsConfig, MicsTrainerMixin
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, t5, tokens


class _Trainer(MicsTrainerMixin, Seq2SeqTrainer):
    pass


def _bart() -> nn.Module:
    """Its ``generate`` calls the encoder past the model's forward."""
    torch.manual_seed(0)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ffn = {"encoder_ffn_dim": 12, "decoder_ffn_dim": 12}
    tokens = {"decoder_start_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCAB, dropout=0.0, forced_eos_token_id=None, **sizes, **heads, **ffn, **tokens)
    )


def _lengths(folder: str, rank_ends_early: int, build: Callable[[], nn.Module]) -> list[int]:
    """How often the decoder of this rank ran for each batch. On one rank any token ends a sequence."""
    fresh_accelerate()
    args = arguments(
        folder, config=Seq2SeqTrainingArguments, predict_with_generate=True, per_device_eval_batch_size=2
    )
    model = build()
    trainer = _Trainer(model, args, eval_dataset=tokens(4), mics_config=MicsConfig(partition_size=2))
    ends = list(range(1, VOCAB)) if trainer.args.process_index == rank_ends_early else [VOCAB - 1]
    model.generation_config.eos_token_id, model.generation_config.max_length = ends, 8
    found = trainer.predict(tokens(4))
    return [int((row > 0).sum()) for row in torch.as_tensor(found.predictions)]


@pytest.mark.parametrize("build", [t5, _bart])
def test_ranks_end_at_other_tokens(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    """One that has ended goes on with the others, and keeps the tokens that it had."""
    for found in run_ranks(2, _lengths, str(tmp_path), 1, build):
        assert len(found) == 4 and max(found[:2]) > max(found[2:])
