"""Memory of a rank in other systems, term by term: each by its own division of the model's state.

For ``P`` parameters over a group of ``p`` ranks, in bytes before activations and buffers::

    FSDP2, HSDP   parameters 4P/p (float32), gradients 4P/p, Adam 8P/p             nothing over replicas
    ZeRO-3        parameters 2P/p, gradients 4P/p, masters 4P/p, Adam 8P/p
    ZeRO-2        parameters 2P,   gradients 4P/p, masters 4P/p, Adam 8P/p

DeepSpeed gathers what each module itself holds, so its units are matrices, not blocks. Its buckets are taken
to be one of them and two are gathered at most: its defaults take more. Activations and what the backward
works in are those of `mics.cost.memory`: the model is the same.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Final

from mics.cost.memory import Division, Terms
from mics.cost.setting import Setting

_PARTS: Final = 3  # of a block: its attention, and both matrices of its MLP
_PARAM: Final = 2  # bytes
_WIDE: Final = 4


def fsdp_terms(setting: Setting) -> Terms:
    """FSDP2 over the partition group. With replicas (HSDP) each has all of it."""
    p, model = setting.partition_size, setting.model
    total = model.num_parameters
    gathered = [(unit, unit.gathered_nbytes(_PARAM)) for unit in model.units if unit.numel]
    chain = [nbytes for unit, nbytes in gathered if not unit.is_held]
    held = sum(nbytes for unit, nbytes in gathered if unit.is_held)
    in_turn, at_loss, buffers = 0.0, 0.0, 0.0
    if p > 1:
        # The unit at work, and the buffer of the next one. The backward begins with the last.
        in_turn = held + max(sum(pair) for pair in pairwise([0, *chain]))
        at_loss = held + chain[-1]
        buffers = setting.wire_nbytes * model.largest_numel * (1 + 1 / p)
    return _with(
        setting,
        {
            "parameters": total * _WIDE / p,
            "gradients": total * _WIDE / p,
            "masters": 0.0,
            "optimizer state": total * setting.state_nbytes / p,
            "gathered units": in_turn,
            "reduce buffers": buffers,
        },
        at_loss={"gathered units": at_loss, "reduce buffers": 0.0},
    )


def zero3_terms(setting: Setting) -> Terms:
    """DeepSpeed's ZeRO-3 over the partition group: the world, or for MiCS a part of it."""
    setting = _by_matrices(setting)
    p, total = setting.partition_size, setting.model.num_parameters
    live = min(total, 2 * setting.model.largest_numel)  # the one at work, and the next
    return _with(
        setting,
        {
            "parameters": _PARAM * total / p,
            "gradients": total * _WIDE / p,
            "masters": total * _WIDE / p,
            "optimizer state": total * setting.state_nbytes / p,
            "gathered units": float(_PARAM * live) if p > 1 else 0.0,
            "reduce buffers": _buckets(setting),
        },
    )


def zero2_terms(setting: Setting) -> Terms:
    """DeepSpeed's ZeRO-2 over the world."""
    setting = _by_matrices(setting)
    p, total = setting.partition_size, setting.model.num_parameters
    return _with(
        setting,
        {
            "parameters": float(_PARAM * total),
            "gradients": total * _WIDE / p,
            "masters": total * _WIDE / p,
            "optimizer state": total * setting.state_nbytes / p,
            "gathered units": 0.0,
            "reduce buffers": _buckets(setting),
        },
    )


def _by_matrices(setting: Setting) -> Setting:
    return setting if setting.model.parts > 1 else replace(setting, model=setting.model.split(_PARTS))


def _buckets(setting: Setting) -> float:
    """One fills while the other is reduced (``overlap_comm``), cast to what goes over the wire."""
    cast = setting.wire_nbytes if setting.wire_nbytes > _PARAM else 0
    return float((2 * _PARAM + cast) * setting.model.largest_numel)


def _with(setting: Setting, fixed: dict[str, float], at_loss: dict[str, float] | None = None) -> Terms:
    """The model's activations beside a system's own state."""
    base = setting.terms_of(Division(partition_size=setting.partition_size))
    moments = [each | fixed for each in (base.in_block, base.between_blocks, base.computed_again)]
    loss = base.at_loss | fixed | (at_loss or {})
    if setting.accumulation == 1:
        # Gradients come as activations go: the sum is largest at one of both ends.
        for terms in moments:
            terms["gradients"] = max(0.0, terms["gradients"] - terms["activations"])
        loss["gradients"] = 0.0
    in_block, between, again = moments
    return replace(base, at_loss=loss, in_block=in_block, between_blocks=between, computed_again=again)
