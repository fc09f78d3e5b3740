"""Programs that accelerate installs, run as they are but for one import; data and metric are local ones.

The program that measures performance has no gradient accumulation: it expects a learning rate that only one
batch per step has. ``test_host_programs.py`` runs accelerate's own checks of accumulation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests import tiers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("trl")  # what programs import in tests is in one file

from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from tests.integrations.changed_imports import PARTITION_SIZE
from tests.integrations.hugging_face import VOCAB, fresh_accelerate, text, tokenizer

WORLD = 4
_SHIPPED = "accelerate.test_utils.scripts.external_deps"


class _Accuracy:
    """What the programs use of ``evaluate``."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right), "num": len(right)}


def _pairs(*_: Any) -> Any:
    """In place of the data set that the programs download."""
    from datasets import Dataset, DatasetDict

    rows = [
        {
            "sentence1": text(number, 3 + number % 4),
            "sentence2": text(number // 2 * 2, 3),
            "label": number % 2,
            "idx": number,
        }
        for number in range(64)
    ]
    return DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows[:37]))


def _model(folder: Path) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCAB, **sizes, **rates))
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


def _run(name: str, folder: str, port: int, partition_size: int | None, batch_size: int, given: Any) -> None:
    """On a rank: what the program calls when it is started, with a batch size of our own."""
    import datasets

    fresh_accelerate()
    os.environ.update({PARTITION_SIZE: str(partition_size), "MASTER_PORT": str(port)})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    spec = importlib.util.find_spec(_SHIPPED)
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / f"{name}.py"
    ours = "Accelerator" if partition_size is not None else "Watched as Accelerator"
    before = "from accelerate import Accelerator, DistributedType"
    after = f"from tests.integrations.changed_imports import {ours}; from accelerate import DistributedType"
    source = path.read_text()
    assert before in source
    metrics: Any = ModuleType("evaluate")
    metrics.load = lambda *_: _Accuracy()
    program: dict[str, Any] = {"__name__": name}
    with (
        mock.patch.dict(sys.modules, {"evaluate": metrics}),
        mock.patch.object(datasets, "load_dataset", _pairs),
        chdir(folder),
    ):
        exec(compile(source.replace(before, after), path, "exec"), program)
        config = {"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": batch_size}
        try:
            program["training_function"](config, argparse.Namespace(**given))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _start(name: str, folder: Path, world_size: int, partition_size: int | None, **given: Any) -> None:
    folder.mkdir(exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    batch_size = given.pop("batch_size", 16 // world_size)
    given["output_dir"] = str(folder)
    launch = "none" if partition_size is None else "variables"
    args = (name, str(folder), store.port, partition_size, batch_size, given)
    run_ranks(world_size, _run, *args, launch=launch)


@pytest.mark.long
@pytest.mark.full
def test_performance(tmp_path: Path) -> None:
    """Losses, accuracies and the saved model are those of one process."""
    options = {"model_name_or_path": _model(tmp_path), "performance_lower_bound": 0.5, "add_pad_token": False}
    options |= {"tp_plan": None, "tp_size": None, "model_dtype": None}
    _start("test_performance", tmp_path / "plain", 1, None, **options)
    expected, results = (
        json.loads((tmp_path / "plain" / name).read_text()) for name in ("losses.json", "all_results.json")
    )
    assert len(expected) == 8 and len(results) == 2
    for partition_size in tiers.some([1, 2, 4], 2):
        folder = tmp_path / f"sharded-{partition_size}"
        _start("test_performance", folder, WORLD, partition_size, **options)
        assert json.loads((folder / "losses.json").read_text()) == pytest.approx(expected, rel=1e-5)
        assert json.loads((folder / "all_results.json").read_text()) == results
        whole = load_file(folder / "model.safetensors")
        for name, value in load_file(tmp_path / "plain" / "model.safetensors").items():
            torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-4)
        (folder / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
        AutoModelForSequenceClassification.from_pretrained(folder)


@pytest.mark.full
def test_checkpointing(tmp_path: Path) -> None:
    """The program itself raises where accuracy or learning rates after a resume are others: on two ranks."""
    options: dict[str, Any] = {"model_name_or_path": _model(tmp_path), "batch_size": 4}
    given = {"resume_from_checkpoint": None, "partial_train_epoch": None}
    _start("test_checkpointing", tmp_path / "run", WORLD, 2, **options, **given)
    folder = str(tmp_path / "run" / "epoch_0")
    given = {"resume_from_checkpoint": folder, "partial_train_epoch": None}
    _start("test_checkpointing", tmp_path / "run", 2, 1, **options, **given)
    state = tmp_path / "run" / "state_0.json"
    kept = json.loads(state.read_text())
    state.write_text(json.dumps({**kept, "accuracy": kept["accuracy"] / 2}))  # what it would raise at
    with pytest.raises(AssertionError, match="Accuracy mismatch"):
        _start("test_checkpointing", tmp_path / "run", 2, 1, **options, **given)
