"""How ranks compute, all of them at once: matrices, attention, a block and the head of a model, updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mics.calibrate.clock import Stopwatch
from mics.cost.clusters import Computing
from mics.cost.compute import HALF_SPEED_WIDTH, UPDATE_NBYTES
from mics.cost.shapes import shape_of_config
from mics.models import GPTConfig
from mics.models.gpt import Block, Linear, rotary_angles

_UPDATED_NUMEL: Final = {"cuda": 32 << 20, "cpu": 1 << 19}
_COPIED_NBYTES: Final = {"cuda": 1 << 30, "cpu": 32 << 20}
_WIDE: Final = {"cuda": 8192, "cpu": 512}  # of matrices that are as fast as matrices get
_PINNED_NBYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank does a second, beside all others."""

    matrix_flops: float
    """Of a model's own matrix: tokens by width by four widths."""
    wide_flops: float
    attention_flops: float
    """Forward; a causal mask counts half."""
    memory_bandwidth: float
    host_bandwidth: float
    """The slower direction; 0 without a device."""
    computing: Computing


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What is computed: a model's shape, the sequences of a micro-step, and where."""

    config: GPTConfig
    batch_size: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """As ``mics.Precision`` has it by itself."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def tokens(self) -> int:
        return self.batch_size * self.config.seq_len

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def block(self) -> Callable[[], None]:
        """A forward and a backward of one block, without communication."""
        config = self.config
        with self.device:
            block = Block(config).to(self.dtype)
        inputs = self.random(self.batch_size, config.seq_len, config.hidden_size).requires_grad_()
        head_size = config.hidden_size // config.num_heads
        angles = None
        if config.rotary:
            angles = rotary_angles(config.seq_len, head_size, dtype=self.dtype, device=self.device)
        gradient = torch.ones_like(inputs)

        def run() -> None:
            block.zero_grad(set_to_none=True)
            inputs.grad = None
            block(inputs, angles).backward(gradient)

        return run

    def head(self) -> Callable[[], None]:
        """The same of the last norm, the head and the loss."""
        config = self.config
        with self.device:
            norm, head = nn.LayerNorm(config.hidden_size), Linear(config.hidden_size, config.vocab_size)
        layers = nn.Sequential(norm, head).to(self.dtype)
        inputs = self.random(self.tokens, config.hidden_size).requires_grad_()
        targets = torch.zeros(self.tokens, dtype=torch.int64, device=self.device)

        def run() -> None:
            layers.zero_grad(set_to_none=True)
            inputs.grad = None
            F.cross_entropy(layers(inputs).float(), targets).backward()

        return run

    def update(self, numel: int) -> Callable[[], None]:
        """AdamW on masters in float32, as ``mics train`` calls it."""
        master = torch.zeros(numel, dtype=torch.float32, device=self.device, requires_grad=True)
        master.grad = torch.ones_like(master)
        optimizer = torch.optim.AdamW([master], fused=True)
        return lambda: optimizer.step()

    def product(self, rows: int, width: int, columns: int) -> Callable[[], object]:
        """A matrix times a matrix."""
        left, right = self.random(rows, width), self.random(width, columns)
        return lambda: left @ right

    def attention(self) -> Callable[[], object]:
        """Its forward alone."""
        config = self.config
        size = config.hidden_size // config.num_heads
        query = self.random(self.batch_size, config.num_heads, config.seq_len, size)
        return lambda: F.scaled_dot_product_attention(query, query, query, is_causal=config.causal)


def measure_machine(
    watch: Stopwatch, work: ModelWork, *, max_seconds: float, advance: Callable[[], object]
) -> Machine:
    """Everything but communication. ``advance`` is called after each of ``NUM_STAGES`` stages."""

    def seconds(action: Callable[[], object]) -> float:
        found = watch.time(action, max_seconds=max_seconds / NUM_STAGES).seconds
        advance()
        return found

    kind, config = work.device.type, work.config
    width, wide = config.hidden_size, _WIDE[kind]
    attention = 4.0 * work.tokens * config.seq_len * width * (0.5 if config.causal else 1.0)
    copied = _COPIED_NBYTES[kind]
    source = torch.zeros(copied, dtype=torch.uint8, device=work.device)
    target = torch.zeros_like(source)
    return Machine(
        matrix_flops=8.0 * work.tokens * width**2 / seconds(work.product(work.tokens, width, 4 * width)),
        wide_flops=2.0 * wide**3 / seconds(work.product(wide, wide, wide)),
        attention_flops=attention / seconds(work.attention()),
        memory_bandwidth=2.0 * copied / seconds(lambda: target.copy_(source)),
        host_bandwidth=_host_bandwidth(watch, work.device, advance),
        computing=_measure_computing(work, seconds),
    )


NUM_STAGES: Final = 8
"""Of ``measure_machine``."""


def _measure_computing(work: ModelWork, seconds: Callable[[Callable[[], object]], float]) -> Computing:
    shape = shape_of_config("measured", work.config)
    block = next(unit for unit in shape.units if unit.kind == "block")
    head = next(unit for unit in shape.units if unit.kind == "head")
    width = work.config.hidden_size
    # Speeds of wide matrices, from which the planner comes back to this width by the same formula.
    scale = 3.0 * work.tokens * (width + HALF_SPEED_WIDTH) / width
    numel = _UPDATED_NUMEL[work.device.type]
    return Computing(
        device=device_name(work.device),
        block_flops=scale * block.flops / seconds(work.block()),
        head_flops=scale * head.flops / seconds(work.head()),
        update_bandwidth=numel * UPDATE_NBYTES / seconds(work.update(numel)),
        param_nbytes=work.dtype.itemsize,
    )


def _host_bandwidth(watch: Stopwatch, device: torch.device, advance: Callable[[], object]) -> float:
    """Of copies between the device and pinned memory, in the slower direction."""
    found = 0.0
    if device.type == "cuda":
        host = torch.zeros(_PINNED_NBYTES, dtype=torch.uint8, device="cpu").pin_memory()
        there = torch.zeros(_PINNED_NBYTES, dtype=torch.uint8, device=device)
        to = watch.time(lambda: there.copy_(host, non_blocking=True)).seconds
        back = watch.time(lambda: host.copy_(there, non_blocking=True)).seconds
        found = _PINNED_NBYTES / max(to, back)
    advance()
    return found


def device_name(device: torch.device) -> str:
    """What tells one kind of device from another."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
