"""``moves.py`` on a GPU: a kernel that encodes, one that decodes for all members, one for checksums."""

# Triton compiles annotations of its functions, and knows none but its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from mics.comm.moves import Moves

_NUM_WARPS: Final = 1  # with blocks of 512 values
SLICE_NUMEL: Final = 1024
"""Words that checksums weigh together."""
_NUM_SLICES: Final = 8  # by one program
_STEP = tl.constexpr(-0x61C8864680B583EB)
_MIX = tl.constexpr(-0x40A7B892E31B1A47)


@triton.jit
def _ordered(bits):
    return tl.where(bits >= 0, bits, -32769 - bits)


@triton.jit
def _moves(old, new, offsets, inside):
    before = _ordered(tl.load(old + offsets, mask=inside, other=0).to(tl.int32))
    after = _ordered(tl.load(new + offsets, mask=inside, other=0).to(tl.int32))
    return ((after - before + 32768) & 0xFFFF) - 32768


@triton.jit
def _sizes(moves):
    """Which moves take a byte, and which two more."""
    return (tl.abs(moves) > 7).to(tl.int32), (tl.abs(moves) > 127).to(tl.int32)


@triton.jit
def _write_rest(moves, first_byte, first_word, few, fewer, num_bytes, num_words):
    """The bytes and words of half a block."""
    large, largest = _sizes(moves)
    place = first_byte + tl.cumsum(large, 0) - large
    code = tl.where(largest > 0, 255, moves + 127)
    tl.store(few + place, code.to(tl.uint8), mask=(large > 0) & (place < num_bytes))
    place = first_word + tl.cumsum(largest, 0) - largest
    tl.store(fewer + place, moves.to(tl.int16), mask=(largest > 0) & (place < num_words))


@triton.jit
def _encode(
    old,
    new,
    nibbles,
    starts,
    few,
    fewer,
    needed,
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
    low_bytes, low_words = _sizes(low)
    high_bytes, high_words = _sizes(high)
    more, most = tl.sum(low_bytes), tl.sum(low_words)
    # Blocks take their places in the order in which they come: each says where it is.
    first_byte = tl.atomic_add(needed, more + tl.sum(high_bytes), sem="relaxed")
    first_word = tl.atomic_add(needed + 1, most + tl.sum(high_words), sem="relaxed")
    tl.store(starts + 2 * block, first_byte)
    tl.store(starts + 2 * block + 1, first_word)
    _write_rest(low, first_byte, first_word, few, fewer, num_bytes, num_words)
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


@triton.jit
def _weights(places):
    """Those of utils/digests.py, made where they are needed."""
    values = (places + 1) * _STEP
    values = (values ^ (values >> 30)) * _MIX
    return (values ^ (values >> 27)) | 1


@triton.jit
def _checksum(words, out, numel, slice_numel: tl.constexpr, num_slices: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * num_slices
    places = tl.arange(0, slice_numel).to(tl.int64)
    sums = tl.zeros([slice_numel], dtype=tl.int64)
    for number in range(num_slices):
        offsets = (first + number) * slice_numel + places
        found = tl.load(words + offsets, mask=offsets < numel, other=0).to(tl.int64)
        sums += found * _weights(slice_numel + first + number)
    tl.atomic_add(out, tl.sum(sums * _weights(places)), sem="relaxed")  # of integers: in any order


def encode(moves: Moves, wire: Tensor, old: Tensor, new: Tensor, needed: Tensor) -> None:
    needed.zero_()
    _encode[(moves.num_blocks,)](
        old, new, *moves.parts(wire), needed, moves.numel, moves.room.num_bytes, moves.room.num_words,
        half=moves.block // 2, num_warps=_NUM_WARPS,
    )  # fmt: skip


def decode(moves: Moves, values: Tensor, wires: Tensor, own: int) -> None:
    at = [part.storage_offset() * part.element_size() for part in moves.parts(wires[0])]
    first = wires.storage_offset()
    _decode[(moves.num_blocks, len(wires))](
        values, wires, *(place - first for place in at), wires.stride(0), moves.numel,
        moves.room.num_bytes, moves.room.num_words, own, half=moves.block // 2,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def checksum(words: Tensor, out: Tensor) -> None:
    out.zero_()
    grid = (triton.cdiv(words.numel(), _NUM_SLICES * SLICE_NUMEL),)
    _checksum[grid](words, out, words.numel(), slice_numel=SLICE_NUMEL, num_slices=_NUM_SLICES)
