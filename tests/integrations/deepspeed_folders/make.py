"""Writes the folders beside it, with DeepSpeed itself. Not run by the tests: they read what it wrote.

    pip install torch deepspeed==0.19.8
    python -m tests.integrations.deepspeed_folders.make zero3 2
    pip install deepspeed==0.16.9        # which still has MiCS
    python -m tests.integrations.deepspeed_folders.make mics 4

Each folder has a checkpoint as DeepSpeed saves it after two steps, and ``expected.safetensors``: the weights
that DeepSpeed's ``zero_to_fp32`` makes of it, Adam's moments as DeepSpeed gathers them, and the losses of two
more steps.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
NUM_STEPS = 2
PORT = 29631


class Tiny(nn.Module):
    """Tied weights, a frozen parameter, a buffer, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, :-1]) * self.scale + self.shift
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (2, 4), generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if _num_dims(param) > 1]
    others = [param for param in trained if _num_dims(param) <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def config(kind: str) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-4, "torch_adam": True},
        },
        "zero_optimization": zero if kind == "zero3" else {**zero, "mics_shard_size": 2},
    }


class _Done:
    def wait(self) -> None:
        pass


def _gather_one_by_one(outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool) -> _Done:
    """MiCS joins its all-gathers into one, which gloo cannot."""
    for output, own in zip(outputs, inputs, strict=True):
        torch.distributed.all_gather_into_tensor(output, own, group=group)
    return _Done()


def _num_dims(param: Any) -> int:
    return len(getattr(param, "ds_shape", param.shape))


def _run(rank: int, world_size: int, kind: str, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(PORT),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = Tiny()
    if kind == "mics":
        deepspeed.comm.all_gather_coalesced = _gather_one_by_one
        deepspeed.comm.has_all_reduce_coalesced = lambda: False
        deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=config(kind))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(kind))

    def train(step: int) -> Tensor:
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        return loss.detach().cpu()

    for step in range(NUM_STEPS):
        train(step)
    engine.save_checkpoint(folder, tag="global_step2", client_state={"epoch": 3})
    expected = {}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            if param.requires_grad:
                value = safe_get_full_optimizer_state(param, key)
                expected[f"{key}.{name}"] = value.detach().cpu().clone().contiguous()
    losses = torch.stack([train(step) for step in range(NUM_STEPS, NUM_STEPS + 2)])
    gathered = [torch.empty_like(losses) for _ in range(world_size)]
    torch.distributed.all_gather(gathered, losses)
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        from safetensors.torch import save_file

        weights = get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2")
        expected |= {f"weight.{name}": value.clone().contiguous() for name, value in weights.items()}
        expected["losses"] = torch.stack(gathered, dim=1)  # [step, rank]
        save_file(expected, Path(folder) / "expected.safetensors")
    torch.distributed.barrier()


if __name__ == "__main__":
    kind, world_size = sys.argv[1], int(sys.argv[2])
    target = HERE / kind
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    torch.multiprocessing.spawn(_run, (world_size, kind, str(target)), nprocs=world_size)
    for script in [*target.glob("*.py"), *target.glob("*/*.py")]:
        script.unlink()
