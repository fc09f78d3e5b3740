"""What integrations override or call of their hosts, and no host promises: a new release may rename it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import pytest

# Host -> path of each name, with the parameters that we pass or that the host passes to us.
_NAMES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "accelerate": {
        "accelerate.Accelerator.prepare_model": ("model", "device_placement", "evaluation_mode"),
        "accelerate.Accelerator.prepare_optimizer": ("optimizer", "device_placement"),
        "accelerate.Accelerator.no_sync": ("model",),
        "accelerate.Accelerator.accumulate": ("models",),
        "accelerate.Accelerator.clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
        "accelerate.Accelerator.get_state_dict": ("model", "unwrap"),
        "accelerate.Accelerator.save_state": ("output_dir",),
        "accelerate.Accelerator.load_state": ("input_dir",),
        "accelerate.Accelerator.register_save_state_pre_hook": ("hook",),
        "accelerate.Accelerator.register_load_state_pre_hook": ("hook",),
        "accelerate.Accelerator.join_uneven_inputs": ("joinables", "even_batches"),
        "accelerate.Accelerator.unscale_gradients": (),
        "accelerate.Accelerator.sync_gradients": (),
        "accelerate.Accelerator.even_batches": (),
        "accelerate.Accelerator.parallelism_config": (),
        "accelerate.utils.is_peft_model": ("model",),
        "accelerate.optimizer.AcceleratedOptimizer.state": (),
        "accelerate.state.GradientState.remainder": (),
        "accelerate.state.GradientState.end_of_dataloader": (),
        "accelerate.state.GradientState.active_dataloader": (),
        "accelerate.data_loader.DataLoaderShard.total_batch_size": (),
        "accelerate.utils.DynamoBackend.NO": (),
        "accelerate.utils.TorchDynamoPlugin.to_kwargs": (),
        "accelerate.utils.DistributedType.MULTI_CPU": (),
    },
    "transformers": {
        "transformers.Trainer.create_accelerator_and_postprocess": (),
        "transformers.Trainer.training_step": ("model", "inputs"),
        "transformers.Trainer.prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
        "transformers.Trainer.evaluation_loop": (),
        "transformers.Trainer.hyperparameter_search": (),
        "transformers.Trainer._move_model_to_device": ("model", "device"),
        "transformers.Trainer._save": ("output_dir", "state_dict"),
        "transformers.Trainer._save_optimizer_and_scheduler": ("output_dir",),
        "transformers.Trainer._load_from_checkpoint": ("resume_from_checkpoint", "model"),
        "transformers.Trainer._load_optimizer_and_scheduler": ("checkpoint",),
        "transformers.trainer.SCHEDULER_NAME": (),
        "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": (),
        "transformers.conversion_mapping.get_model_conversion_mapping": ("model",),
        "transformers.core_model_loading.rename_source_key": (
            "source_key",
            "weight_renamings",
            "weight_converters",
            "base_model_prefix",
            "meta_state_dict",
        ),
        "transformers.core_model_loading.WeightRenaming": ("source_patterns", "target_patterns"),
        "transformers.core_model_loading.WeightConverter": (
            "source_patterns",
            "target_patterns",
            "operations",
        ),
        "transformers.core_model_loading.MergeModulelist": ("dim",),
        "transformers.core_model_loading.Concatenate": ("dim",),
        "transformers.core_model_loading.Chunk": ("dim",),
    },
    "trl": {
        "trl.DPOTrainer._precompute_ref_logps": (),
        "trl.DistillationTrainer._compute_loss": (),
        "trl.KTOTrainer._precompute_ref_logps": (),
        "trl.distributed.DistributedBackend.summon_full_params": ("module",),
        "trl.generation.vllm_generation.VLLMGeneration._iter_named_params": (),
        "trl.generation.vllm_generation.VLLMGeneration._fix_param_name_to_vllm": ("name",),
    },
    "verl": {
        "verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager": (
            "model",
            "optimizer",
            "lr_scheduler",
            "processing_class",
            "checkpoint_config",
        ),
        "verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.save_checkpoint": (
            "local_path",
            "hdfs_path",
            "global_step",
            "max_ckpt_to_keep",
        ),
        "verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.ensure_checkpoint_capacity": (
            "max_ckpt_to_keep",
        ),
        "verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.register_checkpoint": (
            "new_path",
            "max_ckpt_to_keep",
        ),
        "verl.utils.device.get_device_name": (),
        "verl.utils.fsdp_utils.normalize_peft_param_name": ("params",),
        "verl.utils.fsdp_utils.replace_lora_wrapper": ("k", "peft_config"),
        "verl.utils.model.convert_weight_keys": ("state_dict", "model"),
        "verl.utils.torch_dtypes.PrecisionType.to_dtype": ("precision",),
        "verl.workers.engine.base.EngineRegistry.register": ("model_type", "backend", "device"),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine": (
            "model_config",
            "engine_config",
            "optimizer_config",
            "checkpoint_config",
        ),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._init_device_mesh": (),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_fsdp_module": ("module",),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._gradient_sync_context": (
            "is_last_micro_batch",
        ),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.to": ("device", "model", "optimizer", "grad"),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.get_per_tensor_param": (
            "layered_summon",
            "base_sync_done",
        ),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithValueHead": (),
        "verl.workers.engine.fsdp.utils.create_device_mesh": ("world_size", "fsdp_size"),
        "verl.workers.engine.fsdp.utils.unfuse_moe_params": ("weights", "model_type"),
    },
    "torchtitan": {
        "torchtitan.components.optimizer.OptimizersContainer._post_init": ("all_params",),
        "torchtitan.components.checkpointer.BaseCheckpointManager._save": ("curr_step", "last_step"),
        "torchtitan.components.checkpointer.BaseCheckpointManager._load": ("step",),
        "torchtitan.components.checkpointer.BaseCheckpointManager._wait_for_saving": (),
        "torchtitan.components.checkpointer.BaseCheckpointManager._maybe_wait_for_staging": (),
        "torchtitan.components.checkpointer.BaseCheckpointManager._close": (),
        "torchtitan.distributed.compile.apply_compile": ("model", "compile_config", "parallel_dims"),
        "torchtitan.protocols.model_spec.ModelSpec": ("parallelize_fn",),
        "torchtitan.protocols.module.Module._param_init": (),
        "torchtitan.protocols.module.Module._init_self_parameters": (),
        "torchtitan.protocols.module.Module._init_self_buffers": (),
        "torchtitan.protocols.module.Module.init_states": (),
        "torchtitan.models.common.decoder.Decoder.init_states": (),
    },
    "ray": {
        "ray.train.report": ("metrics", "checkpoint", "checkpoint_upload_mode"),
        "ray.train.CheckpointUploadMode.NO_UPLOAD": (),
        "ray.train.get_checkpoint": (),
        "ray.train.FailureConfig": ("max_failures",),
    },
    "torchao": {
        "torchao.float8.float8_linear.Float8Linear": (),
        "torchao.float8.float8_training_tensor.Float8TrainingTensor": (
            "data",
            "scale",
            "orig_dtype",
            "linear_mm_config",
            "gemm_input_role",
        ),
        "torchao.float8.float8_training_tensor.GemmInputRole.WEIGHT": (),
        "torchao.float8.float8_utils.amax_to_scale": ("amax", "float8_dtype", "round_scales_to_power_of_2"),
        "torchao.float8.float8_utils.to_fp8_saturated": ("x", "float8_dtype"),
        "torchao.optim.AdamW8bit": ("block_size",),
        "torchao.optim.subclass_8bit.OptimState8bit.__init__": ("codes", "scale", "qmap", "signed", "dtype"),
        "torchao.optim.subclass_8bit.OptimState8bit.zeros": ("shape", "signed", "block_size", "device"),
    },
    "bitsandbytes": {
        "bitsandbytes.optim.AdamW8bit": ("min_8bit_size", "is_paged"),
        "bitsandbytes.optim.optimizer.Optimizer2State.check_overrides": (),
        "bitsandbytes.optim.optimizer.Optimizer2State.fill_qmap": (),
        "bitsandbytes.optim.optimizer.Optimizer2State.get_config": ("gindex", "pindex", "group"),
        "bitsandbytes.optim.optimizer.Optimizer2State.init_state": ("group", "p", "gindex", "pindex"),
    },
}
# Calls that must still be there, in the text of the method that makes them: we change what they do.
_CALLS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "accelerate": {
        "accelerate.Accelerator.prepare_model": (
            "self._models",
            "evaluation_mode",
            "_is_accelerate_prepared",
        ),
        "accelerate.Accelerator.save_state": ("self._models", "self._optimizers"),
        "accelerate.Accelerator.load_state": (
            "self._models",
            "self._optimizers",
            "_load_model_state_pre_hook",
            "self.step = ",
        ),
        "accelerate.Accelerator.__init__": (
            "self.native_amp",
            "self._models = []",
            "self._optimizers = []",
            "self.step = 0",
            "self.ddp_handler",
        ),
    },
    "transformers": {
        "transformers.Trainer.__init__": (
            "self.create_accelerator_and_postprocess()",
            "self._loss_shifts_labels = ",
            "self.label_names = ",
        ),
        "transformers.Trainer.create_accelerator_and_postprocess": ("self.accelerator = ",),
        "transformers.Trainer._run_epoch": ("_set_sync_gradients(", "self.accelerator.no_sync"),
        "transformers.Trainer._clip_grad_norm": ("self.accelerator.clip_grad_norm_(model.parameters()",),
        "transformers.Trainer._get_grad_norm": ("self.accelerator.clip_grad_norm_(model.parameters()",),
        "transformers.Trainer._prepare_for_training": (
            "self.create_optimizer()",
            "self.accelerator.prepare(self.model, self.optimizer)",
            "self._load_optimizer_and_scheduler(",
        ),
        "transformers.Trainer.train": ("self._load_from_checkpoint(",),
        "transformers.Trainer.save_model": ("self._save(output_dir)",),
        "transformers.Trainer._save_checkpoint": ("self._save_optimizer_and_scheduler(output_dir)",),
        "transformers.Trainer.prediction_step": ("self._get_num_items_in_batch(", "self.compute_loss("),
        "transformers.Trainer.training_step": ("self.compute_loss(", "self.loss_is_scaled_for_ga"),
        "transformers.Trainer.compute_loss": (
            "self.args.average_tokens_across_devices",
            "loss *= loss_scale",
            'kwargs["num_items_in_batch"]',
        ),
        "transformers.Seq2SeqTrainer.prediction_step": ("self._gen_kwargs.copy()", '"synced_gpus"'),
    },
    "trl": {
        "trl.GRPOTrainer.__init__": (
            "self._dist = DistributedBackend(",
            "self.vllm_generation = VLLMGeneration(",
        ),
        "trl.GRPOTrainer._generate_single_turn": ("self._dist.summon_full_params(", ".sync_weights()"),
        "trl.generation.vllm_generation.VLLMGeneration.sync_weights": (
            "self._iter_named_params()",
            "accelerator.is_main_process",
        ),
        "trl.generation.vllm_generation.VLLMGeneration._iter_named_params": (
            "self.model",
            "merge_adapter()",
        ),
    },
    "verl": {
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_model_optimizer": (
            "self._build_module()",
            "self._build_fsdp_module(module)",
        ),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module": ("mesh=self.device_mesh",),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.forward_backward_batch": (
            "self._gradient_sync_context(",
        ),
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step": ("_autocast_dtype",),
    },
    "torchtitan": {
        "torchtitan.trainer.Trainer.__init__": (
            "model_spec.parallelize_fn(",
            "model.to_empty(device=init_device)",
            ".init_weights(buffer_device=buffer_device)",
            "config.optimizer.build(model_parts=self.model_parts)",
            "config.checkpoint.build(",
        ),
        "torchtitan.trainer.Trainer.train_step": ("dist_utils.clip_grad_norm_(", "self.optimizers.step()"),
        "torchtitan.distributed.utils.clip_grad_norm_": ("torch.nn.utils.get_total_norm(",),
        "torchtitan.components.optimizer.OptimizersContainer.__init__": ("self._post_init(all_params)",),
        "torchtitan.protocols.module.Module.init_states": (
            "self._init_self_parameters()",
            "self._init_self_buffers(",
        ),
    },
    "ray": {},
    "torchao": {
        "torchao.float8.float8_linear.Float8Linear.__init__": ("self.config = config",),
        "torchao.float8.float8_linear.matmul_with_hp_or_float8_args.forward": (
            "tensor_already_casted_to_fp8(weight_hp_t)",
        ),
        "torchao.float8.float8_linear.matmul_with_hp_or_float8_args.backward": (
            "tensor_already_casted_to_fp8(weight_hp_t)",
        ),
        "torchao.float8.float8_training_tensor.Float8TrainingTensor.__new__": (
            "self._data = data",
            "self._scale = scale",
        ),
        "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor.__init__": (
            "self._tensor = tensor",
            "self._linear_mm_config = ",
            "self._dtype = dtype",
            "self._precomputed_scale = ",
        ),
        "torchao.optim.adam._AdamBase.step": (
            "if len(state) == 0:",
            'state["exp_avg"] = self._new_buffer(p, True)',
            'state["exp_avg_sq"] = self._new_buffer(p, False)',
            'state["max_exp_avg_sq"] = self._new_buffer(p, False)',
        ),
        "torchao.optim.adam._AdamBase._new_buffer": ("4096", "% self.block_size == 0"),
        "torchao.optim.adam._AdamBase.__init__": ("self.block_size = ",),
    },
    "bitsandbytes": {
        "bitsandbytes.optim.optimizer.Optimizer8bit.step": (
            "if len(state) == 0:",
            "if not self.initialized:",
        ),
        "bitsandbytes.optim.optimizer.Optimizer8bit.fill_qmap": ("name2qmap",),
        "bitsandbytes.optim.optimizer.Optimizer2State.__init__": ("self.optimizer_name = ", "self.args = "),
        "bitsandbytes.optim.optimizer.Optimizer2State.init_state": (
            'if p.numel() < config["min_8bit_size"]:',
            'state["absmax1"] = ',
            "blocksize = 256",
        ),
        "bitsandbytes.optim.optimizer.Optimizer8bit.get_config": ("self.args.min_8bit_size",),
    },
}


# What a host imports, and does not install.
_NEEDS: Final = {"torchtitan": ("triton",)}


def _find(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def _problem(path: str, wanted: tuple[str, ...], has: Callable[[Any, str], bool]) -> str | None:
    try:
        found = _find(path)
    except (AttributeError, ImportError):
        return f"{path} is gone"
    missing = [name for name in wanted if not has(found, name)]
    return f"{path} has no {', '.join(missing)}" if missing else None


def _takes(found: Any, name: str) -> bool:
    return name in inspect.signature(found).parameters


def _says(found: Any, text: str) -> bool:
    return text in inspect.getsource(found)


@pytest.mark.parametrize("host", list(_NAMES))
def test_names_are_there(host: str) -> None:
    """All that are gone are listed at once."""
    for package in (host, *_NEEDS.get(host, ())):
        pytest.importorskip(package)
    problems = [_problem(path, names, _takes) for path, names in _NAMES[host].items()]
    problems += [_problem(path, texts, _says) for path, texts in _CALLS[host].items()]
    assert not list(filter(None, problems)), "\n".join(filter(None, problems))


def test_a_name_that_is_gone_is_found() -> None:
    assert _problem("json.JSONEncoder.gone", (), _takes) == "json.JSONEncoder.gone is gone"
    assert _problem("json.JSONEncoder.encode", ("o", "x"), _takes) == "json.JSONEncoder.encode has no x"
