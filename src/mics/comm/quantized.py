"""Values as integers of 8 or 4 bits, with one scale for each block of 64.

On the wire, for ``numel`` values that go to one member::

    codes    numel bytes; or half as many, the first of two values in the low bits
    scales   bfloat16, one for each block: the largest magnitude over the largest code, or a little less
    padding  up to a multiple of 16 bytes

A block that holds an infinity or NaN is NaN or infinite where it arrives. Sums are made of decoded values, in
float32 or wider.

Rounding is to the nearest code. Where nobody keeps what that loses, it is at random: the nearer a value is to
the code above, the more often up, so that nothing is lost on average. The random numbers are a hash of a
value's own bits and place. So a run that resumes repeats itself, and the random state of user code is not
touched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from mics.comm.codec import Cast, Codec
from mics.layout.compression import QUANT_BLOCK_NUMEL

_log = logging.getLogger("mics")
_ALIGNMENT: Final = 16  # bytes
_BLOCK: Final = QUANT_BLOCK_NUMEL


@dataclass(frozen=True)
class Quantized:
    """Integers of ``num_bits``: 8 or 4."""

    num_bits: int
    at_random: bool = False

    def changes(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and 8 * dtype.itemsize > self.num_bits

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        nbytes = self.codes_nbytes(numel) + 2 * num_blocks(numel)
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def largest(self) -> int:
        """Code; the smallest is as far below zero."""
        return (1 << (self.num_bits - 1)) - 1

    @property
    def highest(self) -> float:
        """What the largest magnitude becomes: no more than a code, once its scale is rounded to bfloat16."""
        return self.largest * (1 - 2**-8)

    def codes_nbytes(self, numel: int) -> int:
        """On the wire, in front of the scales."""
        nbytes = numel if self.num_bits == 8 else -(-numel // 2)
        return nbytes + nbytes % 2  # scales take two

    def encode(self, wires: Tensor, values: Tensor) -> None:
        if _has_kernels(wires):
            from mics.comm import quantized_triton

            quantized_triton.encode(self, wires, values)
        else:
            self._encode(wires, values)

    def encode_with(self, wires: Tensor, values: Tensor, errors: Tensor) -> None:
        """Encode ``values + errors``; ``errors`` (bfloat16, like ``values``) become what that loses."""
        if _has_kernels(wires):
            from mics.comm import quantized_triton

            quantized_triton.encode(self, wires, values, errors)
        else:
            encode_with_errors(self, wires, values, errors)

    def decode(self, values: Tensor, wires: Tensor) -> None:
        if _has_kernels(wires):
            from mics.comm import quantized_triton

            quantized_triton.decode(self, values, wires)
        else:
            values.copy_(self._decoded(wires, values.shape[-1]))

    def add_up(self, out: Tensor, wires: Tensor) -> None:
        if _has_kernels(wires):
            from mics.comm import quantized_triton

            quantized_triton.add_up(self, out, wires)
            return
        wide = out.dtype if out.dtype.itemsize >= 4 else torch.float32
        total = torch.zeros(out.numel(), dtype=wide, device=out.device)
        for wire in wires:
            total += self._decoded(wire, out.numel())
        out.copy_(total.view_as(out))

    @property
    def of_sums(self) -> Codec:
        """Nobody keeps what is lost of sums, and all members need the same."""
        return Cast(torch.bfloat16)

    def of_part(self, index: int, count: int) -> Codec:
        return self

    def parts(self, wires: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and scales of ``numel`` values: [..., n]."""
        first = self.codes_nbytes(numel)
        scales = wires[..., first : first + 2 * num_blocks(numel)].view(torch.bfloat16)
        return wires[..., :first], scales

    def _encode(self, wires: Tensor, values: Tensor) -> None:
        num_rows, numel = values.shape
        codes, scales = self.parts(wires, numel)
        blocks = torch.zeros(num_rows, num_blocks(numel) * _BLOCK, dtype=torch.float32, device=values.device)
        blocks[:, :numel] = values
        blocks = blocks.view(num_rows, -1, _BLOCK)
        magnitudes = blocks.abs().amax(-1)
        # By a tensor: a GPU divides by a number as it multiplies by its reciprocal.
        scales.copy_(magnitudes / torch.full_like(magnitudes, self.highest))
        steps = scales.float().unsqueeze(-1)
        scaled = torch.where(steps > 0, blocks / steps, 0.0).nan_to_num_(0.0)
        rounded = (scaled + _dither(blocks)).floor_() if self.at_random else scaled.round_()
        rounded = rounded.clamp_(-self.largest, self.largest).view(num_rows, -1)
        if self.num_bits == 8:
            codes[:, :numel] = rounded[:, :numel].to(torch.int8).view(torch.uint8)
        else:
            pairs = (rounded.to(torch.int16) & 15).view(num_rows, -1, 2)
            packed = (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)
            codes[:, : -(-numel // 2)] = packed[:, : -(-numel // 2)]

    def _decoded(self, wires: Tensor, numel: int) -> Tensor:
        """What came, in float32: [..., numel]."""
        codes, scales = self.parts(wires, numel)
        if self.num_bits == 8:
            numbers = codes[..., :numel].view(torch.int8)
        else:
            packed = codes.view(torch.int8)
            # Shifts of signed numbers keep the sign.
            numbers = torch.stack([(packed << 4) >> 4, packed >> 4], -1).flatten(-2)[..., :numel]
        steps = scales.float().repeat_interleave(_BLOCK, -1)[..., :numel]
        return numbers.float() * steps


@dataclass(eq=False)
class WithErrors:
    """A codec, and what it has lost so far of one tensor: that is added to what is encoded next."""

    codec: Codec
    errors: Tensor  # bfloat16, as many as values are encoded

    def changes(self, dtype: torch.dtype) -> bool:
        return self.codec.changes(dtype)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.codec.wire_nbytes(numel, dtype)

    def encode(self, wires: Tensor, values: Tensor) -> None:
        errors = self.errors.view_as(values)
        if isinstance(self.codec, Quantized):
            self.codec.encode_with(wires, values, errors)
        else:
            encode_with_errors(self.codec, wires, values, errors)

    def decode(self, values: Tensor, wires: Tensor) -> None:
        self.codec.decode(values, wires)

    def add_up(self, out: Tensor, wires: Tensor) -> None:
        self.codec.add_up(out, wires)

    @property
    def of_sums(self) -> Codec:
        return self.codec.of_sums

    def of_part(self, index: int, count: int) -> Codec:
        return WithErrors(self.codec, self.errors.view(count, -1)[index])


def encode_with_errors(codec: Codec, wires: Tensor, values: Tensor, errors: Tensor) -> None:
    """Encode ``values + errors``; ``errors`` become what that loses, or zero where it is no number."""
    wanted = values + errors
    codec.encode(wires, wanted)
    found = torch.empty_like(wanted)
    codec.decode(found, wires)
    errors.copy_(wanted.sub_(found).nan_to_num_(0.0, posinf=0.0, neginf=0.0))


@cache
def kernels_work(device: torch.device) -> bool:
    """Whether ``device`` has kernels of Triton for this, tried once: they take a C compiler too.

    Without them PyTorch's own make the same values, in more time and temporary memory.
    """
    if device.type != "cuda":
        return False
    codec, numel = Quantized(4), 2 * _BLOCK
    try:
        from mics.comm import quantized_triton

        values = torch.ones(2, numel, dtype=torch.float32, device=device)
        wires = torch.zeros(2, codec.wire_nbytes(numel, values.dtype), dtype=torch.uint8, device=device)
        quantized_triton.encode(codec, wires, values)
        quantized_triton.decode(codec, values, wires)
        quantized_triton.add_up(codec, values[0], wires)
        torch.cuda.synchronize(device)
    except Exception as error:
        _log.warning(
            "int8 and int4 take longer and more temporary memory, to the same values, "
            "since their kernels do not work here: %s",
            error,
        )
        return False
    return True


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and kernels_work(tensor.device)


def codec_of(format: str | None, dtype: torch.dtype | None = None, *, at_random: bool = False) -> Codec:
    """The codec of a format as ``mics.Compression`` names it; of ``None``: a cast to ``dtype``."""
    if format is None:
        return Cast(dtype)
    if format == "bf16":
        return Cast(torch.bfloat16)
    return Quantized({"int8": 8, "int4": 4}[format], at_random=at_random)


def num_blocks(numel: int) -> int:
    """Of ``numel`` values that go to one member; the last may be shorter."""
    return -(-numel // _BLOCK)


def _dither(values: Tensor) -> Tensor:
    """Numbers in [0, 1) that look random: a hash of each value's bits and its place in its row."""
    num_rows = values.shape[0]
    places = torch.arange(values[0].numel(), dtype=torch.int32, device=values.device)
    mixed = values.view(torch.int32).view(num_rows, -1) + places * 0x27D4EB2F
    # The finaliser of MurmurHash3. Shifts of int32 keep the sign, which a mask takes away.
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * -0x7A143595
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -0x3D4D51CB
    mixed ^= (mixed >> 16) & 0xFFFF
    return ((mixed & 0xFFFFFF).float() / (1 << 24)).view_as(values)
