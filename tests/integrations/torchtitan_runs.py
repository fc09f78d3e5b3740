"""torchtitan's Trainer with its debug Llama, as ranks of the pool and as one process run it, on the CPU."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

# torchtitan takes a machine without an accelerator for one with CUDA. What it imports of torch warns.
with (
    mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
    warnings.catch_warnings(action="ignore"),
):
    import torchtitan.tools.utils

    assert torchtitan.tools.utils.device_type == "cpu"
    import torchtitan.components.metrics
    import torchtitan.trainer
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.validate import Validator
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.trainer import Trainer

    from mics.integrations.torchtitan import MicsConfig, with_mics
    from mics.state_dict import full_state_dict

VOCAB, LENGTH, WIDTH, GLOBAL_BATCH = 64, 16, 32, 12


class Stream(BaseDataLoader):
    """Sequences in an order that does not depend on the number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0
        infinite: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        self.seed, self.rank, self.world = config.seed, dp_rank, dp_world_size
        self.local, self.position = sizes["local_batch_size"], 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.position + self.rank * self.local
            tokens = torch.stack([self._sequence(first + i) for i in range(self.local)])
            self.position += self.world * self.local
            positions = torch.arange(LENGTH).repeat(self.local, 1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def _sequence(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return torch.randint(VOCAB, (LENGTH + 1,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


@contextmanager
def _on_cpu() -> Iterator[None]:
    """What in torchtitan asks for a GPU, and what waits for seconds."""
    monitor = SimpleNamespace(
        device_name="CPU",
        get_peak_stats=lambda: torchtitan.components.metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    clock = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)
    logging.disable(logging.WARNING)
    with (
        warnings.catch_warnings(action="ignore"),
        mock.patch.object(torchtitan.components.metrics, "build_device_memory_monitor", return_value=monitor),
        mock.patch.object(torchtitan.trainer.dist_utils, "set_pg_timeouts"),
        mock.patch.object(torchtitan.trainer, "time", clock),
    ):
        try:
            yield
        finally:
            gc.enable()  # the trainer collects by itself
            logging.disable(logging.NOTSET)


def config(folder: Path, *, world: int, accumulation: int = 1, **sections: Any) -> Trainer.Config:
    """torchtitan's own configuration of its debug model, with less of everything."""
    made = llama3_debugmodel()
    _make_small(made.model_spec.model)
    made.dump_folder, made.tokenizer = str(folder), NoTokenizer.Config()
    made.training = replace(
        made.training,
        local_batch_size=GLOBAL_BATCH // world // accumulation,
        global_batch_size=GLOBAL_BATCH,
        seq_len=LENGTH,
        steps=3,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    made.dataloader = Stream.Config()
    made.validator = Validator.Config(enable=True, freq=3, steps=2, dataloader=Stream.Config(seed=1))
    made.optimizer.implementation = "foreach"
    made.activation_checkpoint = None
    made.loss = made.loss.loss_fn
    made.debug.seed = 0
    if sections.pop("chunked", False):
        made.loss = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=made.loss)
        made.activation_checkpoint = FullAC.Config()
    for path, value in sections.items():
        section, _, name = path.partition("__")
        if name:
            setattr(getattr(made, section), name, value)
        else:
            setattr(made, section, value)
    return made


def _make_small(model: Any) -> None:
    """A narrow model: norms of large tensors in float32 depend on how a tensor is divided."""
    rope = ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=500000, scaling="llama")
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
    model.layers = llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex")
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU
    model.dim = model.tok_embeddings.embedding_dim = model.lm_head.in_features = WIDTH
    model.norm.normalized_shape = WIDTH
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB


class NoTokenizer(torchtitan.trainer.BaseTokenizer):
    """The stream has tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCAB


def run(made: Trainer.Config) -> tuple[Trainer, dict[str, list[float]]]:
    """A trainer that has trained, and what it logged."""
    seen: dict[str, list[float]] = {"loss": [], "norm": [], "val": []}
    with _on_cpu():
        trainer = made.build()

        def log(step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
            seen["loss"].append(loss)
            seen["norm"].append(norm)

        trainer.metrics_processor.log = log
        trainer.metrics_processor.log_validation = lambda loss, step: seen["val"].append(loss)
        trainer.train()
        trainer.close()
    return trainer, seen


def one_process(folder: Path, first_weights: Path | None = None, **options: Any) -> dict[str, list[float]]:
    """The trainer without parallelism, in one process. Its first weights are left for others."""

    def as_it_is(model: nn.Module, **ignored: Any) -> nn.Module:
        return model

    made = config(folder, world=1, **options)
    made.model_spec.parallelize_fn = as_it_is
    with _on_cpu():
        if first_weights is not None:
            first = {name: param.detach() for name, param in made.build().model_parts[0].named_parameters()}
            first_weights.mkdir(exist_ok=True)
            save_file(first, first_weights / "model.safetensors")
    trainer, seen = run(made)
    last = Llama3StateDictAdapter(trainer.model_config, None).to_hf(trainer.model_parts[0].state_dict())
    save_file({name: value.contiguous() for name, value in last.items()}, folder / "last.safetensors")
    return seen


def with_partitions(
    folder: Path, size: int, first_weights: Path | None, options: dict[str, Any]
) -> dict[str, list[float]]:
    """The trainer on mics."""
    return run(_sharded(folder, size, first_weights, options))[1]


def _sharded(folder: Path, size: int, first_weights: Path | None, options: dict[str, Any]) -> Trainer.Config:
    world = dist.get_world_size()
    made = config(folder, world=world, **options)
    made.parallelism.data_parallel_shard_degree = size
    made.parallelism.data_parallel_replicate_degree = world // size
    made.checkpoint.enable = True
    made.checkpoint.initial_load_path = None if first_weights is None else str(first_weights)
    return with_mics(made, MicsConfig())


def first_values(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of a model that mics initialised, and of one that torchtitan did."""
    with _on_cpu():
        sharded = _sharded(folder, dist.get_world_size(), None, {}).build().model_parts[0]
        plain = config(folder, world=dist.get_world_size())
        plain.model_spec.parallelize_fn = lambda model, **ignored: model
        model = plain.build().model_parts[0]
    ours = full_state_dict(sharded, rank0_only=False) | dict(sharded.named_buffers())
    return ours, dict(model.state_dict()) | dict(model.named_buffers())


def refused(folder: Path, options: dict[str, Any]) -> None:
    """Builds a trainer on mics with sections changed after ``with_mics``, as the command line does."""
    made = _sharded(folder, dist.get_world_size(), None, {})
    for path, value in options.items():
        section, _, name = path.partition("__")
        setattr(getattr(made, section), name, value)
    with _on_cpu():
        made.build()


def refused_before(options: dict[str, Any]) -> None:
    made = config(Path(), world=1, **options.pop("config", {}))
    with_mics(made, MicsConfig(**options))
