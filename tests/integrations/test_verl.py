"""verl's engine of mics trains, saves and hands out weights as one process does.

Run against the real classes of verl, on the CPU: a stand-in for the platform says that a CPU is the device.
"""

from __future__ import annotations

import inspect
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks

pytest.importorskip("verl", reason="verl is not installed")

import mics
from tests.integrations.hugging_face import VOCAB, llama

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_LENGTHS = [3, 6, 4, 5, 6, 3, 5, 4]


def _on_cpu() -> None:
    import trl
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    class OnCPU(PlatformBase):  # type: ignore[misc]
        """What engines ask for."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

    OnCPU.__abstractmethods__ = frozenset()
    platform_manager._current_platform = OnCPU()
    if not hasattr(
        trl, "AutoModelForCausalLMWithValueHead"
    ):  # which verl compares with, and TRL 1 has elsewhere
        trl.AutoModelForCausalLMWithValueHead = type("AutoModelForCausalLMWithValueHead", (), {})


def _engine(
    folder: str,
    fsdp_size: int,
    *,
    model_type: str = "language_model",
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> Any:
    """An engine as verl's workers build it, with changed configs."""
    _on_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    import mics.integrations.verl  # noqa: F401

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    defaults = {"fsdp_size": fsdp_size, "mixed_precision": precision, "use_torch_compile": False}
    engine_config = FSDPEngineConfig(**{**defaults, **(engine or {})})
    object.__setattr__(engine_config, "strategy", "mics")  # as the config of verl's actors does
    defaults = {
        "path": folder,
        "load_tokenizer": False,
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
        "model_type": model_type,
    }
    return EngineRegistry.new(
        model_type,
        "mics",
        model_config=HFModelConfig(**{**defaults, **(model or {})}),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, clip_grad=0.5, total_training_steps=10),
        checkpoint_config=CheckpointConfig(**(checkpoint or {})),
    )


def _rows(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in _LENGTHS]


def _batch(rows: list[Tensor], micro_batch_size: int) -> Any:
    """What verl's driver sends to a rank."""
    from verl.utils import tensordict_utils as tu

    masks = [torch.ones_like(row) for row in rows]
    for mask in masks:
        mask[0] = 0  # nothing predicts the first token
    tensors = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": masks,
    }
    return tu.get_tensordict(
        {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in tensors.items()},
        {
            "temperature": 1.0,
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": micro_batch_size,
        },
    )


def _train(engine: Any, steps: range) -> list[tuple[float, float]]:
    """Loss and norm of each step, as verl's worker takes them."""
    from verl.workers.utils.losses import sft_loss

    found, size, rank = [], engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    for step in steps:
        data = _batch(_rows(step)[rank::size], micro_batch_size=1)
        with engine.train_mode():
            output = engine.train_batch(data, partial(sft_loss, None))
            engine.lr_scheduler_step()
        loss = torch.tensor(output["loss"]).sum()
        torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
        found.append((loss.item() / size, output["metrics"]["grad_norm"]))
    return found


def _plain(model: nn.Module, steps: range) -> list[tuple[float, float]]:
    """The same in one process, without verl."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    found = []
    for step in steps:
        optimizer.zero_grad()
        rows = _rows(step)
        logprobs = [
            model(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])
            for row in rows
        ]
        loss = -torch.cat(logprobs).sum() / sum(len(row) - 1 for row in rows)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def _run(folder: str, fsdp_size: int) -> tuple[Any, Any, dict[str, Tensor], list[float]]:
    contents = ["model", "optimizer", "extra", "hf_model"]
    engine = _engine(folder + "/model", fsdp_size, checkpoint={"save_contents": contents})
    engine.initialize()
    first = _train(engine, range(2))
    engine.save_checkpoint(folder + "/saved", global_step=2)
    then = _train(engine, range(2, 4))
    weights, adapter = engine.get_per_tensor_param()
    assert adapter is None
    sent = dict(weights)
    whole = mics.full_state_dict(engine.module, rank0_only=False)
    assert sent.keys() == whole.keys() and all(torch.equal(sent[name], whole[name]) for name in sent)
    with engine.eval_mode():
        data = _batch(_rows(0)[:2], micro_batch_size=2)
        logprobs = engine.infer_batch(data)["model_output"]["log_probs"].values().tolist()
    return first, then, sent, logprobs


def _resume(folder: str, fsdp_size: int) -> list[tuple[float, float]]:
    engine = _engine(folder + "/model", fsdp_size)
    engine.initialize()
    engine.load_checkpoint(folder + "/saved")
    return _train(engine, range(2, 4))


@pytest.mark.parametrize("fsdp_size", [2, -1])
def test_losses_norms_weights_and_checkpoints_of_one_process(fsdp_size: int, tmp_path: Path) -> None:
    """With two micro-batches on each of four ranks; then it goes on on two ranks."""
    model = llama()
    model.save_pretrained(tmp_path / "model")
    expected = _plain(model, range(2))
    halfway = {name: value.clone() for name, value in model.state_dict().items()}
    first, then, sent, logprobs = run_ranks(4, _run, str(tmp_path), fsdp_size, timeout_s=600)[0]
    for ours, theirs in zip(first, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    exported = type(model).from_pretrained(tmp_path / "saved" / "huggingface").state_dict()
    for name, value in halfway.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-6)
    model.load_state_dict(sent)
    row = _rows(0)[0]
    plain = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
    assert logprobs[: len(row) - 1] == pytest.approx(plain.tolist(), rel=1e-5)
    for ours, theirs in zip(run_ranks(2, _resume, str(tmp_path), 2, timeout_s=600)[0], then, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": {"param_offload": True}}, "param_offload"),
        ({"engine": {"optimizer_offload": True}}, "optimizer_offload"),
        ({"engine": {"ulysses_sequence_parallel_size": 2}}, "ulysses_sequence_parallel_size"),
        ({"engine": {"mixed_precision": {"param_dtype": "fp16"}}}, "mixed_precision.param_dtype"),
        ({"model": {"enable_activation_offload": True}}, "enable_activation_offload"),
        ({"checkpoint": {"save_lora_only": True}}, "checkpoint.save_lora_only"),
        ({"checkpoint": {"save_contents": ["optimizer"]}}, "checkpoint.save_contents"),
    ],
)
def test_refused(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    """When the engine is built, by the name in the config."""
    llama().save_pretrained(tmp_path)
    with pytest.raises(mics.SettingsError, match=f"^{name}: expected"):
        _engine(str(tmp_path), 1, **options)


def test_interface() -> None:
    """All that verl asks of an engine is there, with the parameters that it passes; shards are refused."""
    from verl.workers.engine.base import BaseEngine

    from mics.integrations.verl import MicsEngineWithLMHead

    inherited = {"train_batch", "infer_batch", "prime_delta_snapshots"}  # of what an engine has
    for name, theirs in inspect.getmembers(BaseEngine, inspect.isfunction):
        ours = getattr(MicsEngineWithLMHead, name)
        assert ours is not theirs or name in inherited, name
        missing = inspect.signature(theirs).parameters.keys() - inspect.signature(ours).parameters.keys()
        assert not missing - {"kwargs"}, (name, missing)


def test_the_entry_point_names_the_module() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"mics": "mics.integrations.verl"}
