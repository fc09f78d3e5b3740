"""Programs that use Lightning, as ranks of the pool and as one process run them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mics.engine import engine_of, is_sharded

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
        self.announced: list[tuple[bool, bool]] = []  # in each micro-step: others follow, it is the last
        self.dtypes: set[torch.dtype] = set()

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss_of(self, batch: Any) -> Tensor:
        x, target = batch
        self.dtypes.add(self.head.weight.dtype)
        return F.mse_loss((self(x) * self.scale).to(target), target)  # torch 2.11: of one dtype

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.seen["loss"].append(loss.item())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if is_sharded(self):
            progress = engine_of(self).progress
            self.announced.append((progress.more_to_come, progress.announced))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        self.seen["norm"].append(float(nn.utils.get_total_norm(grads)))
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
                self.blocks = nn.ModuleList(Block() for _ in range(2))
                self.head = nn.Linear(DIM, 1)
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class WithSGD(Regression):
    """Clipping changes its steps in proportion. Lightning's own function tells the norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"].append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class TwoOptimizers(Regression):
    """Manual optimization: a head and a body that take turns, toggled, and accumulate over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

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
        return [body, torch.optim.SGD([self.scale, *self.head.parameters()], lr=1e-1, momentum=0.9)]


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GLOBAL_BATCH * NUM_BATCHES, DIM, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def shuffled(world_size: int) -> DataLoader[Any]:
    """For training Lightning gives ranks a ``DistributedSampler``: one process needs the same order."""
    found = data()
    sampler = DistributedSampler(found, 1, 0) if world_size == 1 else None
    return DataLoader(found, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)


def in_order(world_size: int, seed: int = 2) -> DataLoader[Any]:
    return DataLoader(data(seed), batch_size=GLOBAL_BATCH // world_size)


def trainer(world_size: int, strategy: Any = "auto", **options: Any) -> L.Trainer:
    warnings.simplefilter("ignore")  # Lightning advises workers for data loaders, and the like
    defaults = {"max_epochs": 1, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    options = defaults | quiet | options
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        enable_progress_bar=False,
        **options,
    )


def strategy_of(settings: dict[str, Any] | None) -> Any:
    from mics.integrations.lightning import MicsStrategy

    return "auto" if settings is None else MicsStrategy(**settings)


def fit(
    world_size: int,
    settings: dict[str, Any] | None,
    options: dict[str, Any],
    kind: type[Regression] = Regression,
    *,
    ckpt_path: str | None = None,
    save_to: str | None = None,
) -> tuple[dict[str, list[float]], list[tuple[bool, bool]], set[torch.dtype]]:
    """What was seen in a run with ``MicsStrategy(**settings)``, or without a strategy."""
    model = kind()
    run = trainer(world_size, strategy_of(settings), **options)
    run.fit(model, shuffled(world_size), in_order(world_size), ckpt_path=ckpt_path)
    if save_to is not None:
        run.save_checkpoint(save_to)
    return model.seen, model.announced, model.dtypes


def fit_in_float16(world_size: int, settings: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """Lightning takes bfloat16 instead on a CPU, unless it is given the plugin."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    return fit(world_size, settings, options | {"plugins": [plugin]})


def use_it_all(world_size: int, settings: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Checkpoints of a callback, a stop in time, then validate, test and predict, also from a file."""
    model = Regression()
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}")
    stop = EarlyStopping("val_loss", min_delta=100.0, patience=1)
    options: dict[str, Any] = {"callbacks": [keep, stop], "enable_checkpointing": True, "max_epochs": 4}
    run = trainer(world_size, strategy_of(settings), enable_model_summary=True, **options)
    run.fit(model, shuffled(world_size), in_order(world_size))
    test = in_order(world_size, seed=3)
    predicted = torch.cat(run.predict(model, test))
    [other] = run.test(Regression(), test, ckpt_path=keep.best_model_path, verbose=False)
    return {
        "epochs": run.current_epoch,
        "val": run.validate(model, in_order(world_size), verbose=False)[0]["val_loss"],
        "test": run.test(model, test, verbose=False)[0]["test_loss"],
        "test of best": other["test_loss"],
        "predicted": predicted,
        "kept": files_in(folder),
    }


class Net(nn.Module):
    """Has a method beside ``forward`` that computes with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss_on(self, x: Tensor) -> Tensor:
        return F.mse_loss(self(x) * self.scale, x.sin())


def use_fabric(
    world_size: int, settings: dict[str, Any] | None, accumulation: int, path: str | None = None
) -> list[float]:
    """Losses and norms: four steps, and two more with another model that the checkpoint was loaded into."""
    from mics.integrations.lightning import MicsFabricStrategy

    warnings.simplefilter("ignore")
    strategy: Any = "auto" if settings is None else MicsFabricStrategy(**settings)
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    batches = iter(fabric.setup_dataloaders(in_order(world_size)))
    found = _fabric_steps(fabric, model, optimizer, batches, 4 // accumulation, accumulation)
    if path is not None:
        state = {"model": model, "optimizer": optimizer, "step": 4}
        fabric.save(path, state)
        with fabric.init_module(empty_init=True):
            model = Net()
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(path, state) == {} and state["step"] == 4
    assert fabric.broadcast(fabric.global_rank, src=world_size - 1) == world_size - 1
    fabric.barrier()
    more = (2 // accumulation, accumulation)
    return found + _fabric_steps(fabric, model, optimizer, batches, *more, announces_right=False)


def _fabric_steps(
    fabric: L.Fabric,
    model: Any,
    optimizer: Any,
    batches: Any,
    num_steps: int,
    accumulation: int,
    *,
    announces_right: bool = True,
) -> list[float]:
    """Steps on all batches. Who announces every micro-step as the last one has the same losses."""
    model.mark_forward_method("loss_on")
    found = []
    for step in range(num_steps):
        for number in range(accumulation):
            others_follow = announces_right and number + 1 < accumulation
            with fabric.no_backward_sync(model, enabled=others_follow):
                loss = model.loss_on(next(batches)[0])
                fabric.backward(loss / accumulation)
            found.append(float(fabric.all_reduce(loss.detach())))
        if step % 2:
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        else:
            found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def fit_under_torchrun(port: int, folder: str) -> Any:
    """The Trainer makes the process group itself."""
    import torch.distributed as dist

    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["MASTER_PORT"] = str(port)
    try:
        assert not dist.is_initialized()
        found = fit(2, {"partition_size": 1}, {"max_epochs": 1}, save_to=f"{folder}/model.ckpt")
        assert dist.get_backend() == "gloo"
        return found
    finally:
        dist.destroy_process_group()


def mean_of(results: list[Any]) -> dict[str, list[float]]:
    """Losses of one process: the mean over ranks. What all ranks have alike is the same."""
    seen = [result[0] for result in results]
    return {
        name: [sum(values) / len(values) for values in zip(*(each[name] for each in seen), strict=True)]
        for name in seen[0]
    }


def files_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
