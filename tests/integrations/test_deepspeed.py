"""Training loops of DeepSpeed on mics: the losses of one process, and configs that mean what they say."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mics
from mics.checkpoint.formats.deepspeed_files import open_deepspeed
from mics.errors import CheckpointError, MicsError, SettingsError
from mics.integrations.deepspeed import (
    DeepSpeedEngine,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_config_arguments,
    init_distributed,
    initialize,
    load_deepspeed_checkpoint,
    read_config,
)
from mics.integrations.deepspeed.loss_scale import LossScale, LossScaling
from tests import tiers
from tests.integrations.deepspeed_folders.make import Tiny, batch, groups
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import SEED, Outcome, Recipe, train_plain
from tests.toys import Chain, floats

FOLDERS = Path(__file__).parent / "deepspeed_folders"
MAX_NORM = 0.3


# -- configs ---------------------------------------------------------------------------------------------


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": MAX_NORM,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 0.01, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.02},
        },
        **more,
    }


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(
    ("section", "partition_size", "optimizer_sharding"),
    [
        ({}, 1, "partition"),
        (zero(0), 1, "partition"),
        (zero(1), 1, "world"),
        (zero(2), 1, "world"),
        (zero(3), 8, "world"),
        (zero(3, mics_shard_size=-1), 8, "world"),
        (zero(3, mics_shard_size=4), 4, "world"),
    ],
)
def test_stages_become_partition_sizes(
    section: dict[str, Any], partition_size: int, optimizer_sharding: str
) -> None:
    found = read_config(config(**section), world_size=8)
    assert found.shard_settings()["partition_size"] == partition_size
    assert found.optimizer_sharding == optimizer_sharding
    assert found.hierarchical == "auto"


def test_optimizer_state_goes_to_the_host() -> None:
    """By the section of today, by the key of once, and not where it is off."""
    for section, expected in (
        (zero(3, offload_optimizer={"device": "cpu", "pin_memory": True, "ratio": 0.5}), "host"),
        (zero(2, cpu_offload=True), "host"),
        (zero(3, offload_optimizer={"device": "none"}), "device"),
        (zero(3, offload_optimizer=None), "device"),
    ):
        found = read_config(config(**section), world_size=4)
        assert found.shard_settings()["optimizer_state"] == expected
    found = read_config(config(**zero(3, offload_optimizer={"pin_memory": True})), world_size=4)
    assert [each.key for each in found.ignored] == ["zero_optimization.offload_optimizer.pin_memory"]


def test_hierarchical_gathers_are_asked_for_by_their_key() -> None:
    section = zero(3, mics_shard_size=4, mics_hierarchical_params_gather=True)
    assert read_config(config(**section), world_size=8).hierarchical is True


def test_a_file_is_read_as_a_dict_is(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config(**zero(3))))
    assert read_config(file, world_size=4) == read_config(config(**zero(3)), world_size=4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 24}, (24, 6, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (24, 2, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (24, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
        ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(given: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = read_config(given, world_size=4)
    assert (found.train_batch_size, found.micro_batch_size, found.accumulation_steps) == expected


def test_what_zero_plus_plus_rounds_is_rounded() -> None:
    """The second copy is that of a partition group; quantized weights and gradients are int8."""
    found = read_config(config(**zero(3, zero_hpz_partition_size=2)), world_size=4)
    assert (found.partition_size, found.optimizer_sharding) == (2, "world")
    assert found.compression == mics.Compression() == found.shard_settings()["compression"]
    both = zero(3, zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz_partition_size=2)
    assert read_config(config(**both), world_size=4).compression == mics.Compression(
        hop2="int8", inter_gather="int8", inter_reduce="int8"
    )
    alone = read_config(config(**zero(3, zero_quantized_weights=True)), world_size=4)
    assert alone.compression == mics.Compression(inter_gather="int8")


@pytest.mark.parametrize(
    ("params", "kind", "decay"),
    [
        ({"type": "Adam", "params": {}}, torch.optim.AdamW, 0.0),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, 0.0),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW, 0.01),
        ({"type": "AdamW", "params": {"weight_decay": 0.2}}, torch.optim.AdamW, 0.2),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, 0),
    ],
)
def test_optimizers_decay_as_in_deepspeed(params: dict[str, Any], kind: type, decay: float) -> None:
    found = read_config(config(optimizer=params), world_size=1).optimizer
    assert found is not None
    made = found[0]([nn.Parameter(torch.ones(1))], **found[1])
    assert type(made) is kind
    assert made.param_groups[0]["weight_decay"] == decay


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": params}}


def warmup(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupLR", "params": params}}


ODD_BETAS: list[Any] = [3, None, "0.9", [0.9], [1, 2, 3], ["a", "b"], [[0.9], 0.9], {"beta1": 0.9}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (zero(3, offload_param={"device": "cpu"}), r"zero_optimization\.offload_param: expected .*cpu"),
    (
        zero(3, offload_optimizer={"device": "nvme"}),
        r"offload_optimizer\.device: expected cpu or none, found nv",
    ),
    (zero(3, offload_optimizer={"devise": "cpu"}), r"offload_optimizer\.devise: .* did you mean 'device'"),
    (zero(2, zero_quantized_gradients=True), r"zero_quantized_gradients: expected stage 3 .* found stage 2"),
    (zero(3, zero_quantized_nontrainable_weights=True), r"nontrainable_weights: .*zero_quantized_weights"),
    (zero(3, zero_hpz_partition_size=3), r"zero_hpz_partition_size: expected a divisor of the 4 ranks"),
    (
        zero(3, zero_hpz_partition_size=4, mics_shard_size=2),
        r"hpz_partition_size: expected .* of 2, found 4",
    ),
    (zero(4), r"zero_optimization\.stage: expected 0, 1, 2 or 3, found 4"),
    (zero(3, mics_shard_size=3), r"mics_shard_size: expected a divisor of the 4 ranks"),
    (zero(2, mics_shard_size=2), r"mics_shard_size: expected stage 3 beside it, found stage 2"),
    (zero(3, mics_shard_sise=2), r"mics_shard_sise: .* did you mean 'mics_shard_size'"),
    ({"gradient_cliping": 1.0}, r"gradient_cliping: .* did you mean 'gradient_clipping'"),
    (
        {"train_batch_size": 9},
        r"train_batch_size: expected a multiple of train_micro_batch_size_per_gpu x 4 ranks = 8, found 9",
    ),
    (
        {"train_batch_size": 8, "gradient_accumulation_steps": 2},
        r"train_batch_size: expected .* x gradient_accumulation_steps x 4 ranks = 16, found 8; leave one",
    ),
    ({"train_batch_size": "auto"}, r'train_batch_size: expected a value, found "auto".*write sequences'),
    ({"bf16": {"enabled": "auto"}}, r'bf16\.enabled: .*"auto".*write true or false'),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"fp16\.enabled: expected bf16 or fp16"),
    ({"amp": {"enabled": True}}, r"amp: expected it to be off"),
    ({"sparse_gradients": True}, r"sparse_gradients: expected it to be off or left out, found true"),
    ({"optimizer": {"type": "Lamb"}}, r"optimizer\.type: .* found Lamb: it scales by the norms"),
    ({"optimizer": {"type": "OneBitAdam"}}, r"optimizer\.type: .* compresses gradients"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, r"max_grad_norm: .*gradient_clipping"),
    ({"optimizer": {"type": "SGD", "params": {"betas": [0, 1]}}}, r"optimizer\.params\.betas: .* of SGD"),
    (adam(lr="3e-4"), r"optimizer\.params\.lr: expected a number, found 3e-4"),
    (adam(lr=None), r"optimizer\.params\.lr: expected a number, found null"),
    (adam(eps=True), r"optimizer\.params\.eps: expected a number, found true"),
    (adam(weight_decay=float("inf")), r"params\.weight_decay: expected a number, found Infinity"),
    (adam(weight_decay=10**400), r"params\.weight_decay: expected a number, found 1000"),
    (adam(amsgrad="no"), r"params\.amsgrad: expected true or false, found no"),
    *(
        (adam(betas=each), r"params\.betas: expected 2 numbers, found .*write \[0.9, 0.999\]")
        for each in ODD_BETAS
    ),
    (
        {"optimizer": {"type": "Rprop", "params": {"step_sizes": 3}}},
        r"step_sizes: expected 2 numbers, found 3",
    ),
    ({"optimizer": {"type": "ASGD", "params": {"t0": "1"}}}, r"params\.t0: expected a number, found 1"),
    (warmup(warmup_min_lr={}), r"scheduler\.params\.warmup_min_lr: expected a number, found {}"),
    (warmup(warmup_max_lr=["a"]), r"scheduler\.params\.warmup_max_lr: expected a number, found 'a'"),
    (warmup(warmup_min_lr=[]), r"params\.warmup_min_lr: expected a number, or one for each .* found 0"),
    (warmup(warmup_num_steps=1.5), r"params\.warmup_num_steps: expected a whole number of steps"),
    ({"scheduler": {"type": ["WarmupLR"]}}, r"scheduler\.type: expected one of WarmupLR"),
    ({"communication_data_type": ["fp32"]}, r"communication_data_type: expected one of fp32"),
    ({"gradient_clipping": 10**400}, r"gradient_clipping: expected a number of at least 0"),
    ({"fp16": {"initial_scale_power": 10**9}}, r"fp16\.initial_scale_power: expected at most 127"),
    ({"zero_optimization": {3: 4}}, r"zero_optimization\.3: expected a key of DeepSpeed's config"),
    (
        {"checkpoint": {"load_universal": True}},
        r"checkpoint\.load_universal: .* be off or left out, found true",
    ),
    ({"load_universal_checkpoint": True}, r"load_universal_checkpoint: .*load_checkpoint reads what DeepSp"),
    ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, r"optimizer\.params: .*Invalid learning rate"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, r"scheduler\.params\.total_num_steps: expected .* found none"),
    ({"scheduler": {"type": "OneCycle"}}, r"scheduler\.type: expected one of WarmupLR.*lr_scheduler="),
    ({"scheduler": {"type": "WarmupLR", "params": {"steps": 1}}}, r"scheduler\.params\.steps: expected"),
]


@pytest.mark.parametrize(("section", "message"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_config(config(**section), world_size=4)


def test_what_is_off_is_accepted_and_what_means_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    found = read_config(
        config(
            **zero(2, offload_optimizer={"device": "none"}, overlap_comm=True, reduce_bucket_size=5e8),
            amp={"enabled": False},
            checkpoint={"load_universal": False, "tag_validation": "Warn"},
            steps_per_print=10,
            zero_allow_untested_optimizer=True,
        ),
        world_size=4,
    )
    keys = [each.key for each in found.ignored]
    assert keys == [
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "checkpoint.tag_validation",
        "steps_per_print",
        "zero_allow_untested_optimizer",
    ]
    with caplog.at_level(logging.INFO, "mics"):
        found.tell()
    assert [key for key in keys if key in caplog.text] == keys


def test_precisions() -> None:
    brain = read_config(config(bf16={"enabled": True}, communication_data_type="bf16"), world_size=1)
    assert brain.precision == mics.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    half = read_config(config(fp16={"enabled": True, "initial_scale_power": 8}), world_size=1)
    assert half.precision.param_dtype is torch.float16
    assert half.loss_scaling == LossScaling(initial_power=8)
    assert read_config(config(), world_size=1).precision.param_dtype is torch.float32


# -- schedules and loss scales ------------------------------------------------------------------------------


def _rates(kind: Any, num_steps: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = kind(optimizer, **arguments)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_have_the_rates_of_deepspeed() -> None:
    """Written down from DeepSpeed 0.19.8: the first step is at the lowest rate, and the second one too."""
    linear = _rates(WarmupLR, 7, warmup_num_steps=4, warmup_max_lr=0.1, warmup_type="linear")
    assert linear == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])
    log = _rates(WarmupLR, 6, warmup_num_steps=4, warmup_min_lr=0.1)
    assert log == pytest.approx([0.1, 0.1, 0.3, 0.41699250, 0.5, 0.5])
    decay = _rates(
        WarmupDecayLR, 9, total_num_steps=6, warmup_num_steps=2, warmup_max_lr=0.1, warmup_type="linear"
    )
    assert decay == pytest.approx([0, 0, 0.05, 0.1, 0.075, 0.05, 0.025, 0, 0])
    cosine = _rates(
        WarmupCosineLR, 7, total_num_steps=5, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    assert cosine == pytest.approx([0, 0, 0.25, 0.3875, 0.1625, 0.05, 0.05])


def test_the_loss_scale_waits_before_it_falls_and_grows_after_a_calm_window() -> None:
    scale = LossScale(LossScaling(initial_power=4, window=2, hysteresis=2, least=4))
    seen = []
    for overflowed in [True, True, False, False, False, True, True]:
        scale.update(overflowed=overflowed)
        seen.append(scale.value)
    assert seen == [16, 8, 8, 8, 16, 16, 8]
    scale.update(overflowed=True)
    with pytest.raises(MicsError, match=r"fp16\.min_loss_scale"):
        scale.update(overflowed=True)


# -- training ----------------------------------------------------------------------------------------------


def decoupled_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=0.01, weight_decay=0.1)


def warmup(optimizer: torch.optim.Optimizer) -> WarmupDecayLR:
    return WarmupDecayLR(optimizer, total_num_steps=9, warmup_num_steps=3, warmup_max_lr=0.02)


def recipe(accumulation: int) -> Recipe:
    return Recipe(
        build=Chain,
        batch=floats,
        optimizer=decoupled_adam,
        scheduler=warmup,
        num_steps=4,
        accumulation=accumulation,
        max_norm=MAX_NORM,
    )


@cache
def plain(accumulation: int, world_size: int) -> Outcome:
    return train_plain(recipe(accumulation), world_size=world_size)


def _train(engine: DeepSpeedEngine, steps: range) -> tuple[list[list[float]], list[float]]:
    """Losses [step][micro] of this rank, and norms [step]."""
    losses, norms = [], []
    rank, accumulation = engine.global_rank, engine.gradient_accumulation_steps()
    engine.train()
    for step in steps:
        losses.append([])
        for micro in range(accumulation):
            assert engine.is_gradient_accumulation_boundary() == (micro == accumulation - 1)
            loss = engine.backward(engine(*floats(step, micro, rank)))
            engine.step()
            losses[-1].append(loss.item())
        norms.append(engine.get_global_grad_norm())
        assert engine.global_steps == step + 1
    return losses, norms


def _engine(given: dict[str, Any], accumulation: int) -> DeepSpeedEngine:
    torch.manual_seed(SEED)
    engine, *_ = initialize(model=Chain(), config={**given, "gradient_accumulation_steps": accumulation})
    return engine


def _run(given: dict[str, Any], accumulation: int) -> Any:
    return _train(_engine(given, accumulation), range(4))


def _compare(found: list[Any], accumulation: int) -> None:
    expected = plain(accumulation, len(found))
    losses = torch.tensor([losses for losses, _ in found]).mean(0)  # over ranks
    torch.testing.assert_close(losses, torch.tensor(expected.losses)[:, :, 0], atol=1e-5, rtol=1e-5)
    for _, norms in found:
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected.norms), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("world_size", "section", "accumulation"),
    tiers.first(
        [
            (4, zero(3, mics_shard_size=2), 3),
            (4, zero(1), 3),
            (4, zero(3, mics_shard_size=2, offload_optimizer={"device": "cpu", "pin_memory": True}), 3),
            (2, zero(3), 3),
            (4, zero(3, mics_shard_size=2), 1),
        ],
        2,
    ),
)
def test_losses_and_norms_are_those_of_one_process(
    world_size: int, section: dict[str, Any], accumulation: int
) -> None:
    """Clipped, with a schedule, on ranks: what plain training of the global batch gives."""
    _compare(run_ranks(world_size, _run, config(**section), accumulation), accumulation)


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("section", [zero(0), zero(2), *(zero(3, mics_shard_size=p) for p in (1, 2, 4))])
def test_losses_at_every_stage_and_shard_size(section: dict[str, Any], accumulation: int) -> None:
    _compare(run_ranks(4, _run, config(**section), accumulation), accumulation)


def _own_parts() -> Any:
    """An optimizer that was built for the plain model, and a function that builds the scheduler."""
    torch.manual_seed(SEED)
    model = Chain()
    given = decoupled_adam(model)
    bare = {key: value for key, value in config(**zero(3)).items() if key not in ("optimizer", "scheduler")}
    engine, optimizer, loader, scheduler = initialize(
        model=model, config=bare, optimizer=given, lr_scheduler=warmup
    )
    assert optimizer is given
    assert loader is None
    assert isinstance(scheduler, WarmupDecayLR)
    return _train(engine, range(4))


def test_an_optimizer_of_the_plain_model_trains_the_sharded_one() -> None:
    _compare(run_ranks(2, _own_parts), 1)


def _script(arguments: list[str]) -> Any:
    """What a script has around its loop, and one that counts micro-steps itself."""
    parser = add_config_arguments(argparse.ArgumentParser())
    init_distributed()
    torch.manual_seed(SEED)
    model = Chain()
    data = [floats(0, 0, number) for number in range(8)]
    args = parser.parse_args(arguments)
    engine, _, loader, _ = initialize(args, model, training_data=data, dist_init_required=False)
    assert args.deepspeed
    assert loader is not None
    assert len(loader) == 2
    assert engine.local_rank == torch.distributed.get_rank()
    assert not (engine.fp16_enabled() or engine.bfloat16_enabled())
    losses = []
    for step in range(2):
        with engine.no_sync():
            engine.backward(engine(*floats(step, 0, engine.global_rank)) / 2)
        losses.append(2 * engine.backward(engine(*floats(step, 1, engine.global_rank)) / 2).item())
        engine.step()
    return losses, engine.get_global_grad_norm()


def test_a_script_finds_what_it_calls(tmp_path: Path) -> None:
    """Arguments, a data loader, a backward within ``no_sync``: the losses and norms of one process."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config(**zero(1))))
    found = run_ranks(2, _script, ["--deepspeed", "--deepspeed_config", str(file)])
    expected = plain(2, 2)
    for step in range(2):
        mean = (found[0][0][step] + found[1][0][step]) / 2
        # The reference divides the losses of both micro-steps by two as well.
        assert mean / 2 == pytest.approx(expected.losses[step][1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(float(expected.norms[1]), rel=1e-5)


def _announced() -> tuple[list[int], list[int]]:
    """Calls between replicas after each micro-step of a step, with and without the engine's counting."""
    engine = _engine(config(**zero(3, mics_shard_size=1)), 3)
    rows = []
    for micro in range(3):
        engine.backward(engine(*floats(0, micro, engine.global_rank)))
        calls = mics.traffic(engine.module).calls
        rows.append(sum(n for (kind, group), n in calls.items() if "repl" in f"{kind}{group}"))
        engine.step()
    return rows, list(map(int, mics.traffic(engine.module).calls.values()))


def test_replicas_are_reduced_within_the_last_backward_alone() -> None:
    for rows, _ in run_ranks(2, _announced):
        assert rows[0] == rows[1] < rows[2], rows


def _half(scale_power: int) -> Any:
    given = config(
        **zero(3),
        fp16={"enabled": True, "initial_scale_power": scale_power, "hysteresis": 1, "auto_cast": True},
    )
    engine = _engine({**given, "scheduler": {}}, 1)
    seen = []
    for step in range(4):
        x, target = floats(step, 0, engine.global_rank)
        loss = engine(x, target)
        engine.backward(loss)
        engine.step()
        seen.append(
            (loss.item(), engine.was_step_applied(), engine.loss_scale, engine.get_global_grad_norm())
        )
    return seen, engine.skipped_steps


def test_float16_leaves_out_steps_that_overflow_on_every_rank() -> None:
    """A scale that no gradient survives is halved until one does; a small one changes nothing."""
    (calm, none), (other, _) = run_ranks(2, _half, 3)
    assert none == 0
    assert [row[1:] for row in calm] == [row[1:] for row in other]
    (loud, skipped), (same, _) = run_ranks(2, _half, 24)
    assert [row[1:3] for row in loud] == [row[1:3] for row in same]
    assert skipped == sum(not applied for _, applied, *_ in loud) > 0
    assert loud[0][1:3] == (False, 2.0**23)
    expected = train_plain(
        Recipe(build=Chain, batch=floats, optimizer=decoupled_adam, num_steps=4, max_norm=MAX_NORM),
        world_size=2,
    )
    for (one, _, _, norm), (two, *_), loss, wanted in zip(
        calm, other, expected.losses, expected.norms, strict=True
    ):
        assert (one + two) / 2 == pytest.approx(loss[0][0], rel=2e-2)
        assert norm == pytest.approx(wanted, rel=5e-2)


# -- checkpoints of the engine -------------------------------------------------------------------------------


def _save(folder: str) -> Any:
    engine = _engine(config(**zero(3, mics_shard_size=2)), 3)
    _train(engine, range(2))
    engine.save_checkpoint(folder, client_state={"epoch": 5})
    assert engine.load_checkpoint(folder) == (f"{folder}/global_step2", {"epoch": 5})  # on every rank at once
    engine.save_16bit_model(folder)
    return _train(engine, range(2, 4)), engine.get_lr()


def _resume(folder: str) -> Any:
    engine = _engine(config(**zero(3)), 3)
    assert engine.load_checkpoint(f"{folder}/nothing") == (None, {})
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    assert Path(path).name == "global_step2"
    assert state == {"epoch": 5}
    assert (engine.global_steps, engine.micro_steps) == (2, 6)
    return _train(engine, range(2, 4)), engine.get_lr()


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """With another shard size: losses, norms, the schedule, counters and client state."""
    saved = run_ranks(4, _save, str(tmp_path))
    resumed = run_ranks(4, _resume, str(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    for (before, rates), (after, again) in zip(saved, resumed, strict=True):
        torch.testing.assert_close(torch.tensor(after[0]), torch.tensor(before[0]), atol=1e-5, rtol=1e-5)
        assert again == rates
    whole = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    Chain().load_state_dict(whole)


def _one_step(folder: str) -> None:
    engine = _engine(config(**zero(3, mics_shard_size=2)), 1)
    _train(engine, range(1))
    engine.save_checkpoint(folder)


def _the_rest(folder: str) -> Any:
    """Each rank trains in two micro-steps what two ranks did in one. A micro-step before is forgotten."""
    engine = _engine(config(**zero(3)), 2)
    engine.backward(engine(*floats(7, 7, 7)))
    engine.step()
    engine.load_checkpoint(folder)
    losses, norms = [], []
    for step in range(1, 4):
        for micro in range(2):
            losses.append(engine.backward(engine(*floats(step, 0, 2 * micro + engine.global_rank))).item())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return [a + b for a, b in zip(losses[::2], losses[1::2], strict=True)], norms


def test_a_run_goes_on_on_fewer_ranks_with_more_micro_steps(tmp_path: Path) -> None:
    """Steps are as long as the new config says, from the first one on."""
    run_ranks(4, _one_step, str(tmp_path))
    found = run_ranks(2, _the_rest, str(tmp_path))
    expected = plain(1, 4)
    losses = torch.tensor([losses for losses, _ in found]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses)[1:, 0, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], expected.norms[1:], atol=1e-5, rtol=1e-4)


# -- checkpoints of DeepSpeed --------------------------------------------------------------------------------


def _load(folder: str, partition_size: int) -> Any:
    torch.manual_seed(3)
    model = Tiny()
    with torch.no_grad():
        model.shift.zero_()
        model.scale.zero_()
    mics.shard(model, partition_size=partition_size)
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    found = load_deepspeed_checkpoint(model, folder, optimizer)
    weights = mics.full_state_dict(model, rank0_only=False)
    state = mics.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    writers = load_file(f"{folder}/expected.safetensors")["losses"].shape[1]
    for step in range(2, 4):
        # Each rank takes its share of the batches that the writers' ranks had.
        own = [batch(step, each) for each in range(rank, writers, world_size)] if rank < writers else []
        loss = model(torch.cat(own)) if own else model(batch(step, 0)) * 0.0
        (loss * len(own) * world_size / writers if own else loss).backward()
        mics.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * len(own))
    return weights, state, found, losses


@pytest.mark.parametrize(
    ("kind", "world_size", "partition_size"),
    [
        ("zero3", 2, 1),
        ("zero3", 4, 2),
        ("mics", 2, 2),
        pytest.param("zero3", 3, 3, marks=pytest.mark.full),
        pytest.param("mics", 4, 2, marks=pytest.mark.full),
    ],
)
def test_checkpoints_of_deepspeed_load_on_any_ranks(kind: str, world_size: int, partition_size: int) -> None:
    """Weights as zero_to_fp32 has them, Adam's moments, and the losses of DeepSpeed's next two steps."""
    expected = load_file(FOLDERS / kind / "expected.safetensors")
    found = run_ranks(world_size, _load, str(FOLDERS / kind), partition_size)
    for weights, state, about, _ in found:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[f"weight.{name}"], atol=0, rtol=0)
        assert set(state) == {key.removeprefix("exp_avg.") for key in expected if key.startswith("exp_avg.")}
        for name, entries in state.items():
            assert float(entries["step"]) == 2
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(entries[key], expected[f"{key}.{name}"], atol=0, rtol=0)
        assert about.counts["global_steps"] == 2
        assert about.client_state == {"epoch": 3}
    losses = torch.tensor([losses for *_, losses in found]).sum(0)
    torch.testing.assert_close(losses, expected["losses"].sum(1), atol=1e-5, rtol=1e-5)


def _load_engine(folder: str, scheduler: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(3)
    given = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **zero(3)}
    given |= {"scheduler": scheduler or {}}
    model = Tiny()
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=given)
    path, state = engine.load_checkpoint(folder)
    return path, state, engine.global_steps, engine.get_lr()


def test_the_engine_goes_on_from_a_checkpoint_of_deepspeed() -> None:
    for path, state, steps, rates in run_ranks(2, _load_engine, str(FOLDERS / "zero3")):
        assert Path(path).name == "global_step2"
        assert (state, steps, rates) == ({"epoch": 3}, 2, [0.02, 0.02])


def test_a_schedule_of_deepspeed_goes_on(tmp_path: Path) -> None:
    """Its state is where it stands: DeepSpeed 0.19.8 has these rates after four steps."""
    (tmp_path / "latest").write_text("tag")
    (tmp_path / "tag").mkdir()
    file = _copied(tmp_path / "tag") / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    torch.save({**states, "lr_scheduler": {"last_batch_iteration": 4}}, file)
    params = {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.02}
    arguments = (str(tmp_path), {"type": "WarmupDecayLR", "params": params})
    (found,) = run_ranks(1, _load_engine, *arguments)
    assert found[-1] == pytest.approx([0.016666666666666666] * 2)
    torch.save({**states, "lr_scheduler": {"step": "now"}}, file)
    (error,) = run_expecting_error(1, _load_engine, *arguments)
    assert "lr_scheduler: expected that of WarmupDecayLR" in error.message
    assert "found step" in error.message


def _copied(tmp_path: Path, *, without: str = "") -> Path:
    for file in (FOLDERS / "zero3/global_step2").iterdir():
        if file.name != without:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = _copied(tmp_path, without="zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="expected the files of 2 ranks, found 1 of optimizers and 2"):
        open_deepspeed(folder)


def test_other_stages_are_refused_by_name(tmp_path: Path) -> None:
    folder = _copied(tmp_path)
    for file in folder.glob("*_optim_states.pt"):
        torch.save({"optimizer_state_dict": {"zero_stage": 2, "partition_count": [2]}}, file)
    with pytest.raises(CheckpointError, match="expected ZeRO stage 3 or MiCS, found stage 2; convert"):
        open_deepspeed(folder)


class _Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("opened",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would call a function, in a place that is read: refused by name and not called."""
    monkeypatch.chdir(tmp_path)
    folder = _copied(tmp_path)
    for file in folder.glob("*_optim_states.pt"):
        flats = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [_Trap()]}
        torch.save({"optimizer_state_dict": {**flats, "optimizer_state_dict": {}}}, file)
    with pytest.raises(CheckpointError, match=r"fp32_flat_groups: expected a plain tensor, found \w+\.mkdir"):
        open_deepspeed(folder)
    assert not (tmp_path / "opened").exists()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    folder = _copied(tmp_path)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(
        CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt: expected an archive"
    ):
        open_deepspeed(folder)


# -- refusals of the engine ----------------------------------------------------------------------------------


def _bad(case: str) -> None:
    model = Chain()
    bare = {key: value for key, value in config().items() if key not in ("optimizer", "scheduler")}
    if case == "no optimizer":
        initialize(model=model, config=bare)
    if case == "no config":
        initialize(model=model)
    if case == "model first":
        initialize(model)
    if case == "another model's":
        initialize(model=model, config=bare, optimizer=torch.optim.SGD(Chain().parameters(), lr=0.1))
    if case == "stepped":
        optimizer = torch.optim.Adam(model.parameters())
        model(*floats(0, 0, 0)).backward()
        optimizer.step()
        initialize(model=model, config=bare, optimizer=optimizer)
    if case == "whole matrices":
        initialize(model=model, config=bare, optimizer=torch.optim.Adafactor(model.parameters()))
    if case == "a number":
        initialize(model=model, config=config())[0].backward(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no optimizer", "optimizer: expected an optimizer section in the config"),
        ("no config", "initialize: expected config, found none"),
        ("model first", "initialize: expected config, found none"),
        ("another model's", "optimizer: expected parameters of the model"),
        ("stepped", "optimizer: expected one without state"),
        ("whole matrices", "Adafactor cannot train a sharded model"),
        ("a number", "engine.backward: expected a loss, found float"),
    ],
)
def test_the_engine_says_what_is_missing(case: str, message: str) -> None:
    for error in run_expecting_error(1, _bad, case):
        assert error.is_a("SettingsError")
        assert message in error.message


def test_deepspeed_is_not_imported() -> None:
    assert "deepspeed" not in sys.modules
