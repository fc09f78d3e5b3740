"""The Trainer of Hugging Face transformers, and trainers that derive from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
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
from mics.engine import is_sharded
from mics.errors import SettingsError
from mics.integrations.accelerate import Accelerator, plain_optimizer
from mics.integrations.config import MicsConfig
from mics.integrations.losses import IGNORED, LossWatch, has_labels, num_items
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
        self._watch = LossWatch()
        self._is_predicting = False
        self._is_share = False  # the last loss: divided by the items of all ranks
        self._has_samples = True  # of its own, this rank in this batch
        self._whole: dict[str, Any] | None = None  # the model, while it is saved
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

    def _shard_model(self) -> None:
        """Before training: whoever runs the model finds it where its inputs are."""
        if self.model is not None and not is_sharded(self.model):
            self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate; the trainer does not prepare its model once the accelerator has another one."""
        self._shard_model()
        return super().evaluation_loop(*args, **options)

    def _precompute_ref_logps(self, *args: Any, **options: Any) -> Any:
        """Run the reference model of TRL, which is the model itself where there is no other."""
        if getattr(self, "ref_model", None) is None:
            self._shard_model()
        return super()._precompute_ref_logps(*args, **options)  # type: ignore[misc]

    def training_step(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Run one micro-step, the last one announced as such."""
        last = micro_step(model, last=True) if self.accelerator.sync_gradients else nullcontext()
        with last, self._made_losses():
            loss: Tensor = super().training_step(model, *args, **options)
        return loss

    @contextmanager
    def _made_losses(self) -> Iterator[None]:
        """Have ``compute_loss`` called by ``_make_loss``, whoever wrote it."""
        given = self.__dict__.get("compute_loss")
        self.compute_loss = partial(self._make_loss, self.compute_loss)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.compute_loss
            if given is not None:
                self.compute_loss = given  # type: ignore[method-assign]

    def _make_loss(
        self,
        make: Any,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Any:
        """Call ``compute_loss``: the mean over ranks is the loss of one process."""
        given = dict(inputs) if isinstance(inputs, Mapping) else inputs  # labels may be taken out
        is_training = not self._is_predicting
        with self._watch.making(self, model, num_items_in_batch, is_training) as made:
            found = make(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=made.number, **options
            )
        self._is_share = made.has_number and self.args.average_tokens_across_devices
        loss, *outputs = found if return_outputs else (found,)
        if made.is_multiplied:
            loss = loss / self.accelerator.num_processes
        if is_training and not made.has_number and not self._is_scaled and self.accelerator.num_processes > 1:
            loss = _weighed(loss, self._weight(self._num_items(given), loss.device)[0])
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

        num_rows = len(inputs[self.label_names[0]]) if has_labels(inputs, self.label_names) else 0
        is_filled = self._is_filled(num_rows) and _can_be_cut(inputs, num_rows)
        counted, has_samples = inputs, True
        if is_filled:
            first = self.accelerator.process_index * num_rows
            num_own = min(max(self.accelerator.gradient_state.remainder - first, 0), num_rows)
            counted, has_samples = _first_samples(inputs, num_rows, max(num_own, 1)), num_own > 0
            if not has_samples:  # metrics count tokens, too
                tokens = [name for name in self.label_names if counted[name].dim() > 1]
                counted |= {
                    name: torch.full_like(counted[name], _ignored_label(self.model)) for name in tokens
                }
        self._is_predicting, self._has_samples, self._is_share = True, has_samples, False
        try:
            count = self._num_items(counted)
            with self._made_losses():
                loss, *outputs = predict(counted, prediction_loss_only or is_filled)
                if prediction_loss_only:
                    outputs = [None] * len(outputs)
                elif is_filled:
                    _, *outputs = predict(inputs, False)  # of all samples: ranks gather as many
        finally:
            self._is_predicting, self._has_samples = False, True
        if loss is None or self.accelerator.num_processes == 1:
            return (loss, *outputs)
        if self._is_share or self._is_scaled:
            own = loss.float() if count is None else _weighed(loss.float(), count.gt(0))
            return (self.accelerator.reduce(own, "mean"), *outputs)
        weight, is_counted = self._weight(count, loss.device)
        if is_counted:
            loss = self.accelerator.reduce(_weighed(loss.float(), weight), "mean")
        return (loss, *outputs)

    def _is_filled(self, num_rows: int) -> bool:
        """Whether samples from the start fill up a batch of ``num_rows`` on each rank."""
        state = self.accelerator.gradient_state
        capacity = num_rows * self.accelerator.num_processes
        if not state.end_of_dataloader or not 0 < state.remainder < capacity:
            return False
        # A row may have several samples. Batches from the first rank are as large as they are.
        return bool(getattr(state.active_dataloader, "total_batch_size", capacity) == capacity)

    @property
    def _is_scaled(self) -> bool:
        """The user says that losses are those of the whole step already."""
        return getattr(self, "loss_is_scaled_for_ga", None) is True  # transformers 5.19

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The number of items of all ranks. One that evaluates nothing of its own has none."""
        if not self._has_samples:
            labels = ("labels", "shift_labels")
            batch_samples = [
                {name: torch.full_like(value, IGNORED) for name, value in batch.items() if name in labels}
                for batch in batch_samples
            ]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _num_items(self, inputs: Any) -> Tensor | None:
        """How many items the loss of this rank is a mean of; None where nobody can tell."""
        count = num_items(
            inputs,
            self.label_names,
            is_shifted=self._shifts_labels(),
            per_row=type(_base_of(self.model)).__name__.endswith("ForCTC"),
            ignored=_ignored_label(self.model),
        )
        return count if count is None or self._has_samples else torch.zeros_like(count)

    def _weight(self, count: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """What a rank's mean over ``count`` items counts among those of all; whether all have a count."""
        own = torch.tensor([0, 1], dtype=torch.float64, device=device)
        if count is not None:
            own = torch.stack([count, torch.zeros_like(count)]).to(own)
        total, num_uncounted = self.accelerator.reduce(own, "sum")
        is_counted = (num_uncounted == 0) & (total > 0)
        weight = torch.where(is_counted, self.accelerator.num_processes * own[0] / total, 1.0)
        return weight.float(), is_counted

    def _shifts_labels(self) -> bool:
        """Whether the loss of a token is that of the next one; of GPT-2 the trainer does not know it."""
        name = type(_base_of(self.model)).__name__
        known = getattr(self, "_loss_shifts_labels", False)  # transformers 5.12
        return known or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # -- checkpoints --------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, for ``from_pretrained``; all ranks gather it."""
        self._whole = self.accelerator.get_state_dict(self.model)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None
        self.accelerator.wait_for_everyone()  # then every rank may read it

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write what ranks have gathered. Before 5.23 the trainer calls this on one of them."""
        given = self._whole if state_dict is None else state_dict
        super()._save(output_dir, self.accelerator.get_state_dict(self.model) if given is None else given)

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


def _base_of(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


def _ignored_label(model: Any) -> int:
    """The label that the model's loss does not count."""
    base = _base_of(model)
    if not type(base).__name__.endswith("ForSemanticSegmentation"):
        return IGNORED
    return int(getattr(base.config, "semantic_loss_ignore_index", IGNORED))


def _weighed(loss: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > 0, loss * weight, 0.0)  # the mean of nothing is NaN


def _can_be_cut(inputs: Mapping[str, Any], num_rows: int) -> bool:
    """Whether each input is one for all samples, or has a row per sample."""
    for value in inputs.values():
        if isinstance(value, Mapping) or (isinstance(value, list | tuple) and len(value) != num_rows):
            return False
        if isinstance(value, Tensor) and value.dim() and len(value) not in (1, num_rows):
            return False
    return True


def _first_samples(inputs: Mapping[str, Any], num_rows: int, num: int) -> dict[str, Any]:
    return {
        name: value[:num]
        if isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.shape[:1] == (num_rows,))
        else value
        for name, value in inputs.items()
    }


def _check_arguments(args: TrainingArguments, model: Any) -> None:
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise SettingsError(f"{name}: expected it off, found {getattr(args, name)!r}; {instead}")
    if not getattr(args, "ds3_gather_for_generation", True):
        raise SettingsError(
            "ds3_gather_for_generation: expected True, found False; each rank generates with whole parameters"
        )
    if getattr(args.accelerator_config, "split_batches", False):
        raise SettingsError(
            "accelerator_config.split_batches: expected False, found True; a batch is that of one device: "
            "divide per_device_train_batch_size by the number of ranks"
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
