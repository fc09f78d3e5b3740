"""``quantized.py`` on a GPU, to the same bits: a kernel each to encode, to decode and to add up."""

# Triton compiles annotations of its functions, and knows none but its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from mics.layout.compression import QUANT_BLOCK_NUMEL

if TYPE_CHECKING:
    from torch import Tensor

    from mics.comm.quantized import Quantized

_NUM_BLOCKS: Final = 16  # that a program takes: 1024 values, 8 for each of its threads
_OPTIONS: Final[dict[str, Any]] = {
    "num_warps": 4,
    # A product and a sum are rounded each, as by the CPU.
    "enable_fp_fusion": False,
    # The hash is modulo 2^32: that is no overflow to stop at where Triton looks for such.
    "sanitize_overflow": False,
}


@triton.jit
def _dither(values, places):
    """``quantized.py: _dither``: shifts of unsigned numbers need no mask."""
    mixed = values.to(tl.uint32, bitcast=True) + places.to(tl.uint32) * 0x27D4EB2F
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return (mixed & 0xFFFFFF).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def _tile(first, num_blocks: tl.constexpr, width: tl.constexpr):
    """The places of blocks from ``first`` on, where each takes ``width``: [num_blocks, width]."""
    return first * width + tl.arange(0, num_blocks)[:, None] * width + tl.arange(0, width)[None, :]


@triton.jit
def _with_errors(values, errors):
    """Their sum, in the format of both that PyTorch finds."""
    if values.dtype == tl.float64:
        wanted = values + errors.to(tl.float64)
    elif values.dtype == tl.bfloat16:
        wanted = (values.to(tl.float32) + errors.to(tl.float32)).to(tl.bfloat16)
    else:
        wanted = values.to(tl.float32) + errors.to(tl.float32)
    return wanted


@triton.jit
def _lost(wanted, found):
    """What ``found``, in float32, is short of ``wanted``; 0 where that is no number."""
    if wanted.dtype == tl.float64:
        lost = wanted - found.to(tl.float64)
    elif wanted.dtype == tl.bfloat16:
        found = found.to(tl.bfloat16).to(tl.float32)
        lost = (wanted.to(tl.float32) - found).to(tl.bfloat16).to(tl.float32)
    else:
        lost = wanted - found
    return tl.where(tl.abs(lost) < float("inf"), lost, 0.0).to(tl.float32)


@triton.jit
def _encode(
    values,
    errors,
    wires,
    numel,
    num_bytes,
    scales_at,
    values_stride,
    errors_stride,
    wires_stride,
    num_bits: tl.constexpr,
    at_random: tl.constexpr,
    num_blocks: tl.constexpr,
    block: tl.constexpr,
):
    largest: tl.constexpr = (1 << (num_bits - 1)) - 1
    highest: tl.constexpr = largest * 0.99609375  # ``Quantized.highest``
    first = tl.program_id(0).to(tl.int64) * num_blocks
    row = tl.program_id(1).to(tl.int64)
    places = _tile(first, num_blocks, block)
    inside = places < numel
    wanted = tl.load(values + row * values_stride + places, mask=inside, other=0.0)
    if errors is not None:
        errors += row * errors_stride
        wanted = _with_errors(wanted, tl.load(errors + places, mask=inside, other=0.0))
    exact = wanted.to(tl.float32)
    # Magnitudes as integers: the same order, and NaN is above infinity. A maximum of numbers leaves it out.
    sizes = exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scales = tl.div_rn(tl.max(sizes, 1).to(tl.float32, bitcast=True), highest).to(tl.bfloat16)
    steps = tl.broadcast_to(scales.to(tl.float32)[:, None], [num_blocks, block])
    scaled = tl.where(steps > 0, tl.div_rn(exact, steps), 0.0)
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # infinity over infinity
    if at_random:
        raised = scaled + _dither(exact, places)
        rounded = raised.to(tl.int32).to(tl.float32)  # towards zero
        rounded = tl.where(rounded > raised, rounded - 1, rounded)  # tl.floor takes the tiniest numbers for 0
    else:
        # Numbers from 2^23 to 2^24 have no fraction: the sum is rounded half to even.
        rounded = (scaled + 12582912.0) - 12582912.0
    rounded = tl.minimum(tl.maximum(rounded, -1.0 * largest), 1.0 * largest)
    codes = rounded.to(tl.int32)
    wire = wires + row * wires_stride
    if num_bits == 8:
        tl.store(wire + places, (codes & 255).to(tl.uint8), mask=inside)
    else:
        low, high = tl.split(tl.reshape(codes, [num_blocks, block // 2, 2]))
        pairs = _tile(first, num_blocks, block // 2)
        tl.store(wire + pairs, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask=pairs < num_bytes)
    blocks = first + tl.arange(0, num_blocks)
    scales_of = (wire + scales_at).to(tl.pointer_type(tl.bfloat16))
    tl.store(scales_of + blocks, scales, mask=blocks * block < numel)
    if errors is not None:
        lost = _lost(wanted, rounded * steps)
        tl.store(errors + places, lost.to(tl.bfloat16), mask=inside)


@triton.jit
def _decoded(
    wire,
    first,
    is_there,
    numel,
    num_bytes,
    scales_at,
    num_bits: tl.constexpr,
    num_blocks: tl.constexpr,
    block: tl.constexpr,
):
    """What came in blocks from ``first`` on, in float32: [num_blocks, block]; zeros if not ``is_there``."""
    places = _tile(first, num_blocks, block * num_bits // 8)
    codes = tl.load(wire + places, mask=(places < num_bytes) & is_there, other=0).to(tl.int32)
    if num_bits == 8:
        codes = (codes << 24) >> 24  # with the sign
    else:
        codes = tl.reshape(tl.join((codes << 28) >> 28, (codes << 24) >> 28), [num_blocks, block])
    blocks = first + tl.arange(0, num_blocks)
    scales_of = (wire + scales_at).to(tl.pointer_type(tl.bfloat16))
    scales = tl.load(scales_of + blocks, mask=(blocks * block < numel) & is_there, other=0.0)
    return codes.to(tl.float32) * scales.to(tl.float32)[:, None]


@triton.jit
def _decode(
    values,
    wires,
    numel,
    num_bytes,
    scales_at,
    values_stride,
    wires_stride,
    num_bits: tl.constexpr,
    num_blocks: tl.constexpr,
    block: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * num_blocks
    row = tl.program_id(1).to(tl.int64)
    wire = wires + row * wires_stride
    found = _decoded(wire, first, True, numel, num_bytes, scales_at, num_bits, num_blocks, block)
    places = _tile(first, num_blocks, block)
    found = found.to(values.dtype.element_ty)
    tl.store(values + row * values_stride + places, found, mask=places < numel)


@triton.jit
def _add_up(
    out,
    wires,
    num_members,
    numel,
    num_bytes,
    scales_at,
    wires_stride,
    num_bits: tl.constexpr,
    num_blocks: tl.constexpr,
    block: tl.constexpr,
    num_at_once: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * num_blocks
    if out.dtype.element_ty == tl.float64:
        total = tl.zeros([num_blocks, block], tl.float64)
    else:
        total = tl.zeros([num_blocks, block], tl.float32)
    wire = wires
    for member in range(0, num_members, num_at_once):
        # Reads of some members are on their way together. Where there is no member, zeros change nothing.
        for ahead in tl.static_range(num_at_once):
            is_there = member + ahead < num_members
            found = _decoded(wire, first, is_there, numel, num_bytes, scales_at, num_bits, num_blocks, block)
            total += found.to(total.dtype)
            wire += wires_stride
    places = _tile(first, num_blocks, block)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=places < numel)


def encode(codec: Quantized, wires: Tensor, values: Tensor, errors: Tensor | None = None) -> None:
    num_rows, numel = values.shape
    _encode[_num_programs(numel), num_rows](
        values, errors, wires, numel, -(-numel * codec.num_bits // 8), codec.codes_nbytes(numel),
        values.stride(0), 0 if errors is None else errors.stride(0), wires.stride(0),
        num_bits=codec.num_bits, at_random=codec.at_random, num_blocks=_NUM_BLOCKS, block=QUANT_BLOCK_NUMEL,
        **_OPTIONS,
    )  # fmt: skip


def decode(codec: Quantized, values: Tensor, wires: Tensor) -> None:
    num_rows, numel = values.shape
    _decode[_num_programs(numel), num_rows](
        values, wires, numel, -(-numel * codec.num_bits // 8), codec.codes_nbytes(numel),
        values.stride(0), wires.stride(0),
        num_bits=codec.num_bits, num_blocks=_NUM_BLOCKS, block=QUANT_BLOCK_NUMEL, **_OPTIONS,
    )  # fmt: skip


def add_up(codec: Quantized, out: Tensor, wires: Tensor) -> None:
    numel = out.numel()
    _add_up[_num_programs(numel),](
        out, wires, len(wires), numel, -(-numel * codec.num_bits // 8), codec.codes_nbytes(numel),
        wires.stride(0),
        num_bits=codec.num_bits, num_blocks=_NUM_BLOCKS, block=QUANT_BLOCK_NUMEL, num_at_once=4, **_OPTIONS,
    )  # fmt: skip


def _num_programs(numel: int) -> int:
    return -(-numel // (_NUM_BLOCKS * QUANT_BLOCK_NUMEL))
