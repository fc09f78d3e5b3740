"""Bytes that one optimizer step puts on each host's uplink, with and without compression.

    python -m benchmarks.cluster run --hosts 2 --ranks 2 --rate 1gbit -- -m benchmarks.cluster.step_bytes

Partition groups fill one host each, and the other hosts hold replicas; with a smaller ``--partition-size`` a
host holds several. What crosses an uplink is hop 2 and the new parameters. Parameters are bfloat16 over
float32 masters. The interface counts, so headers, acknowledgements, heartbeats and what ranks agree on at
each boundary are in the figures.

With ``--equal-steps N`` a model also trains N steps with and without lossless refreshes: all losses,
parameters and optimizer states must be the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.cluster.counters import uplink_nbytes_of
from torch import Tensor
from xxhash import xxh3_64_hexdigest

import mics
from mics.models import GPT, GPTConfig
from mics.train.sequences import TextSequences, load_text

COMPRESSIONS: Final = {
    "none": None,
    "lossless": mics.Compression(),
    "lossless, hop 2 int8": mics.Compression(hop2="int8"),
    "lossless, hop 2 int4": mics.Compression(hop2="int4"),
}
_SEQ_LEN: Final = 32
_LEARNING_RATE: Final = 3e-4


class Training:
    """A byte-level GPT on the bundled text."""

    def __init__(
        self,
        compression: mics.Compression | None,
        hidden_size: int,
        layers: int,
        partition_size: int | None = None,
    ) -> None:
        torch.manual_seed(0)
        shape = GPTConfig(
            num_layers=layers,
            num_heads=2,
            hidden_size=hidden_size,
            vocab_size=256,
            seq_len=_SEQ_LEN,
            rotary=False,
        )
        self.model = mics.shard(
            GPT(shape),
            partition_size=partition_size or int(os.environ["LOCAL_WORLD_SIZE"]),
            precision=mics.Precision(param_dtype=torch.bfloat16),
            compression=compression,
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        text = load_text(None, validation_share=0.1, seq_len=_SEQ_LEN)
        self._text = TextSequences(text=text, seq_len=_SEQ_LEN, seed=0)
        self._step = 0

    def steps(self, count: int) -> list[float]:
        """This rank's losses. Nothing is under way afterwards."""
        losses = []
        for _ in range(count):
            places = np.arange(dist.get_rank(), dist.get_rank() + 1)
            tokens, targets = self._text.train(self._step, places, of=dist.get_world_size())
            for _ in mics.microsteps(self.model, range(1)):
                loss = self.model(tokens, targets)
                loss.backward()
            mics.clip_grad_norm_(self.model, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.item())
            self._step += 1
        mics.traffic(self.model)
        return losses

    def state(self) -> Iterator[Tensor]:
        """Whole parameters and optimizer state."""
        yield from mics.full_state_dict(self.model, rank0_only=False).values()
        optimizer = mics.full_optimizer_state_dict(self.model, self._optimizer, rank0_only=False)
        for entries in optimizer.values():
            yield from (value for value in entries.values() if isinstance(value, Tensor))


def bytes_of_a_step(args: argparse.Namespace, name: str) -> list[float]:
    """That each host sends, as a mean over ``--steps`` that follow the first ones."""
    trained = Training(COMPRESSIONS[name], args.hidden_size, args.layers, args.partition_size)
    trained.steps(args.first)
    sent = uplink_nbytes_of(lambda: trained.steps(args.steps)).sent_nbytes / args.steps
    of_ranks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sent)
    return of_ranks[:: int(os.environ["LOCAL_WORLD_SIZE"])]


def digest(compression: mics.Compression | None, count: int) -> str:
    """Of all ranks' losses, and of parameters and optimizer state after the last step."""
    trained = Training(compression, 32, 2)
    found = [repr(trained.steps(count)).encode()]
    found += [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in trained.state()]
    of_ranks = [""] * dist.get_world_size()
    dist.all_gather_object(of_ranks, xxh3_64_hexdigest(b"".join(found)))
    return "".join(of_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--partition-size", type=int, help="default: a host's ranks")
    parser.add_argument("--first", type=int, default=4, help="steps before those that count (default 4)")
    parser.add_argument("--steps", type=int, default=4, help="that count (default 4)")
    parser.add_argument("--with", dest="names", nargs="+", choices=list(COMPRESSIONS), metavar="NAME")
    parser.add_argument("--equal-steps", type=int, metavar="N", help="compare so many steps bit by bit")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    report: dict[str, Any] = {"uplink_nbytes": {}}
    for name in args.names or COMPRESSIONS:
        found = report["uplink_nbytes"][name] = bytes_of_a_step(args, name)
        if dist.get_rank() == 0:
            base = report["uplink_nbytes"].get("none", found)
            hosts = ", ".join(f"{each:,.0f}" for each in found)
            print(f"{name:<22} {hosts} bytes a step, {max(found) / max(base):.3f} of none", flush=True)
    if args.equal_steps is not None:
        plain, lossless = (digest(COMPRESSIONS[name], args.equal_steps) for name in ("none", "lossless"))
        report["equal"] = plain == lossless
        if dist.get_rank() == 0:
            print(
                f"{args.equal_steps} steps, lossless: {'equal' if report['equal'] else 'NOT equal'}",
                flush=True,
            )
    if dist.get_rank() == 0 and args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
