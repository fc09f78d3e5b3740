"""What the copy of gradients into the reduce buffer takes, and what could replace it.

    python benchmarks/gradient_copies.py     # on a GPU a block of gpt-3.6b, on a CPU a small one

Autograd leaves one tensor for each parameter of a unit, and hop 1 reduces one flat buffer. Each row is one
way from those tensors to that buffer, for one unit: time on an otherwise idle device, bytes that must move,
kernels launched, and the time of all units of gpt-3.6b in one micro-step. The last table runs today's copy
beside matrix products, on a stream of its own, as the engine does: what they take longer is what it costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mics.gradients.hops import _copy_to
from mics.gradients.reduce_buffers import ReduceBuffer, ReduceViews
from mics.layout.flat import plan_layout
from mics.models import GPT_SIZES

MODEL = "gpt-3.6b"
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block's gradients as backward leaves them, and its place in a reduce buffer."""

    grads: list[Tensor]
    views: ReduceViews

    @classmethod
    def of(cls, hidden: int, grad: torch.dtype, wire: torch.dtype, device: torch.device) -> Block:
        matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        shapes = [shape for matrix in matrices for shape in (matrix, matrix[:1])] + [(hidden,)] * 4
        layout = plan_layout([(str(n), shape) for n, shape in enumerate(shapes)], num_chunks=8, num_pieces=1)
        buffer = ReduceBuffer(numel=layout.numel, shard_numel=layout.chunk_numel, dtype=wire, device=device)
        return cls(
            grads=[torch.randn(shape, device=device).to(grad) for shape in shapes],
            views=buffer.views_for(0, layout, 0),
        )

    @property
    def numel(self) -> int:
        return sum(grad.numel() for grad in self.grads)


def copy_each(block: Block) -> None:
    """A kernel for each tensor."""
    for view, grad in zip(block.views.params, block.grads, strict=True):
        view.copy_(grad)


def copy_foreach(block: Block) -> None:
    """What mics does."""
    _copy_to(block.views, block.grads)


def accumulate(block: Block) -> None:
    """Views preset as ``.grad``: the buffer is cleared, and autograd adds to it."""
    block.views.full.zero_()
    for view, grad in zip(block.views.params, block.grads, strict=True):
        view += grad


def seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time of one call."""
    found = []
    for number in range(repeats + 3):
        _wait(device)
        began = time.perf_counter()
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # the host is ahead: its time does not count
            start.record()
            run()
            end.record()
            _wait(device)
            took = start.elapsed_time(end) / 1e3
        else:
            run()
            took = time.perf_counter() - began
        if number >= 3:
            found.append(took)
    return statistics.median(found)


def host_seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """What the host takes to issue it."""
    found = []
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def num_kernels(run: Callable[[], Any], device: torch.device) -> int | None:
    """Kernels launched by one call; None without a GPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        _wait(device)
    return sum(event.count for event in profile.key_averages() if event.device_time_total > 0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ways_of(block: Block, device: torch.device) -> dict[str, tuple[Callable[[], None], float]]:
    """Each way, with the bytes it moves for each parameter."""
    read, write = block.grads[0].dtype.itemsize, block.views.full.dtype.itemsize
    found: dict[str, tuple[Callable[[], None], float]] = {
        "a copy for each tensor": (lambda: copy_each(block), read + write),
        "foreach copy (mics)": (lambda: copy_foreach(block), read + write),
        "preset views, cleared and added to": (lambda: accumulate(block), write + read + 2 * write),
    }
    return found


def print_ways(hidden: int, device: torch.device, repeats: int) -> None:
    """A table for each pair of formats."""
    total = GPT_SIZES[MODEL].num_parameters
    for grad, wire in ((BF16, FP32), (BF16, BF16), (FP32, FP32)):
        block = Block.of(hidden, grad, wire, device)
        print(f"\n{_name(grad)} gradients, {_name(wire)} wire, {block.numel / 1e6:.1f} M parameters\n")
        print(f"| way | ms | GB/s | bytes a parameter | kernels | host ms | ms of {MODEL} |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, (run, nbytes) in ways_of(block, device).items():
            block.views.full.fill_(-1)
            run()
            pairs = zip(block.views.params, block.grads, strict=True)
            assert all(torch.equal(view, grad.to(wire)) for view, grad in pairs), name
            took = seconds(run, device, repeats)
            print(
                f"| {name} | {1e3 * took:.3f} | {nbytes * block.numel / took / 1e9:.0f} | {nbytes:.0f} "
                f"| {num_kernels(run, device) or '-'} | {1e3 * host_seconds(run, device, repeats):.3f} "
                f"| {1e3 * took * total / block.numel:.2f} |"
            )


def print_products(hidden: int, rows: int, device: torch.device, repeats: int) -> None:
    """A weight's gradient, left to autograd and copied, or written to its place by the product itself."""
    print(f"\nThe gradient of a matrix {4 * hidden} x {hidden}, from {rows} rows\n")
    print("| way | wire | ms |\n|---|---|---:|")
    outputs = torch.randn(rows, 4 * hidden, device=device).to(BF16)
    inputs = torch.randn(rows, hidden, device=device).to(BF16)
    for wire in (FP32, BF16):
        place = torch.empty(4 * hidden, hidden, dtype=wire, device=device)
        ways: dict[str, Callable[[], Any]] = {
            "product alone": lambda: outputs.t() @ inputs,
            "product, then copy": lambda place=place: place.copy_(outputs.t() @ inputs),
            "product into its place": lambda place=place: _into(place, outputs.t(), inputs),
        }
        for name, run in ways.items():
            try:
                print(f"| {name} | {_name(wire)} | {1e3 * seconds(run, device, repeats):.3f} |")
            except (RuntimeError, TypeError, NotImplementedError) as error:
                print(f"| {name} | {_name(wire)} | refused: {str(error).splitlines()[0][:60]} |")


def _into(place: Tensor, left: Tensor, right: Tensor) -> None:
    if place.dtype is left.dtype:
        torch.mm(left, right, out=place)
    else:
        torch.mm(left, right, out_dtype=place.dtype, out=place)  # type: ignore[call-overload]


def print_overlap(hidden: int, rows: int, repeats: int) -> None:
    """Matrix products alone, and with today's copy beside them."""
    device = torch.device("cuda")
    block = Block.of(hidden, BF16, FP32, device)
    left = torch.randn(rows, hidden, device=device).to(BF16)
    right = torch.randn(hidden, 4 * hidden, device=device).to(BF16)
    lane = torch.cuda.Stream(device, priority=-1)

    def products() -> None:
        for _ in range(12):
            left @ right

    def both() -> None:
        lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane):
            copy_foreach(block)
        products()
        torch.cuda.current_stream().wait_stream(lane)

    alone, copy, together = (
        seconds(run, device, repeats) for run in (products, lambda: copy_foreach(block), both)
    )
    left_over = together - alone
    print("\nToday's copy of a block, bf16 to fp32, beside matrix products on another stream\n")
    print("| products alone, ms | copy alone, ms | both, ms | what the copy costs, ms | of its time |")
    print("|---:|---:|---:|---:|---:|")
    values = " | ".join(f"{1e3 * value:.3f}" for value in (alone, copy, together, left_over))
    print(f"| {values} | {left_over / copy:.0%} |")
    blocks = GPT_SIZES[MODEL].num_parameters / block.numel
    print(f"\nIn one micro-step of {MODEL}: {1e3 * left_over * blocks:.2f} ms")


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP32: "fp32"}[dtype]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--hidden", type=int, default=4096 if on_gpu else 64)
    parser.add_argument(
        "--rows",
        type=int,
        default=8192 if on_gpu else 64,
        help="of activations: micro-batch times sequence",
    )
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, a block of hidden {args.hidden}")
    print_ways(args.hidden, device, args.repeats)
    print_products(args.hidden, args.rows, device, args.repeats)
    if device.type == "cuda":
        print_overlap(args.hidden, args.rows, args.repeats)


if __name__ == "__main__":
    main()
