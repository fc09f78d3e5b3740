"""``moves.py`` on a GPU: a kernel that counts and one that encodes, and one that decodes for all members."""

# Triton compiles annotations of its functions, and knows none but its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from mics.comm.moves import Moves


@triton.jit
def _ordered(bits):
    return tl.where(bits >= 0, bits, -32769 - bits)


@triton.jit
def _moves(old, new, offsets, inside):
    before = _ordered(tl.load(old + offsets, mask=inside, other=0).to(tl.int32))
    after = _ordered(tl.load(new + offsets, mask=inside, other=0).to(tl.int32))
    return ((after - before + 32768) & 0xFFFF) - 32768


@triton.jit
def _count(old, new, counts, numel, block_size: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * block_size + tl.arange(0, block_size)
    size = tl.abs(_moves(old, new, offsets, offsets < numel))
    tl.store(counts + 2 * block, tl.sum((size > 7).to(tl.int32)))
    tl.store(counts + 2 * block + 1, tl.sum((size > 127).to(tl.int32)))


@triton.jit
def _write_rest(moves, first_byte, first_word, few, fewer, num_bytes, num_words):
    """The bytes and words of half a block; how many there were."""
    large = (tl.abs(moves) > 7).to(tl.int32)
    largest = (tl.abs(moves) > 127).to(tl.int32)
    place = first_byte + tl.cumsum(large, 0) - large
    code = tl.where(largest > 0, 255, moves + 127)
    tl.store(few + place, code.to(tl.uint8), mask=(large > 0) & (place < num_bytes))
    place = first_word + tl.cumsum(largest, 0) - largest
    tl.store(fewer + place, moves.to(tl.int16), mask=(largest > 0) & (place < num_words))
    return tl.sum(large), tl.sum(largest)


@triton.jit
def _encode(
    old,
    new,
    nibbles,
    starts,
    few,
    fewer,
    numel,
    num_bytes,
    num_words,
    half: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * 2 * half + tl.arange(0, half)
    low = _moves(old, new, offsets, offsets < numel)
    high = _moves(old, new, offsets + half, offsets + half < numel)
    codes = tl.where(tl.abs(low) > 7, 15, low + 7) | (tl.where(tl.abs(high) > 7, 15, high + 7) << 4)
    tl.store(nibbles + block * half + tl.arange(0, half), codes.to(tl.uint8))
    first_byte, first_word = tl.load(starts + 2 * block), tl.load(starts + 2 * block + 1)
    more, most = _write_rest(low, first_byte, first_word, few, fewer, num_bytes, num_words)
    _write_rest(high, first_byte + more, first_word + most, few, fewer, num_bytes, num_words)


@triton.jit
def _move(
    values,
    offsets,
    inside,
    codes,
    first_byte,
    first_word,
    few,
    fewer,
    num_bytes,
    num_words,
):
    """Half a block; how many bytes and words it took."""
    large = ((codes == 15) & inside).to(tl.int32)
    place = first_byte + tl.cumsum(large, 0) - large
    rest = tl.load(few + place, mask=(large > 0) & (place < num_bytes), other=0).to(tl.int32)
    largest = ((rest == 255) & (large > 0)).to(tl.int32)
    place = first_word + tl.cumsum(largest, 0) - largest
    words = tl.load(fewer + place, mask=(largest > 0) & (place < num_words), other=0).to(tl.int32)
    moves = tl.where(largest > 0, words, tl.where(large > 0, rest - 127, codes - 7))
    before = _ordered(tl.load(values + offsets, mask=inside, other=0).to(tl.int32))
    after = ((before + moves + 32768) & 0xFFFF) - 32768
    tl.store(values + offsets, _ordered(after).to(tl.int16), mask=inside)
    return tl.sum(large), tl.sum(largest)


@triton.jit
def _decode(
    values,
    wires,
    nibbles_at,
    starts_at,
    few_at,
    fewer_at,
    wire_nbytes,
    numel,
    num_bytes,
    num_words,
    own,
    half: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    if member == own:
        return
    block = tl.program_id(0).to(tl.int64)
    wire = wires + member * wire_nbytes
    starts = (wire + starts_at).to(tl.pointer_type(tl.int32))
    few, fewer = wire + few_at, (wire + fewer_at).to(tl.pointer_type(tl.int16))
    values += member * numel
    offsets = block * 2 * half + tl.arange(0, half)
    codes = tl.load(wire + nibbles_at + block * half + tl.arange(0, half)).to(tl.int32)
    first_byte, first_word = tl.load(starts + 2 * block), tl.load(starts + 2 * block + 1)
    more, most = _move(
        values, offsets, offsets < numel, codes & 15, first_byte, first_word, few, fewer, num_bytes, num_words
    )
    offsets += half
    _move(
        values,
        offsets,
        offsets < numel,
        codes >> 4,
        first_byte + more,
        first_word + most,
        few,
        fewer,
        num_bytes,
        num_words,
    )


def encode(moves: Moves, wire: Tensor, old: Tensor, new: Tensor, needed: Tensor) -> None:
    nibbles, starts, few, fewer = moves.parts(wire)
    counts = torch.empty(moves.num_blocks, 2, dtype=torch.int32, device=old.device)
    _count[(moves.num_blocks,)](old, new, counts, moves.numel, block_size=moves.block)
    ends = counts.cumsum(0, dtype=torch.int32)
    torch.sub(ends, counts, out=starts.view(-1, 2))
    needed.copy_(ends[-1])
    room = moves.room
    _encode[(moves.num_blocks,)](
        old, new, nibbles, starts, few, fewer, moves.numel, room.num_bytes, room.num_words,
        half=moves.block // 2,
    )  # fmt: skip


def decode(moves: Moves, values: Tensor, wires: Tensor, own: int) -> None:
    at = [part.storage_offset() * part.element_size() for part in moves.parts(wires[0])]
    first = wires.storage_offset()
    _decode[(moves.num_blocks, len(wires))](
        values, wires, *(place - first for place in at), wires.stride(0), moves.numel,
        moves.room.num_bytes, moves.room.num_words, own, half=moves.block // 2,
    )  # fmt: skip
