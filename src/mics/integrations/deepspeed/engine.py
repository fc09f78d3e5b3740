"""The calls of a DeepSpeed training loop over a model that mics shards.

DeepSpeed's engine counts micro-steps, so it knows which one is the last before the optimizer: that is what
``mics.microsteps`` is told elsewhere.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mics.checkpoint.folders as folders
from mics.api import clip_grad_norm_, shard
from mics.checkpoint import load, save
from mics.checkpoint.arguments import as_place
from mics.checkpoint.formats.deepspeed_files import is_deepspeed
from mics.checkpoint.storage import Place
from mics.comm import join_world
from mics.engine import engine_of, engines_of, is_sharded
from mics.errors import CheckpointError, SettingsError
from mics.gradients.optimizer import check_optimizer
from mics.integrations.deepspeed.checkpoint import (
    latest_tag,
    load_deepspeed_checkpoint,
    on_first_rank,
    plain_tag,
)
from mics.integrations.deepspeed.config import DeepSpeedConfig, read_config
from mics.integrations.deepspeed.loss_scale import LossScale
from mics.integrations.deepspeed.schedules import DEEPSPEED_STATE, Schedule
from mics.state_dict import full_state_dict

_LOG: Final = logging.getLogger("mics")
Scheduler = Any
"""One of torch, or whatever else has ``step``."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    dist_init_required: bool | None = None,
) -> tuple[DeepSpeedEngine, Optimizer, DataLoader[Any] | None, Scheduler | None]:
    """Shard ``model`` as a config of DeepSpeed says: engine, optimizer, data loader and scheduler.

    ``config`` is a path or a dict; by default ``config_params``, its old name, or ``args.deepspeed_config``.
    ``optimizer`` and ``lr_scheduler`` replace those of the config: objects built for the plain model, or
    functions that build them. ``model_parameters`` are parameters or groups of them; by default all that need
    a gradient. ``model`` may come first. A process group that is missing is made, whatever
    ``dist_init_required`` says.
    """
    if model is None and isinstance(args, nn.Module):
        args, model = None, args
    choices = (config, config_params, getattr(args, "deepspeed_config", None))
    given = next((each for each in choices if each is not None), None)
    if given is None:
        raise SettingsError('initialize: expected config, found none; pass config="ds_config.json" or a dict')
    if not isinstance(model, nn.Module) or is_sharded(model):
        found = "a sharded model" if isinstance(model, nn.Module) else type(model).__name__
        raise SettingsError(f"initialize: expected model to be a plain torch.nn.Module, found {found}")
    init_distributed()
    world = join_world()
    settings = read_config(given, world_size=world.size)
    names = {id(param): name for name, param in model.named_parameters()}
    if isinstance(optimizer, Optimizer):
        _check_unused(optimizer, names)
    groups = list(model_parameters) if model_parameters is not None else None
    shard(_on_device(model), **settings.shard_settings())
    if world.rank == 0:
        settings.tell()
    now = _Sharded(names, dict(model.named_parameters()))
    made = _optimizer(settings, optimizer, now, model, groups)
    check_optimizer(made)
    scheduler = _scheduler(settings, lr_scheduler, made)
    engine = DeepSpeedEngine(model, made, scheduler, settings)
    loader = None
    if training_data is not None:
        loader = DataLoader(
            training_data,
            batch_size=settings.micro_batch_size,
            sampler=DistributedSampler(training_data, world.size, world.rank),
            collate_fn=collate_fn,
            drop_last=settings.drop_last,
        )
    return engine, made, loader, scheduler


class _Configured:
    """What a training loop asks for, and the config answers."""

    config: DeepSpeedConfig

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.config.accumulation_steps

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def fp16_enabled(self) -> bool:
        return self.config.precision.param_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.config.precision.param_dtype is torch.bfloat16


class DeepSpeedEngine(_Configured):
    """A sharded model with its optimizer, called as DeepSpeed's engine is. Other names are the model's."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, lr_scheduler: Scheduler | None, config: DeepSpeedConfig
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.device = engine_of(module).device
        self.global_rank = engine_of(module).world.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = self.dp_world_size = engine_of(module).world.size
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._norm: Tensor | None = None
        self._applied = False
        self._syncs = True
        self._loss_scale = None if config.loss_scaling is None else LossScale(config.loss_scaling)
        self._scaler = torch.amp.GradScaler(
            self.device.type, init_scale=self.loss_scale, enabled=self._loss_scale is not None
        )

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet: a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(self.module, name)

    # -- training -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self.module.training and torch.is_grad_enabled():
            self._announce()
        if self.config.casts_inputs:
            args, kwargs = tree_map_only(Tensor, _half, (args, kwargs))
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of one micro-batch, whose loss is divided by the accumulation steps."""
        if not isinstance(loss, Tensor):
            raise SettingsError(
                f"engine.backward: expected a loss, found {type(loss).__name__}; pass the tensor itself"
            )
        self._announce()
        divided = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._scaler.scale(divided).backward(retain_graph=retain_graph)
        return divided

    def step(self) -> None:
        """End a micro-step. The last of an optimizer step clips, updates and moves the scheduler."""
        if self.is_gradient_accumulation_boundary():
            self._update()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step under way is the last before the optimizer."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backwards that others follow before ``step``: replicas do not reduce within them."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def _announce(self) -> None:
        last = self._syncs and self.is_gradient_accumulation_boundary()
        for engine in engines_of(self.module):
            engine.progress.announce(last=last)

    def _update(self) -> None:
        for engine in engines_of(self.module):
            engine.progress.announce(last=None)
        if self._loss_scale is not None:
            self._scaler.unscale_(self.optimizer)
        self._norm = self._clip()
        self._applied = self._loss_scale is None or bool(self._norm.isfinite())
        if self._applied:
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        if self._loss_scale is not None:
            self._loss_scale.update(overflowed=not self._applied)
            self._scaler.update(self._loss_scale.value)
        self.optimizer.zero_grad()
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _clip(self) -> Tensor:
        if self.config.gradient_clipping:
            return clip_grad_norm_(self.module, self.config.gradient_clipping)
        with torch.no_grad():
            norms = [engine.clip.norm() for engine in engines_of(self.module)]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
            return total

    # -- what a loop asks for ------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first."""
        return None if self._norm is None else float(self._norm)

    def was_step_applied(self) -> bool:
        """Whether the last optimizer step changed the model: float16 leaves out steps that overflow."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    # -- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Save in the format of mics to ``save_dir/tag``, on all ranks; ``latest`` then names the tag."""
        name = plain_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        root = as_place(save_dir, "save_checkpoint")
        state: dict[str, Any] = {"client_state": dict(client_state or {}), "engine": self._counts()}
        if hasattr(self.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = self.lr_scheduler
        if self._loss_scale is not None:
            state["loss_scale"] = self._loss_scale
        save(root / name, self.module, self.optimizer, state)
        if save_latest:
            on_first_rank("save_checkpoint", lambda: folders.point_latest(root, name))
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load ``load_dir/tag``, by default the latest: its path, and the client state.

        Checkpoints that DeepSpeed wrote load too: the model, Adam's moments, counters and where the schedule
        stands. Without ``latest`` nothing is loaded, and the path is None.
        """
        root = as_place(load_dir, "load_checkpoint")
        name, is_ours = on_first_rank("load_checkpoint", lambda: _named(root, tag))
        if not name:
            if self.global_rank == 0:
                _LOG.warning(
                    "%s: nothing is loaded: expected a file 'latest' that names a tag; or give tag=", root
                )
            return None, {}
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        if not is_ours:
            found = load_deepspeed_checkpoint(
                self.module, root, optimizer, tag=name, strict=load_module_strict
            )
            if not load_module_only:
                self._restore(found.counts)
                if load_lr_scheduler_states and found.lr_scheduler:
                    self._take_schedule(found.lr_scheduler)
            return str(root / name), found.client_state
        state: dict[str, Any] = {}
        if (
            load_lr_scheduler_states
            and not load_module_only
            and hasattr(self.lr_scheduler, "load_state_dict")
        ):
            state["lr_scheduler"] = self.lr_scheduler
        if self._loss_scale is not None and not load_module_only:
            state["loss_scale"] = self._loss_scale
        extra = load(root / name, self.module, optimizer, state, strict=load_module_strict)
        if not load_module_only:
            self._restore(extra.get("engine", {}))
            if self._loss_scale is not None:
                self._scaler.update(self.loss_scale)
        return str(root / name), extra.get("client_state", {})

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write whole weights as the model computes them, on rank 0: a state dict for ``torch.load``."""
        whole = full_state_dict(self.module)
        if self.global_rank == 0:
            dtype = self.config.precision.param_dtype
            weights = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
            cast = {
                name: value.to(dtype) if name in weights and value.is_floating_point() else value
                for name, value in whole.items()
            }
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(cast, Path(save_dir) / save_filename)
        return True

    def _take_schedule(self, state: dict[str, Any]) -> None:
        """Go on where a schedule of DeepSpeed's stood, or the scheduler that it was given."""
        if self.lr_scheduler is None or not hasattr(self.lr_scheduler, "load_state_dict"):
            return
        own = isinstance(self.lr_scheduler, Schedule)
        known = DEEPSPEED_STATE if own else self.lr_scheduler.state_dict().keys()
        if not state.keys() <= known:
            raise CheckpointError(
                f"lr_scheduler: expected that of {type(self.lr_scheduler).__name__} ({', '.join(known)}), "
                f"found {', '.join(map(str, state))[:120]}; build the scheduler that was saved, or pass "
                "load_lr_scheduler_states=False"
            )
        self.lr_scheduler.load_state_dict(state)

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def _restore(self, counts: Mapping[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(counts.get(name, getattr(self, name))))
        # Gradients are not saved, and a step may have more micro-steps now: the next one is its first.
        self.optimizer.zero_grad()
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()


_COUNTS: Final = ("global_steps", "global_samples", "skipped_steps")


def _named(root: Place, tag: str | int | None) -> tuple[str, bool]:
    """The tag to load, or nothing, and whether its checkpoint is one of ours."""
    if tag is None and not (root / folders.LATEST).exists():
        return "", True
    name = latest_tag(root) if tag is None else plain_tag(str(tag))
    return name, not is_deepspeed(root / name)


class _Sharded:
    """Finds the sharded parameter for one of the plain model, which sharding has replaced."""

    def __init__(self, names: Mapping[int, str], params: Mapping[str, nn.Parameter]) -> None:
        self._names = names
        self._params = params

    def of(self, param: Any) -> Any:
        name = self._names.get(id(param))
        if name is None:
            raise SettingsError(
                f"initialize: expected parameters of the model, found one of shape {_shape(param)} that it "
                "does not have; pass model.parameters(), or groups of them"
            )
        return self._params[name]

    def groups(self, given: Sequence[Any]) -> list[Any]:
        """Parameters, groups of them, or pairs of names and parameters."""
        return [
            {**each, "params": [self.of(param) for param in each["params"]]}
            if isinstance(each, Mapping)
            else (each[0], self.of(each[1]))
            if isinstance(each, tuple)
            else self.of(each)
            for each in given
        ]


def _optimizer(
    settings: DeepSpeedConfig,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    sharded: _Sharded,
    model: nn.Module,
    groups: Sequence[Any] | None,
) -> Optimizer:
    if isinstance(given, Optimizer):
        for group in given.param_groups:
            group["params"] = [sharded.of(param) for param in group["params"]]
        return given
    params: Any = [param for param in model.parameters() if param.requires_grad]
    if groups is not None:
        params = sharded.groups(groups)
    if given is not None:
        return given(params)
    if settings.optimizer is None:
        raise SettingsError(
            "optimizer: expected an optimizer section in the config, or initialize(optimizer=), found none; "
            'write {"type": "AdamW", "params": {"lr": 3e-4}}'
        )
    kind, arguments = settings.optimizer
    return kind(params, **arguments)


def _scheduler(settings: DeepSpeedConfig, given: Any, optimizer: Optimizer) -> Scheduler | None:
    if given is not None:
        return given if hasattr(given, "step") else given(optimizer)
    if settings.scheduler is None:
        return None
    kind, arguments = settings.scheduler
    return kind(optimizer, **arguments)


def _check_unused(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """That its parameters can be replaced: before its first step nothing else belongs to them."""
    if optimizer.state:
        raise SettingsError(
            "optimizer: expected one without state, found one that has stepped; build it anew, or pass a "
            "function: initialize(optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))"
        )
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise SettingsError(
                    f"optimizer: expected parameters of the model, found one of shape {_shape(param)} that "
                    "it does not have; build the optimizer from model.parameters()"
                )


def init_distributed(dist_backend: str | None = None) -> None:
    """Make the process group, if a launcher wants one and the script has made none."""
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(dist_backend)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a script take ``--deepspeed_config``, which ``initialize(args)`` reads, and ``--deepspeed``."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="ignored: initialize() is called or not")
    group.add_argument("--deepspeed_config", help="path of a ds_config.json")
    return parser


def _on_device(model: nn.Module) -> nn.Module:
    is_meta = any(param.is_meta for param in model.parameters())
    return model if is_meta or not torch.cuda.is_available() else model.cuda()


def _half(value: Tensor) -> Tensor:
    return value.half() if value.is_floating_point() else value


def _shape(param: Any) -> Any:
    return tuple(param.shape) if isinstance(param, Tensor) else type(param).__name__
