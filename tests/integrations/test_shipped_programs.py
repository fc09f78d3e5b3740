"""Programs that TRL installs, run as they are but for one import: those of one process, and resumed on two.

They are programs of ``transformers.Trainer`` too, which ships none itself: TRL's trainers derive from it.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests import tiers
from tests.programs import run_as_main
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integrations.changed_imports import PARTITION_SIZE
from tests.integrations.hugging_face import fresh_accelerate, gpt2, text, tokenizer

WORLD, GLOBAL_BATCH = 4, 8
_TIMES = ("runtime", "per_second", "preparation_time")


class Program(NamedTuple):
    """A script of TRL, and a row of its data."""

    name: str
    trainer: str
    auto_model: Any
    num_evaluated: int  # pairs of sentences that fill up a last batch count, as with DDP
    options: dict[str, str]

    def row(self, number: int) -> dict[str, str]:
        length = 3 + number % 5
        if self.name == "sft":
            return {"text": text(number, length)}
        start, good, bad = text(number, 2), text(number + 1, length), text(number + 2, 4)
        if self.name == "dpo":
            return {"prompt": start, "chosen": " " + good, "rejected": " " + bad}
        return {"chosen": f"{start} {good}", "rejected": f"{start} {bad}"}

    def path(self) -> Path:
        spec = find_spec("trl.scripts")
        assert spec is not None and spec.submodule_search_locations is not None
        return Path(spec.submodule_search_locations[0]) / f"{self.name}.py"


SFT = Program("sft", "SFTTrainer", AutoModelForCausalLM, 19, {})
DPO = Program("dpo", "DPOTrainer", AutoModelForCausalLM, 16, {})
# Whatever is added to all rewards has a gradient of rounding, which Adam makes steps of.
_SGD = {"optim": "sgd", "optim_args": "momentum=0.9"}
REWARD = Program("reward", "RewardTrainer", AutoModelForSequenceClassification, 16, _SGD)


def _prepare(program: Program, folder: Path) -> None:
    """A model, data, and the program with its import changed."""
    model = gpt2()
    if program is REWARD:
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(model.config)
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for split, num in (("train", 96), ("test", program.num_evaluated)):
        rows = [json.dumps(program.row(number)) for number in range(num)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(rows))
    source = program.path().read_text()
    (folder / "plain.py").write_text(source)
    changed = source.replace(
        f"from trl import {program.trainer}, ",
        f"from tests.integrations.changed_imports import {program.trainer}; from trl import ",
    )
    assert changed != source
    (folder / "changed.py").write_text(changed)


def _run(words: list[str], folder: str, port: int, partition_size: int | None) -> str:
    fresh_accelerate()
    os.environ[PARTITION_SIZE] = str(partition_size)
    os.environ["HF_DATASETS_CACHE"] = folder
    return run_as_main(words, folder, port)


def _train(
    program: Program,
    folder: Path,
    output: str,
    world_size: int,
    partition_size: int | None,
    accumulation: int,
    **options: Any,
) -> list[dict[str, float]]:
    """What the run logged: losses, norms, evaluations and all that the trainer measures."""
    given: dict[str, Any] = {
        "model_name_or_path": "model",
        "dataset_name": "data",
        "output_dir": output,
        "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "per_device_eval_batch_size": GLOBAL_BATCH // world_size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **program.options,
        **options,
    }
    script = "plain.py" if partition_size is None else "changed.py"
    words = [str(folder / script)]
    words += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = "none" if partition_size is None else "variables"
    run_ranks(world_size, _run, words, str(folder), store.port, partition_size, launch=launch)
    state = json.loads((folder / output / "checkpoint-4" / "trainer_state.json").read_text())
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in state["log_history"]
    ]


def _assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


_CASES = tiers.first(
    [
        (SFT, 3, (2,)),
        (DPO, 3, (4,)),
        (REWARD, 3, (1,)),
        (SFT, 3, (1, 4)),
        (SFT, 1, (2, 1, 4)),
        *((program, 3, (2, 1, 4)) for program in (DPO, REWARD)),
        *((program, 1, (2, 1, 4)) for program in (DPO, REWARD)),
    ],
    0,
    3,
)


@pytest.mark.parametrize(("program", "accumulation", "partition_sizes"), _CASES)
def test_one_import_changed(
    program: Program, accumulation: int, partition_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """What the trainer logs is that of one process, also after a resume on two ranks; the export loads."""
    _prepare(program, tmp_path)
    expected = _train(program, tmp_path, "expected", 1, None, accumulation)
    assert {"loss", "grad_norm"} < expected[0].keys() and "eval_loss" in expected[2]
    for partition_size in partition_sizes:
        output = f"found-{partition_size}"
        found = _train(program, tmp_path, output, WORLD, partition_size, accumulation)
        _assert_same(found, expected)
    ours, theirs = (program.auto_model.from_pretrained(tmp_path / name) for name in (output, "expected"))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-4)

    middle = str(tmp_path / output / "checkpoint-2")
    resumed = _train(program, tmp_path, "resumed", 2, 2, accumulation, resume_from_checkpoint=middle)
    for entry in (*resumed, *found):
        for name in ("num_tokens", "eval_num_tokens"):  # TRL counts from zero
            entry.pop(name, None)
    _assert_same(resumed, found)
