"""An engine for verl: ``actor_rollout_ref.actor.strategy=mics`` trains with mics.

verl finds it through the entry point ``verl.plugins``. What is around the model (batches, losses, rates) is
that of verl's own engine for FSDP; the model, its gradients, checkpoints and weights for rollouts are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate.utils import is_peft_model
from torch import Tensor
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import normalize_peft_param_name, replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.fsdp.utils import create_device_mesh, unfuse_moe_params

from mics.api import clip_grad_norm_
from mics.checkpoint import load, save
from mics.errors import SettingsError
from mics.full_params import iter_full_params
from mics.integrations.config import MicsConfig
from mics.integrations.micro_steps import micro_step
from mics.integrations.weights import export_safetensors, param_dtype
from mics.layout.precision import Precision
from mics.state_dict import summon_full_params

__all__ = ["MicsEngine", "MicsEngineWithLMHead", "MicsEngineWithValueHead"]

_FOLDER: Final = "mics"
# What would have to be off, of the engine's and of the model's config: the argument, and what to do instead.
_ENGINE_REFUSED: Final = {
    "param_offload": "shards stay on the device",
    "optimizer_offload": "optimizer state stays on the device, divided over all ranks",
    "offload_policy": "shards stay on the device",
}
_MODEL_REFUSED: Final = {"enable_activation_offload": "use enable_gradient_checkpointing"}


class MicsEngine(FSDPEngine):  # type: ignore[misc]
    """What engines of all model types share. ``fsdp_size`` is the partition size; -1 lets mics choose."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        _check(engine_config, model_config, checkpoint_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _init_device_mesh(self) -> None:
        """Every rank is one of data parallelism, and reads the model itself."""
        super()._init_device_mesh()
        self.device_mesh = create_device_mesh(world_size=dist.get_world_size(), fsdp_size=1)

    def initialize(self) -> None:
        """Build the model, optimizer, learning rate schedule and what saves them."""
        self._build_model_optimizer()
        self.checkpoint_manager = _CheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.model_config.get_processor(),
            checkpoint_config=self.checkpoint_config,
        )

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        dtypes = self.engine_config.mixed_precision or {}
        self._autocast_dtype = PrecisionType.to_dtype(dtypes.get("param_dtype", "bf16"))
        reduce_dtype = PrecisionType.to_dtype(dtypes.get("reduce_dtype", "fp32"))
        size = self.engine_config.fsdp_size
        config = MicsConfig(
            partition_size=min(size, dist.get_world_size()) if size > 0 else None,
            precision=Precision(param_dtype=self._autocast_dtype, reduce_dtype=reduce_dtype),
        )
        return config.shard(module.to(get_device_name()))

    # -- steps --------------------------------------------------------------------------------------

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return micro_step(self.module, last=is_last_micro_batch)

    def optimizer_step(self) -> float:
        """Clip, and update where the norm is finite; return the norm before."""
        norm = clip_grad_norm_(self.module, self.optimizer_config.clip_grad).item()
        if math.isfinite(norm):  # the same on all ranks
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return norm

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing moves: refused where something would have to."""
        if device == "cpu" and device != get_device_name() and (model or optimizer or grad):
            raise SettingsError("engine.to('cpu'): expected it on the device, found a move; offload nothing")

    # -- checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """Every rank writes its part into a folder ``mics``, which loads on any number of ranks."""
        self.checkpoint_manager.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **options: Any,
    ) -> None:
        """Load what ``save_checkpoint`` wrote; ``del_local_after_load`` is ignored: others may need it."""
        self.checkpoint_manager.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    # -- weights for rollouts -----------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **options: Any
    ) -> tuple[Iterable[tuple[str, Tensor]], dict[str, Any] | None]:
        """Whole parameters one after the other, under the names of a checkpoint. All ranks must iterate."""
        model = self.module
        if not is_peft_model(model):
            return self._renamed(iter_full_params(model, dtype=param_dtype(model))), None
        if self.model_config.lora.get("merge", False):
            return self._renamed(self._merged()), None
        adapter = model.peft_config["default"]
        names = [name for name, _ in model.named_parameters() if (model.prefix in name) is base_sync_done]
        params = iter_full_params(model, names, dtype=param_dtype(model))
        if base_sync_done:
            return ((name.replace(".default.", "."), param) for name, param in params), adapter.to_dict()
        plain = (next(iter(normalize_peft_param_name({name: param}).items())) for name, param in params)
        wrapped = ((replace_lora_wrapper(name, adapter), param) for name, param in self._renamed(plain))
        return wrapped, adapter.to_dict()

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        with summon_full_params(self.module):  # adapters are merged into these, which are then dropped
            self.module.merge_adapter()
            try:
                for name, param in normalize_peft_param_name(dict(self.module.named_parameters())).items():
                    yield name, param.detach().to(self._autocast_dtype, copy=True)
            finally:
                self.module.unmerge_adapter()

    def _renamed(self, params: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        converted = (item for name, param in params for item in self._in_checkpoint(name, param))
        renamed: Iterator[tuple[str, Tensor]] = unfuse_moe_params(
            converted, self.model_config.hf_config.model_type
        )
        return renamed

    def _in_checkpoint(self, name: str, param: Tensor) -> Iterable[tuple[str, Tensor]]:
        items: Iterable[tuple[str, Tensor]] = convert_weight_keys({name: param}, self.module).items()
        return items

    def get_per_tensor_param_shard(self, **options: Any) -> NoReturn:
        """Refused: a shard of mics is a flat part of a unit, not of one dimension of a parameter."""
        raise SettingsError(
            "checkpoint_engine.backend: expected one that takes whole parameters, found one for shards; use "
            "'naive' or 'nccl'"
        )

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard


@EngineRegistry.register(model_type="language_model", backend="mics", device=["cuda", "cpu"])
class MicsEngineWithLMHead(MicsEngine, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Policies and reference models."""


@EngineRegistry.register(model_type="value_model", backend="mics", device=["cuda", "cpu"])
class MicsEngineWithValueHead(MicsEngine, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critics."""


class _CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Writes a folder ``mics``, and ``huggingface`` where ``save_contents`` has ``hf_model``."""

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        if self.should_save_model:
            optimizer = self.optimizer if self.should_save_optimizer else None
            extra = {"lr_scheduler": self.lr_scheduler} if self._has_extra(self.should_save_extra) else None
            save(str(Path(local_path) / _FOLDER), self.model, optimizer, extra)
        if self.should_save_hf_model:
            folder = Path(local_path) / "huggingface"
            export_safetensors(self.model, folder, dtype=param_dtype(self.model))
            if self.rank == 0 and self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        dist.barrier()
        if self.rank == 0:
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        if local_path is None:
            return
        if not self.should_load_model:
            raise SettingsError("checkpoint.load_contents: expected 'model' in it, found none; add it")
        optimizer = self.optimizer if self.should_load_optimizer else None
        extra = {"lr_scheduler": self.lr_scheduler} if self._has_extra(self.should_load_extra) else None
        load(str(Path(local_path) / _FOLDER), self.model, optimizer, extra)

    def _has_extra(self, wanted: bool) -> bool:
        return wanted and self.lr_scheduler is not None


def _check(engine_config: Any, model_config: Any, checkpoint_config: Any) -> None:
    """Refuse what cannot work, by name."""
    for config, refused in ((engine_config, _ENGINE_REFUSED), (model_config, _MODEL_REFUSED)):
        for name, instead in refused.items():
            if getattr(config, name, False):
                raise SettingsError(f"{name}: expected False, found True; {instead}")
    size = engine_config.ulysses_sequence_parallel_size
    if size != 1:
        raise SettingsError(f"ulysses_sequence_parallel_size: expected 1, found {size}; use fsdp2 for it")
    if getattr(engine_config.qat, "enable", False):
        raise SettingsError("qat.enable: expected False, found True; use fsdp2 for it")
    dtype = (engine_config.mixed_precision or {}).get("param_dtype", "bf16")
    if PrecisionType.to_dtype(dtype) == torch.float16:
        raise SettingsError(f"mixed_precision.param_dtype: expected bf16 or fp32, found {dtype!r}; use bf16")
    contents = (checkpoint_config.get("save_contents", None) if checkpoint_config else None) or ["model"]
    if "hf_model" in contents and model_config.lora_rank > 0:
        raise SettingsError(
            "checkpoint.save_contents: expected no 'hf_model' with lora_rank > 0, found it; leave it out"
        )
    if "model" not in contents and {"optimizer", "extra"} & set(contents):
        raise SettingsError(
            f"checkpoint.save_contents: expected 'model' beside the others, found {contents}; add it"
        )
    if checkpoint_config and checkpoint_config.get("save_lora_only", False):
        raise SettingsError("checkpoint.save_lora_only: expected False, found True; leave it out")
