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

_ENCODE_WARPS: Final = 2  # with blocks of 512 values
_DECODE_WARPS: Final = 1
SLICE_NUMEL: Final = 1024
"""Words that checksums weigh together."""
_NUM_SLICES: Final = 8  # by one program
_STEP = tl.constexpr(-0x61C8864680B583EB)
_MIX = tl.constexpr(-0x40A7B892E31B1A47)


@triton.jit
def _ordered(bits):
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _moves(old, new, offsets, inside):
    before = _ordered(tl.load(old + offsets, mask=inside, other=0).to(tl.int32))
    after = _ordered(tl.load(new + offsets, mask=inside, other=0).to(tl.int32))
    return (after - before).to(tl.int16).to(tl.int32)


@triton.jit
def _nibbles(moves):
    return tl.minimum((moves + 7).to(tl.uint32), 15)


@triton.jit
def _bytes(moves):
    return tl.minimum((moves + 127).to(tl.uint32), 255)


@triton.jit
def _sizes(moves):
    """Which moves take a byte, and in the high half which take a word."""
    return tl.where(_nibbles(moves) == 15, tl.where(_bytes(moves) == 255, 0x10001, 1), 0)


@triton.jit
def _write_rest(moves, sizes, first_byte, first_word, few, fewer, num_bytes, num_words):
    """The bytes and words of half a block.

    Each thread stores what it has: the hints keep Triton from handing values on between threads first, as it
    does where neighbours look unrelated, for a third of the kernel's instructions. No store gets wider by
    them, since masks differ from value to value.
    """
    before = tl.cumsum(sizes, 0) - sizes
    place = first_byte + (before & 0xFFFF)
    fits = (sizes > 0) & (place < num_bytes)
    tl.store(few + tl.max_contiguous(tl.multiple_of(place, 8), 8), _bytes(moves).to(tl.uint8), mask=fits)
    place = first_word + (before >> 16)
    fits = (sizes > 0xFFFF) & (place < num_words)
    tl.store(fewer + tl.max_contiguous(tl.multiple_of(place, 8), 8), moves.to(tl.int16), mask=fits)


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
    places = tl.arange(0, half)
    offsets = block * 2 * half + places
    low = _moves(old, new, offsets, offsets < numel)
    high = _moves(old, new, offsets + half, offsets + half < numel)
    tl.store(nibbles + block * half + places, (_nibbles(low) | (_nibbles(high) << 4)).to(tl.uint8))
    low_sizes, high_sizes = _sizes(low), _sizes(high)
    in_low = tl.sum(low_sizes)
    in_both = in_low + tl.sum(high_sizes)
    # Blocks take their places in the order in which they come, bytes and words at once, and say where.
    taken = (in_both & 0xFFFF).to(tl.int64) | ((in_both >> 16).to(tl.int64) << 32)
    first = tl.atomic_add(needed.to(tl.pointer_type(tl.int64)), taken, sem="relaxed")
    tl.store(starts.to(tl.pointer_type(tl.int64)) + block, first)
    first_byte, first_word = (first & 0xFFFFFFFF).to(tl.int32), (first >> 32).to(tl.int32)
    _write_rest(low, low_sizes, first_byte, first_word, few, fewer, num_bytes, num_words)
    first_byte, first_word = first_byte + (in_low & 0xFFFF), first_word + (in_low >> 16)
    _write_rest(high, high_sizes, first_byte, first_word, few, fewer, num_bytes, num_words)


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
    after = (before + moves).to(tl.int16).to(tl.int32)
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
        half=moves.block // 2, num_warps=_ENCODE_WARPS,
    )  # fmt: skip


def decode(moves: Moves, values: Tensor, wires: Tensor, own: int) -> None:
    at = [part.storage_offset() * part.element_size() for part in moves.parts(wires[0])]
    first = wires.storage_offset()
    _decode[(moves.num_blocks, len(wires))](
        values, wires, *(place - first for place in at), wires.stride(0), moves.numel,
        moves.room.num_bytes, moves.room.num_words, own, half=moves.block // 2,
        num_warps=_DECODE_WARPS,
    )  # fmt: skip


def checksum(words: Tensor, out: Tensor) -> None:
    out.zero_()
    grid = (triton.cdiv(words.numel(), _NUM_SLICES * SLICE_NUMEL),)
    _checksum[grid](words, out, words.numel(), slice_numel=SLICE_NUMEL, num_slices=_NUM_SLICES)
