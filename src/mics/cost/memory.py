"""Memory of one rank, term by term: what the engine reports against and the search decides by."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from mics.cost.shapes import ModelShape, UnitShape
from mics.layout.flat import BLOCK_NUMEL, alignment_of, round_up
from mics.layout.homes import Change, Recorded, aligned, plan_homes, plan_segments
from mics.layout.order import NO_BATCHING, Batching, Prefetch, make_plan

TINY_SHARE: Final = 16
"""Units of less than this part of the largest have reduce buffers of their own, and wait for no large one."""
QUICK_SHARE: Final = 0.1
"""With `low_memory`: a reduction of less than this part of a forward is waited for: 3% of a unit's time."""
USABLE: Final = 0.92
"""Of a device's memory: the rest is the CUDA context, the allocator's holes and NCCL's buffers."""
DRIVER_NBYTES: Final = 1 << 30
"""Of a GPU's memory, that no program has: tables of its pages, the CUDA context and loaded kernels."""
MASTER_NBYTES: Final = 4  # of an element in float32
ADAM_NBYTES: Final = 8  # two moments in float32, for each element of a master
ADAM_8BIT_NBYTES: Final = 2 * (1 + 4 / BLOCK_NUMEL)  # two codes, and two scales in float32 for each block
NUM_STAGED: Final = 2  # units whose optimizer state is on the device at once, if it comes from the host
NUM_RECEIVED: Final = 2  # units whose moves are on the device at once, of all members
_PARAM: Final = 2  # bytes, bfloat16
_WIDE: Final = 4  # bytes, float32
_ERROR: Final = 2  # bytes, bfloat16
_LOGIT_NBYTES: Final = 12  # cross-entropy's softmax and two gradients in float32, at once


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a model is divided: what the terms depend on, beside the model."""

    partition_size: int
    num_replicas: int = 1
    over_replicas: bool = True
    """Masters and optimizer state are divided over replicas too."""
    prefetch: int = 1
    stay_nbytes: int = 0
    """Of gathered units that are not released between their uses."""
    num_reduce_buffers: int = 1
    param_nbytes: int = _PARAM
    reduce_nbytes: int = _WIDE
    state_nbytes: float = ADAM_NBYTES
    """Of an optimizer, for each element of a master."""
    low_memory: bool = False
    """Gradients, buffers and gathered units have memory only while they are needed."""
    state_on_host: bool = False
    """Masters and optimizer state are in host memory; those of two units are on the device in a step."""
    reduction_share: float = math.inf
    """How long a unit is being reduced, for each second of its forward. Quick ones are waited for."""
    keeps_errors: bool = False
    """What rounding between replicas loses is kept."""
    staged_nbytes: float = 0.0
    """Of an element of the largest unit, on its way in fewer bits (``cost/stages.py``)."""
    move_nbytes: float = 0.0
    """Of an element whose new value is sent as a move: to replicas, else of units that stay."""

    @property
    def casts_masters(self) -> bool:
        """Gathers cast the masters: there is no second copy of the parameters."""
        whole = self.num_replicas == 1 or not self.over_replicas
        return (
            self.low_memory
            and not self.state_on_host
            and whole
            and self.partition_size > 1
            and self.param_nbytes < _WIDE
        )

    @property
    def num_owners(self) -> int:
        return self.partition_size * (self.num_replicas if self.over_replicas else 1)


def padded(numel: int, division: Division) -> int:
    """Elements of a unit once every rank's piece is aligned; its largest parameter is most of it."""
    return round_up(numel, alignment_of(numel) * division.partition_size * division.num_replicas)


@dataclass(frozen=True)
class Nest:
    """Units that are at work together, as long as what is inside them."""

    units: tuple[int, ...]
    inside: tuple[Nest, ...] = ()
    again: bool = False
    """All of it is recomputed in the backward."""

    def nbytes(self, sizes: Sequence[int]) -> int:
        """The most at once."""
        at_once = sum if self.again else max
        inner = at_once(nest.nbytes(sizes) for nest in self.inside) if self.inside else 0
        return sum(sizes[unit] for unit in self.units) + inner

    def all_units(self) -> Iterator[int]:
        """With those inside, in the order of the forward."""
        yield from self.units
        for nest in self.inside:
            yield from nest.all_units()


@lru_cache(maxsize=256)
def homes(
    sizes: tuple[int, ...],
    lookups: tuple[int, ...],
    prefetch: int,
    held: tuple[int, ...] = (),
    staying: int = 0,
    batching: Batching = NO_BATCHING,
    alone: tuple[int, ...] = (),
    nests: tuple[Nest, ...] | None = None,
    ahead: int | None = None,
    frees: bool = False,
) -> int:
    """Bytes of the arena: the engine's own plan for a forward and a backward through a chain of units.

    ``sizes`` are in the order of the forward; ``lookups`` names units that the backward does not need.
    ``held``: of units beside the chain, gathered all the while. ``staying``: bytes of units that wait for
    their next use. ``batching``: small units that travel together look further ahead.
    ``alone``: units that share their home with nobody. ``nests``: all units, where some are inside others.
    ``ahead``: bytes that may be prefetched at once. ``frees``: the loss may have what is not gathered then,
    so units that are gathered then, and those that are alone, have places of their own.
    """
    if nests is None:
        nests = tuple(Nest((unit,)) for unit in range(len(sizes)))
    if prefetch == 0:
        return max((nest.nbytes(sizes) for nest in nests), default=0) + sum(held)
    there, back = list(_way_there(nests)), list(_way_back(nests, lookups))
    by_unit = dict(enumerate(sizes))
    turn = sum(visit.begins for visit in there) if frees else None
    plan = make_plan(
        [visit.unit for visit in (*there, *back) if visit.begins],
        sizes=by_unit,
        prefetch=Prefetch(units=prefetch, nbytes=ahead, stay_nbytes=staying),
        batching=batching,
        turn=turn,
    )
    events, position = [], -1
    for visit in (*there, *back):
        position += visit.begins
        if visit.begins or not (visit.may_be_kept and visit.unit in plan.kept[position]):
            events.append(Change(visit.unit, needed=visit.begins))
    recorded = Recorded(
        events=events,
        sent_at=plan.sent_at(),
        staying=plan.staying.union(alone),
        first=plan.first_units,
        turn=turn,
    )
    planned = plan_segments([recorded], by_unit, apart=alone) if frees else [plan_homes([recorded], by_unit)]
    return sum(found.nbytes for found in planned) + sum(map(aligned, held))


@dataclass(frozen=True)
class _Visit:
    """A forward or a backward of a unit begins or ends."""

    unit: int
    begins: bool
    may_be_kept: bool = False  # at its end, because it is needed again


def _way_there(nests: Sequence[Nest]) -> Iterator[_Visit]:
    for nest in nests:
        yield from (_Visit(unit, begins=True) for unit in nest.units)
        yield from _way_there(nest.inside)
        yield from (_Visit(unit, begins=False, may_be_kept=True) for unit in nest.units)


def _way_back(nests: Sequence[Nest], unread: Collection[int]) -> Iterator[_Visit]:
    for nest in reversed(nests):
        read = [unit for unit in nest.units if unit not in unread]
        yield from (_Visit(unit, begins=True) for unit in read)
        if nest.again:  # what is recomputed stays until its own backward
            inner = [unit for each in nest.inside for unit in each.all_units()]
            yield from (_Visit(unit, begins=True) for unit in inner)
            yield from (_Visit(unit, begins=False) for unit in reversed(inner))
        else:
            yield from _way_back(nest.inside, unread)
        yield from (_Visit(unit, begins=False) for unit in read)


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What is kept between forward and backward."""

    checkpoint: bool
    offload: bool = False

    def __str__(self) -> str:
        return "offload" if self.offload else "checkpoint" if self.checkpoint else "kept"


_FIXED: Final = (
    "parameters",
    "gradients",
    "masters",
    "optimizer state",
    "gathered units",
    "reduce buffers",
    "lost in rounding",
    "wire",
    "moves",
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Bytes of one rank, by name, in each moment that may be the peak."""

    at_loss: dict[str, float]
    in_block: dict[str, float]
    """In the middle of a block's backward."""
    between_blocks: dict[str, float]
    computed_again: dict[str, float]
    """At the end of a block's second forward."""
    at_update: dict[str, float] = field(default_factory=dict)
    """While the optimizer steps, if its state comes from the host."""
    host: float = 0.0

    @property
    def fixed(self) -> float:
        """What is there at the end of every backward, whatever it works on."""
        return sum(self.between_blocks.get(name, 0.0) for name in _FIXED)

    @property
    def peak(self) -> float:
        """In whichever moment it is most."""
        return sum(self.on_device().values())

    def on_device(self) -> dict[str, float]:
        """By name, for people: at the peak."""
        moments = self.at_loss, self.in_block, self.between_blocks, self.computed_again, self.at_update
        return max(moments, key=lambda terms: sum(terms.values()))


@dataclass(frozen=True, kw_only=True)
class _SavedBytes:
    """Of activations, between forward and backward."""

    blocks: float
    blocks_at_loss: float
    outside: float  # of what is no block
    on_host: float
    in_block: float  # all that the largest one saves

    @classmethod
    def of(cls, model: ModelShape, activations: Keeping, per_token: float) -> _SavedBytes:
        """``per_token``: bytes of one element of every token."""
        blocks = [unit for unit in model.units if unit.kind == "block"]
        rest = [unit for unit in model.units if unit.kind != "block"]
        inputs = sum(unit.input_numel for unit in blocks) * per_token
        kept = inputs if activations.checkpoint else sum(unit.saved_numel for unit in blocks) * per_token
        at_loss, on_host, in_block = kept, 0.0, 0.0
        if blocks:
            block = max(blocks, key=lambda unit: unit.saved_numel)
            in_block = block.saved_numel * model.parts * per_token
            if activations.checkpoint and activations.offload:
                # The last one stays; in the backward the next is on its way.
                at_loss = min(inputs, block.input_numel * per_token)
                kept, on_host = min(inputs, 2 * at_loss), inputs
        return cls(
            blocks=kept,
            blocks_at_loss=at_loss,
            outside=sum(unit.saved_numel for unit in rest) * per_token,
            on_host=on_host,
            in_block=in_block,
        )


def _gathered_nbytes(unit: UnitShape, division: Division) -> int:
    return replace(unit, numel=padded(unit.numel, division)).gathered_nbytes(division.param_nbytes)


def _gathered(model: ModelShape, division: Division) -> tuple[float, int]:
    """Bytes of gathered units: the most at once, and what the backward begins with."""
    sizes = [_gathered_nbytes(unit, division) for unit in model.without_repeats]
    shapes = list(zip(model.without_repeats, sizes, strict=True))
    chain = [(unit, nbytes) for unit, nbytes in shapes if not unit.is_held]
    held = tuple(nbytes for unit, nbytes in shapes if unit.is_held)
    lookups = tuple(index for index, (unit, _) in enumerate(chain) if unit.kind == "embedding")
    first_back = sum(nbytes for _, nbytes in chain[-1:]) + sum(held)
    if division.partition_size == 1:
        return 0.0, first_back
    sizes_of_chain = tuple(nbytes for _, nbytes in chain)
    arena: float = homes(sizes_of_chain, lookups, division.prefetch, held, frees=division.low_memory)
    if division.stay_nbytes:  # at homes of their own
        total = sum(_gathered_nbytes(unit, division) for unit in model.units if unit.numel)
        arena = min(arena + division.stay_nbytes, float(total))
    return arena, first_back


def _param_nbytes(units: Sequence[UnitShape], division: Division) -> int:
    """Bytes of what is gathered, of a group. Gathers cast to 16 bits on the way, not to float8."""
    if division.casts_masters:
        return sum(unit.float8_numel for unit in units)
    return sum(_gathered_nbytes(unit, division) for unit in units)


def _compressed(units: Sequence[UnitShape], division: Division) -> dict[str, float]:
    """What fewer bytes take."""
    numels = [padded(unit.numel, division) for unit in units]
    found = {}
    if division.keeps_errors and division.num_replicas > 1:
        found["lost in rounding"] = sum(numels) * _ERROR / division.partition_size
    if division.staged_nbytes:
        found["wire"] = max(numels) * division.staged_nbytes
    if division.move_nbytes:
        moved = [numel - unit.float8_numel for numel, unit in zip(numels, units, strict=True)]
        found["moves"] = division.move_nbytes * _num_moved(division, moved)
    return found


def _num_moved(division: Division, numels: Sequence[int]) -> float:
    """Elements with memory for their moves: this rank's own, and those of two units from all members."""
    p, total, largest = division.partition_size, sum(numels), max(numels)
    if division.num_replicas > 1:
        return total / (p * division.num_replicas) + NUM_RECEIVED * largest / p
    stay = min(division.stay_nbytes / division.param_nbytes, total)
    return stay / p + NUM_RECEIVED * min(stay, largest)


def memory_terms(
    model: ModelShape,
    division: Division,
    activations: Keeping,
    tokens: float,
    *,
    accumulates: bool = True,
) -> Terms:
    """Of a rank that works on ``tokens`` at a time, in several micro-steps a step if it ``accumulates``."""
    p, param = division.partition_size, division.param_nbytes
    units = [unit for unit in model.units if unit.numel]
    numels = [padded(unit.numel, division) for unit in units]
    total, largest = sum(numels), max(numels)
    tiny = max((numel for numel in numels if numel * TINY_SHARE < largest), default=0)
    reduced = division.num_reduce_buffers * division.reduce_nbytes * (largest + tiny)
    saved = _SavedBytes.of(model, activations, param * tokens)
    again = saved.in_block if activations.checkpoint else 0.0
    arena, first_back = _gathered(model, division)
    masters = MASTER_NBYTES if param < _WIDE else 0  # bytes of an element
    stays = 0 if division.state_on_host else 1
    between = {
        "parameters": _param_nbytes(units, division) / p,
        "gradients": total * _WIDE / p,
        "masters": stays * total * masters / division.num_owners,
        "optimizer state": stays * total * division.state_nbytes / division.num_owners,
        "gathered units": arena,
        "reduce buffers": reduced * (1 + 1 / p),
        "activations": saved.blocks + saved.outside,
        "logits or workspace": float(largest * param),
    }
    between |= _compressed(units, division)
    # At its widest part: what the block saves if that is recomputed, the gradients of that part (half of
    # what is saved) for what it has used up (a quarter), and the full gradients of a matrix.
    in_block = between | {"logits or workspace": again + saved.in_block / 4 + largest * param / 3}
    # What has been recomputed, and the gradients of the block before until they are laid out.
    again_done = between | {"logits or workspace": again + largest * param}
    at_loss = between | {
        "activations": saved.blocks_at_loss + saved.outside,
        "logits or workspace": tokens * model.vocab_size * _LOGIT_NBYTES,
    }
    if division.low_memory:
        if division.reduction_share <= QUICK_SHARE:
            in_block["reduce buffers"] = 0.0
            again_done |= {"reduce buffers": 0.0, "logits or workspace": again}
        at_loss["gathered units"] = min(arena, first_back)
        at_loss["reduce buffers"] = 0.0
        at_loss["gradients"] *= accumulates  # of earlier micro-steps
    at_update, state = {}, 0.0
    if division.state_on_host:
        staged = NUM_STAGED * largest / division.num_owners
        at_update = between | {"activations": 0.0, "logits or workspace": 0.0}
        at_update |= {"masters": staged * masters, "optimizer state": staged * ADAM_NBYTES}
        state = total * (masters + ADAM_NBYTES) / division.num_owners
    return Terms(
        at_loss=at_loss,
        in_block=in_block,
        between_blocks=between,
        computed_again=again_done,
        at_update=at_update,
        host=saved.on_host + state,
    )
