"""Programs that use Lightning, as ranks of the pool and as one process run them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, GLOBAL_BATCH, NUM_BATCHES = 8, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(self.norm(x)))


class Regression(L.LightningModule):
    """Computes with a parameter of its own in its steps, and keeps what one compares."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.build()
        self.seen: dict[str, list[float]] = {"loss": [], "norm": [], "val": [], "lr": []}

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss_of(self, batch: Any) -> Tensor:
        x, target = batch
        return F.mse_loss(self(x) * self.scale, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.seen["loss"].append(loss.item())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"].append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.seen["lr"].append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) * self.scale

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen["val"].append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OnMeta(Regression):
    """Is built in ``configure_model``, without memory."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            with torch.device("meta"):
                self.blocks = nn.ModuleList(Block() for _ in range(3))
                self.head = nn.Linear(DIM, 1)
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class TwoOptimizers(Regression):
    """Manual optimization: a head and a body that take turns, toggled, and accumulate over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss_of(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        turn = optimizers[(batch_idx // 2) % 2]
        with self.toggled_optimizer(turn):
            loss = self.loss_of(batch)
            self.seen["loss"].append(loss.item())
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.clip_gradients(turn, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                turn.step()
                turn.zero_grad()

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(self.blocks.parameters(), lr=1e-2)
        return [body, torch.optim.SGD(self.head.parameters(), lr=1e-1, momentum=0.9)]


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GLOBAL_BATCH * NUM_BATCHES, DIM, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def loader(world_size: int, seed: int = 1) -> DataLoader[Any]:
    """Lightning gives ranks a ``DistributedSampler``, which shuffles: one process needs the same order."""
    found = data(seed)
    sampler = DistributedSampler(found, 1, 0) if world_size == 1 else None
    return DataLoader(found, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)


def trainer(world_size: int, strategy: Any = "auto", **options: Any) -> L.Trainer:
    warnings.simplefilter("ignore")  # Lightning advises workers for data loaders, and the like
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    options = {"enable_model_summary": False} | options
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        enable_progress_bar=False,
        **options,
    )


def fit(
    world_size: int,
    settings: dict[str, Any] | None,
    options: dict[str, Any],
    kind: type[Regression] = Regression,
    *,
    ckpt_path: str | None = None,
    save_to: str | None = None,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """What was seen in a run with ``MicsStrategy(**settings)``, or without a strategy; and the metrics."""
    strategy: Any = "auto"
    if settings is not None:
        from mics.integrations.lightning import MicsStrategy

        strategy = MicsStrategy(**settings)
    model = kind()
    run = trainer(world_size, strategy, **options)
    run.fit(model, loader(world_size), loader(world_size, seed=2), ckpt_path=ckpt_path)
    if save_to is not None:
        run.save_checkpoint(save_to)
    return model.seen, {name: float(value) for name, value in run.callback_metrics.items()}


def mean_of(results: list[Any]) -> dict[str, list[float]]:
    """Losses of one process: the mean over ranks. What all ranks have alike is the same."""
    seen = [result[0] for result in results]
    return {
        name: [sum(values) / len(values) for values in zip(*(each[name] for each in seen), strict=True)]
        for name in seen[0]
    }


def files_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
