"""A model as the planner sees it: units in the order of the forward, each with its size and its work.

Work is counted for one token. Activations are counted in elements of a token: what a unit saves for its
backward, and what of that is its input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from mics.models import GPT_SIZES, PUBLISHED_SIZES, GPTConfig, find_size

UnitKind = Literal["block", "embedding", "head", "other"]
_BLOCK_SAVED: Final = 16  # x hidden: input, two norms, qkv (3), attention, residual, up (4), its GELU (4)
_BLOCK_TRAFFIC: Final = 18  # x hidden elements read or written outside of matrices in a forward
_CHAIN: Final = 32  # equal units in a row: all of a small model, and more than any plan looks ahead
_FULL_VOCABULARY: Final = 50304


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """What is gathered and released together."""

    name: str
    kind: UnitKind
    numel: int
    matrix_flops: float = 0.0
    """Of a token's forward, in matrices: two for each element of them."""
    attention_flops: float = 0.0
    """Of a token's forward, in attention itself."""
    width: int = 0
    """Of the matrices: narrow ones multiply more slowly."""
    input_numel: int = 0
    """Elements of a token that come in: all that a checkpoint saves."""
    saved_numel: int = 0
    """Elements of a token that are saved without a checkpoint."""
    traffic_numel: int = 0
    """Elements of a token that pass through memory outside of matrices."""
    score_numel: int = 0
    """Attention scores of a token: they pass through memory where attention is not fused."""
    is_held: bool = False
    """It belongs to a module around others (tied weights), and is gathered as long as they are at work."""
    in_float8: bool = False
    """Its matrices are gathered in float8."""

    @property
    def float8_numel(self) -> int:
        """Elements that take one byte on the wire, and never go as moves."""
        return min(self.numel, int(self.matrix_flops / 2)) if self.in_float8 else 0

    def gathered_nbytes(self, param_nbytes: int) -> int:
        """Of the whole unit, whose other elements take ``param_nbytes``."""
        return param_nbytes * self.numel - (param_nbytes - 1) * self.float8_numel

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.attention_flops


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model at one sequence length."""

    name: str
    seq_len: int
    units: tuple[UnitShape, ...]
    vocab_size: int = 0
    """Of the logits that a loss is made of; 0: none."""
    parts: int = 1
    """Units that each block is split into."""
    num_calls: int = 1
    """Of each layer in a forward, where layers share weights: what the rest counts is one."""

    @property
    def num_parameters(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def num_blocks(self) -> int:
        return sum(unit.kind == "block" for unit in self.units)

    @property
    def largest_numel(self) -> int:
        return max(unit.numel for unit in self.units)

    @cached_property
    def without_repeats(self) -> tuple[UnitShape, ...]:
        """Units that hold parameters, long chains of equal ones cut short: nothing differs there."""
        found: list[UnitShape] = []
        for unit in self.units:
            before = [(other.kind, other.numel) for other in found[-_CHAIN:]]
            if unit.numel and before != [(unit.kind, unit.numel)] * _CHAIN:
                found.append(unit)
        return tuple(found)

    def with_blocks(self, number: int) -> ModelShape:
        """The same with only so many blocks (of all their parts)."""
        left, units = number * self.parts, []
        for unit in self.units:
            left -= unit.kind == "block"
            if unit.kind != "block" or left >= 0:
                units.append(unit)
        return replace(self, units=tuple(units))

    def with_float8(self, is_on: bool) -> ModelShape:
        """The same with the matrices of blocks gathered in float8, or none."""
        if is_on == any(unit.in_float8 for unit in self.units):
            return self
        units = (replace(unit, in_float8=is_on and unit.kind == "block") for unit in self.units)
        return replace(self, units=tuple(units))

    def split(self, parts: int) -> ModelShape:
        """The same with every block in so many units: its attention and MLP, or their matrices."""
        if parts == 1:
            return self
        units: list[UnitShape] = []
        for unit in self.units:
            if unit.kind != "block":
                units.append(unit)
                continue
            part = replace(
                unit,
                numel=-(-unit.numel // parts),
                matrix_flops=unit.matrix_flops / parts,
                attention_flops=unit.attention_flops / parts,
                saved_numel=-(-unit.saved_numel // parts),
                traffic_numel=unit.traffic_numel // parts,
                score_numel=unit.score_numel // parts,
            )
            # The block's checkpoint keeps its input; what is inside keeps nothing.
            units += [
                replace(part, name=f"{unit.name}.{number}", input_numel=0 if number else unit.input_numel)
                for number in range(parts)
            ]
        return replace(self, units=tuple(units), parts=parts)

    def flops(self, tokens: float, *, recomputed: bool = False) -> float:
        """Of one forward and backward, and of computing blocks again if that counts."""
        forward = sum(unit.flops for unit in self.units)
        again = sum(unit.flops for unit in self.units if unit.kind == "block") if recomputed else 0.0
        return tokens * (3 * forward + again)


def transformer(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    seq_len: int,
    vocab_size: int = _FULL_VOCABULARY,
    tied: bool = False,
    learned_positions: bool = True,
    biases: bool = True,
) -> ModelShape:
    """A GPT or BERT: blocks of attention and an MLP of four times the width."""
    h = hidden_size
    embedding = UnitShape(
        name="embedding", kind="embedding", numel=vocab_size * h, traffic_numel=2 * h, is_held=tied
    )
    positions = UnitShape(name="positions", kind="embedding", numel=seq_len * h, traffic_numel=3 * h)
    block = UnitShape(
        name="block",
        kind="block",
        numel=12 * h * h + (13 if biases else 4) * h,
        matrix_flops=24.0 * h * h,
        attention_flops=4.0 * seq_len * h,
        width=h,
        input_numel=h,
        saved_numel=_BLOCK_SAVED * h,
        traffic_numel=_BLOCK_TRAFFIC * h,
        score_numel=num_heads * seq_len,
    )
    norm = UnitShape(
        name="norm", kind="other", numel=2 * h, input_numel=h, saved_numel=h, traffic_numel=2 * h, width=h
    )
    head = UnitShape(
        name="head",
        kind="head",
        numel=0 if tied else vocab_size * h,
        matrix_flops=2.0 * vocab_size * h,
        width=h,
        input_numel=h,
        saved_numel=h,
        # Logits as they come, in float32, and what becomes of them.
        traffic_numel=8 * vocab_size,
    )
    blocks = tuple(replace(block, name=f"blocks.{number}") for number in range(num_layers))
    first = (embedding, positions) if learned_positions else (embedding,)
    return ModelShape(name=name, seq_len=seq_len, units=(*first, *blocks, norm, head), vocab_size=vocab_size)


def shape_of_config(
    name: str, config: GPTConfig, *, seq_len: int | None = None, biases: bool = False
) -> ModelShape:
    """A GPT as ours are built, or with ``biases`` as those of the papers."""
    return transformer(
        name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        seq_len=seq_len or config.seq_len,
        vocab_size=config.vocab_size,
        tied=config.tie_weights,
        learned_positions=not config.rotary,
        biases=biases,
    )


NAMES: Final = tuple(GPT_SIZES)
"""Every named size, from small to large by kind."""


def named_shape(name: str, *, seq_len: int | None = None) -> ModelShape:
    """A model by name."""
    return shape_of_config(name, find_size(name), seq_len=seq_len, biases=name in PUBLISHED_SIZES)
