"""Moves of values in place of values: every bit comes back, and what does not fit is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mics.comm.moves import Moves, Room, checksum, moves_work
from mics.utils.digests import digests

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _sent(old: Tensor, new: Tensor, room: Room | None = None) -> tuple[Tensor, Room, int]:
    """What a member has that held ``old``, the room that was needed, and the bytes on the wire."""
    needed = torch.zeros(2, dtype=torch.int32, device=old.device)
    if room is None:
        none = Moves(old.numel(), Room(0, 0))
        wire = torch.zeros(none.nbytes, dtype=torch.uint8, device=old.device)
        none.encode(wire, old, new, needed)
        room = Room(*needed.tolist())
    moves = Moves(old.numel(), room)
    wires = torch.full((3, moves.nbytes), 0xAB, dtype=torch.uint8, device=old.device)
    for wire in wires:
        moves.encode(wire, old, new, needed)
    values = torch.stack([old, old, old])
    moves.decode(values, wires, own=1)
    assert torch.equal(values[1].view(torch.int16), old.view(torch.int16)), "its own is new already"
    found = Room(*needed.tolist())
    assert not room.holds(found) or torch.equal(values[0].view(torch.int16), values[2].view(torch.int16))
    return values[0], found, moves.nbytes


def _every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_comes_back(dtype: torch.dtype, device: str) -> None:
    """Zeros of both signs, infinities and NaN too, from any value to any other."""
    old = _every_value(dtype).to(device)
    shuffle = torch.randperm(old.numel(), generator=torch.Generator().manual_seed(1)).to(device)
    for new in (old, old.roll(1), old.roll(100), old.flip(0), old[shuffle]):
        found, needed, _ = _sent(old, new)
        assert torch.equal(found.view(torch.int16), new.view(torch.int16))
        assert needed.num_words <= needed.num_bytes <= old.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 511, 512, 513, 5000])
def test_every_size(numel: int, device: str) -> None:
    generator = torch.Generator().manual_seed(numel)
    old = torch.randn(numel, generator=generator).bfloat16()
    steps = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 8
    new = (old.float() + steps).bfloat16()
    found, _, _ = _sent(old.to(device), new.to(device))
    assert torch.equal(found.cpu().view(torch.int16), new.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
def test_small_moves_take_a_third(device: str) -> None:
    """As AdamW makes them: 90% within a nibble, all but a few within a byte."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 18, generator=generator).bfloat16()
    ulp = (torch.randn(old.numel(), generator=generator) * 4.2).round().to(torch.int16)
    new = (old.view(torch.int16) + ulp).view(torch.bfloat16)
    found, needed, nbytes = _sent(old.to(device), new.to(device))
    assert torch.equal(found.cpu().view(torch.int16), new.view(torch.int16))
    assert 0.05 < needed.num_bytes / old.numel() < 0.15
    assert nbytes < 0.33 * old.nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_says_what_did_not_fit(device: str) -> None:
    """What is decoded is wrong then, nothing else is touched, and the need is that of all moves."""
    old = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    _, needed, _ = _sent(old, -old, Room(10, 3))
    assert needed.num_bytes == needed.num_words and needed.num_words > 4000
    assert not Room(10, 3).holds(needed) and needed.holds(needed)


@pytest.mark.gpu
def test_kernels_write_what_the_cpu_writes() -> None:
    """But for the order of the blocks' bytes and words, which is that in which they were done."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(70_001, generator=generator).bfloat16()
    new = (old.float() * (1 + 0.05 * torch.randn(old.numel(), generator=generator) ** 3)).bfloat16()
    room = Room(40_000, 20_000)
    moves = Moves(old.numel(), room)
    found = []
    for device in ("cpu", "cuda"):
        wire = torch.zeros(moves.nbytes, dtype=torch.uint8, device=device)
        needed = torch.zeros(2, dtype=torch.int32, device=device)
        moves.encode(wire, old.to(device), new.to(device), needed)
        nibbles, starts, few, fewer = (part.cpu() for part in moves.parts(wire))
        order = starts.view(-1, 2)[:, 0].argsort()
        assert device == "cuda" or order.tolist() == list(range(moves.num_blocks))
        bytes_left, words_left = needed.tolist()
        found.append((nibbles, few[:bytes_left].sort(), fewer[:words_left].sort(), needed.tolist()))
    (nibbles, few, fewer, needed), others = found
    assert needed == others[3] and torch.equal(nibbles, others[0])
    assert torch.equal(few.values, others[1].values) and torch.equal(fewer.values, others[2].values)


def _checksum(values: Tensor) -> int:
    out = torch.full((1,), 7, dtype=torch.int64, device=values.device)
    checksum(values, out)
    return int(out)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checksum_sees_every_bit_and_its_place(device: str) -> None:
    """Also signs of zeros, values that change places, and pairs of highest bits."""
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    values[:4], values[-1] = 0, 1
    found = {_checksum(values)}
    assert found == {_checksum(values.clone())}
    for number, bit in ((0, 15), (1, 0), (17, 3), (20_000, 14), (39_999, 15)):
        other = values.clone()
        other.view(torch.int16)[number] ^= 1 << bit if bit < 15 else -(1 << 15)
        found.add(_checksum(other))
    for first, second in ((5, 6), (5, 7), (5, 39_999), (1024, 2048)):
        other = values.clone()
        other[[first, second]] = values[[second, first]]
        found.add(_checksum(other))
        other = values.clone()
        other[[first, second]] *= -1
        found.add(_checksum(other))
    assert len(found) == 1 + 5 + 4 + 4


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [8, 2040, 2048, 70_000, 1 << 20])
def test_the_kernel_of_checksums_finds_what_digests_finds(numel: int) -> None:
    from mics.comm.moves_triton import SLICE_NUMEL

    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert _checksum(values.cuda()) == int(digests([values], slice_numel=SLICE_NUMEL))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_cannot_make_them_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As one whose machine has no C compiler: the values are sent then."""
    moves_work.cache_clear()
    assert moves_work(torch.device("cpu")) and not caplog.records
    assert not moves_work(torch.device("cuda"))
    assert "new parameters go to the replicas as they are" in caplog.text
