"""``MicsTrainer`` trains, evaluates, saves and resumes as the plain ``Trainer`` does in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

import mics
from mics.engine import engine_of
from mics.integrations.transformers import MicsConfig, MicsTrainer
from tests.integrations.hugging_face import arguments, fresh_accelerate, gpt2, llama, tokens

GLOBAL_BATCH = 8


def _trainer(
    folder: str,
    partition_size: int | None,
    world_size: int,
    *,
    build: Callable[[], nn.Module] = gpt2,
    **options: Any,
) -> Any:
    """A trainer of eight samples per micro-step; with partition_size=None, the plain one."""
    fresh_accelerate()
    given = {name: options.pop(name) for name in ("compute_metrics", "callbacks") if name in options}
    options.setdefault("per_device_train_batch_size", GLOBAL_BATCH // world_size)
    options.setdefault("per_device_eval_batch_size", GLOBAL_BATCH // world_size)
    given |= {"train_dataset": tokens(96), "eval_dataset": tokens(19, seed=1)}
    args = arguments(folder, **options)
    if partition_size is None:
        return Trainer(build(), args, **given)
    return MicsTrainer(build(), args, mics_config=MicsConfig(partition_size=partition_size), **given)


def _history(trainer: Any) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def _train(
    folder: str, partition_size: int | None, world_size: int, **options: Any
) -> list[dict[str, float]]:
    resume = options.pop("resume", None)
    trainer = _trainer(folder, partition_size, world_size, **options)
    trainer.train(resume_from_checkpoint=resume)
    return _history(trainer)


def _plain(folder: str | Path, **options: Any) -> list[dict[str, float]]:
    return run_ranks(1, _train, str(folder), None, 1, launch="none", kwargs=options)[0]


def _assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "partition_size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))]
)
@pytest.mark.parametrize("accumulation", tiers.first([3, 1]))
def test_losses_norms_and_evaluation_of_one_process(
    partition_size: int, accumulation: int, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2}
    expected = _plain(tmp_path, **options)
    for found in run_ranks(4, _train, str(tmp_path), partition_size, 4, kwargs=options):
        _assert_same(found, expected)


def _accuracy(prediction: Any) -> dict[str, float]:
    guesses = (
        prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    )
    counted = prediction.label_ids != -100
    return {"accuracy": float((guesses.argmax(-1) == prediction.label_ids)[counted].mean())}


def _lora(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


_OPTIONS: dict[str, dict[str, Any]] = {
    "max_grad_norm": {"max_grad_norm": 0.0},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "gradient_checkpointing": {"gradient_checkpointing": True, "build": llama},
    "compute_metrics": {"compute_metrics": _accuracy, "eval_strategy": "steps", "eval_steps": 4},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "optim": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adagrad": {"optim": "adagrad"},  # has state when it is built
    "lr_scheduler_type": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    "average_tokens_across_devices": {
        "average_tokens_across_devices": True,
        "gradient_accumulation_steps": 2,
    },
    "lora": {"build": _lora},
    "dora": {"build": partial(_lora, use_dora=True)},
}


def _train_all(folder: str, partition_size: int | None, world_size: int) -> dict[str, list[dict[str, float]]]:
    return {
        name: _train(folder, partition_size, world_size, **{"max_steps": 2, **options})
        for name, options in _OPTIONS.items()
    }


@pytest.mark.full
def test_arguments_mean_what_they_mean_in_one_process(tmp_path: Path) -> None:
    """Each of them changes the losses, the norms or the metrics of some step."""
    (expected,) = run_ranks(1, _train_all, str(tmp_path), None, 1, launch="none")
    found = run_ranks(4, _train_all, str(tmp_path), 2, 4)[0]
    for name in _OPTIONS:
        _assert_same(found[name], expected[name])


_SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "save_total_limit": 2,
    "max_steps": 6,
    "lr_scheduler_type": "constant",  # a schedule would know how many steps there are
}


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.clone() for name, value in mics.full_state_dict(trainer.model, rank0_only=False).items()
    }


def _save_and_go_on(folder: str) -> tuple[list[dict[str, float]], float, dict[str, torch.Tensor]]:
    trainer = _trainer(folder, 2, 4, **_SAVING)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    best = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder + "/final")
    return _history(trainer), best, _whole(trainer)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return gpt2()


def _resume(
    folder: str, partition_size: int, world_size: int, build: Callable[[], nn.Module] = gpt2
) -> list[dict[str, float]]:
    options = {**_SAVING, "load_best_model_at_end": False, "save_strategy": "no", "build": build}
    trainer = _trainer(folder + "/again", partition_size, world_size, **options)
    trainer.train(resume_from_checkpoint=folder + "/checkpoint-4")
    return _history(trainer)


def test_checkpoints(tmp_path: Path) -> None:
    """A resumed run is the same to the bit, on other ranks to rounding; the folders load as plain models.

    The model that resumes may be on meta: it never has whole parameters.
    """
    folder = str(tmp_path)
    history, best, whole = run_ranks(4, _save_and_go_on, folder)[0]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert best == min(losses)

    resumed = run_ranks(4, _resume, folder, 2, 4)[0]
    assert resumed[:-1] == history[: len(resumed) - 1]
    assert run_ranks(4, _resume, folder, 2, 4, _on_meta)[0] == resumed
    assert len([entry for entry in resumed if "loss" in entry]) == 6
    _assert_same(run_ranks(2, _resume, folder, 1, 2)[0], resumed)

    plain = type(gpt2()).from_pretrained(folder + "/final")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, whole[name]), name


def _resume_plain_checkpoint(
    folder: str, partition_size: int | None, world_size: int
) -> list[dict[str, float]]:
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    if partition_size is None:
        return _train(folder, None, 1, **options)
    trainer = _trainer(folder + "/again", partition_size, world_size, lr_scheduler_type="constant")
    trainer.train(resume_from_checkpoint=folder + "/checkpoint-2")
    return _history(trainer)


def test_a_checkpoint_of_the_plain_trainer_resumes_sharded(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, _resume_plain_checkpoint, str(tmp_path), None, 1, launch="none")
    _assert_same(run_ranks(4, _resume_plain_checkpoint, str(tmp_path), 2, 4)[0], expected)


class _Notes(TrainerCallback):
    """Writes down what it is told, and looks at the whole model."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append(f"step {state.global_step}")
        self.weights.append(mics.full_state_dict(given["model"], rank0_only=False))

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("evaluated")

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("saved")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("end")


_EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def _with_callbacks(folder: str) -> list[str]:
    notes = _Notes()
    options = {**_EACH_STEP, "learning_rate": 0.0, "save_only_model": True, "load_best_model_at_end": True}
    options["callbacks"] = [notes, EarlyStoppingCallback(2)]
    trainer = _trainer(folder, 2, 4, max_steps=8, **options)
    trainer.train()
    assert all(torch.equal(notes.weights[0][name], value) for name, value in _whole(trainer).items())
    trainer.create_model_card()
    trainer.save_model()
    return notes.events


@pytest.mark.full
def test_callbacks(tmp_path: Path) -> None:
    """They are told what happens on every rank, may read the whole model, and may stop the run.

    Checkpoints of models only have no optimizer, and the folder has what a repository of the hub needs.
    """
    steps = [[f"step {number}", "evaluated", "saved"] for number in (1, 2, 3)]
    for events in run_ranks(4, _with_callbacks, str(tmp_path)):
        assert events == ["begin", *steps[0], *steps[1], *steps[2], "end"]
    assert not list(tmp_path.glob("checkpoint-*/mics")) and list(tmp_path.glob("checkpoint-*/*.safetensors"))
    assert {"README.md", "config.json", "generation_config.json"} < {path.name for path in tmp_path.iterdir()}
    type(gpt2()).from_pretrained(tmp_path)


def _lora_folder(folder: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    options = {"build": _lora, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    whole = _train(folder, 2, 4, **options)
    return whole, _train(folder + "/again", 2, 4, **options, resume=folder + "/checkpoint-2")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, by transformers
def test_lora_checkpoints(tmp_path: Path) -> None:
    """Adapters alone are in the folder, and load into a plain model; the run resumes."""
    from peft import PeftModel

    whole, resumed = run_ranks(4, _lora_folder, str(tmp_path))[0]
    assert resumed[:-1] == whole[:-1]
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()
    adapted = PeftModel.from_pretrained(gpt2(), str(tmp_path / "checkpoint-4"))
    assert any(value.abs().max() > 0 for name, value in adapted.state_dict().items() if "lora_B" in name)


def _losses(folder: str, options: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in _train(folder, 2, 4, **options) if "loss" in entry]


@pytest.mark.parametrize(
    ("options", "rel"),
    [
        ({"bf16": True}, 2e-2),
        pytest.param({"neftune_noise_alpha": 5.0}, 0.3, marks=pytest.mark.full),
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, 1e-5, marks=pytest.mark.full),
        pytest.param({"auto": "evaluate first"}, 1e-5, marks=pytest.mark.full),
    ],
)
def test_what_rounds_or_draws_differently(options: dict[str, Any], rel: float, tmp_path: Path) -> None:
    """Precision, noise on embeddings, compiled units; and a model that was evaluated before."""
    if options.pop("auto", None):
        losses = run_ranks(4, _evaluate_first, str(tmp_path))[0]
    else:
        losses = run_ranks(4, _losses, str(tmp_path), options)[0]
    plain = [entry["loss"] for entry in _plain(tmp_path) if "loss" in entry]
    assert losses == pytest.approx(plain, rel=rel)
    assert (losses == pytest.approx(plain, rel=1e-5)) is (rel <= 1e-5)


def _evaluate_first(folder: str) -> list[float]:
    trainer = _trainer(folder, 2, 4)
    trainer.evaluate()
    trainer.predict(tokens(5))
    trainer.train()
    return [entry["loss"] for entry in _history(trainer) if "loss" in entry]


def _wide() -> nn.Module:
    """With matrices that 8-bit optimizers quantise, and a few that they do not."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**gpt2().config.to_dict(), "n_embd": 32}))


def _narrow(folder: str, partition_size: int | None, world_size: int, optim: str) -> tuple[Any, int]:
    torch.compiler.set_stance("force_eager")  # torchao's step
    trainer = _trainer(folder, partition_size, world_size, build=_wide, optim=optim, max_steps=4)
    trainer.train()
    entries = [value for state in trainer.optimizer.state.values() for value in state.values()]
    codes = [getattr(value, "codes", value) for value in entries if isinstance(value, torch.Tensor)]
    return _history(trainer), sum(each.dtype is torch.uint8 for each in codes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "optim"), [("torchao", "adamw_torch_8bit"), ("bitsandbytes", "adamw_bnb_8bit")]
)
def test_eight_bit_optimizers(library: str, optim: str, tmp_path: Path) -> None:
    """Losses and norms of the plain trainer with the same optimizer."""
    pytest.importorskip(library)
    plain, num_plain = run_ranks(1, _narrow, str(tmp_path), None, 1, optim, launch="none")[0]
    found = run_ranks(4, _narrow, str(tmp_path), 2, 4, optim)
    assert num_plain and any(num for _, num in found)
    _assert_same(found[0][0], plain)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optim": "adafactor"}, "optim"),
        ({"optim": "adamw_torch_4bit"}, "optim"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"fp16_full_eval": True}, "fp16_full_eval"),
        ({"fsdp": True}, "fsdp"),
    ],
)
def test_refused(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    """At construction, by the argument's name."""
    with pytest.raises(mics.SettingsError, match=f"^{name}: expected"):
        _trainer(str(tmp_path), 1, 1, **options)


class _Watched(MicsTrainer):
    """Writes down what each micro-step knows of the step it belongs to."""

    def compute_loss(self, model: Any, *args: Any, **options: Any) -> Any:
        progress = engine_of(model).progress
        self.seen = [*getattr(self, "seen", []), (progress.more_to_come, progress.announced)]
        return super().compute_loss(model, *args, **options)


def _micro_steps(folder: str) -> list[tuple[bool, bool]]:
    fresh_accelerate()
    model = gpt2()
    args = arguments(folder, max_steps=2, gradient_accumulation_steps=3, per_device_train_batch_size=2)
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)  # built before the model is sharded
    config = MicsConfig(partition_size=2)
    trainer = _Watched(model, args, train_dataset=tokens(96), optimizers=optimizers, mics_config=config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    after = _whole(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return trainer.seen


def test_the_last_micro_step_is_announced(tmp_path: Path) -> None:
    """And an optimizer that was passed in trains the shards."""
    step = [(True, False), (True, False), (False, True)]
    assert run_ranks(2, _micro_steps, str(tmp_path)) == [step * 2] * 2
