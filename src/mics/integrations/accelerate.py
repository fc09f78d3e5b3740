"""Hugging Face Accelerate: a script that imports ``Accelerator`` from here trains sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import accelerate
import torch
import torch.nn as nn
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    broadcast_object_list,
    is_peft_model,
)
from torch import Tensor
from torch.optim import Adagrad, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mics.api import clip_grad_norm_, register_forward_method
from mics.checkpoint import load, save
from mics.comm import join_world
from mics.engine import is_sharded
from mics.errors import SettingsError
from mics.gradients.optimizer import check_optimizer
from mics.integrations.config import MicsConfig
from mics.integrations.micro_steps import micro_step
from mics.layout.assign import unit_modules
from mics.layout.topology import check_partition_size
from mics.state_dict import full_state_dict

__all__ = ["Accelerator", "MicsConfig"]

_FOLDER: Final = "mics"
_REFUSED: Final = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that shards with mics where the other one wraps in DDP.

    ``prepare`` shards models in place, and gives optimizers that were built before the sharded parameters.
    ``get_state_dict``, ``save_model``, ``save_state``, ``load_state`` and ``clip_grad_norm_`` must be called
    on all ranks. What ``save_state`` wrote loads on any number of ranks.
    """

    mics_config: MicsConfig
    step: int
    _models: list[nn.Module]
    _optimizers: list[Optimizer]

    def __init__(self, *args: Any, mics_config: MicsConfig | None = None, **options: Any) -> None:
        for name in _REFUSED:
            if options.get(name) is not None:
                raise SettingsError(
                    f"{name}: expected None, found {options[name]!r}; mics shards the model itself: pass "
                    "mics_config=MicsConfig(...), or use accelerate's own Accelerator"
                )
        super().__init__(*args, **options)
        self._take(mics_config)

    @classmethod
    def adopt(cls, plain: accelerate.Accelerator, mics_config: MicsConfig | None) -> None:
        """Make one of ours of an accelerator that a trainer has built and handed out, before it is used."""
        plain.__class__ = cls
        plain._take(mics_config)

    def _take(self, mics_config: MicsConfig | None) -> None:
        kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        if self.distributed_type not in kinds or self.parallelism_config is not None:
            raise SettingsError(
                f"distributed_type: expected one of {', '.join(kind.value for kind in kinds)}, found "
                f"{self.distributed_type.value}; start the script with torchrun, or take FSDP, DeepSpeed and "
                "parallelism out of the file of `accelerate config`"
            )
        if self.mixed_precision == "fp8":
            raise SettingsError("mixed_precision: expected 'no', 'bf16' or 'fp16', found 'fp8'; use 'bf16'")
        if not self.even_batches:
            raise SettingsError(
                "even_batches: expected True, found False; leave it out: all ranks gather parameters in each "
                "forward, so all need as many batches"
            )
        hook = DDPCommunicationHookType.NO if self.ddp_handler is None else self.ddp_handler.comm_hook
        if hook != DDPCommunicationHookType.NO:
            raise SettingsError(
                f"comm_hook: expected none, found {hook.value}; pass MicsConfig(precision=mics.Precision("
                "reduce_dtype=...)), which says in what format gradients travel"
            )
        if not (mics_config is None or isinstance(mics_config, MicsConfig)):
            raise SettingsError(f"mics_config: expected a MicsConfig or None, found {mics_config!r}")
        self.mics_config = MicsConfig() if mics_config is None else mics_config
        if self.mics_config.partition_size is not None:
            check_partition_size(self.mics_config.partition_size, self.num_processes)
        self._replacements = WeakIdKeyDictionary()  # parameter from before sharding -> its shard

    # -- models and optimizers ----------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard ``model`` in place, with mixed precision and compiled units if asked for, and return it."""
        if not is_sharded(model) and next(model.parameters(), None) is not None:
            place = self.device_placement if device_placement is None else device_placement
            if place and not self._arrives_sharded(model):
                model.to(self.device)
            self._shard(model)
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO  # units are compiled, not the whole
        try:
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            plugin.backend = backend
        return prepared

    def _arrives_sharded(self, model: nn.Module) -> bool:
        """Whether sharding brings the model to the device, unit by unit: the whole of it may not fit."""
        given = next(model.parameters()).device
        found = join_world().backend_device(None if given.type == "meta" else given)
        own: torch.device = self.device
        return found == own or found.type == own.type == "cpu"  # which accelerate numbers

    def _shard(self, model: nn.Module) -> None:
        before = dict(model.named_parameters())
        units = unit_modules(model, self.mics_config.units)
        idle = _idle_adapters(model)
        for name in idle:
            before[name].requires_grad_(True)  # makes room for gradients: set_adapter may switch it on
        self.mics_config.shard(
            model, param_dtype=_DTYPES.get(self.mixed_precision) if self.native_amp else None
        )
        if not hasattr(model, "no_sync"):
            model.__dict__["no_sync"] = partial(_no_sync, model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(
            model, "generate"
        ):
            register_forward_method(model, "generate")  # it calls the encoder past the model's forward
        after = dict(model.named_parameters())
        for name in idle:
            after[name].requires_grad_(False)
        self._replacements.update({param: after[name] for name, param in before.items()})
        for optimizer in self._optimizers:
            self._replace_params(optimizer)
        plugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO:
            options = plugin.to_kwargs()
            options.pop("use_regional_compilation", None)
            for unit in units:
                unit.compile(**options)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Wrap ``optimizer``, over the shards of the parameters that it was built with."""
        self._replace_params(optimizer)
        prepared: Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def _replace_params(self, optimizer: Optimizer) -> None:
        optimizer = plain_optimizer(optimizer)
        for group in optimizer.param_groups:
            stale = [param for param in group["params"] if param in self._replacements]
            made = [optimizer.state[param] for param in stale if param in optimizer.state]
            if made and (type(optimizer) is not Adagrad or any(state["step"] for state in made)):
                raise SettingsError(
                    f"{type(optimizer).__name__}: expected an optimizer without state, found state of "
                    "parameters from before sharding; load its state after accelerator.prepare()"
                )
            group["params"] = [self._replacements.get(param, param) for param in group["params"]]
            if made:  # makes its state when it is built
                for param in stale:
                    optimizer.state.pop(param, None)
                params = [self._replacements[param] for param in stale]
                optimizer.state.update(Adagrad([{**group, "params": params}], **optimizer.defaults).state)
        check_optimizer(optimizer)

    # -- steps --------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run micro-steps that the optimizer does not follow."""
        with _no_sync(model):
            yield

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-step; replicas reduce their gradients within the last one's backward."""
        with super().accumulate(*models), ExitStack() as stack:
            for model in models if self.sync_gradients else ():
                stack.enter_context(micro_step(model, last=True))
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients to ``max_norm`` over all ranks; return their norm before."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(param) for param in given}
        for model in self._models:
            if is_sharded(model) and ids == {id(param) for param in model.parameters()}:
                self.unscale_gradients()
                return clip_grad_norm_(model, max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
        return norm

    # -- state --------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on the main process, an empty one on the others."""
        if is_sharded(model):
            return full_state_dict(model)
        found: dict[str, Any] = super().get_state_dict(model, unwrap)
        return found

    def save_state(self, output_dir: str | None = None, **options: Any) -> Path:
        """Save everything that was prepared or registered. Models and optimizers are in ``mics`` folders."""
        with self._without_models() as folders_of:
            location = Path(super().save_state(output_dir, **options))
        for folder, model, parts in folders_of(location):
            save(str(folder), model, [part for _, part in parts])
        return location

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:
        """Load what ``save_state`` wrote, on any number of ranks."""
        found: list[str] = []
        handle = super().register_load_state_pre_hook(lambda models, folder: found.append(folder))
        try:
            with self._without_models() as folders_of:
                super().load_state(input_dir, **options)
        finally:
            handle.remove()
        # A rank that saved nothing has read no count of micro-steps: all go on with that of the first.
        (self.step,) = broadcast_object_list([self.step])
        for folder, model, parts in folders_of(Path(found[0])):
            load(str(folder), model, [part for _, part in parts])
            for optimizer, part in parts:
                _give_back(optimizer, part)

    @contextmanager
    def _without_models(self) -> Iterator[Any]:
        """Let the host save and load all but models and optimizers: which of them are in which folders."""
        models, optimizers = self._models, self._optimizers
        plain = [plain_optimizer(optimizer) for optimizer in optimizers]
        _check_owned(models, plain)
        self._models, self._optimizers = [], []

        def folders_of(place: Path) -> Iterator[tuple[Path, nn.Module, list[tuple[Optimizer, Optimizer]]]]:
            for number, model in enumerate(models):
                if is_sharded(model):
                    folder = place / (f"{_FOLDER}_{number}" if number else _FOLDER)
                    yield folder, model, list(_parts(model, plain))

        try:
            yield folders_of
        finally:
            self._models, self._optimizers = models, optimizers

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refused: nothing that a hook could change is written by accelerate."""
        raise SettingsError(
            f"register_save_state_pre_hook: expected no hook, found {hook!r}; save what you need beside "
            "accelerator.save_state(folder), or register an object with register_for_checkpointing"
        )

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refused: nothing that a hook could change is read by accelerate."""
        raise SettingsError(
            f"register_load_state_pre_hook: expected no hook, found {hook!r}; load what you need beside "
            "accelerator.load_state(folder), or register an object with register_for_checkpointing"
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Refused: all ranks gather parameters in every forward."""
        raise SettingsError(
            "join_uneven_inputs: expected as many batches on every rank, found uneven ones; leave it out: "
            "data loaders from accelerator.prepare() are even"
        )


@contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    """DDP's ``no_sync``, where no step may be: with DDP it would be one of this rank alone."""

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        own = {id(param) for param in model.parameters()}
        if any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            raise SettingsError(
                f"no_sync: expected {type(optimizer).__name__}.step() after it, found it inside, where "
                "LocalSGD has it: a rank has a part of the model, so none can step alone; leave LocalSGD out"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        with micro_step(model, last=False):
            yield
    finally:
        handle.remove()


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _idle_adapters(model: nn.Module) -> list[str]:
    """Frozen parameters of adapters of PEFT, where there are several."""
    adapters: Any = getattr(model, "peft_config", {})
    if not is_peft_model(model) or len(adapters) < 2:
        return []
    prefix: Any = getattr(model, "prefix", None)  # of their names; some kinds of adapters have none
    params = model.named_parameters()
    return [name for name, param in params if prefix and prefix in name and not param.requires_grad]


def _check_owned(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    owned = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        if any(id(param) not in owned for group in optimizer.param_groups for param in group["params"]):
            raise SettingsError(
                f"{type(optimizer).__name__}: expected parameters of prepared models, found others; pass the "
                "model to accelerator.prepare() too, or save and load them with an optimizer of their own"
            )


def _parts(model: nn.Module, optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, Optimizer]]:
    """Each optimizer that trains ``model``, and its part for it: itself, unless it trains others too."""
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        groups = [
            {**group, "params": [param for param in group["params"] if id(param) in own]}
            for group in optimizer.param_groups
        ]
        if not any(group["params"] for group in groups):
            continue
        part = optimizer
        if _num_params(groups) < _num_params(optimizer.param_groups):
            part = copy(optimizer)  # of torch: settings and state alone
            part.param_groups = [group for group in groups if group["params"]]
            part.state = defaultdict(dict, {p: kept for p, kept in optimizer.state.items() if id(p) in own})
        yield optimizer, part


def _give_back(optimizer: Optimizer, part: Optimizer) -> None:
    """What was loaded into a part of an optimizer."""
    if part is optimizer:
        return
    optimizer.state.update(part.state)
    for loaded in part.param_groups:
        ids = {id(param) for param in loaded["params"]}
        for group in optimizer.param_groups:
            if any(id(param) in ids for param in group["params"]):
                group.update({key: value for key, value in loaded.items() if key != "params"})


def _num_params(groups: list[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)
