"""Hugging Face models with random weights train sharded, with no edit, as they train plain."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import mics
from mics.activations.policy import _warn_about_cache
from mics.engine import engine_of
from tests import tiers
from tests.compare import SHARDINGS, assert_trains_like_plain
from tests.ranks import run_ranks
from tests.reference import Recipe, Tolerance, train_plain
from tests.toys import seeded

pytest.importorskip("transformers")

VOCAB = 31
ROUNDING = Tolerance(rtol=1e-4)


def _gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _checkpointed_gpt2(reentrant: bool) -> nn.Module:
    model = _gpt2()
    # The second name came with transformers 5.23, which warns of the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model


def _batch(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    generator = seeded(step, micro, rank)
    ids = torch.randint(3, VOCAB, (2, 7), generator=generator)
    labels = torch.randint(3, VOCAB, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": labels}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _recipe(build: Any, **options: Any) -> Recipe:
    options = {"accumulation": 2, **options}
    return Recipe(build=build, batch=_batch, loss=_loss, **options)


@pytest.mark.parametrize(
    "build", [_gpt2, *(pytest.param(build, marks=pytest.mark.full) for build in (_llama, _bert, _t5))]
)
def test_models_train_like_plain(build: Any) -> None:
    """GPT-2, Llama, BERT and T5: losses, gradients, parameters and optimizer state."""
    recipe = _recipe(build)
    outcomes = assert_trains_like_plain(recipe, tolerance=ROUNDING)
    plain = train_plain(recipe, world_size=4)
    losses = [sum(ranks) / len(ranks) for step in outcomes[0].losses for ranks in step]
    expected = [ranks[0] for step in plain.losses for ranks in step]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert list(outcomes[0].state_dict) == list(plain.state_dict)


@pytest.mark.parametrize("reentrant", tiers.first([False, True]))
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Their own switch for activation checkpointing, in both variants."""
    recipe = _recipe(partial(_checkpointed_gpt2, reentrant))
    assert_trains_like_plain(recipe, tolerance=ROUNDING, shardings=SHARDINGS[:1])


def _generate(model: nn.Module, step: int) -> list[list[int]]:
    model.eval()
    prompt = torch.tensor([[5, 7, 11]])
    with torch.no_grad():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    model.train()
    return tokens.tolist()


def test_generation_between_steps() -> None:
    """`generate` after each step gives the tokens the plain model gives, on every rank."""
    recipe = _recipe(_gpt2, between_steps=_generate, accumulation=1)
    assert_trains_like_plain(recipe, tolerance=ROUNDING, shardings=SHARDINGS[:1])


def test_bfloat16_masters_and_all() -> None:
    """Llama with bf16 parameters over fp32 masters."""
    recipe = _recipe(_llama, param_dtype=torch.bfloat16)
    tolerance = Tolerance(rtol=2e-2)
    assert_trains_like_plain(recipe, tolerance=tolerance, shardings=SHARDINGS[:1])


def _with_activations(build: Any) -> list[tuple[list[float], int]]:
    """Losses of a few steps, and how many bytes left, for each way to keep activations."""
    found = []
    offload = mics.Activations(offload=True)
    for policy in (None, mics.Activations(), offload, mics.Activations(checkpoint="none", offload=True)):
        torch.manual_seed(0)
        model = mics.shard(build(), partition_size=2, activations=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, away = [], 0
        with patch("mics.activations.offload.LEAST_NBYTES", 1):  # these models are small
            for step in range(4):
                for micro in mics.microsteps(model, range(2)):
                    loss = _loss(model, _batch(step, micro, torch.distributed.get_rank()))
                    offloader = engine_of(model).offloader
                    away += offloader.offloaded_nbytes if offloader is not None else 0
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        found.append((losses, away))
    return found


@pytest.mark.full
@pytest.mark.parametrize("build", [_gpt2, _llama, _bert, _t5])
def test_activations_are_recomputed_and_moved(build: Any) -> None:
    """The same bits, with masks and position tensors that all layers share, and an encoder's output."""
    for plain, recomputed, moved, all_moved in run_ranks(2, _with_activations, build):
        assert plain[0] == all_moved[0]
        assert recomputed[0] == moved[0]
        # What is recomputed goes without a cache, which moves keys and values: T5 rounds differently.
        assert recomputed[0] == (pytest.approx(plain[0], rel=1e-4) if build is _t5 else plain[0])
        assert 0 == plain[1] == recomputed[1] < moved[1] < all_moved[1]


def _masked_losses(policy: mics.Activations | None) -> list[float]:
    torch.manual_seed(0)
    model = mics.shard(_gpt2(attn_implementation="eager"), partition_size=1, activations=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        batch = _batch(step, 0, 0)
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -2:] = 0
        loss = model(**batch, attention_mask=mask).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_cache_among_the_positional_arguments() -> None:
    """GPT-2 passes it so; what is recomputed must not write into it twice. The user is told once."""
    _warn_about_cache.cache_clear()
    with pytest.warns(UserWarning, match="stays empty in training") as warned:
        found = _masked_losses(mics.Activations())
    assert found == _masked_losses(None) and len(warned) == 1


@pytest.mark.parametrize("build", [_gpt2, _llama, _t5])
def test_layers_that_are_computed_again_among_others(build: Any) -> None:
    """Those that are not must not fill the cache either: the next one would find it filled."""
    losses = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _warn_about_cache()  # once
    for every in (0, 1, 2):
        torch.manual_seed(0)
        policy = mics.Activations(every=every, checkpoint="unit") if every else None
        model = mics.shard(build(), partition_size=1, activations=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[every] = []
        for step in range(2):
            loss = _loss(model, _batch(step, 0, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[every].append(loss.item())
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-4)
