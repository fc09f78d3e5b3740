"""Whether a device computes right, and how fast.

Two answers tell a broken device. The product of matrices of -1, 0 and 1 has one right answer in any dtype and
any order, which the CPU checks by Freivalds' method. A computation in floating point gives the same bits on
every device of one kind.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from mics.doctor.facts import ComputeFacts

_BOX_SECONDS: Final = 1.0
_EXACT_DEPTH: Final = 256  # sums of so many ones are whole numbers up to 256: exact even in bfloat16
_SIZES: Final = {"cpu": 256, "cuda": 8192}
_EXACT_SIZES: Final = {"cpu": 256, "cuda": 2048}


def examine_device(device: torch.device) -> ComputeFacts:
    """About two seconds of work."""
    product, wrong = _exact_product(device)
    digests = _float_digests(device)
    rate, stable = _matmul_rate(device)
    return ComputeFacts(
        kind=_kind(device),
        rate=rate,
        wrong_rows=wrong,
        nonfinite=int((~torch.isfinite(product)).sum()),
        unstable=len(digests) > 1 or not stable,
        digest=min(digests),
    )


def wrong_rows(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> int:
    """Rows of ``product`` that are not those of ``left @ right``; all of whole numbers, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    vector = _whole_numbers(1, 1000, (right.shape[1],), generator).double()
    expected = left.double() @ (right.double() @ vector)
    found = product.double() @ vector
    return int((found != expected).sum())  # NaN differs from everything


def _exact_product(device: torch.device) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(0)
    size = _EXACT_SIZES[device.type]
    left = _whole_numbers(-1, 2, (size, _EXACT_DEPTH), generator)
    right = _whole_numbers(-1, 2, (_EXACT_DEPTH, size), generator)
    dtype = _dtype(device)
    product = (left.to(device, dtype) @ right.to(device, dtype)).cpu()
    return product, wrong_rows(left, right, product)


def _whole_numbers(lowest: int, end: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(lowest, end, shape, generator=generator, dtype=torch.int64, device="cpu")


def _float_digests(device: torch.device) -> set[str]:
    """Of the same computation, three times."""
    generator = torch.Generator().manual_seed(2)
    size = _EXACT_SIZES[device.type]
    first, weight = (
        torch.randn(size, size, generator=generator, dtype=torch.float32, device="cpu") / size**0.5
        for _ in range(2)
    )
    first, weight = first.to(device, _dtype(device)), weight.to(device, _dtype(device))
    return {_float_digest(first, weight) for _ in range(3)}


def _float_digest(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    for _ in range(4):
        hidden = F.gelu(F.layer_norm(hidden @ weight, (weight.shape[0],)))
    found = torch.softmax(hidden.float(), dim=-1).cpu().contiguous()
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]


def _matmul_rate(device: torch.device) -> tuple[float, bool]:
    """Flops per second, and whether all products were equal."""
    size = _SIZES[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=_dtype(device)) for _ in range(2))
    first = left @ right
    out = torch.empty_like(first)
    seconds: list[float] = []
    deadline = time.perf_counter() + _BOX_SECONDS
    while time.perf_counter() < deadline or len(seconds) < 3:
        seconds.append(_timed(lambda: torch.mm(left, right, out=out), device))
    # A core that others use too is at its own speed at times. A GPU belongs to the run, and may be throttled.
    typical = min(seconds) if device.type == "cpu" else statistics.median(seconds)
    return 2.0 * size**3 / typical, torch.equal(first, out)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} processors, torch {torch.__version__}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_name() -> str:
    """As Linux describes it: kernels are chosen by it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    wanted = ("model name", "CPU implementer", "CPU part", "CPU variant")
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith(wanted)]
    return " ".join(line.partition(":")[2].strip() for line in lines) or platform.machine()
