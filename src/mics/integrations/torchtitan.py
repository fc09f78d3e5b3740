"""torchtitan's Trainer on mics: ``config = with_mics(config)`` is the only change.

    def llama3_8b_mics() -> Trainer.Config:
        return with_mics(llama3_8b())

The trainer asks ``ModelSpec.parallelize_fn`` for a sharded model, then makes memory and initialises it.
Here the model comes with both: mics runs torchtitan's own initialisers, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from mics.checkpoint import load, save
from mics.engine import Engine, engine_of
from mics.errors import SettingsError
from mics.integrations.config import MicsConfig
from mics.state_dict import full_state_dict

__all__ = ["MicsCheckpointManager", "MicsConfig", "MicsOptimizers", "parallelize", "with_mics"]

_OPTIMIZERS: Final = ("Adam", "AdamW")
_HF_FILE: Final = "model.safetensors"


def with_mics(config: Trainer.Config, mics_config: MicsConfig | None = None) -> Trainer.Config:
    """``config`` of a trainer that shards by mics, updates by torchtitan's optimizers and saves by mics.

    ``parallelism.data_parallel_shard_degree`` is the size of a partition group: -1 is all ranks, divided by
    ``data_parallel_replicate_degree``. ``mics_config`` has what else ``mics.shard`` takes.
    """
    settings = mics_config or MicsConfig()
    if not isinstance(config, Trainer.Config) or config.model_spec is None:
        raise SettingsError(
            f"with_mics: config: expected a Trainer.Config with a model_spec, found {type(config).__name__}"
        )
    for name in ("partition_size", "mesh"):
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"MicsConfig.{name}: expected None, found {getattr(settings, name)!r}; set "
                "parallelism.data_parallel_shard_degree, the ranks that hold one copy of the parameters"
            )
    if settings.optimizer_state != "device":
        raise SettingsError(
            f"MicsConfig.optimizer_state: expected 'device', found {settings.optimizer_state!r}: it is not "
            "tested with torchtitan's optimizers"
        )
    return replace(
        config,
        model_spec=replace(config.model_spec, parallelize_fn=partial(parallelize, mics_config=settings)),
        optimizer=_converted(config.optimizer, MicsOptimizers.Config, "optimizer"),
        checkpoint=_converted(config.checkpoint, MicsCheckpointManager.Config, "checkpoint"),
    )


def _converted(config: Any, kind: type, section: str) -> Any:
    """``config`` as one of ``kind``. What that has no field for must be the default."""
    known = {field.name for field in fields(kind)}
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(config, field.name)
        if field.name not in known and value != default:
            raise SettingsError(f"{section}.{field.name}: expected {default!r}, found {value!r}")
    return kind(**{name: getattr(config, name) for name in known if hasattr(config, name)})


# -- the model ----------------------------------------------------------------------------------------


def parallelize(
    model: Decoder,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    mics_config: MicsConfig,
) -> Decoder:
    """``ModelSpec.parallelize_fn``: recomputation and ``torch.compile`` as torchtitan does, then mics."""
    _check(model, parallel_dims, training, parallelism)
    if model.enable_weight_tying:
        model.tok_embeddings.weight = model.lm_head.weight
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    units = mics_config.units
    if units is None:  # the head too: some losses call it by itself
        units = [*model.layers.values(), *([] if model.enable_weight_tying else [model.lm_head])]
    config = replace(mics_config, partition_size=parallel_dims.dp_shard, units=units)
    with _own_initialisers(model):
        config.shard(model, param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param])
    engine = engine_of(model)
    for unit in engine.hops.units:
        if unit.spec.trainable:
            engine.shown.of(unit).divisor = 1.0  # losses are divided by the tokens of all ranks
    num_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    accumulation = max(1, training.global_batch_size // (training.local_batch_size * num_ranks))
    model.register_forward_pre_hook(_MicroSteps(engine, accumulation))
    model.to_empty = partial(_keep_memory, model)
    model.init_weights = _keep_values
    return model


def _check(model: Any, parallel_dims: Any, training: Any, parallelism: Any) -> None:
    """Raise for what mics does not do, by its name in the config."""
    if not isinstance(model, Decoder):
        raise SettingsError(f"model_spec.model: expected a Decoder, found {type(model).__name__}")
    degrees = {
        "parallelism.tensor_parallel_degree": parallel_dims.tp,
        "parallelism.context_parallel_degree": parallel_dims.cp,
        "parallelism.pipeline_parallel_degree": parallel_dims.pp,
        "parallelism.expert_parallel_degree": parallel_dims.ep,
    }
    only = "mics shards over data-parallel ranks alone"
    wanted: list[tuple[str, Any, Any, str]] = [(name, found, 1, only) for name, found in degrees.items()]
    wanted += [
        (
            "parallelism.spmd_backend",
            parallelism.spmd_backend == "full_dtensor",
            False,
            "take 'spmd_types': mics has plain tensors",
        ),
        (
            "parallelism.fsdp_reshard_after_forward",
            parallelism.fsdp_reshard_after_forward,
            "default",
            "mics decides it by network and memory: MicsConfig(prefetch=...)",
        ),
        (
            "parallelism.enable_fsdp_symm_mem",
            parallelism.enable_fsdp_symm_mem,
            False,
            "mics allocates the buffers of its collectives",
        ),
        (
            "training.enable_cpu_offload",
            training.enable_cpu_offload,
            False,
            "mics keeps parameters on the device",
        ),
        ("training.dtype", training.dtype, "float32", "mics has float32 masters: set mixed_precision_param"),
        (
            "training.disable_cuda_graphs",
            training.disable_cuda_graphs,
            True,
            "CUDA graphs cannot hold mics' collectives",
        ),
    ]
    for name, found, expected, why in wanted:
        if found != expected:
            raise SettingsError(f"{name}: expected {expected!r}, found {found!r}; {why}")
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            raise SettingsError(f"model_spec.model: expected a dense model, found experts at {path!r}")
        if isinstance(module, Module) and type(module).init_states not in _KNOWN_INIT:
            raise SettingsError(
                f"model_spec.model: expected modules that initialise themselves one by one, found "
                f"{type(module).__name__}.init_states at {path!r}"
            )


_KNOWN_INIT: Final = (Module.init_states, Decoder.init_states)


@contextmanager
def _own_initialisers(model: Decoder) -> Iterator[None]:
    """Inside, ``reset_parameters()`` of a module does what ``init_states()`` does for it alone."""
    modules = [module for module in model.modules() if isinstance(module, Module)]
    for module in modules:
        module.__dict__["reset_parameters"] = partial(_initialise, module)
    if model.enable_weight_tying:  # torchtitan initialises the head's, mics that of the first module
        model.tok_embeddings.__dict__["reset_parameters"] = partial(
            _initialise_tied, model.tok_embeddings, model.lm_head
        )
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["reset_parameters"]


@torch.no_grad()
def _initialise(module: Module) -> None:
    reset: Callable[[Module], None] | None = getattr(type(module), "reset_parameters", None)
    if module._param_init is not None:
        module._init_self_parameters()
    elif reset is not None:
        reset(module)
    module._init_self_buffers()


@torch.no_grad()
def _initialise_tied(embeddings: Module, head: Module) -> None:
    head._param_init["weight"](embeddings.weight)


@dataclass(eq=False)
class _MicroSteps:
    """Before each forward of a step: says whether its backward is the last one before the optimizer."""

    engine: Engine
    accumulation: int
    num_forwards: int = 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.num_forwards += 1
            self.engine.progress.announce(last=self.num_forwards % self.accumulation == 0)


def _keep_memory(model: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    """``to_empty`` of a model that has its memory."""
    return model


def _keep_values(**ignored: Any) -> None:
    """``init_weights`` of a model that has its values."""


# -- optimizers and checkpoints -----------------------------------------------------------------------


class MicsOptimizers(OptimizersContainer):
    """torchtitan's container. It is an optimizer too, but has no parameters: only those inside step."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        for group in config.param_groups:
            if group.optimizer_name not in _OPTIMIZERS:
                raise SettingsError(
                    f"optimizer.param_groups: expected {' or '.join(_OPTIMIZERS)}, found "
                    f"{group.optimizer_name!r}: mics takes optimizers that update each element by itself"
                )
        if config.implementation == "fused_opt_states_bf16":
            raise SettingsError(
                "optimizer.implementation: expected 'fused', 'foreach' or 'for-loop', found "
                "'fused_opt_states_bf16': mics keeps optimizer state in float32"
            )
        super().__init__(config, model_parts=model_parts)

    def _post_init(self, all_params: list[nn.Parameter]) -> None:
        Optimizer.__init__(self, [nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))], {})


class MicsCheckpointManager(BaseCheckpointManager):
    """Folders of ``mics.save`` under ``dump_folder/folder``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        for name in ("create_seed_checkpoint", "initial_load_in_hf"):
            if getattr(config, name):
                raise SettingsError(
                    f"checkpoint.{name}: expected False, found True; give checkpoint.initial_load_path a "
                    "folder of mics.save, of torch.distributed.checkpoint or of safetensors, with "
                    "torchtitan's names"
                )
        if config.export_dtype != "float32":
            raise SettingsError(
                f"checkpoint.export_dtype: expected 'float32', found {config.export_dtype!r}; "
                "`mics checkpoint export` writes other dtypes"
            )
        if config.initial_load_path and not config.initial_load_model_only:
            raise SettingsError("checkpoint.initial_load_model_only: expected True, found False")
        if config.last_save_in_hf and sd_adapter is None:
            raise SettingsError(
                "checkpoint.last_save_in_hf: expected a model_spec with a state_dict_adapter, found none"
            )
        self.config, self.sd_adapter = config, sd_adapter
        self.folder = Path(base_folder, config.folder)
        (self.model,) = model_parts
        self.optimizers = list(optimizers)
        self.states = {**states, "dataloader": dataloader, "lr_scheduler": lr_schedulers}

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        is_first = config.enable_first_step_checkpoint and curr_step == 1
        if config.load_only or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_in_hf:
            self._export(self.folder / f"step-{curr_step}-hf")
        elif last_step and config.last_save_model_only:
            save(self.folder, self.model, step=curr_step, keep=config.keep_latest_k or None)
        else:
            kept = config.keep_latest_k or None
            save(self.folder, self.model, self.optimizers, self.states, step=curr_step, keep=kept)
        return True

    def _export(self, folder: Path) -> None:
        """The whole model with the names of Hugging Face, written by rank 0."""
        whole = full_state_dict(self.model)
        if whole:
            folder.mkdir(parents=True, exist_ok=True)
            named = {name: value.contiguous() for name, value in self.sd_adapter.to_hf(whole).items()}
            save_file(named, folder / _HF_FILE, metadata={"format": "pt"})

    def _load(self, step: int = -1) -> bool:
        excluded = self.config.exclude_from_loading
        optimizers = [] if "optimizer" in excluded else self.optimizers
        states = {name: state for name, state in self.states.items() if name not in excluded}
        if step != -1:
            load(self.folder / f"step-{step}", self.model, optimizers, states)
        elif (self.folder / "latest").exists():
            load(self.folder, self.model, optimizers, states)
        elif self.config.initial_load_path:
            load(self.config.initial_load_path, self.model)
        else:
            return False
        return True

    def _wait_for_saving(self) -> None:
        """``save`` waits."""

    def _maybe_wait_for_staging(self) -> None:
        """``save`` waits."""

    def _close(self) -> None:
        """Nothing is left open."""
