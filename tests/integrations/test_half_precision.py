"""``MicsTrainer`` with ``fp16=True``: a scaled loss, and steps that overflow are left out on all ranks.

On a CPU accelerate takes no notice of ``fp16``: there the trainer gets a scaler from the test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import mics
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from mics.integrations.transformers import MicsConfig, MicsTrainer
from mics.integrations.weights import param_dtype
from tests.integrations.hugging_face import arguments, fresh_accelerate, gpt2, tokens

GLOBAL_BATCH = 8


class _Scaled(MicsTrainer):
    """On a CPU with what accelerate would make on a GPU."""

    init_scale = 2.0**8

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.use_cpu:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.accelerator.scaler._init_scale = self.init_scale


def _options(folder: str, world_size: int, use_cpu: bool, **options: Any) -> Any:
    return arguments(
        folder,
        use_cpu=use_cpu,
        per_device_train_batch_size=GLOBAL_BATCH // world_size,
        gradient_accumulation_steps=2,
        logging_nan_inf_filter=False,
        optim="adamw_torch",  # the fused one is called at an overflow too, and the schedule goes on
        **options,
    )


def _history(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def _plain(folder: str) -> list[tuple[float, float]]:
    fresh_accelerate()
    trainer = Trainer(gpt2(), _options(folder, 1, True), train_dataset=tokens(96))
    trainer.train()
    return _history(trainer)


def _train(folder: str, world_size: int, use_cpu: bool, init_scale: float) -> dict[str, Any]:
    fresh_accelerate()
    if not use_cpu:  # ranks share a GPU
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
    args, config = _options(folder, world_size, use_cpu, fp16=True), MicsConfig(partition_size=2)
    model = gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kind = type("Scaled", (_Scaled,), {"init_scale": init_scale})
    trainer = kind(model, args, train_dataset=tokens(96), mics_config=config)
    trainer.train()
    whole = mics.full_state_dict(trainer.model, rank0_only=False)
    return {
        "history": _history(trainer),
        "scale": trainer.accelerator.scaler.get_scale(),
        "dtype": param_dtype(trainer.model),
        "changed": any(not torch.equal(value.cpu(), before[name]) for name, value in whole.items()),
        "rate": trainer.lr_scheduler.last_epoch,
    }


def _check(folder: Path, world_size: int, use_cpu: bool, **launch: Any) -> None:
    (expected,) = run_ranks(1, _plain, str(folder), launch="none")
    for found in run_ranks(world_size, _train, str(folder), world_size, use_cpu, 2.0**8, **launch):
        assert found["scale"] == 2.0**8 and found["changed"] and found["rate"] == 4
        assert found["dtype"] is torch.float16
        for ours, theirs in zip(found["history"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2) and ours != pytest.approx(theirs, rel=1e-6)
    for found in run_ranks(world_size, _train, str(folder), world_size, use_cpu, 2.0**40, **launch):
        assert found["scale"] == 2.0**36 and not found["changed"] and found["rate"] == 0


def test_scaled_losses(tmp_path: Path) -> None:
    """Losses and norms near those of float32; at too large a scale nothing changes but the scale."""
    _check(tmp_path, 4, True)


@pytest.mark.gpu
def test_scaled_losses_under_nccl(tmp_path: Path) -> None:
    _check(tmp_path, 2, False, backend="nccl")
