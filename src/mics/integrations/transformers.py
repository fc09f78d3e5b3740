"""The Trainer of Hugging Face transformers, and trainers that derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.nn as nn
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import SCHEDULER_NAME

from mics.checkpoint import load, save
from mics.errors import SettingsError
from mics.guard import plainly
from mics.integrations.accelerate import Accelerator, plain_optimizer
from mics.integrations.config import MicsConfig
from mics.integrations.micro_steps import micro_step

__all__ = ["MicsConfig", "MicsTrainer", "MicsTrainerMixin"]

_FOLDER: Final = "mics"
_OPTIMIZERS: Final = (
    *("adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd"),
    *(
        "adamw_torch_8bit",
        "adamw_bnb_8bit",
        "adamw_8bit",
    ),  # torchao's, and two names of bitsandbytes'
)
_IGNORED: Final = -100  # a label that no loss of transformers counts
# What would have to be off: the argument, and what to do instead.
_REFUSED: Final = {
    "fsdp": "mics shards the model itself: pass mics_config=MicsConfig(partition_size=...)",
    "deepspeed": "mics shards the model itself: pass mics_config=MicsConfig(partition_size=...)",
    "parallelism_config": "mics has partition groups and replicas only",
    "auto_find_batch_size": "one rank would try again without the others: set per_device_train_batch_size",
    "fp16_full_eval": "a sharded model keeps its dtype: train and evaluate with fp16=True",
    "bf16_full_eval": "a sharded model keeps its dtype: train and evaluate with bf16=True",
    # of TRL
    "use_transformers_continuous_batching": "it changes the dtype of the model: generate without it",
}

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class MicsTrainerMixin(_Base):
    """Put before a ``Trainer`` class, it trains sharded: ``class MySFT(MicsTrainerMixin, SFTTrainer)``.

    ``mics_config`` says how. The model is sharded where the trainer would have wrapped it in DDP. All ranks
    must call ``train``, ``evaluate``, ``predict`` and ``save_model``, as they do with DDP.
    """

    def __init__(self, *args: Any, mics_config: MicsConfig | None = None, **options: Any) -> None:
        self.mics_config = MicsConfig() if mics_config is None else mics_config
        self._divides_by_items: bool | None = None  # a loss by num_items_in_batch: not known yet
        self._is_share = False  # the loss of a rank is divided by the tokens of all
        super().__init__(*args, **options)
        if hasattr(self, "_dist"):  # a trainer of TRL that generates
            from mics.integrations.trl import adopt_generation

            adopt_generation(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what cannot work, and make an accelerator that shards."""
        _check_arguments(self.args, self.model)
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator, self.mics_config)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave it to the accelerator, which shards it: a whole model may not fit."""

    def training_step(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Run one micro-step, the last one announced as such."""
        with micro_step(model, last=True) if self.accelerator.sync_gradients else nullcontext():
            loss: Tensor = super().training_step(model, *args, **options)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As in one process also where a model takes the number of tokens and does not divide by it.

        The trainer multiplies the loss by the number of ranks for whoever takes it.
        """
        is_scaled = (
            isinstance(num_items_in_batch, Tensor)
            and self.args.average_tokens_across_devices
            and self.model_accepts_loss_kwargs
            and self.compute_loss_func is None
            and getattr(super().compute_loss, "__func__", None) is Trainer.compute_loss
        )
        items: Any = num_items_in_batch
        if is_scaled and self._divides_by_items is None and not self.args.torch_compile:
            items = items.as_subclass(_Watched)
            items.used = [False]
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=items)
        if isinstance(items, _Watched):
            self._divides_by_items = items.used[0]
        self._is_share = (
            num_items_in_batch is not None
            and self.args.average_tokens_across_devices
            and self._divides_by_items is not False
        )
        if not is_scaled or self._divides_by_items is not False:
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = loss / self.accelerator.num_processes
        return (loss, *outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate a batch. Its loss is that of the samples of all ranks, which count as in one process.

        Samples from the start that fill up the last batch do not count.
        """
        if getattr(self.args, "predict_with_generate", False):  # of Seq2SeqTrainer
            given: dict[str, Any] = getattr(self, "_gen_kwargs", {})
            self._gen_kwargs = {**given, "synced_gpus": True}  # all ranks go on until the last one has ended

        def predict(inputs: Any, loss_only: bool) -> Any:
            return super(MicsTrainerMixin, self).prediction_step(model, inputs, loss_only, ignore_keys)

        num_samples = self._num_samples(inputs)
        if num_samples is None:
            return predict(inputs, prediction_loss_only)
        # Whoever overrides `compute_loss` may divide by what the trainer counts.
        self._is_share = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        counted = self._first_samples(inputs, num_samples)
        loss, *outputs = predict(counted, prediction_loss_only or self._is_filled)
        if self._is_filled and not prediction_loss_only:
            _, *outputs = predict(inputs, False)  # of all samples: ranks gather as many
        if loss is None:
            return (loss, *outputs)
        num_labels = self._num_labels(counted) if num_samples else 0
        weight = 1 if self._is_share else num_labels
        part = loss.float() * weight if num_labels else loss.new_zeros((), dtype=torch.float)
        total, weight = self.accelerator.reduce(torch.stack([part, part.new_tensor(weight)]), "sum")
        return (total / weight, *outputs)

    def _num_samples(self, inputs: Any) -> int | None:
        """How many samples of a batch are this rank's own; None where they cannot be told apart."""
        if not self.accelerator.use_distributed or not isinstance(inputs, Mapping) or not self.label_names:
            return None  # TRL passes lists of prompts
        labels = [inputs.get(name) for name in self.label_names]
        if not all(isinstance(each, Tensor) and each.dim() > 0 for each in labels):
            return None
        num_rows = len(inputs[self.label_names[0]])
        if not self._is_filled:
            return num_rows
        state = self.accelerator.gradient_state
        if state.active_dataloader.total_batch_size != num_rows * self.accelerator.num_processes:
            return None  # several samples in a row
        num_own: int = state.remainder - self.accelerator.process_index * num_rows
        return min(max(num_own, 0), num_rows)

    @property
    def _is_filled(self) -> bool:
        """Whether samples from the start fill up this batch, on one of the ranks."""
        state = self.accelerator.gradient_state
        return bool(state.end_of_dataloader and state.remainder > 0)

    def _first_samples(self, inputs: Mapping[str, Any], num: int) -> dict[str, Any]:
        """The first samples of a batch; of none, one without a label that the trainer counts."""
        num_rows = len(inputs[self.label_names[0]])
        kept = {
            name: value[: max(num, 1)]
            if isinstance(value, Tensor) and value.shape[:1] == (num_rows,)
            else value
            for name, value in inputs.items()
        }
        if num == 0 and self._is_share:
            kept |= {name: torch.full_like(kept[name], _IGNORED) for name in self.label_names}
        return kept

    def _num_labels(self, inputs: Mapping[str, Any]) -> int:
        """How many labels the loss is a mean of."""
        labels: Tensor = inputs.get("shift_labels", inputs[self.label_names[0]])
        if len(self.label_names) > 1:  # of one sample each, as the two ends of an answer
            return len(labels)
        if "shift_labels" not in inputs and labels.dim() > 1 and self._shifts_labels():
            labels = labels[..., 1:]
        return int(labels.ne(_IGNORED).sum())

    def _shifts_labels(self) -> bool:
        """Whether the loss of a token is that of the next one; of GPT-2 the trainer does not know it."""
        model: Any = self.model
        base = model.get_base_model() if is_peft_model(model) else model
        return self._loss_shifts_labels or type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # -- checkpoints --------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the whole model, for ``from_pretrained``; all ranks gather it."""
        whole = self.accelerator.get_state_dict(self.model) if state_dict is None else state_dict
        super()._save(output_dir, whole)
        self.accelerator.wait_for_everyone()  # then every rank may read it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its part of masters and optimizer state."""
        assert self.model is not None and self.optimizer is not None and self.lr_scheduler is not None
        save(str(Path(output_dir) / _FOLDER), self.model, plain_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave it to ``_load_optimizer_and_scheduler``, where the checkpoint has masters."""
        if not (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load masters and optimizer state, whatever number of ranks wrote them."""
        if checkpoint is None or not (Path(checkpoint) / _FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(
                checkpoint
            )  # whole tensors, as the plain Trainer writes them
            return
        assert self.model is not None and self.optimizer is not None and self.lr_scheduler is not None
        load(str(Path(checkpoint) / _FOLDER), self.model, plain_optimizer(self.optimizer))
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def hyperparameter_search(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: trials are chosen on one rank."""
        raise SettingsError(
            "hyperparameter_search: expected one run of a model, found a search; start a run per trial"
        )


class MicsTrainer(MicsTrainerMixin, Trainer):
    """``transformers.Trainer`` that trains with mics."""


class _Watched(Tensor):
    """Notes that somebody computes with it; to look at it, to move and to cast it is nothing."""

    used: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plainly():
            found = func(*args, **(kwargs or {}))
        watched = next((arg for arg in args if isinstance(arg, cls)), None)
        if func.__name__ in ("__get__", "is_floating_point", "is_complex", "dim", "size", "numel"):
            return found
        if func.__name__ in ("to", "detach", "clone") and watched is not None:
            moved = found.as_subclass(cls)
            moved.used = watched.used
            return moved
        if watched is not None:
            watched.used[0] = True
        return found


def _check_arguments(args: TrainingArguments, model: Any) -> None:
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise SettingsError(f"{name}: expected it off, found {getattr(args, name)!r}; {instead}")
    if not getattr(args, "ds3_gather_for_generation", True):
        raise SettingsError(
            "ds3_gather_for_generation: expected True, found False; each rank generates with whole parameters"
        )
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer not in _OPTIMIZERS:
        raise SettingsError(
            f"optim: expected one of {', '.join(_OPTIMIZERS)}, found {optimizer!r}; another elementwise "
            "optimizer goes to Trainer(optimizer_cls_and_kwargs=...), declared with mics.allow_optimizer"
        )
    if args.n_gpu > 1:
        raise SettingsError(
            f"n_gpu: expected one GPU per process, found {args.n_gpu}; start the script with torchrun"
        )
    if (
        getattr(model, "is_distributed_loading_by_transformers", False)
        or (getattr(model, "tp_size", 1) or 1) > 1
    ):
        raise SettingsError(
            "model: expected a plain one, found one that from_pretrained has distributed; leave out "
            "distributed_config and tp_plan"
        )
