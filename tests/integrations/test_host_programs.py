"""Programs in the style of the hosts' own examples, and those that hosts ship: with one import changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import mics
from tests import tiers
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from accelerate.utils import set_seed
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from mics.integrations.accelerate import Accelerator, MicsConfig
from tests.integrations.hugging_face import VOCAB, fresh_accelerate

pytestmark = pytest.mark.full  # what they use is in `test_accelerate.py` and `test_lightning.py`
WORLD, GLOBAL_BATCH = 4, 8


def accelerator_of(partition_size: int | None, **options: Any) -> Any:
    fresh_accelerate()
    if partition_size is None:
        return accelerate.Accelerator(cpu=True, **options)
    return Accelerator(cpu=True, mics_config=MicsConfig(partition_size=partition_size), **options)


# -- a text classifier --------------------------------------------------------------------------------


def sentences(num: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "input_ids": torch.randint(3, VOCAB, (4 + number % 5,), generator=generator),
            "labels": number % 3 % 2,
        }
        for number in range(num)
    ]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """To the longest of the batch: ranks have batches of different lengths."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def classify_text(partition_size: int | None, world_size: int, accumulation: int) -> dict[str, list[Any]]:
    """Epochs of training with a warm-up, each followed by an evaluation of all samples."""
    accelerator = accelerator_of(partition_size, gradient_accumulation_steps=accumulation)
    batch_size, samples = GLOBAL_BATCH // world_size, sentences(6 * GLOBAL_BATCH + 3)
    training = DataLoader(samples[: 6 * GLOBAL_BATCH], collate_fn=pad, batch_size=batch_size, drop_last=True)
    heldout = DataLoader(samples, collate_fn=pad, batch_size=batch_size)
    set_seed(42)
    model = bert().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2 * world_size, 12 * world_size)
    model, optimizer, training, heldout, scheduler = accelerator.prepare(
        model, optimizer, training, heldout, scheduler
    )
    found: dict[str, list[Any]] = {"losses": [], "rates": [], "guesses": [], "norms": []}
    for _ in range(2):
        model.train()
        for batch in training:
            with accelerator.accumulate(model):
                loss = model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    found["norms"].append(float(norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
            found["rates"].append(scheduler.get_last_lr()[0])
        model.eval()
        for batch in heldout:
            with torch.no_grad():
                logits = model(**batch).logits
            scores, labels = accelerator.gather_for_metrics((logits.softmax(-1), batch["labels"]))
            assert len(scores) == len(labels)
            found["guesses"] += scores.flatten().tolist()
    accelerator.end_training()
    return found


# -- an image classifier: most of it is frozen --------------------------------------------------------


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU()) for _ in range(3)
        )
        self.classifier = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = x + stage(x)
        return self.classifier(x.mean((2, 3)))


def classify_images(partition_size: int | None, world_size: int, accumulation: int) -> dict[str, list[Any]]:
    """Only the classifier is trained, by an optimizer that was given everything, on a one-cycle schedule."""
    accelerator = accelerator_of(
        partition_size, gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer=False
    )
    generator = torch.Generator().manual_seed(3)
    images = [
        {"image": torch.randn(3, 6, 6, generator=generator), "label": number % 4}
        for number in range(6 * GLOBAL_BATCH + 3)
    ]
    batch_size = GLOBAL_BATCH // world_size
    training = DataLoader(images[: 6 * GLOBAL_BATCH], batch_size=batch_size)
    heldout = DataLoader(images, batch_size=batch_size)
    set_seed(42)
    model = Vision().to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.classifier.parameters():
        param.requires_grad = True
    optimizer = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, epochs=2, steps_per_epoch=6)
    model, optimizer, training, heldout, scheduler = accelerator.prepare(
        model, optimizer, training, heldout, scheduler
    )
    mean = torch.tensor([0.1, 0.2, 0.3])[None, :, None, None].to(accelerator.device)
    found: dict[str, list[Any]] = {"losses": [], "rates": [], "guesses": [], "norms": []}
    for _ in range(2):
        model.train()
        for batch in training:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["image"] - mean), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
        model.eval()
        for batch in heldout:
            with torch.no_grad():
                outputs = model(batch["image"] - mean)
            scores, _ = accelerator.gather_for_metrics((outputs, batch["label"]))
            found["guesses"] += scores.flatten().tolist()
    return found


_SIZES = tiers.first([2, 1, 4], 1, 1)


@pytest.mark.parametrize("program", [classify_text, classify_images])
@pytest.mark.parametrize("accumulation", tiers.first([3, 1], 1, 1))
@pytest.mark.parametrize("partition_size", _SIZES)
def test_programs_of_accelerate(program: Callable[..., Any], partition_size: int, accumulation: int) -> None:
    """Losses, norms, learning rates and scores of the evaluation are those of one process."""
    (expected,) = run_ranks(1, program, None, 1, accumulation, launch="none")
    for found in run_ranks(WORLD, program, partition_size, WORLD, accumulation):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


# -- programs that accelerate ships -------------------------------------------------------------------


class WholeAtTheEnd(Accelerator):
    """Parameters of a sharded model read as pieces; who compares them takes a plain model."""

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        from accelerate.test_utils import RegressionModel

        plain = RegressionModel()
        plain.load_state_dict(mics.full_state_dict(model, rank0_only=False))
        return plain


@contextmanager
def import_changed(partition_size: int, *modules: Any) -> Iterator[None]:
    ours = partial(WholeAtTheEnd, cpu=True, mics_config=MicsConfig(partition_size=partition_size))
    before = [module.Accelerator for module in modules]
    for module in modules:
        module.Accelerator = ours
    try:
        yield
    finally:
        for module, kept in zip(modules, before, strict=True):
            module.Accelerator = kept


def run_shipped(partition_size: int) -> None:
    """They raise where a distributed run differs from plain training."""
    from accelerate.test_utils.scripts import test_script, test_sync

    with import_changed(partition_size, test_script, test_sync):
        for split_batches in (False, True):
            # Gradients of mics are those of the step so far whenever they are read: as after each batch.
            for check in (
                test_sync.test_gradient_accumulation,
                test_sync.test_gradient_accumulation_with_opt_and_scheduler,
            ):
                fresh_accelerate()
                check(split_batches=split_batches, sync_each_batch=True)
        fresh_accelerate()
        test_sync.test_dataloader_break()
        fresh_accelerate()
        test_script.Accelerator()
        # Its check of bfloat16 has a model that autocast leaves in float32, and mics does not.
        test_script.is_bf16_available = lambda: False
        test_script.training_check(use_seedable_sampler=True)


@pytest.mark.parametrize("partition_size", _SIZES)
def test_programs_that_accelerate_ships(partition_size: int) -> None:
    """Its own checks of training, gradient accumulation and schedules hold."""
    run_ranks(WORLD, run_shipped, partition_size)


# -- the language model that Lightning ships ----------------------------------------------------------


def language_model(partition_size: int | None, world_size: int, accumulation: int) -> list[float]:
    """A loop of Fabric as its docs write it: losses, and norms before clipping."""
    import lightning as L
    from lightning.pytorch.demos import Transformer

    from mics.integrations.lightning import MicsFabricStrategy

    ours = partition_size is not None
    strategy: Any = MicsFabricStrategy(partition_size=partition_size) if ours else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(42, verbose=False)
    model: Any = Transformer(vocab_size=VOCAB, ninp=8, nhead=2, nhid=12, nlayers=2, dropout=0.0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(VOCAB, (6,), generator=generator) for _ in range(6 * GLOBAL_BATCH)]
    samples = [(text[:-1], text[1:]) for text in texts]
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=GLOBAL_BATCH // world_size))
    found = []
    for number, (inputs, target) in enumerate(loader):
        others_follow = (number + 1) % accumulation != 0
        with fabric.no_backward_sync(model, enabled=others_follow):
            loss = F.nll_loss(model(inputs, target), target.view(-1))
            fabric.backward(loss / accumulation)
        if not others_follow:
            found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.25)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(fabric.all_reduce(loss.detach())))
    return found


@pytest.mark.parametrize("accumulation", tiers.first([3, 1], 1, 1))
@pytest.mark.parametrize("partition_size", _SIZES)
def test_the_language_model_of_lightning(partition_size: int, accumulation: int) -> None:
    """Lightning's model and Fabric's loop: one strategy given, losses and norms of one process."""
    pytest.importorskip("lightning")
    (expected,) = run_ranks(1, language_model, None, 1, accumulation, launch="none")
    for found in run_ranks(WORLD, language_model, partition_size, WORLD, accumulation):
        assert found == pytest.approx(expected, rel=1e-5)


# -- the Lightning module and data that Lightning ships ------------------------------------------------


def fit_shipped(
    folder: str, partition_size: int | None, world_size: int, accumulation: int, resume: bool = False
) -> list[float]:
    """Losses of steps, and norms before clipping, of `LightningTransformer` on a text in its folder.

    Batches are of one sample, as in its own loader, which Lightning would shuffle on several ranks alone: one
    process takes as many more of them for a step.
    """
    import lightning as L
    from lightning.pytorch.demos import LightningTransformer, WikiText2

    from mics.integrations.lightning import MicsStrategy

    found: list[float] = []
    micro_losses: list[float] = []

    class Notes(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            micro_losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = [param.grad for param in module.parameters() if param.grad is not None]
            # Of whole gradients in float32, torch's norm is off by 1.4e-5.
            found.append(float(nn.utils.get_total_norm(grads if ours else [grad.double() for grad in grads])))

    ours = partition_size is not None
    L.seed_everything(42, verbose=False)
    model: Any = LightningTransformer(vocab_size=VOCAB)
    for module in model.modules():  # each process would draw other numbers
        if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
            module.__dict__["p" if isinstance(module, nn.Dropout) else "dropout"] = 0.0
    num_batches = accumulation * WORLD // world_size
    with contextlib.chdir(folder):
        texts = WikiText2(download=False)
        sampler = DistributedSampler(texts, shuffle=False) if ours else None
        loader = DataLoader(texts, sampler=sampler)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=MicsStrategy(partition_size=partition_size) if ours else "auto",
            accumulate_grad_batches=num_batches,
            gradient_clip_val=0.5,
            max_epochs=2,
            callbacks=[Notes()],
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if not resume and ours:
            trainer.fit_loop.max_epochs = 1
            trainer.fit(model, loader)
            trainer.save_checkpoint("middle.ckpt")
            trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader, ckpt_path="middle.ckpt" if resume else None)
    means = [
        sum(micro_losses[first : first + num_batches])  # each divided by their number
        for first in range(0, len(micro_losses), num_batches)
    ]
    return means + found


@pytest.mark.parametrize("accumulation", tiers.first([3, 1], 1, 1))
def test_the_lightning_module_of_lightning(accumulation: int, tmp_path: Path) -> None:
    """Losses and norms of one process at all partition sizes; a run goes on with two ranks."""
    pytest.importorskip("lightning")
    (tmp_path / "data").mkdir()
    words = [f"w{number * number % (VOCAB - 1)}" for number in range(13 * 35)]  # for 12 samples
    (tmp_path / "data" / "wikitext-2.txt").write_text(" ".join(words))
    (expected,) = run_ranks(1, fit_shipped, str(tmp_path), None, 1, accumulation, launch="none")
    assert len(expected) == 2 * 6 // accumulation
    for partition_size in tiers.some([2, 1, 4], 1):
        for found in run_ranks(WORLD, fit_shipped, str(tmp_path), partition_size, WORLD, accumulation):
            assert found == pytest.approx(expected, rel=1e-5)
    losses, norms = expected[: len(expected) // 2], expected[len(expected) // 2 :]
    for found in run_ranks(2, fit_shipped, str(tmp_path), 1, 2, accumulation, True):
        assert found == pytest.approx(losses[len(losses) // 2 :] + norms[len(norms) // 2 :], rel=1e-5)
