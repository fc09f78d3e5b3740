"""How few bytes gradients would take without loss: the entropy of their bits while a GPT trains.

    python benchmarks/gradient_entropy.py              # a GPT of 0.8 M parameters on a CPU, about a minute

Signs and exponents repeat themselves, mantissas do not. The codes counted here have a table of frequencies
for each parameter, which none on a wire has: this is a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import mics
from mics.models.gpt import GPT, GPTConfig

_TEXT = Path(mics.__file__).parent / "train" / "fables.txt"
_SHAPE = GPTConfig(num_layers=4, num_heads=4, hidden_size=128, vocab_size=256, seq_len=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 20, 100, 300], help="where to look")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(_SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(_TEXT.read_bytes()), dtype=torch.uint8).long()
    print("| step | loss | sign and exponent, bits of 9 | float32 | bfloat16 | nibble and escapes, float32 |")
    print("|---:|---:|---:|---:|---:|---:|")
    for step in range(1, max(args.steps) + 1):
        starts = torch.randint(0, len(text) - _SHAPE.seq_len - 1, (args.batch_size,))
        rows = torch.stack([text[start : start + _SHAPE.seq_len + 1] for start in starts])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        if step in args.steps:
            _report(step, loss.item(), [p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()


def _report(step: int, loss: float, gradients: list[Tensor]) -> None:
    numel = sum(gradient.numel() for gradient in gradients)
    bits = {
        dtype: sum(_bits(gradient.to(dtype)) * gradient.numel() for gradient in gradients) / numel
        for dtype in (torch.float32, torch.bfloat16)
    }
    wide, narrow = bits[torch.float32], bits[torch.bfloat16]
    nibbles = sum(_nibble_bits(gradient) * gradient.numel() for gradient in gradients) / numel
    print(
        f"| {step} | {loss:.3f} | {wide - 23:.2f} | {wide / 32:.3f} | {narrow / 16:.3f} | "
        f"{nibbles / 32:.3f} |",
        flush=True,
    )


def _bits(values: Tensor) -> float:
    """Of each value: the entropy of sign and exponent, and of each byte of the mantissa."""
    parts = _fields(values.float(), 23 if values.dtype is torch.float32 else 7)
    return sum(_entropy(part) for part in parts)


def _fields(values: Tensor, mantissa: int) -> Iterator[Tensor]:
    words = values.contiguous().view(torch.int32)
    yield (words >> 23) & 0x1FF
    for low in range(23 - mantissa, 23, 8):
        yield (words >> low) & ((1 << min(8, 23 - low)) - 1)


def _entropy(field: Tensor) -> float:
    counts = torch.bincount(field.flatten()).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _nibble_bits(values: Tensor) -> float:
    """Sign and mantissa as they are, the exponent as 4 bits below the largest of 64, or a byte more."""
    exponents = ((values.contiguous().view(torch.int32) >> 23) & 0xFF).flatten()
    blocks = exponents[: exponents.numel() // 64 * 64].view(-1, 64)
    if not blocks.numel():
        return 32.0
    below = blocks.amax(1, keepdim=True) - blocks
    return 24 + 4 + 8 / 64 + 8 * float((below >= 15).double().mean())


if __name__ == "__main__":
    main()
