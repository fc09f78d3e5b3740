"""A script of Accelerate trains sharded as it trains plain in one process, with another import alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mics
from tests import tiers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from mics.engine import engine_of
from mics.integrations.accelerate import Accelerator, MicsConfig
from tests.integrations.hugging_face import fresh_accelerate, gpt2, llama, tokens

GLOBAL_BATCH = 8


def _accelerator(partition_size: int | None, accumulation: int, **options: Any) -> Any:
    fresh_accelerate()
    options |= {"gradient_accumulation_steps": accumulation, "cpu": True}
    if partition_size is None:
        return accelerate.Accelerator(**options)
    return Accelerator(**options, mics_config=MicsConfig(partition_size=partition_size))


def _script(
    partition_size: int | None,
    world_size: int,
    accumulation: int,
    save: str | None = None,
    load: str | None = None,
    clip: float = 0.5,
) -> dict[str, list[Any]]:
    """What a user writes: the same lines with either accelerator."""
    accelerator = _accelerator(partition_size, accumulation)
    model = llama()
    # All samples count as many tokens: the loop takes means of means.
    samples = [{**sample, "labels": sample["input_ids"]} for sample in tokens(13 * GLOBAL_BATCH)]
    loader = torch.utils.data.DataLoader(samples, batch_size=GLOBAL_BATCH // world_size)
    heldout = torch.utils.data.DataLoader(samples[:11], batch_size=GLOBAL_BATCH // world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * world_size, gamma=0.5)
    optimizer, loader, heldout, model, scheduler = accelerator.prepare(
        optimizer, loader, heldout, model, scheduler
    )
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "rates": [], "guesses": []}
    first = 0
    if load is not None:
        accelerator.load_state(load)
        first = 6
        loader = accelerator.skip_first_batches(loader, first)
    for number, batch in enumerate(loader, first):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
        found["rates"].append(scheduler.get_last_lr()[0])
        if save is not None and number + 1 == 6:
            accelerator.save_state(save)
    model.eval()
    for batch in heldout:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        found["guesses"] += accelerator.gather_for_metrics(logits.argmax(-1)).tolist()
    if save is not None:
        _save_whole(accelerator, model, save)
    return found


def _save_whole(accelerator: Any, model: Any, folder: str) -> None:
    state = accelerator.get_state_dict(model)
    assert bool(state) is accelerator.is_main_process
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder + "/pretrained", is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.save_model(model, folder + "/weights")
    accelerator.wait_for_everyone()


def _assert_same(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert found["guesses"] == expected["guesses"]
    for name in ("losses", "norms", "rates"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(
    "partition_size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))]
)
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_script_trains_as_in_one_process(partition_size: int, accumulation: int) -> None:
    """Losses, norms, learning rates and predictions; thirteen batches, so that the last step is shorter."""
    (expected,) = run_ranks(1, _script, None, 1, accumulation, launch="none")
    for found in run_ranks(4, _script, partition_size, 4, accumulation):
        _assert_same(found, expected)


def test_state_loads_on_other_ranks(tmp_path: Path) -> None:
    """To the bit on as many ranks, to rounding on two; whole weights load into plain models."""
    folder = str(tmp_path)
    kwargs = {"save": folder}
    whole = run_ranks(4, _script, 2, 4, 3, kwargs=kwargs)[0]
    rest = {name: values[6 if name in ("losses", "rates") else 2 :] for name, values in whole.items()}
    rest["guesses"] = whole["guesses"]
    assert run_ranks(4, _script, 2, 4, 3, kwargs={"load": folder})[0] == rest
    on_two = run_ranks(2, _script, 1, 2, 3, kwargs={"load": folder})[0]
    assert on_two["losses"] == pytest.approx(rest["losses"], rel=1e-5)
    assert on_two["norms"] == pytest.approx(rest["norms"], rel=1e-5)

    plain, initial = type(llama()).from_pretrained(folder + "/pretrained").state_dict(), llama().state_dict()
    weights = load_file(folder + "/weights/model.safetensors")
    assert weights.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(value, weights[name])
        assert not torch.equal(value, initial[name]), name


def _example(kind: str, partition_size: int | None, world_size: int) -> list[float]:
    """The calls of Accelerate's cv_example and nlp_example, in their order, with small models and data.

    "nlp" accumulates by itself, with the schedule built after ``prepare``, and evaluates with gradients on.
    "cv" trains the head of a frozen model with an optimizer for all of it, and schedules in one cycle.
    """
    accelerator = _accelerator(partition_size, 1)
    accelerate.utils.set_seed(42)
    local = GLOBAL_BATCH // world_size
    generator = torch.Generator().manual_seed(0)
    if kind == "nlp":
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: Any = BertForSequenceClassification(BertConfig(vocab_size=31, **sizes, **rates))
        inputs = torch.randint(3, 31, (60, 6), generator=generator)
    else:
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(144, 2)).to(accelerator.device)
        model[:-1].requires_grad_(requires_grad=False)
        inputs = torch.randn(60, 3, 8, 8, generator=generator)
    samples = [{"x": x, "label": number % 2} for number, x in enumerate(inputs)]
    # Not shuffled: Accelerate draws another order on ranks than in one process.
    loader = torch.utils.data.DataLoader(samples[:48], batch_size=local)
    heldout = torch.utils.data.DataLoader(samples[48:], batch_size=local)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    # Accelerate steps it once for each rank: a rise of three steps in a cycle of twelve.
    total = 12 * world_size + 1
    peak = (3 * world_size + 1) / total
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total, pct_start=peak)
    model, optimizer, loader, heldout = accelerator.prepare(model, optimizer, loader, heldout)
    if kind == "nlp":
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    else:
        scheduler = accelerator.prepare(cycle)
    found = []
    for _ in range(2):
        model.train()
        for step, batch in enumerate(loader):
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            output = model(batch["x"])
            loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), batch["label"])
            accelerator.backward(loss / 2)
            if kind == "cv" or step % 2:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
        model.eval()
        with torch.set_grad_enabled(kind == "nlp"):
            for batch in heldout:
                output = model(batch["x"])
                output = accelerator.gather_for_metrics(getattr(output, "logits", output))
                found += output.detach().flatten().tolist()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("kind", tiers.first(["cv", "nlp"]))
def test_examples_of_accelerate(kind: str) -> None:
    """Losses and all logits of the evaluation, whose last batch is not full."""
    (expected,) = run_ranks(1, _example, kind, None, 1, launch="none")
    assert len(expected) == 2 * (6 + 2 * 12)
    for found in run_ranks(4, _example, kind, 2, 4):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def _two_models(
    partition_size: int | None, world_size: int, save: str | None = None, load: str | None = None
) -> list[float]:
    """Losses of two models that one optimizer trains: steps of five batches, a checkpoint after the sixth."""
    accelerator = _accelerator(partition_size, 5)
    first, second = llama(), gpt2()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=world_size, gamma=0.5)
    loader = torch.utils.data.DataLoader(tokens(11 * GLOBAL_BATCH), batch_size=GLOBAL_BATCH // world_size)
    first, second, optimizer, loader, scheduler = accelerator.prepare(
        first, second, optimizer, loader, scheduler
    )
    losses = []
    if load is not None:
        accelerator.load_state(load)
        loader = accelerator.skip_first_batches(loader, 6)
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(first, second):
            loss = torch.nn.functional.mse_loss(
                first(input_ids=batch["input_ids"]).logits, second(input_ids=batch["input_ids"]).logits + 1
            )
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if save is not None and number == 6:
            accelerator.save_state(save)
    return losses


@pytest.mark.full
def test_an_optimizer_for_two_models_loads_on_more_ranks(tmp_path: Path) -> None:
    """Saved between optimizer steps: the new ranks count micro-steps as the others do."""
    (expected,) = run_ranks(1, _two_models, None, 1, launch="none", kwargs={"save": str(tmp_path / "plain")})
    whole = run_ranks(2, _two_models, 1, 2, kwargs={"save": str(tmp_path / "sharded")})[0]
    assert whole == pytest.approx(expected, rel=1e-5)
    (expected,) = run_ranks(1, _two_models, None, 1, launch="none", kwargs={"load": str(tmp_path / "plain")})
    for found in run_ranks(4, _two_models, 2, 4, kwargs={"load": str(tmp_path / "sharded")}):
        assert found == pytest.approx(expected, rel=1e-5)


def _separately(order: str) -> list[float]:
    """Prepare model and optimizer one after the other."""
    accelerator = _accelerator(2, 1)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    losses = []
    for _ in range(3):
        loss = model(**{name: value[None] for name, value in tokens(1)[0].items()}).loss
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_model_and_optimizer_prepared_apart() -> None:
    first, second = (run_ranks(2, _separately, order)[0] for order in ("optimizer first", "model first"))
    assert first == second and first[2] < first[0]


def _announced(by_hand: bool) -> list[tuple[bool, bool]]:
    """``by_hand``: as programs do that know DDP."""
    accelerator = _accelerator(2, 2)
    model, optimizer = accelerator.prepare(model := gpt2(), torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for number in range(4):
        is_last = number % 2 == 1
        with (nullcontext if is_last else model.no_sync)() if by_hand else accelerator.accumulate(model):
            progress = engine_of(model).progress
            found.append((progress.more_to_come, progress.announced))
            accelerator.backward(model(**{k: v[None] for k, v in tokens(1)[0].items()}).loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    assert (progress.more_to_come, progress.announced) == (False, False)
    return found


def test_the_last_micro_step_is_announced() -> None:
    assert run_ranks(2, _announced, False) == [[(True, False), (False, True)] * 2] * 2
    assert run_ranks(2, _announced, True) == [[(True, False), (False, False)] * 2] * 2


def test_refused() -> None:
    """By name, and before anything is changed."""
    from accelerate.utils import (
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )

    for name, value in {
        "fsdp_plugin": FullyShardedDataParallelPlugin(),
        "parallelism_config": ParallelismConfig(),
    }.items():
        with pytest.raises(mics.SettingsError, match=f"^{name}: expected None"):
            Accelerator(**{name: value})
    compressed = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    for name, options in {
        "even_batches": {"dataloader_config": DataLoaderConfiguration(even_batches=False)},
        "comm_hook": {"kwargs_handlers": [compressed]},
    }.items():
        fresh_accelerate()
        with pytest.raises(mics.SettingsError, match=f"^{name}: expected"):
            Accelerator(cpu=True, **options)
    with pytest.raises(mics.SettingsError, match=r"^mics_config: expected a MicsConfig"):
        Accelerator(cpu=True, mics_config={"partition_size": 2})
    with pytest.raises(mics.SettingsError, match=r"^partition_size: expected a divisor of the world size 1"):
        Accelerator(cpu=True, mics_config=MicsConfig(partition_size=2))
    for name, value in {"prefetch": -1, "units": "Block", "low_memory": "no", "compression": "int8"}.items():
        with pytest.raises(mics.SettingsError, match=f"^{name}: expected"):
            MicsConfig(**{name: value})
    accelerator = _accelerator(1, 1)
    for call in (
        accelerator.register_save_state_pre_hook,
        accelerator.register_load_state_pre_hook,
        accelerator.join_uneven_inputs,
    ):
        with pytest.raises(mics.SettingsError, match=f"^{call.__name__}: expected"):
            call(print)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**{name: value[None] for name, value in tokens(1)[0].items()}).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(mics.SettingsError, match=r"^SGD: expected an optimizer without state"):
        accelerator.prepare(model, optimizer)
    model, optimizer = accelerator.prepare(model := gpt2(), torch.optim.SGD(model.parameters(), lr=0.1))
    for no_sync in (model.no_sync, partial(accelerator.no_sync, model)):
        with pytest.raises(mics.SettingsError, match=r"^no_sync: expected SGD.* LocalSGD"), no_sync():
            optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_optimizers_are_checked_when_they_are_prepared(optimizer_first: bool) -> None:
    """Whatever comes first: Adafactor needs whole matrices, and Adagrad has state when it is built."""
    for kind, problem in ((torch.optim.Adagrad, None), (torch.optim.Adafactor, "whole matri")):
        accelerator, model = _accelerator(1, 1), gpt2()
        given = model, kind(model.parameters(), lr=0.1)
        with nullcontext() if problem is None else pytest.raises(mics.SettingsError, match=problem):
            accelerator.prepare(*(reversed(given) if optimizer_first else given))


def test_the_config_has_what_shard_takes() -> None:
    from dataclasses import fields
    from inspect import signature

    taken = {p.name: p.default for p in signature(mics.shard).parameters.values() if p.name != "model"}
    assert {field.name: field.default for field in fields(MicsConfig)} == taken


def _scaled(init_scale: float) -> tuple[list[float], list[bool], float]:
    """What accelerate sets up for float16 on a GPU, on the CPU: autocast and a gradient scaler."""
    accelerator = _accelerator(2, 1, mixed_precision="fp16")
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=init_scale)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, skipped = [], []
    for sample in tokens(6)[accelerator.process_index :: accelerator.num_processes]:
        loss = model(**{name: value[None] for name, value in sample.items()}).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert next(iter(engine_of(model).units)).whole.params[0].dtype == torch.float16
    return losses, skipped, accelerator.scaler.get_scale()


def test_float16_with_a_scaler() -> None:
    """The scale does not change the losses; all ranks leave out a step that overflows on some."""
    small, large = run_ranks(2, _scaled, 2.0**4), run_ranks(2, _scaled, 2.0**10)
    assert small[0] == small[1]
    assert small[0][0] == pytest.approx(large[0][0], rel=1e-2)
    assert small[0][1] == [False] * 3
    overflowing = run_ranks(2, _scaled, 2.0**40)
    assert overflowing[0] == overflowing[1]
    assert overflowing[0][1] == [True] * 3 and overflowing[0][2] == 2.0**37
