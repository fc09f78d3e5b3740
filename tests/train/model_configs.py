"""Small models of Hugging Face for the tests of `mics train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

_COMMON = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "num_key_value_heads": 2, "max_position_embeddings": 32},
    "roberta": {**_COMMON, **_NO_DROPOUT, "max_position_embeddings": 34, "pad_token_id": 1},
    "gpt2": {
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "vocab_size": 260,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        **_COMMON,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "full_attention"],
    },
    "xlm-roberta": {**_COMMON, **_NO_DROPOUT, "max_position_embeddings": 34, "pad_token_id": 1},
}
BOTH = ["llama", "roberta"]
OTHERS = [pytest.param(kind, marks=pytest.mark.full) for kind in ("gpt2", "qwen2", "xlm-roberta")]


def config_file(folder: Path, kind: str, **changes: Any) -> Path:
    """A config.json in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS.get(kind, {}), **changes}))
    return file


def import_classes() -> None:
    """On a rank: what takes long the first time, so that no rank waits for another's imports later."""
    import transformers

    for name in ("LlamaForCausalLM", "RobertaForMaskedLM", "AutoModelForCausalLM", "AutoModelForMaskedLM"):
        getattr(transformers, name)


@pytest.fixture(scope="module")
def ready_ranks() -> None:
    """Ranks that have imported transformers."""
    run_ranks(4, import_classes, launch="none")
