"""Folders of Hugging Face that have other names and other tensors than the models they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mics
from mics.errors import CheckpointError
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping", reason="transformers 4 convert nothing")

_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_EXPERTS: dict[str, Any] = {"num_key_value_heads": 1, "num_experts_per_tok": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "num_local_experts": 12},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 3,
        "moe_intermediate_size": 4,
        "shared_expert_intermediate_size": 4,
    },
    "gpt_neox": {},
    "bert": {},
    "gte": {},  # one matrix of queries, keys and values becomes three
}


def _built(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **_SMALL, **_CONFIGS[kind])
    auto = transformers.AutoModelForMaskedLM if kind in ("bert", "gte") else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    return model


def _loaded(kind: str, folder: str) -> dict[str, Tensor]:
    model = _built(kind, seed=1)
    mics.shard(model, partition_size=2)
    mics.load(folder, model)
    return {name: value.clone() for name, value in mics.full_state_dict(model).items()}


@pytest.mark.parametrize("kind", _CONFIGS)
def test_what_transformers_load_is_loaded(kind: str, tmp_path: Path) -> None:
    """Experts that are saved one by one, a head of another name, old names of BERT, a matrix that is cut."""
    model = _built(kind, seed=0)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    if kind == "bert":
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            end = f"LayerNorm.{new}"
            stored = {name.replace(end, f"LayerNorm.{old}"): value for name, value in stored.items()}
        save_file(stored, file, metadata={"format": "pt"})
    expected = dict(model.named_parameters())
    assert not expected.keys() <= stored.keys(), "the folder has the model's own names"
    found = run_ranks(2, _loaded, kind, str(tmp_path))[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _refused(folder: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        _loaded("mixtral", folder)
    return str(raised.value)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """An expert of another width, and one that is missing."""
    _built("mixtral", seed=0).save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    expert = next(name for name in sorted(stored) if ".experts.7." in name and "w1" in name)
    stored[expert] = torch.zeros(5, 8)
    save_file(stored, file)
    message = run_ranks(2, _refused, str(tmp_path))[0]
    assert "gate_up_proj: expected parts of one format and width" in message and "(1, 5, 8)" in message
    del stored[expert]
    save_file(stored, file)
    message = run_ranks(2, _refused, str(tmp_path))[0]
    assert "gate_up_proj: expected parts of one format and width" in message and "(11, 12, 8)" in message
