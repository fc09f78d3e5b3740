"""One Trainer of transformers, under mics and under Accelerate's FSDP2: step time and peak memory.

    python -m benchmarks.trainer_beside_fsdp2                        # 4 NCCL ranks, on one GPU or several
    python -m benchmarks.trainer_beside_fsdp2 --ranks 2 --hidden-size 64 --layers 2 --steps 4     # CPUs

The same Llama, batches, optimizer and TrainingArguments; only what shards the model differs. Gradients
travel in ``--reduce-dtypes``: float32 is the default of mics, bfloat16 that of Accelerate with ``bf16=True``.
Like is compared with like. Each run has its own processes, so that none warms another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from mics.integrations.transformers import MicsConfig, MicsTrainer
from mics.layout.precision import Precision
from mics.train.ranks import share_gpu

_WARMUP = 3
_HEAD = "| gradients in | system | step ms (rounds) | of FSDP2 | peak GiB | reserved GiB | last loss |"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--ranks", type=int, default=4)
    found.add_argument("--partition-sizes", type=int, nargs="+", help="of mics; all divisors unless given")
    found.add_argument("--reduce-dtypes", nargs="+", default=["float32", "bfloat16"])
    found.add_argument("--layers", type=int, default=16)
    found.add_argument("--hidden-size", type=int, default=2048)
    found.add_argument("--vocab-size", type=int, default=32_000)
    found.add_argument("--seq-len", type=int, default=512)
    found.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-step on a rank")
    found.add_argument("--accumulation", type=int, default=2)
    found.add_argument("--steps", type=int, default=6, help=f"timed, after {_WARMUP} that are not")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--timeout", type=float, default=300.0, help="of one run, in seconds")
    found.add_argument("--json", type=Path, help="keep all rounds in this file")
    found.add_argument("--dtype", help=argparse.SUPPRESS)
    found.add_argument("--system", help=argparse.SUPPRESS)
    found.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return found


def main() -> None:
    args = parser().parse_args()
    if args.worker is not None:
        worker(args)
        return
    sizes = args.partition_sizes or [size for size in range(1, args.ranks + 1) if args.ranks % size == 0]
    systems = ["fsdp2", *(f"mics-{size}" for size in sizes)]
    runs = [(dtype, system) for dtype in args.reduce_dtypes for system in systems]
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for dtype, system in runs if number % 2 == 0 else reversed(runs):
            rows.append(one_run(args, dtype, system))
            print(f"round {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
    print("\n".join(table(runs, rows)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def table(runs: list[tuple[str, str]], rows: list[dict[str, Any]]) -> list[str]:
    """One line a run, its rounds as a range."""
    lines = [_HEAD, "|---|---|---:|---:|---:|---:|---:|"]
    own = {run: [row for row in rows if (row["dtype"], row["system"]) == run] for run in runs}
    medians = {run: statistics.median(row["seconds"] for row in found) for run, found in own.items()}
    for run, found in own.items():
        each = sorted(1e3 * row["seconds"] for row in found)
        name, _, size = run[1].partition("-")
        peaks = [max(row[what] for row in found) / 2**30 for what in ("allocated", "reserved")]
        lines.append(
            f"| {run[0]} | {name + (f', p={size}' if size else '')} | {1e3 * medians[run]:.0f} "
            f"({each[0]:.0f} to {each[-1]:.0f}) | {medians[run] / medians[run[0], 'fsdp2']:.2f} x | "
            f"{peaks[0]:.2f} | {peaks[1]:.2f} | {found[-1]['loss']:.4f} |"
        )
    return lines


def one_run(args: argparse.Namespace, dtype: str, system: str) -> dict[str, Any]:
    """One system, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = ["-m", "benchmarks.trainer_beside_fsdp2", *sys.argv[1:]]
        one = ["--dtype", dtype, "--system", system, "--worker", str(out)]
        environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        command = [*torchrun, "--nproc-per-node", str(args.ranks), *program, *one]
        subprocess.run(command, check=True, stdout=sys.stderr, env=environ, timeout=args.timeout)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


class _Clock(TrainerCallback):
    """When each step ended, with all that it put on the device."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ended) < _WARMUP:  # what was there before training does not count
                torch.cuda.reset_peak_memory_stats()
        self.ended.append(time.perf_counter())


def worker(args: argparse.Namespace) -> None:
    """One rank of one system."""
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        num_gpus = torch.cuda.device_count()
        if num_gpus < args.ranks:
            share_gpu(rank, os.environ)
        # Accelerate takes the device of LOCAL_RANK; where ranks share, only one is visible to each.
        torch.cuda.set_device(rank % num_gpus)
        os.environ["LOCAL_RANK"] = str(rank % num_gpus)
    clock = _Clock()
    trainer = trainer_of(args, on_gpu, [clock])
    result = trainer.train()
    if on_gpu and args.system == "fsdp2" and not isinstance(trainer.model_wrapped, FSDPModule):
        raise SystemExit(f"fsdp2: expected an FSDPModule, found {type(trainer.model_wrapped).__name__}")
    steps = [late - early for early, late in zip(clock.ended, clock.ended[1:], strict=False)]
    device = "cuda" if on_gpu else "cpu"
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    found = torch.tensor(
        [statistics.median(steps[_WARMUP - 1 :]), *peaks], dtype=torch.float64, device=device
    )
    dist.all_reduce(found, dist.ReduceOp.MAX)
    seconds, allocated, reserved = found.tolist()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if rank == 0:
        args.worker.write_text(
            json.dumps(
                {
                    "dtype": args.dtype,
                    "system": args.system,
                    "seconds": seconds,
                    "allocated": allocated,
                    "reserved": reserved,
                    "loss": losses[-1],
                    "parameters": num_params(args),
                    "trained": result.global_step,
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def llama(args: argparse.Namespace) -> LlamaConfig:
    heads = max(1, args.hidden_size // 64)
    return LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=args.vocab_size,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=True,
        use_cache=False,
    )


def num_params(args: argparse.Namespace) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in LlamaForCausalLM(llama(args)).parameters())


def trainer_of(args: argparse.Namespace, on_gpu: bool, callbacks: list[TrainerCallback]) -> Trainer:
    """The same program twice: one import and one argument differ."""
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(llama(args))
    steps = _WARMUP + args.steps
    tokens = torch.randint(
        args.vocab_size, (args.ranks * args.batch_size * args.accumulation * steps, args.seq_len)
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    by_fsdp2 = args.system == "fsdp2"
    fsdp2: dict[str, Any] = {
        "fsdp": True if int(transformers.__version__.partition(".")[0]) >= 5 else "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    }
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        max_steps=steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        ddp_backend="nccl" if on_gpu else "gloo",
        **(fsdp2 if by_fsdp2 else {}),
    )
    reduce_dtype = getattr(torch, args.dtype)
    param_dtype = torch.bfloat16 if on_gpu else None
    if by_fsdp2:
        found = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
        plugin = getattr(found.accelerator.state, "fsdp_plugin", None)
        if on_gpu and plugin is not None:  # TrainingArguments have no word for it
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            plugin.mixed_precision_policy = policy
        return found
    config = MicsConfig(
        partition_size=int(args.system.partition("-")[2]),
        precision=Precision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    )
    return MicsTrainer(
        model=model, args=arguments, train_dataset=rows, callbacks=callbacks, mics_config=config
    )


if __name__ == "__main__":
    main()
