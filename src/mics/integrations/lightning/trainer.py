"""``MicsStrategy``: a ``lightning.Trainer`` over a model that mics shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PrecisionPlugin
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from mics.api import register_forward_method
from mics.engine import is_sharded
from mics.errors import SettingsError
from mics.gradients.optimizer import check_optimizer
from mics.integrations.lightning.checkpoints import (
    is_folder,
    load_folder,
    save_folder,
    whole_optimizer_state,
)
from mics.integrations.lightning.settings import Sharding, StateDictType
from mics.integrations.micro_steps import micro_step
from mics.state_dict import full_state_dict

_STEPS = ("validation_step", "test_step", "predict_step")


class MicsStrategy(DDPStrategy):
    """Train a ``LightningModule`` that ``mics.shard`` shards, with ``lightning.Trainer``.

    Args:
        partition_size: ranks that together hold one copy of the parameters, as for ``mics.shard``.
        state_dict_type: "full" checkpoints are one file with whole tensors, which
            ``LightningModule.load_from_checkpoint`` and any other strategy read. "sharded" ones are folders
            of ``mics.save``: every rank writes its part. Both load on any number of ranks.
        timeout: of the process group that the strategy makes.
        cluster_environment: as for Lightning's other strategies.
        checkpoint_io: what reads and writes "full" checkpoints.
        settings: what else ``mics.shard`` takes.

    The model is sharded after ``configure_model`` and stays so. Processes start as under ``DDPStrategy``.
    """

    def __init__(
        self,
        partition_size: int | None = None,
        *,
        state_dict_type: StateDictType = "full",
        timeout: timedelta = default_pg_timeout,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **settings: Any,
    ) -> None:
        self._sharding = Sharding(
            owner=type(self).__name__,
            settings={"partition_size": partition_size, **settings},
            state_dict_type=state_dict_type,
        )
        super().__init__(
            timeout=timeout, cluster_environment=cluster_environment, checkpoint_io=checkpoint_io
        )

    # -- precision ----------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> PrecisionPlugin:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: PrecisionPlugin | None) -> None:
        if plugin is not None:
            self._sharding.check_precision(plugin, (PrecisionPlugin, MixedPrecision, HalfPrecision))
        self._precision_plugin = plugin

    # -- set-up -------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into shards

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        where = torch.device("meta") if empty_init else nullcontext()  # mics.shard initialises it
        with where, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then build its optimizers."""
        model, is_fitting = self._module, trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        _refuse_callbacks(trainer)
        if not is_sharded(model):
            self._reset_optimizers_and_schedulers()  # of another model
            if is_fitting and self._layer_sync is not None:
                self._layer_sync.apply(model)
            self.precision_plugin.convert_module(model)
        self._sharding.shard(model, self.precision_plugin.precision, self.root_device)
        _update_properties(model, device=self.root_device)  # nobody has called model.to()
        self._follow_steps(model)
        self.model = model
        if is_fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_optimizer(optimizer)
        self.setup_precision_plugin()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _follow_steps(self, model: LightningModule) -> None:
        """Steps may compute with parameters of the LightningModule itself. Manual ones step inside."""
        for name in (*(("training_step",) if model.automatic_optimization else ()), *_STEPS):
            if is_overridden(name, model):
                register_forward_method(model, name)

    def model_to_device(self) -> None:
        """Nothing: ``mics.shard`` brings each rank its part."""

    # -- training -----------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around a micro-step that others follow."""
        with micro_step(self._module, last=False):
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The closure of automatic optimization has the last micro-step in it."""

        def last_micro_step() -> Any:
            with micro_step(self._module, last=True):
                return closure()

        chosen = last_micro_step if self._module.automatic_optimization else closure
        return super().optimizer_step(optimizer, chosen, model, **kwargs)

    # -- checkpoints --------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on rank 0. Empty elsewhere, and where ``save_checkpoint`` writes shards."""
        return {} if self._is_sharded_type else full_state_dict(self._module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state with whole tensors on rank 0. Empty elsewhere, and where shards are written."""
        return {} if self._is_sharded_type else whole_optimizer_state([self._module], optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        path = str(self.broadcast(filepath))
        if not self._is_sharded_type:
            if self.is_global_zero and is_folder(path):  # of a run with "sharded"
                self.checkpoint_io.remove_checkpoint(path)
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if storage_options is not None:
            raise SettingsError(
                "storage_options: expected None with state_dict_type='sharded', which needs no CheckpointIO; "
                "found some"
            )
        has_optimizers = "optimizer_states" in checkpoint
        rest = {key: checkpoint[key] for key in checkpoint if key not in ("state_dict", "optimizer_states")}
        save_folder(path, self._module, self.optimizers if has_optimizers else None, rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = str(self.broadcast(checkpoint_path))
        if not self.broadcast(is_folder(path)):
            return super().load_checkpoint(path, weights_only=weights_only)
        is_fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        rest = load_folder(
            path,
            self._module,
            self.optimizers if is_fitting else None,
            strict=self._module.strict_loading,
            weights_only=weights_only,
        )
        return {**rest, "optimizer_states": []}  # they have it

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # not that of a folder, which is in the model already
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):
            raise SettingsError(
                f"ckpt_path: expected the state of {len(self.optimizers)} optimizers, found {len(states)}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):  # none: from a folder
            optimizer.load_state_dict(state)

    @property
    def _is_sharded_type(self) -> bool:
        return self._sharding.state_dict_type == "sharded"

    # -- the end ------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """As other strategies do, but the model stays where its shards are."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _refuse_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise SettingsError(
                f"callbacks: expected none that copies the whole model, found {type(callback).__name__}; "
                "average in a callback of your own, on pieces of parameters"
            )
        if isinstance(callback, ModelPruning):
            raise SettingsError(
                "callbacks: expected none that ranks the elements of whole parameters, found "
                f"{type(callback).__name__}; prune the model before or after the training"
            )
        if isinstance(callback, BaseFinetuning):
            raise SettingsError(
                "callbacks: expected none that trains later what it freezes before, found "
                f"{type(callback).__name__}: there is no room for the gradients; freeze parameters once "
                "they are sharded, in on_train_start of a callback of your own, and unfreeze them there"
            )
