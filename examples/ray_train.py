"""Train under Ray: workers of a TorchTrainer, one of which may die, go on from the last checkpoint of mics.

    python examples/ray_train.py --workers 4 --kill-at 6

--storage must be a folder that all machines see. The same command continues a run that was stopped, also with
another number of workers.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--storage", type=Path, default="runs/ray", help="of checkpoints and of Ray's own files")
parser.add_argument("--name", default="run")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--partition-size", type=int, default=2, help="workers with one copy of the parameters")
parser.add_argument("--batch-size", type=int, default=64, help="samples of all workers per step")
parser.add_argument("--micro-batch-size", type=int, default=4, help="samples of one worker per micro-step")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--kill-at", type=int, help="kill the last worker in this step, once")


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs. Ray has made the process group and chosen the device."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), get_device()
    torch.manual_seed(0)  # the same initial weights everywhere
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    mics.shard(model.to(device), partition_size=config["partition_size"])  # in the place of prepare_model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"step": 0, "losses": [], "norms": []}
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        state = mics.load(checkpoint.path, model, optimizer)

    for step in range(state["step"], config["steps"]):
        samples = torch.randn(config["batch_size"], 16, generator=torch.Generator().manual_seed(step))
        micro_batches = samples[rank::world].to(device).split(config["micro_batch_size"])
        total = torch.zeros((), device=device)
        for x in mics.microsteps(model, micro_batches):
            loss = nn.functional.mse_loss(model(x), x.sin()) * len(x) * world / config["batch_size"]
            loss.backward()
            total += loss.detach() / world
        norm = mics.clip_grad_norm_(model, 1.0)
        if step == config["kill_at"] and checkpoint is None and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        state["step"] = step + 1
        state["losses"] = [*state["losses"], total.item()]
        state["norms"] = [*state["norms"], norm.item()]
        # All workers write their parts of one folder, so Ray has nothing to upload or to merge.
        saving = mics.save(config["folder"], model, optimizer, state, step=step + 1)
        train.report(
            {**state, "workers": world, "resumed": checkpoint is not None},
            checkpoint=train.Checkpoint(str(saving.folder)),
            checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
        )


def fit(args: argparse.Namespace) -> dict[str, Any]:
    """Run workers until all steps are done, starting them again up to twice. What was reported last."""
    storage = args.storage.resolve()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={**vars(args), "folder": str(storage / args.name / "mics")},
        scaling_config=train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=train.RunConfig(
            name=args.name,
            storage_path=str(storage),
            failure_config=train.FailureConfig(max_failures=2),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None
    return metrics


if __name__ == "__main__":
    metrics = fit(parser.parse_args())
    for step, (loss, norm) in enumerate(zip(metrics["losses"], metrics["norms"], strict=True)):
        print(f"step {step} loss {loss:.6f} norm {norm:.6f}")
    print(f"on {metrics['workers']} workers,", "after a resume" if metrics["resumed"] else "without a resume")
