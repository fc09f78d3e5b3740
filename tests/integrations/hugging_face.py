"""What tests of Hugging Face integrations share: tiny models, token data, runs of trainers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

VOCAB = 31
LENGTH = 6
_WORDS = [f"w{number}" for number in range(3, VOCAB)]


def gpt2() -> nn.Module:
    """With tied embeddings, no dropout and the same weights on every call."""
    torch.manual_seed(0)
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
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
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


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def tokens(num: int, *, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples with labels; some of them count fewer tokens than others."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(num):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 3] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def tokenizer() -> PreTrainedTokenizerFast:
    """Of words, one for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *_WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(number: int, length: int) -> str:
    """Words of that tokenizer."""
    return " ".join(_WORDS[(number * 7 + step * 3) % len(_WORDS)] for step in range(length))


def fresh_accelerate() -> None:
    """Forget the run before: accelerate keeps its state for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    warnings.simplefilter("ignore")


def arguments(folder: str | Path, *, config: Any = TrainingArguments, **options: Any) -> Any:
    """On the CPU, logging each step, quiet."""
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return config(output_dir=str(folder), **{**defaults, **options})
