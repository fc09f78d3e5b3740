"""Trainers of TRL that generate: what they sample, learn and send to vLLM is that of one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("trl")

from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

import mics
from mics.integrations.transformers import MicsConfig, MicsTrainerMixin
from tests.integrations.hugging_face import VOCAB, arguments, fresh_accelerate, llama, text, tokenizer

_NAMES = ("loss", "grad_norm", "reward", "kl", "entropy", "eval_reward")
_NEW = 4  # tokens
_END = 2


class _MyGRPOTrainer(MicsTrainerMixin, GRPOTrainer):
    """What the docs show."""


class _Drawn(LogitsProcessor):
    """Adds noise that depends on a row's number among all ranks: greedy search then samples."""

    def __init__(self, first_row: int, prompt_length: int, draw: int) -> None:
        self._first_row, self._prompt_length, self._draw = first_row, prompt_length, draw

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self._draw + ids.shape[1] - self._prompt_length)
        noise = torch.rand(64, VOCAB, generator=generator).log().neg().log().neg()
        return scores + noise[self._first_row : self._first_row + len(ids)]


def _drawing(generate: Any, first_row: int, draw: int) -> Any:
    """``generate`` of a model, sampling rows by their number."""

    def drawn(input_ids: Tensor, *, generation_config: GenerationConfig, **options: Any) -> Tensor:
        generation_config.do_sample = False
        processors = LogitsProcessorList([_Drawn(first_row, input_ids.shape[1], draw)])
        found: Tensor = generate(
            input_ids, generation_config=generation_config, logits_processor=processors, **options
        )
        return found

    return drawn


def _draw_alike(trainer: Any) -> list[list[list[int]]]:
    """Let rows be sampled the same way whatever rank has them; what was generated comes here."""
    generate = trainer.model.generate
    seen: list[list[list[int]]] = []

    def drawn(input_ids: Tensor, **options: Any) -> Tensor:
        first_row = trainer.accelerator.process_index * len(input_ids)
        found: Tensor = _drawing(generate, first_row, len(seen))(input_ids, **options)
        seen.append([_until_end(row) for row in found[:, input_ids.shape[1] :].tolist()])
        return found

    trainer.model.generate = drawn
    return seen


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(_END) + 1] if _END in row else row


def _score(completions: list[str], **options: Any) -> list[float]:
    """Other completions have other rewards."""
    return [sum(ord(letter) * (at + 1) for at, letter in enumerate(each)) % 97 / 97 for each in completions]


def _grpo(
    folder: str, partition_size: int | None, world_size: int, *, build: Any = llama, **options: Any
) -> Any:
    """A trainer of eight completions per micro-step; with partition_size=None, the plain one."""
    from datasets import Dataset

    fresh_accelerate()
    rows = Dataset.from_list([{"prompt": text(number, 2 + number % 3)} for number in range(16)])
    defaults: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": _NEW,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8 // world_size,
        "per_device_eval_batch_size": 8 // world_size,
    }
    given: dict[str, Any] = {
        "args": arguments(folder, config=GRPOConfig, **{**defaults, **options}),
        "reward_funcs": _score,
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": tokenizer(),
    }
    if partition_size is None:
        return GRPOTrainer(build(), **given)
    return _MyGRPOTrainer(build(), mics_config=MicsConfig(partition_size=partition_size), **given)


def _history(trainer: Any) -> list[dict[str, float]]:
    logged = trainer.state.log_history[:-1]
    return [{name: entry[name] for name in _NAMES if name in entry} for entry in logged]


def _assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def _assert_learns(history: list[dict[str, float]]) -> None:
    assert len([entry for entry in history if entry.get("grad_norm", 0) > 1e-3]) == 3


def _sample_and_learn(
    folder: str, partition_size: int | None, world_size: int, **options: Any
) -> tuple[list[dict[str, float]], list[list[list[int]]]]:
    trainer = _grpo(folder, partition_size, world_size, **options)
    seen = _draw_alike(trainer)
    trainer.train()
    return _history(trainer), seen


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)


def _from_folder(folder: str) -> nn.Module:
    return LlamaForCausalLM.from_pretrained(folder)


_REFERENCE = {"beta": 5.0, "sync_ref_model": True, "ref_model_sync_steps": 1}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, marks=pytest.mark.full),
        pytest.param({"num_iterations": 2}, marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param({"build": _lora, "beta": 5.0, "gradient_accumulation_steps": 1}, marks=pytest.mark.full),
        pytest.param({**_REFERENCE, "gradient_accumulation_steps": 1}, marks=pytest.mark.full),
    ],
    ids=["evaluation", "old_policy", "lora", "reference"],
)
def test_tokens_losses_and_norms_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Each rank generates with whole parameters, for prompts of its own."""
    if "sync_ref_model" in options:  # the reference model comes from the folder that the model came from
        llama().save_pretrained(tmp_path / "model")
        options = {**options, "build": partial(_from_folder, str(tmp_path / "model"))}
    folder = str(tmp_path)
    ((expected, tokens),) = run_ranks(1, _sample_and_learn, folder, None, 1, launch="none", kwargs=options)
    _assert_learns(expected)
    assert any(len(row) < _NEW for rows in tokens for row in rows)
    for world_size in (2, 4):
        found = run_ranks(world_size, _sample_and_learn, folder, 2, world_size, kwargs=options)
        for history, _ in found:
            _assert_same(history, expected)
        parts = zip(*(seen for _, seen in found), strict=True)  # of each generation, a part of each rank
        assert [list(chain(*part)) for part in parts] == tokens


class _MyDistillationTrainer(MicsTrainerMixin, DistillationTrainer):
    """What the docs show."""


def _teacher() -> nn.Module:
    torch.manual_seed(5)
    config = llama().config
    config.hidden_size, config.intermediate_size, config.tie_word_embeddings = 32, 48, False
    return LlamaForCausalLM(config)


def _distil(
    folder: str, partition_size: int | None, world_size: int
) -> tuple[list[dict[str, float]], list[list[list[int]]]]:
    from datasets import Dataset

    fresh_accelerate()
    options: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "max_completion_length": _NEW,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8 // world_size,
    }
    given: dict[str, Any] = {
        "teacher_model": _teacher(),
        "args": arguments(folder, config=DistillationConfig, **options),
        "train_dataset": Dataset.from_list([{"prompt": text(n, 2 + n % 3)} for n in range(16)]),
        "processing_class": tokenizer(),
    }
    if partition_size is None:
        trainer = DistillationTrainer(llama(), **given)
    else:
        trainer = _MyDistillationTrainer(
            llama(), mics_config=MicsConfig(partition_size=partition_size), **given
        )
    seen = _draw_alike(trainer)
    trainer.train()
    return _history(trainer), seen


@pytest.mark.full
def test_a_sharded_teacher(tmp_path: Path) -> None:
    """The loss multiplies with the weights of the teacher's head, after the teacher's forward."""
    ((expected, tokens),) = run_ranks(1, _distil, str(tmp_path), None, 1, launch="none")
    _assert_learns(expected)
    for world_size in (2, 4):
        found = run_ranks(world_size, _distil, str(tmp_path), 2, world_size)
        for history, _ in found:
            _assert_same(history, expected)
        parts = zip(*(seen for _, seen in found), strict=True)
        assert [list(chain(*part)) for part in parts] == tokens


@pytest.mark.parametrize(
    "options", [{"ds3_gather_for_generation": False}, {"use_transformers_continuous_batching": True}], ids=str
)
def test_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """At construction, by the argument's name."""
    with pytest.raises(mics.SettingsError, match=f"^{next(iter(options))}: expected"):
        _grpo(str(tmp_path), 1, 1, **options)


# -- vLLM, as far as TRL calls it ------------------------------------------------------------------------


class _Engine:
    """A plain model of its own, which knows no weights but those it is sent."""

    def __init__(self) -> None:
        self.model = llama()
        self.draws = 0
        for param in self.model.parameters():
            param.data.fill_(float("nan"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params = dict(self.model.named_parameters())
        names = set()
        for name, weight in weights:
            params[name].data.copy_(weight)
            names.add(name)
        return names

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], first_row: int) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities for each prompt."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        config = GenerationConfig(max_new_tokens=_NEW, pad_token_id=0, eos_token_id=_END)
        generate = _drawing(self.model.generate, first_row, self.draws)
        self.draws += 1
        rows = generate(ids, generation_config=config, attention_mask=mask)
        mask = torch.cat([mask, torch.ones_like(rows[:, longest:])], dim=1)
        logits = self.model(
            input_ids=rows, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)
        ).logits
        logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
        new = [_until_end(row) for row in rows[:, longest:].tolist()]
        return [
            (row, log[longest - 1 :][: len(row)].tolist()) for row, log in zip(new, logprobs, strict=True)
        ]


class _LLM:
    """``vllm.LLM`` in the process of a rank."""

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = _Engine()
        runner = SimpleNamespace(model=self.engine)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def generate(self, prompts: list[dict[str, Any]], *, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        first_row = int(os.environ["RANK"]) * len(ids)
        found = []
        for prompt, (row, logprobs) in zip(ids, self.engine.complete(ids, first_row), strict=True):
            each = [
                {token: SimpleNamespace(rank=1, logprob=value)}
                for token, value in zip(row, logprobs, strict=True)
            ]
            output = SimpleNamespace(token_ids=row, logprobs=each)
            found.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[output]))
        return found


class _Client:
    """``trl``'s client of a vLLM server."""

    def __init__(self, base_url: str, group_port: int, connection_timeout: float) -> None:
        self.engine = _Engine()

    def init_communicator(self, device: torch.device) -> None:
        """The server is here."""

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """As the server does, believe ``metadata``; as its client does, pack what came and send it late."""
        values = [value for _, value in named_params]
        for (name, dtype, shape), value in zip(metadata, values, strict=True):
            assert (str(value.dtype), list(value.shape)) == (f"torch.{dtype}", shape)
            self.engine.load_weights([(name, value)])

    def generate(self, prompts: list[list[int]], n: int, **options: Any) -> dict[str, Any]:
        found = self.engine.complete([ids for ids in prompts for _ in range(n)], 0)
        return {
            "prompt_ids": prompts,
            "completion_ids": [row for row, _ in found],
            "logprobs": [[[value] for value in logprobs] for _, logprobs in found],
        }


def _learn_from_vllm(
    folder: str, partition_size: int | None, world_size: int, mode: str, build: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor] | None]:
    """Losses, and the weights that the engine has in the end."""
    from trl.generation import vllm_generation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "LLM", _LLM, raising=False)
        patch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
        patch.setattr(vllm_generation, "VLLMClient", _Client)
        patch.setenv("RANK", "0")  # which TRL sets
        trainer = _grpo(
            folder, partition_size, world_size, build=build, use_vllm=True, vllm_mode=mode, max_steps=3
        )
        trainer.train()
        engine = trainer.vllm_generation
        engine.sync_weights()
    holder = getattr(engine, "llm" if mode == "colocate" else "vllm_client", None)
    return _history(trainer), None if holder is None else holder.engine.model.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("build", [llama, pytest.param(_lora, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_weights_to_vllm(mode: str, build: Any, tmp_path: Path) -> None:
    """An engine of TRL's interface samples from the weights of the step, and the model learns from it."""
    folder = str(tmp_path)
    ((expected, weights),) = run_ranks(1, _learn_from_vllm, folder, None, 1, "colocate", build, launch="none")
    _assert_learns(expected)
    for world_size in (2, 4):
        found = run_ranks(world_size, _learn_from_vllm, folder, 2, world_size, mode, build)
        assert [sent is not None for _, sent in found] == [
            mode == "colocate" or rank == 0 for rank in range(world_size)
        ]
        for history, sent in found:
            _assert_same(history, expected)
            for name, value in (sent or {}).items():
                torch.testing.assert_close(value, weights[name])
