"""Values as integers with a scale for each block: what comes back, what is lost, and what is kept of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mics.comm.codec import Cast, Codec
from mics.comm.quantized import Quantized, WithErrors, codec_of, encode_with_errors, kernels_work

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CODECS = [Quantized(8), Quantized(4), Quantized(8, at_random=True), Quantized(4, at_random=True)]


def _sent(codec: Codec, values: Tensor) -> Tensor:
    """What arrives of rows of ``values``."""
    nbytes = codec.wire_nbytes(values.shape[1], values.dtype)
    wires = torch.full((len(values), nbytes), 0xAB, dtype=torch.uint8, device=values.device)
    codec.encode(wires, values)
    found = torch.full_like(values, -1)
    codec.decode(found, wires)
    total, expected = torch.empty_like(values[0]), torch.zeros_like(values[0], dtype=torch.float32)
    codec.add_up(total, wires)
    for row in found:
        expected += row
    atol = 1e-6 if values.dtype.itemsize >= 4 else 0.05  # sums are rounded once, after the addition
    torch.testing.assert_close(total.float(), expected, rtol=0.01, atol=atol, equal_nan=True)
    return found


def _steps(values: Tensor, codec: Quantized) -> Tensor:
    """The distance of two codes, for each value."""
    rows, numel = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -numel % 64)).view(rows, -1, 64)
    largest = padded.abs().amax(-1, keepdim=True).expand_as(padded).reshape(rows, -1)[:, :numel]
    return largest / codec.largest * (1 + 2**-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 8, 63, 64, 65, 1000, 4096])
def test_nothing_is_further_off_than_a_step(codec: Quantized, numel: int, device: str) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = (torch.randn(3, numel, generator=generator) * 10.0 ** torch.arange(-12, -9).view(3, 1)).to(
        device
    )
    lost = (_sent(codec, values) - values).abs()
    allowed = _steps(values, codec) * (1.0 if codec.at_random else 0.51) + values.abs() * 2**-8
    assert (lost <= allowed).all()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_rounding_at_random_loses_nothing_on_average(num_bits: int) -> None:
    """To the nearest, all of these would become zero."""
    values = torch.full((1, 1 << 16), 0.2) * torch.linspace(0.9, 1.1, 1 << 16)
    values[0, ::64] = 1.0 * Quantized(num_bits).largest  # the scale of each block is 1
    small = torch.ones(1 << 16, dtype=torch.bool)
    small[::64] = False
    found = _sent(Quantized(num_bits, at_random=True), values)[0, small]
    assert not _sent(Quantized(num_bits), values)[0, small].any()
    assert found.mean() == pytest.approx(values[0, small].mean().item(), rel=0.02)
    again = _sent(Quantized(num_bits, at_random=True), values)[0, small]
    assert torch.equal(found, again), "the same values are rounded alike"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", [Quantized(8), Quantized(4), Cast(torch.bfloat16)], ids=str)
def test_what_is_lost_comes_later(codec: Codec, device: str) -> None:
    """The sum over many rounds is off by what is still kept, not by what was lost in each."""
    values = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(device)
    values[:, 1:] *= 1e-3  # far below a step
    kept = WithErrors(codec, torch.zeros(600, dtype=torch.bfloat16, device=device))
    with_errors, without = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(400):
        with_errors += _sent(kept, values)
        without += _sent(codec, values)
    off, off_without = ((found / 400 - values)[:, 1:].abs().max().item() for found in (with_errors, without))
    assert off < 0.05e-3 * (20 if codec == Quantized(4) else 1)
    assert off < off_without or isinstance(codec, Cast)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS[:3], ids=str)
def test_what_is_no_number_is_seen_and_not_kept(codec: Quantized, bad: float, device: str) -> None:
    """A step with an overflow is left out by the optimizer; the next one is as if it had not been."""
    values = torch.ones(1, 200, device=device)
    values[0, 70] = bad
    kept = WithErrors(codec, torch.zeros(200, dtype=torch.bfloat16, device=device))
    found = _sent(kept, values)
    assert not found[0, 64:128].isfinite().any() and found[0, :64].isfinite().all()
    assert kept.errors.isfinite().all()
    assert _sent(kept, torch.ones_like(values)).isfinite().all()


def test_bytes() -> None:
    """About a quarter and an eighth of float32; never more than the values take."""
    assert Quantized(8).wire_nbytes(1 << 20, torch.float32) / (4 << 20) == pytest.approx(0.2578, abs=1e-4)
    assert Quantized(4).wire_nbytes(1 << 20, torch.float32) / (4 << 20) == pytest.approx(0.1328, abs=1e-4)
    for codec in CODECS:
        assert all(codec.wire_nbytes(numel, torch.float32) % 16 == 0 for numel in range(100))
    assert codec_of("bf16").wire_nbytes(8, torch.float32) == 16


@pytest.mark.parametrize("codec", [*CODECS, Cast(torch.bfloat16), Cast()], ids=str)
def test_formats(codec: Codec) -> None:
    """Float16, bfloat16, float32 and float64 come back in their own format."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(2, 128, dtype=torch.float32).to(dtype)
        found = _sent(codec, values)
        assert found.dtype is dtype
        torch.testing.assert_close(found, values, rtol=0.02, atol=1.0 if "4" in str(codec) else 0.05)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _awkward(numel: int, dtype: torch.dtype) -> Tensor:
    """Rows of ordinary and of tiny values, of values between two codes, and with some that are no numbers."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(5, numel, generator=generator, dtype=torch.float64)
    values[1] *= 1e-40
    values[2] = torch.randint(-254, 255, (numel,), generator=generator) / 2
    values[2, ::64] = 127
    values[3, numel // 2], values[4, numel // 3], values[4, -1] = float("nan"), float("inf"), -float("inf")
    return values.to(dtype)


def _assert_same(found: Tensor, expected: Tensor) -> None:
    """To the bit; NaN is any NaN."""
    found = found.cpu()
    assert found.dtype is expected.dtype
    if found.is_floating_point():
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = (each.masked_fill(each.isnan(), 0.0).contiguous() for each in (found, expected))
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def _assert_same_wires(codec: Quantized, numel: int, found: Tensor, expected: Tensor) -> None:
    for part, expected_part in zip(codec.parts(found, numel), codec.parts(expected, numel), strict=True):
        _assert_same(part, expected_part)
    end = codec.codes_nbytes(numel) + 2 * -(-numel // 64)
    assert (found[:, end:] == 0xAB).all(), "padding is nobody's"


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 7, 8, 63, 64, 65, 1000, 4096, 100_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_kernels_make_what_the_cpu_makes(codec: Quantized, dtype: torch.dtype, numel: int) -> None:
    """To the bit: codes, scales, what is kept of errors, decoded values and sums."""
    assert kernels_work(torch.device("cuda", torch.cuda.current_device()))
    values = _awkward(numel, dtype)
    empty = torch.full((5, codec.wire_nbytes(numel, dtype)), 0xAB, dtype=torch.uint8)
    expected, found = empty.clone(), empty.cuda()
    codec.encode(expected, values)
    codec.encode(found, values.cuda())
    _assert_same_wires(codec, numel, found, expected)
    decoded, total = torch.empty_like(values), torch.empty_like(values[0])
    decoded_there, total_there = decoded.cuda(), total.cuda()
    codec.decode(decoded, expected)
    codec.decode(decoded_there, expected.cuda())
    _assert_same(decoded_there, decoded)
    for num_members in range(1, 6):
        codec.add_up(total, expected[:num_members])
        codec.add_up(total_there, expected[:num_members].cuda())
        _assert_same(total_there, total)
    errors = (values / 300).nan_to_num(0.0, 0.0, 0.0).bfloat16()
    errors_there = errors.cuda()
    for _ in range(3):
        expected, found = empty.clone(), empty.cuda()
        codec.encode_with(expected, values, errors)
        codec.encode_with(found, values.cuda(), errors_there)
        _assert_same_wires(codec, numel, found, expected)
        _assert_same(errors_there, errors)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_gpu_without_kernels_makes_the_same(codec: Quantized, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mics.comm.quantized.kernels_work", lambda device: False)
    values = _awkward(1000, torch.float32)
    expected = torch.full((5, codec.wire_nbytes(1000, values.dtype)), 0xAB, dtype=torch.uint8)
    found, errors = expected.cuda(), torch.full_like(values, 1e-3, dtype=torch.bfloat16)
    errors_there, total = errors.cuda(), torch.empty_like(values[0])
    total_there = total.cuda()
    encode_with_errors(codec, expected, values, errors)
    codec.encode_with(found, values.cuda(), errors_there)
    _assert_same_wires(codec, 1000, found, expected)
    _assert_same(errors_there, errors)
    codec.add_up(total, expected)
    codec.add_up(total_there, found)
    _assert_same(total_there, total)


@pytest.mark.gpu
@pytest.mark.parametrize("num_bits", [8, 4])
def test_kernels_take_no_memory_and_no_wait(num_bits: int) -> None:
    """But for the first call of each."""
    codec, numel = Quantized(num_bits), 64_000
    values = torch.randn(4, numel, device="cuda")
    errors, total = torch.zeros_like(values, dtype=torch.bfloat16), torch.empty_like(values[0])
    wires = torch.empty(4, codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8, device="cuda")

    def all_of_it() -> None:
        codec.encode(wires, values)
        codec.encode_with(wires, values, errors)
        codec.decode(values, wires)
        codec.add_up(total, wires)

    all_of_it()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_of_it()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_has_no_kernels_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As one whose machine has no C compiler."""
    kernels_work.cache_clear()
    assert not kernels_work(torch.device("cpu")) and not caplog.records
    assert not kernels_work(torch.device("cuda")) and not kernels_work(torch.device("cuda"))
    assert len(caplog.records) == 1
    assert "int8 and int4 take longer and more temporary memory" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize(("num_bits", "dtype"), [(8, "fp32"), (8, "bf16"), (4, "fp32"), (4, "bf16")])
def test_kernels_compile_without_a_gpu(num_bits: int, dtype: str) -> None:
    """For an H100 or H200: what the compiler refuses is found where no GPU is."""
    triton = pytest.importorskip("triton", reason="comes with PyTorch for CUDA")
    pytest.importorskip("triton.backends.nvidia")
    from triton.backends.compiler import GPUTarget

    from mics.comm import quantized_triton

    def code_of(kernel: Any, formats: dict[str, str], **constants: Any) -> str:
        constants |= {"num_bits": num_bits, "num_blocks": 16, "block": 64}
        names = list(kernel.arg_names)
        types = {name: "constexpr" if name in constants else formats.get(name, "i32") for name in names}
        source = triton.compiler.ASTSource(
            fn=kernel, signature=types, constexprs={(names.index(key),): constants[key] for key in constants}
        )
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options=dict(quantized_triton._OPTIONS)
        )
        return str(compiled.asm["ptx"])

    formats = {"values": f"*{dtype}", "out": f"*{dtype}", "wires": "*u8"}
    found = [
        code_of(quantized_triton._encode, formats, errors=None, at_random=True),
        code_of(quantized_triton._encode, {**formats, "errors": "*bf16"}, at_random=False),
        code_of(quantized_triton._decode, formats),
        code_of(quantized_triton._add_up, formats, num_at_once=4),
    ]
    for code in found:
        assert "fma.rn" not in code and ".ftz" not in code and "div.full" not in code, (
            "other bits than the CPU"
        )
