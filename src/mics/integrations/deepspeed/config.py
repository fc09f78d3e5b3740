"""A ``ds_config.json`` as settings of mics: each key is used, ignored with a reason, or refused by name."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mics.config import OptimizerState
from mics.integrations.deepspeed.loss_scale import LossScaling
from mics.integrations.deepspeed.schedules import SCHEDULES, is_number
from mics.integrations.deepspeed.sections import Ignored, Section, load_config, refuse_auto
from mics.layout.compression import Compression
from mics.layout.precision import Precision

_LOG: Final = logging.getLogger("mics")
_MAX_SCALE_POWER: Final = 127
_DTYPES: Final = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}
_TORCH_OPTIMIZERS: Final[dict[str, type[Optimizer]]] = {
    kind.__name__.lower(): kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}
_REFUSED_OPTIMIZERS: Final = {
    "lamb": "it scales by the norms of whole matrices, and a rank has only a part of each",
    "onebitadam": "it compresses gradients, so losses would differ",
    "onebitlamb": "it compresses gradients, so losses would differ",
    "zerooneadam": "it compresses gradients, so losses would differ",
    "muon": "it needs whole matrices, and a rank has only a part of each",
    "lion": "torch has none",
    "muadam": "it is from another package",
    "muadamw": "it is from another package",
    "musgd": "it is from another package",
}


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """What a config means for mics, and what of it means nothing."""

    stage: int
    partition_size: int
    optimizer_sharding: Literal["world", "partition"]
    optimizer_state: OptimizerState
    hierarchical: Literal["auto"] | bool
    precision: Precision
    compression: Compression
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    gradient_clipping: float = 0.0
    loss_scaling: LossScaling | None = None
    casts_inputs: bool = False
    drop_last: bool = False
    optimizer: tuple[type[Optimizer], dict[str, Any]] | None = None
    scheduler: tuple[type[LRScheduler], dict[str, Any]] | None = None
    ignored: tuple[Ignored, ...] = ()

    def shard_settings(self) -> dict[str, Any]:
        """The keywords of ``mics.shard``."""
        return {
            "partition_size": self.partition_size,
            "optimizer_sharding": self.optimizer_sharding,
            "optimizer_state": self.optimizer_state,
            "hierarchical": self.hierarchical,
            "precision": self.precision,
            "compression": self.compression,
        }

    def tell(self) -> None:
        """Log what is ignored, one line each."""
        for each in self.ignored:
            _LOG.info("deepspeed config: %s is ignored: %s", each.key, each.reason)


def read_config(config: str | Path | Mapping[str, Any], *, world_size: int) -> DeepSpeedConfig:
    """Read a config of DeepSpeed, a file or a dict, for ``world_size`` ranks."""
    reader = Section("", load_config(config), [])
    refuse_auto(reader.values, "")
    stage, sharding = _zero(reader, world_size)
    train, micro, accumulation = _batch_sizes(reader, world_size)
    precision, scaling, casts = _precision(reader)
    clipping = reader.number("gradient_clipping", 0.0)
    drop_last = reader.flag("dataloader_drop_last")
    reader.section("checkpoint").finish()
    if reader.take("gradient_allreduce_op", "mean") != "mean":
        raise reader.error("gradient_allreduce_op", '"mean"', "mics averages gradients over ranks")
    optimizer = _optimizer(reader)
    scheduler = _scheduler(reader)
    reader.finish()
    return DeepSpeedConfig(
        stage=stage,
        **sharding,
        precision=precision,
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        gradient_clipping=clipping,
        loss_scaling=scaling,
        casts_inputs=casts,
        drop_last=drop_last,
        optimizer=optimizer,
        scheduler=scheduler,
        ignored=tuple(reader.ignored),
    )


# -- sections --------------------------------------------------------------------------------------------


def _zero(reader: Section, world_size: int) -> tuple[int, dict[str, Any]]:
    zero = reader.section("zero_optimization")
    stage = zero.take("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise zero.error("stage", "0, 1, 2 or 3", found=stage)
    size = zero.whole("mics_shard_size", -1)
    gather = zero.take("mics_hierarchical_params_gather", None)
    if gather not in (None, True, False):
        raise zero.error("mics_hierarchical_params_gather", "true or false", found=gather)
    if size > 0 and stage != 3:
        raise zero.error("mics_shard_size", "stage 3 beside it", "write stage 3", found=f"stage {stage}")
    if size == 0 or size < -1 or (size > 0 and world_size % size):
        raise zero.error("mics_shard_size", f"a divisor of the {world_size} ranks, or -1", found=size)
    size = _secondary(zero, size, stage, world_size)
    compression = _quantized(zero, stage)
    if stage == 2:
        zero.ignore(
            "stage",
            "2 is taken as 1: gradients stay whole on each rank until the step; stage 3 shards them too, and "
            "mics_shard_size keeps its traffic inside a node",
        )
    optimizer_state = _optimizer_state(zero)
    zero.finish()
    whole = size if size > 0 else world_size
    return stage, {
        "partition_size": whole if stage == 3 else 1,
        "optimizer_sharding": "partition" if stage == 0 else "world",
        "optimizer_state": optimizer_state,
        "hierarchical": "auto" if gather is None else gather,
        "compression": compression,
    }


def _optimizer_state(zero: Section) -> OptimizerState:
    offload = zero.section("offload_optimizer")
    device = offload.take("device", None)
    if device not in (None, "none", "cpu"):
        raise offload.error("device", "cpu or none", "masters and optimizer state go to host memory alone")
    offload.finish()
    is_on_host = zero.flag("cpu_offload") or device == "cpu"
    return "host" if is_on_host else "device"


def _secondary(zero: Section, size: int, stage: int, world_size: int) -> int:
    """The partition size: ZeRO++ has a second copy of the parameters in groups of so many ranks."""
    key = "zero_hpz_partition_size"
    second = zero.whole(key, 1, least=1)
    if second == 1:
        return size
    if stage != 3:
        raise zero.error(key, "stage 3 beside it", "write stage 3", found=f"stage {stage}")
    if world_size % second:
        raise zero.error(key, f"a divisor of the {world_size} ranks", found=second)
    if size not in (-1, second):
        raise zero.error(key, f"the mics_shard_size of {size}", "leave one of them out", found=second)
    return int(second)


def _quantized(zero: Section, stage: int) -> Compression:
    """What ZeRO++ rounds. Its formats are its own: here both are int8."""
    weights, gradients = "zero_quantized_weights", "zero_quantized_gradients"
    on = {key: zero.flag(key) for key in (weights, gradients)}
    for key in on:
        if on[key] and stage != 3:
            raise zero.error(key, "stage 3 beside it", "write stage 3", found=f"stage {stage}")
    return Compression(
        hop2="int8" if on[gradients] else None,
        inter_reduce="int8" if on[gradients] else None,
        inter_gather="int8" if on[weights] else None,
    )


def _batch_sizes(reader: Section, world_size: int) -> tuple[int, int, int]:
    """All three from any that are given: train = micro x accumulation x ranks."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (reader.whole(key, None, least=1) for key in keys)
    if train is None and micro is None:
        raise reader.error(
            keys[1],
            f"it or {keys[0]}",
            f'write "{keys[1]}": sequences of a micro-step on a rank',
            found="none",
        )
    factors = {keys[1]: micro, keys[2]: accumulation}
    given = {key: value for key, value in factors.items() if value is not None}
    known = math.prod(given.values()) * world_size
    train = known if train is None else train
    left, rest = divmod(train, known)
    if rest or (given == factors and left != 1):
        product = " x ".join([*given, f"{world_size} ranks"])
        raise reader.error(
            keys[0],
            f"{product} = {known}" if given == factors else f"a multiple of {product} = {known}",
            "leave one of the three out" if given == factors else "change one of them",
            found=train,
        )
    if micro is None:
        micro, accumulation = left, accumulation or 1
    elif accumulation is None:
        accumulation = left
    return train, micro, accumulation


def _precision(reader: Section) -> tuple[Precision, LossScaling | None, bool]:
    fp16 = reader.section("fp16")
    bf16 = reader.section("bf16" if "bf16" in reader.values else "bfloat16")
    types = reader.section("data_types")
    is_half, is_brain = fp16.flag("enabled"), bf16.flag("enabled")
    if is_half and is_brain:
        raise reader.error("fp16.enabled", "bf16 or fp16", "turn one of them off", found="both")
    static = fp16.number("loss_scale", 0.0)
    scaling = LossScaling(
        static=static,
        initial_power=fp16.whole("initial_scale_power", 16, least=0, most=_MAX_SCALE_POWER),
        window=fp16.whole("loss_scale_window", 1000, least=1),
        hysteresis=fp16.whole("hysteresis", 2, least=1),
        consecutive_hysteresis=fp16.flag("consecutive_hysteresis"),
        least=fp16.number("min_loss_scale", 1.0),
    )
    casts = fp16.flag("auto_cast")
    accumulated = types.take("grad_accum_dtype", None)
    if accumulated not in (None, "fp32"):
        types.ignore("grad_accum_dtype", "gradients are always accumulated in float32")
    travels = reader.take("communication_data_type", None)
    if travels is not None and (not isinstance(travels, str) or travels not in _DTYPES):
        raise reader.error("communication_data_type", f"one of {', '.join(_DTYPES)}", found=travels)
    for section in (fp16, bf16, types):
        section.finish()
    param = torch.float16 if is_half else torch.bfloat16 if is_brain else torch.float32
    reduce = torch.float32 if travels is None else _DTYPES[travels]
    return Precision(param_dtype=param, reduce_dtype=reduce), scaling if is_half else None, is_half and casts


def _optimizer(reader: Section) -> tuple[type[Optimizer], dict[str, Any]] | None:
    section = reader.section("optimizer")
    if not section.values:
        return None
    name, params = str(section.take("type", "")), section.section("params")
    section.finish()
    kind = name.lower()
    if kind in _REFUSED_OPTIMIZERS:
        raise section.error(
            "type",
            "Adam, AdamW or another elementwise optimizer",
            "write AdamW",
            found=f"{name}: {_REFUSED_OPTIMIZERS[kind]}",
        )
    if "max_grad_norm" in params.values:
        raise params.error("max_grad_norm", "no such key", "write gradient_clipping at the top of the config")
    if kind in ("adam", "adamw"):
        made, arguments = _adam(params, decoupled=kind == "adamw")
    elif kind in _TORCH_OPTIMIZERS:
        made = _TORCH_OPTIMIZERS[kind]
        arguments = _like_defaults(params, made)
    else:
        known = ["Adam", "AdamW", *(each.__name__ for each in _TORCH_OPTIMIZERS.values())]
        raise section.error("type", f"one of {', '.join(known)}", found=name or "none")
    try:
        made(
            [torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)], **arguments
        )  # what torch refuses, before a model is sharded
    except (TypeError, ValueError) as error:
        raise section.error("params", f"settings of {made.__name__}", " ".join(str(error).split())) from None
    return made, arguments


def _adam(params: Section, *, decoupled: bool) -> tuple[type[Optimizer], dict[str, Any]]:
    """Adam means AdamW unless ``adam_w_mode`` says otherwise; DeepSpeed's own has no decay by default."""
    decoupled = params.flag("adam_w_mode", default=True) or decoupled
    is_torch = params.flag("torch_adam")
    params.flag("set_grad_none")
    params.flag("fp32_optimizer_states")
    if not params.flag("bias_correction", default=True):
        raise params.error("bias_correction", "true", "torch's Adam always corrects", found=False)
    kind: type[Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
    given = _like_defaults(params, kind)
    return kind, given if is_torch else {"weight_decay": 0.0, **given}


def _like_defaults(params: Section, kind: type[Optimizer]) -> dict[str, Any]:
    """What is left, as arguments of an optimizer: each is what the default of torch is."""
    given = params.arguments_of(kind, kind.__name__)
    for key, value in given.items():
        default = inspect.signature(kind).parameters[key].default
        if default is None or isinstance(default, bool):
            if not isinstance(value, bool) and value is not default:
                raise params.error(key, "true or false")
        elif isinstance(default, tuple):
            if not (
                isinstance(value, list | tuple) and len(value) == len(default) and all(map(is_number, value))
            ):
                raise params.error(key, f"{len(default)} numbers", f"write {json.dumps(default)}")
            given[key] = tuple(value)
        elif not is_number(value):
            raise params.error(key, "a number")
    return given


def _scheduler(reader: Section) -> tuple[type[LRScheduler], dict[str, Any]] | None:
    section = reader.section("scheduler")
    if not section.values:
        return None
    name, params = section.take("type", None), section.section("params")
    section.finish()
    if name is None:
        return None
    if not isinstance(name, str) or name not in SCHEDULES:
        raise section.error(
            "type",
            f"one of {', '.join(SCHEDULES)}",
            "pass a scheduler of torch as initialize(lr_scheduler=lambda optimizer: ...)",
            found=name,
        )
    params.take("last_batch_iteration", -1)
    arguments = params.arguments_of(SCHEDULES[name], name)
    for key, wanted in inspect.signature(SCHEDULES[name]).parameters.items():
        if wanted.default is wanted.empty and key not in ("optimizer", *arguments):
            raise params.error(key, f"a value, which {name} needs", found="none")
    num_groups = max([1, *(len(value) for value in arguments.values() if isinstance(value, list | tuple))])
    groups = [{"params": torch.zeros(1, dtype=torch.float32, device="cpu")} for _ in range(num_groups)]
    SCHEDULES[name](torch.optim.SGD(groups), **arguments)  # what it refuses, before a model is sharded
    return SCHEDULES[name], arguments
