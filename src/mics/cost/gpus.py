"""What GPUs do: peaks of their data sheets, and how much of them is reached, with who measured it.

The clusters take their machines from here, and ``--as-gpu`` takes the clock of another GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

TILE_WIDTH: Final = 128.0
"""Of a matrix kernel: a matrix of this width reaches half of the efficiency."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, with libraries of today."""

    name: str
    tflops: float
    """Usual, of large matrices."""
    peak_tflops: float
    """Of the data sheet: 16-bit formats, dense."""
    memory_gib: float
    memory_tbs: float
    """Of the data sheet: bandwidth of its memory."""
    host_gbs: float
    """Of copies to the host and back, about 85% of a PCIe slot of 16 lanes."""
    matrix_share: float
    """Of the peak, by wide matrices."""
    attention_share: float
    """Of the peak, by attention forward and backward over long sequences."""
    memory_share: float
    """Of the data sheet's bandwidth, by a kernel that reads and writes."""
    formats: tuple[str, ...] = ("bfloat16", "float16")
    """16-bit formats that its matrix units multiply, the usual one first."""
    float8: bool = False

    def matrix_flops(self, width: int) -> float:
        """A second, of matrices whose narrowest side is ``width``."""
        return self.peak_tflops * 1e12 * self.matrix_share * width / (width + TILE_WIDTH)

    def attention_flops(self, seq_len: int, *, causal: bool) -> float:
        """A second, counted without what a causal mask leaves out: short rows keep fewer units busy."""
        half_speed = _CAUSAL_HALF_SPEED if causal else _HALF_SPEED
        return self.peak_tflops * 1e12 * self.attention_share * seq_len / (seq_len + half_speed)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second that are reached."""
        return self.memory_tbs * 1e12 * self.memory_share


# Tokens at which attention reaches half of its speed, read off the curves of FlashAttention-2 on an A100
# (arXiv 2307.08691, figure 4): about 130 TFLOP/s at 512 tokens, 155 at 2,048 with a causal mask, 190 to 200
# at 16,384.
_HALF_SPEED: Final = 256.0
_CAUSAL_HALF_SPEED: Final = 512.0

_ALL: Final = (
    # Matrices: 83 of 112.7 TFLOP/s on the PCIe card at best (Markidis et al., arXiv 1803.04014), 74%.
    # Attention: it has no flash kernel; of the memory-efficient one this is an estimate.
    # Memory: from 750 GiB/s (Jia et al., arXiv 1804.06826) to 835 GB/s (BabelStream).
    Gpu(
        name="v100",
        tflops=90,
        peak_tflops=125,
        memory_gib=32,
        memory_tbs=0.9,
        host_gbs=13.5,
        matrix_share=0.76,
        attention_share=0.35,
        memory_share=0.90,
        formats=("float16",),
    ),
    # Matrices: 267.9 of 312 TFLOP/s for the best shape, 86% (github.com/stas00/ml-engineering, "Maximum
    # Achievable Matmul FLOPS", CUDA 12.1). A GPT of width 2,560 trains at 205 TFLOP/s (arXiv 2307.08691,
    # table 1, which counts attention without its mask): that leaves about 76% to matrices of this width.
    # Attention: up to 73% forward and 63% backward (arXiv 2307.08691).
    # Memory: 1.40 TB/s of 1.555, 1.75 to 1.80 of 2.039 (BabelStream).
    Gpu(
        name="a100-40gb",
        tflops=240,
        peak_tflops=312,
        memory_gib=40,
        memory_tbs=1.555,
        host_gbs=27,
        matrix_share=0.80,
        attention_share=0.65,
        memory_share=0.88,
    ),
    Gpu(
        name="a100",
        tflops=240,
        peak_tflops=312,
        memory_gib=80,
        memory_tbs=2.039,
        host_gbs=27,
        matrix_share=0.80,
        attention_share=0.65,
        memory_share=0.88,
    ),
    # Matrices: 794.5 of 989 TFLOP/s for the best shape, 80% (ml-engineering, as above); our planner finds 72%
    # on an H200, whose cores are the same.
    # Attention: FlashAttention-2, which torch takes, reaches 35% of this GPU (arXiv 2407.08608).
    # Memory: 3.09 of 3.35 TB/s.
    Gpu(
        name="h100",
        tflops=650,
        peak_tflops=989,
        memory_gib=80,
        memory_tbs=3.35,
        host_gbs=55,
        matrix_share=0.72,
        attention_share=0.37,
        memory_share=0.92,
        float8=True,
    ),
)
GPUS: Final[Mapping[str, Gpu]] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""By name; ``a100`` is the one of 80 GB."""


def find_gpu(name: str, of_cluster: str) -> Gpu:
    """The GPU ``name``, with as much memory as the cluster's has if that is one of them."""
    return GPUS[of_cluster if of_cluster.partition("-")[0] == name else name]


def formats_of(gpu: str) -> tuple[str, ...]:
    """16-bit formats of a GPU, the usual one first: ``("float16",)`` needs a GradScaler. Unknown: both."""
    return GPUS[gpu].formats if gpu in GPUS else ("bfloat16", "float16")


def has_float8(gpu: str) -> bool:
    """Whether its matrix units multiply float8. Unknown: yes."""
    return gpu not in GPUS or GPUS[gpu].float8
