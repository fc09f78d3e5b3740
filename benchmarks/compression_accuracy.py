"""What rounding on the wire does to training: each setting of mics.Compression beside float32 on the wire.

    python -m benchmarks.compression_accuracy --json accuracy.json            # a small model, CPUs
    python -m benchmarks.compression_accuracy --size 40m --json large.json    # on GPUs; ranks may share one
    python -m benchmarks.compression_accuracy --json accuracy.json --draw docs/compression-accuracy.png

A GPT and a BERT (masked bytes, every token sees all) train from the same weights on the same bytes of text
with each setting, once for each seed. Ranks are nodes of --ranks-per-node, so that partition groups cross
nodes and have replicas. One seed is trained after the other: a run that is broken off has whole comparisons.
What --json has already is not trained again, so the same command goes on. --at-once trains so many models
beside each other, each with ranks of its own, where the host has processors to spare.

Each model also trains with and without lossless refreshes, in bfloat16 over float32 masters: all losses,
parameters and optimizer states must be equal to the bit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import random
import socket
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped]
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks import one_gpu
from benchmarks.compression_picture import draw_both, table
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

import mics
from mics.data.packing import MaskedPacking
from mics.data.tokenizer import BytesTokenizer
from mics.models import GPT, GPTConfig
from mics.train.sequences import ByteText, TensorPair, TextSequences

NONE: Final = mics.Compression(refresh=None)
SETTINGS: Final[dict[str, mics.Compression]] = {
    "float32": NONE,
    "disturbed": NONE,  # weights that start a millionth apart: what any rounding may do
    "hop 2 bf16": mics.Compression(refresh=None, hop2="bf16"),
    "hop 2 bf16, no feedback": mics.Compression(refresh=None, hop2="bf16", hop2_error_feedback=False),
    "hop 2 int8": mics.Compression(refresh=None, hop2="int8"),
    "hop 2 int8, no feedback": mics.Compression(refresh=None, hop2="int8", hop2_error_feedback=False),
    "hop 2 int4": mics.Compression(refresh=None, hop2="int4"),
    "hop 2 int4, no feedback": mics.Compression(refresh=None, hop2="int4", hop2_error_feedback=False),
    "gathers int8": mics.Compression(refresh=None, inter_gather="int8"),
    "hop 1 int8": mics.Compression(refresh=None, inter_reduce="int8"),
    "all int8": mics.Compression(refresh=None, hop2="int8", inter_gather="int8", inter_reduce="int8"),
}
MODELS: Final = ("gpt", "bert")
_DISTURBANCE: Final = 1e-6
_CHECK_SEED: Final = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how it is trained."""

    layers: int
    heads: int
    hidden_size: int
    seq_len: int
    batch_size: int  # sequences of a rank and micro-step
    accumulation: int
    steps: int
    learning_rate: float
    validation_windows: int  # of a rank
    evaluations: int
    check_steps: int
    text: str

    def shape(self, model: str) -> GPTConfig:
        return GPTConfig(
            num_layers=self.layers,
            num_heads=self.heads,
            hidden_size=self.hidden_size,
            vocab_size=BytesTokenizer.vocab_size,
            seq_len=self.seq_len,
            causal=model == "gpt",
        )


SIZES: Final = {
    "tiny": Size(
        layers=2,
        heads=4,
        hidden_size=128,
        seq_len=32,
        batch_size=4,
        accumulation=1,
        steps=120,
        learning_rate=2e-3,
        validation_windows=24,
        evaluations=5,
        check_steps=20,
        text="reference",
    ),
    "40m": Size(
        layers=6,
        heads=12,
        hidden_size=768,
        seq_len=256,
        batch_size=8,
        accumulation=1,
        steps=1000,
        learning_rate=1e-3,
        validation_windows=64,
        evaluations=20,
        check_steps=200,
        text="library",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model, setting and seed."""

    model: str
    setting: str
    seed: int


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--size", choices=list(SIZES), default="tiny", help="default tiny")
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    found.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME"
    )
    found.add_argument("--seeds", type=int, default=3)
    found.add_argument("--steps", type=int, help="in place of the size's own")
    found.add_argument("--ranks", type=int, default=4)
    found.add_argument("--partition-size", type=int, default=2)
    found.add_argument(
        "--ranks-per-node", type=int, default=1, help="default 1: all traffic is between nodes"
    )
    found.add_argument("--at-once", type=int, default=1, metavar="N", help="models that train together")
    found.add_argument(
        "--text", type=Path, help="a text of your own; default: Python's reference, large models: its library"
    )
    found.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many")
    found.add_argument("--json", type=Path, help="keep all figures there, and go on from what it has")
    found.add_argument("--draw", type=Path, metavar="PNG", help="draw what --json has, and train nothing")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.draw is not None:
        if args.json is None:
            raise SystemExit("--draw: expected --json FILE with the figures, found none")
        figures = json.loads(args.json.read_text())
        draw_both(args.draw, figures)
        print("\n".join(table(figures)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.json is None:
            args.json = Path(folder) / "accuracy.json"
        open_figures(args)
        sets = [
            mp.start_processes(
                worker, (args, free_port(), part), nprocs=args.ranks, start_method="spawn", join=False
            )
            for part in range(args.at_once)
        ]
        for each in sets:
            while not each.join():
                pass
        print("\n".join(table(json.loads(args.json.read_text()))), flush=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def open_figures(args: argparse.Namespace) -> None:
    """What there is from an earlier start of the same study, or an empty one."""
    size, text = SIZES[args.size], text_of(args)
    config = {
        "size": args.size,
        "shape": vars(size) | {"steps": args.steps or size.steps},
        "parameters": size.shape("gpt").num_parameters,
        "ranks": args.ranks,
        "partition_size": args.partition_size,
        "ranks_per_node": args.ranks_per_node,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "text": {"bytes": len(text), "xxh3": xxh3_64_hexdigest(text)},
    }
    if args.json.is_file():
        before: dict[str, Any] = json.loads(args.json.read_text())
        differing = [name for name in config if before["config"].get(name) != json_of(config[name])]
        if differing:
            raise SystemExit(f"--json {args.json}: expected a study like this one, found other {differing}")
        return
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write(args.json, {"config": json_of(config), "versions": versions, "lossless": [], "runs": []})


def add(file: Path, kind: str, found: dict[str, Any]) -> None:
    """Keep one more result. Several processes do."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        figures = json.loads(file.read_text())
        figures[kind].append(found)
        write(file, figures)


def write(file: Path, figures: dict[str, Any]) -> None:
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(figures) + "\n")
    fresh.replace(file)


# -- the ranks -------------------------------------------------------------------------------------------


def worker(rank: int, args: argparse.Namespace, port: int, part: int) -> None:
    """One rank, for every ``--at-once``th run from ``part`` on."""
    node, local = divmod(rank, args.ranks_per_node)
    places = {
        "RANK": rank,
        "WORLD_SIZE": args.ranks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": args.ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": args.ranks // args.ranks_per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(device)
        backend = "nccl" if num_gpus >= args.ranks else one_gpu.register()
    dist.init_process_group(backend)
    Study(args, device, part).run_all()
    dist.destroy_process_group()


class Study:
    """All runs, on one rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device, part: int) -> None:
        self._args = args
        self._device = device
        self._part = part
        self._rank = dist.get_rank()
        self._size = SIZES[args.size]
        self._steps = args.steps or self._size.steps
        self._start = time.monotonic()
        self._text = divided(text_of(args))

    def run_all(self) -> None:
        args = self._args
        figures = of_first_rank(json.loads(args.json.read_text()) if self._rank == 0 else None)
        done = {(each["model"], each["setting"], each["seed"]) for each in figures["runs"]}
        wanted = [
            Run(model=model, setting=setting, seed=seed)
            for seed in range(args.seeds)
            for model in args.models
            for setting in args.settings
        ]
        left = [run for run in wanted if (run.model, run.setting, run.seed) not in done]
        checked = {each["model"] for each in figures["lossless"]}
        unchecked = [model for model in args.models if model not in checked]
        for model in unchecked[self._part :: args.at_once]:
            found = self._check(model)
            self._keep("lossless", found, f"{model}, lossless: {found}")
        left = left[self._part :: args.at_once]
        for number, run in enumerate(left, 1):
            if self._is_over():
                self._say(f"{args.minutes:g} minutes are over, {len(left) - number + 1} runs are left")
                break
            found = self._train(run)
            minutes = (time.monotonic() - self._start) / 60
            line = (
                f"{number}/{len(left)} {run.model} {run.setting}, seed {run.seed}: "
                f"validation {found['validation'][-1][1]:.4f} in {found['seconds']:.0f} s; "
                f"{minutes:.1f} min, about {minutes * (len(left) - number) / number:.0f} left"
            )
            self._keep("runs", found, line)

    def _keep(self, kind: str, found: dict[str, Any], line: str) -> None:
        self._say(line)
        if self._rank == 0:
            add(self._args.json, kind, found)

    def _say(self, line: str) -> None:
        if self._rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _is_over(self) -> bool:
        """Rank 0's clock counts."""
        late = torch.tensor([float(time.monotonic() - self._start > 60 * self._args.minutes)])
        late = late.to(self._device)
        dist.broadcast(late, src=0)
        return bool(late.item())

    def _check(self, model: str) -> dict[str, Any]:
        """Whether lossless refreshes change a bit of anything, on any rank."""
        precision = mics.Precision(param_dtype=torch.bfloat16)
        run = Run(model=model, setting="float32", seed=_CHECK_SEED)
        found, sent = [], []
        for compression in (None, mics.Compression()):
            trained = Training(self, run, compression, precision, steps=self._size.check_steps)
            losses = [trained.step(step)[0].item() for step in range(1, self._size.check_steps + 1)]
            found.append(xxh3_64_hexdigest(repr([losses, trained.digest()]).encode()))
            sent.append(sum(mics.traffic(trained.model).nbytes.values()))
        differs = torch.tensor([float(found[0] != found[1])], device=self._device)
        dist.all_reduce(differs)
        share = round(sent[1] / sent[0], 4)
        return {
            "model": model,
            "steps": self._size.check_steps,
            "equal": not differs.item(),
            "bytes": share,
        }

    def _train(self, run: Run) -> dict[str, Any]:
        start = time.monotonic()
        trained = Training(self, run, SETTINGS[run.setting], self.precision, steps=self._steps)
        between = self._steps // self._size.evaluations
        losses, norms, validation = [], [], [(0, trained.evaluate())]
        for step in range(1, self._steps + 1):
            loss, norm = trained.step(step)
            losses.append(loss)
            norms.append(norm)
            if step % between == 0 or step == self._steps:
                validation.append((step, trained.evaluate()))
        return {
            "model": run.model,
            "setting": run.setting,
            "seed": run.seed,
            "validation": [(step, round(value, 6)) for step, value in validation],
            "training": [round(value, 5) for value in torch.stack(losses).tolist()],
            "norms": [round(value, 5) for value in torch.stack(norms).tolist()],
            "nbytes": trained.nbytes_between_nodes() / self._steps,
            "seconds": round(time.monotonic() - start, 2),
        }

    @property
    def precision(self) -> mics.Precision:
        """On GPUs bfloat16 over float32 masters."""
        return mics.Precision(param_dtype=torch.bfloat16 if self._device.type == "cuda" else torch.float32)

    def sequences(self, model: str, seed: int) -> TextSequences:
        seq_len, special = self._size.seq_len, BytesTokenizer.special
        masking = None
        if model == "bert":
            masking = MaskedPacking(
                seq_len=seq_len, vocab_size=BytesTokenizer.vocab_size, special=special, name="text"
            )
        return TextSequences(text=self._text, seq_len=seq_len, seed=seed, masking=masking)

    @property
    def size(self) -> Size:
        return self._size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def issuing(self) -> dict[str, Any]:
        """Ranks that share few processors wait for each other in every collective: few, and no threads.

        What is rounded, and when, is the same.
        """
        return {} if self._device.type == "cuda" else {"units": [], "prefetch": 0}

    @property
    def partition_size(self) -> int:
        partition_size: int = self._args.partition_size
        return partition_size


class Training:
    """One model that trains."""

    def __init__(
        self,
        study: Study,
        run: Run,
        compression: mics.Compression | None,
        precision: mics.Precision,
        *,
        steps: int,
    ) -> None:
        self._study, self._steps = study, steps
        self._train = study.sequences(run.model, run.seed)
        self._held_out = study.sequences(run.model, 0)  # the same for all seeds
        torch.manual_seed(run.seed)
        model = GPT(study.size.shape(run.model)).to(study.device)
        if run.setting == "disturbed":
            disturb(model)
        self.model = mics.shard(
            model,
            partition_size=study.partition_size,
            precision=precision,
            compression=compression,
            **study.issuing,
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=study.size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """The loss of this rank and the norm of all gradients."""
        size = self._study.size
        for group in self._optimizer.param_groups:
            group["lr"] = size.learning_rate * self._rate(step)
        tokens, targets = self._batch(step)
        total = torch.zeros((), device=self._study.device)
        micros = zip(tokens.split(size.batch_size), targets.split(size.batch_size), strict=True)
        for micro in mics.microsteps(self.model, list(micros)):
            loss = self.model(*micro) / size.accumulation
            loss.backward()
            total += loss.detach()
        norm = torch.as_tensor(mics.clip_grad_norm_(self.model, 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, norm.detach().clone()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the same held-out windows every time."""
        rank, num_ranks, count = dist.get_rank(), dist.get_world_size(), self._study.size.validation_windows
        places = np.arange(rank * count, (rank + 1) * count)
        tokens, targets = self._to_device(self._held_out.validation(places, of=num_ranks * count))
        loss = self.model(tokens, targets).double()
        dist.all_reduce(loss)
        return float(loss.item() / num_ranks)

    def digest(self) -> str:
        """Of all parameters and the whole optimizer state."""
        parameters = mics.full_state_dict(self.model, rank0_only=False)
        state = mics.full_optimizer_state_dict(self.model, self._optimizer, rank0_only=False)
        moments = [value for each in state.values() for value in each.values() if isinstance(value, Tensor)]
        return xxh3_64_hexdigest(b"".join(bytes_of(value) for value in (*parameters.values(), *moments)))

    def nbytes_between_nodes(self) -> int:
        """What this rank has sent to other nodes, where all its replicas are."""
        nbytes = mics.traffic(self.model).nbytes
        axes = ("replication", "inter" if any(axis == "inter" for axis, _ in nbytes) else "partition")
        return sum(count for (axis, _), count in nbytes.items() if axis in axes)

    def _rate(self, step: int) -> float:
        """A linear rise over 30% of the steps, at most 100, then a cosine down to a tenth.

        A shorter rise ends in a spike of the gradient norm, and integers came out of it better than float32.
        """
        rise = max(1, min(100, 3 * self._steps // 10))
        if step <= rise:
            return step / rise
        return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / (self._steps - rise))

    def _batch(self, step: int) -> TensorPair:
        rank, num_ranks, size = dist.get_rank(), dist.get_world_size(), self._study.size
        count = size.batch_size * size.accumulation
        places = np.arange(rank * count, (rank + 1) * count)
        return self._to_device(self._train.train(step, places, of=num_ranks * count))

    def _to_device(self, pair: TensorPair) -> TensorPair:
        tokens, targets = pair
        return tokens.to(self._study.device), targets.to(self._study.device)


# -- helpers ---------------------------------------------------------------------------------------------


def of_first_rank(found: Any) -> Any:
    """What the first rank has found, on all."""
    objects = [found]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def text_of(args: argparse.Namespace) -> bytes:
    if args.text is not None:
        return bytes(args.text.read_bytes())
    return library() if SIZES[args.size].text == "library" else reference()


def library() -> bytes:
    """The sources of Python's standard library, in any order."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.rglob("*.py"))
    files = [file for file in files if not {"site-packages", "dist-packages", "test"} & set(file.parts)]
    random.Random(0).shuffle(files)
    return b"\n\n".join(file.read_bytes() for file in files)


def reference() -> bytes:
    """The language reference that Python brings along, its topics in any order."""
    names = sorted(topics)
    random.Random(0).shuffle(names)
    return "\n\n".join(topics[name] for name in names).encode()


def divided(text: bytes) -> ByteText:
    """The last tenth is held out."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    num_train = len(text) - len(text) // 10
    return ByteText(train=tokens[:num_train], validation=tokens[num_train:])


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator).to(param.device)
        param.mul_(1 + _DISTURBANCE * noise)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def json_of(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


if __name__ == "__main__":
    main()
