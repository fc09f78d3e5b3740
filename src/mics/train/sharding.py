"""From the settings of a run to ``mics.shard``, and in words what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

import mics
from mics.engine import engine_of
from mics.layout.assign import unit_modules
from mics.train.config import ShardingSettings
from mics.utils.numbers import memory, plural

_DTYPES: Final = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard_model(model: nn.Module, settings: ShardingSettings) -> nn.Module:
    """``mics.shard`` as the settings ask for it."""
    parts = block_parts(model) if settings.units == "parts" else None
    return mics.shard(
        model,
        partition_size=settings.partition_size,
        units=parts,
        optimizer_sharding=settings.optimizer_sharding,
        optimizer_state=settings.optimizer_state,
        precision=mics.Precision(
            param_dtype=_DTYPES[settings.param_dtype],
            reduce_dtype=_DTYPES[settings.reduce_dtype] or torch.float32,
            replica_reduce_dtype=_DTYPES[settings.replica_reduce_dtype] if settings.hop2 is None else None,
        ),
        prefetch="auto" if settings.prefetch is None else settings.prefetch,
        activations=_activations(model, settings),
        compression=settings.compression,
    )


def block_parts(model: nn.Module) -> list[nn.Module]:
    """Of every block the modules in it that have matrices: its attention, and its MLP or the parts of that.

    A block without such modules stays a unit.
    """
    found: list[nn.Module] = []
    for block in unit_modules(model):
        parts = [child for child in block.children() if any(param.ndim >= 2 for param in child.parameters())]
        found += parts or [block]
    return found


def _activations(model: nn.Module, settings: ShardingSettings) -> mics.Activations | None:
    if settings.activations == "keep":
        return None
    offload = settings.activations == "offload"
    if settings.units == "blocks":
        return mics.Activations(offload=offload)
    blocks = {id(block) for block in unit_modules(model)}
    return mics.Activations(checkpoint=lambda module: id(module) in blocks, offload=offload)


def describe_choices(model: nn.Module, settings: ShardingSettings) -> Iterator[str]:
    """What the engine chose and why, a line each."""
    engine = engine_of(model)
    topology = engine.topology
    why = "asked for"
    if settings.partition_size is None:
        on_gpu = engine.device.type == "cuda"
        why = (
            "the smallest that leaves half of a GPU to activations" if on_gpu else "one node: no GPU to fill"
        )
    stages = "two stages, within nodes and between them" if any(topology.two_stage) else "one stage"
    yield f"partition size {topology.partition_size} ({why}); collectives in {stages}"
    over_all = all(unit.share.masters_over_replicas for unit in engine.units)
    where = "all ranks" if over_all else "the partition group"
    how = "asked for" if settings.optimizer_sharding != "auto" else "by the cost model"
    kept = {"keep": "kept", "checkpoint": "recomputed", "offload": "recomputed, inputs offloaded"}
    on_host = ", on the host" if settings.optimizer_state == "host" else ""
    yield (
        f"optimizer state sharded over {where} ({how}){on_host}; activations {kept[settings.activations]} "
        "(asked for)"
    )
    yield f"{plural(len(engine.units), 'unit')} ({settings.units}); prefetch {describe_prefetch(model)}"
    if engine.device.type == "cpu" and settings.param_dtype in ("bf16", "fp16"):
        # mics plan --write names the dtype of the GPU that it planned for.
        yield (
            f"sharding.param_dtype {settings.param_dtype}: meant for GPUs, and slow on most processors; "
            "--sharding.param-dtype auto is fp32 here"
        )


class PrefetchNews:
    """Tells once how far the engine looks ahead, when the first steps have decided it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plans = engine_of(model).residency.plans
        self._told = self._plans.is_final  # by the header

    def take(self) -> str | None:
        if self._told or not self._plans.is_final:
            return None
        self._told = True
        return f"prefetch {describe_prefetch(self._model)}"


def describe_prefetch(model: nn.Module) -> str:
    """How far the engine looks ahead, as far as it has decided."""
    plans = engine_of(model).residency.plans
    ahead = plans.prefetch
    if not plans.is_final:
        return f"{plural(ahead.units, 'unit')} until the first steps have shown what hides the all-gathers"
    limit = "" if ahead.nbytes is None else f", at most {memory(ahead.nbytes)}"
    stays = f"; {memory(ahead.stay_nbytes)} stay unsharded between uses" if ahead.stay_nbytes else ""
    return f"{plural(ahead.units, 'unit')}{limit}{stays}"
