"""Trainers of TRL that generate: with whole parameters, or with vLLM, which gets them one after the other.

``MicsTrainerMixin`` imports this for a trainer of TRL; there is nothing here to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch.nn as nn
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from mics.engine import is_sharded
from mics.full_params import iter_full_params
from mics.integrations.weights import param_dtype
from mics.state_dict import summon_full_params


def adopt_generation(trainer: Any) -> None:
    """Let a trainer of TRL that was just built generate from a sharded model, and learn from one."""
    if isinstance(getattr(trainer, "_dist", None), DistributedBackend):
        trainer._dist.__class__ = FullParamsBackend
    generation = getattr(trainer, "vllm_generation", None)
    if isinstance(generation, VLLMGeneration):
        generation.__class__ = WeightsToVLLM
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is not None and is_sharded(teacher):
        trainer._compute_loss = _with_whole_head(teacher, trainer._compute_loss)


def _with_whole_head(teacher: Any, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """For a loss that multiplies with the weights of the teacher's head, after the teacher's forward."""
    head = teacher.get_output_embeddings()
    name = next(name for name, module in teacher.named_modules() if module is head)
    names = [f"{name}.{parameter}" for parameter, value in head.named_parameters(recurse=False)]

    def compute(*args: Any, **options: Any) -> Any:
        found = dict(iter_full_params(teacher, names, dtype=param_dtype(teacher)))
        whole = SimpleNamespace(weight=found[f"{name}.weight"], bias=found.get(f"{name}.bias"))
        teacher.get_output_embeddings = lambda: whole
        try:
            return compute_loss(*args, **options)
        finally:
            del teacher.get_output_embeddings

    return compute


class FullParamsBackend(DistributedBackend):
    """What TRL asks of a backend, for models that mics has sharded."""

    @contextmanager
    def summon_full_params(self, module: nn.Module, **options: Any) -> Iterator[None]:
        """Inside, each rank generates for itself: some may end many tokens before others."""
        with summon_full_params(module) if is_sharded(module) else nullcontext():
            yield


class WeightsToVLLM(VLLMGeneration):
    """Sends whole parameters to vLLM, in the dtype that the model computes in.

    No rank holds the whole model, but for adapters of PEFT: they are merged into all parameters at once.
    """

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """On all ranks; to a server, which only the main process talks to, the others send what they have."""
        model: nn.Module = self.model
        if not is_sharded(model):
            yield from super()._iter_named_params()  # type: ignore[no-untyped-call]
        elif is_peft_model(model):
            with summon_full_params(model):  # adapters are merged into these, which are then dropped
                for name, param in super()._iter_named_params():  # type: ignore[no-untyped-call]
                    yield name, param.clone()  # whoever keeps it does not see it unmerged
        else:
            rank = 0 if self.mode == "server" else None
            for name, param in iter_full_params(model, dtype=param_dtype(model), rank=rank):
                yield self._fix_param_name_to_vllm(name), param
