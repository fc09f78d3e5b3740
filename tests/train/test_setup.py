"""What `mics train` says about a run is what the engine that runs has."""

from typing import Any

import pytest
import torch

from mics.train.config import ModelSettings, ShardingSettings, TrainConfig
from mics.train.data import Dealing
from mics.train.setup import Setup, describe_run, describe_title
from mics.train.sharding import describe_choices, shard_model
from tests.ranks import run_ranks

CONFIG = TrainConfig(model=ModelSettings(num_layers=1, num_heads=2, hidden_size=16, seq_len=8))
DEALING = Dealing(batch_size=1, micro_steps=2, num_ranks=4)
GPUS = Setup(
    num_parameters=7_000_000_000,
    precision="bf16",
    node_sizes=(4, 4),
    partition_size=1,
    num_replicas=8,
    device="NVIDIA H200",
    ranks_on_gpu=2,
)


def _sharded(options: dict[str, Any]) -> tuple[Setup, int]:
    import mics

    model = CONFIG.model.build().make()
    numel = sum(param.numel() for param in model.parameters())
    return Setup.of(mics.shard(model, **options)), numel


@pytest.mark.parametrize(
    ("ranks_per_node", "param", "partition_size", "words"),
    [
        (2, None, 1, "fp32\n4 ranks = 2 nodes x 2 (CPU), partition groups of 1, "),
        (2, None, None, "fp32\n4 ranks = 2 nodes x 2 (CPU), partition groups of 2, "),
        (
            3,
            torch.bfloat16,
            None,
            "bf16\n4 ranks = nodes of 3 + 1 (CPU), partition groups of 4, ",
        ),
    ],
)
def test_the_header_is_the_engines(
    ranks_per_node: int, param: torch.dtype | None, partition_size: int | None, words: str
) -> None:
    """Groups, nodes, format and parameters are those of the sharded model, also where it chose them."""
    import mics

    options = {"partition_size": partition_size, "precision": mics.Precision(param_dtype=param)}
    for setup, numel in run_ranks(4, _sharded, options, ranks_per_node=ranks_per_node):
        text = describe_run(CONFIG, setup, DEALING)
        assert "\nglobal batch 64 tokens = 8 sequences of 8: 1 sequence per rank and micro-step, 2 gr" in text
        assert words + f"replication groups of {setup.num_replicas}" in text
        assert setup.num_replicas * setup.partition_size == setup.num_ranks == 4
        assert setup.num_parameters == numel
        assert f"partition size {setup.partition_size}" in describe_title(CONFIG, setup)


def test_gpus_that_ranks_share_are_counted_once() -> None:
    """Eight ranks two by two are four GPUs; seven are four as well, one of them with a single rank."""
    text = describe_run(TrainConfig(), GPUS, DEALING)
    assert "8 ranks = 2 nodes x 4 (NVIDIA H200, 2 ranks on each), partition groups of 1" in text
    uneven = Setup(**{**vars(GPUS), "node_sizes": (4, 3)})
    assert "7 ranks = nodes of 4 + 3 (NVIDIA H200, up to 2 ranks on each)" in describe_run(
        TrainConfig(), uneven, DEALING
    )
    assert (GPUS.num_gpus, uneven.num_gpus) == (4, 4)


def test_a_changed_size_is_not_called_by_its_name() -> None:
    """A named size of which a number was replaced says so."""
    assert (ModelSettings().title, CONFIG.model.title) == ("nano", "nano (changed)")


def _choices(settings: ShardingSettings) -> list[str]:
    model = shard_model(CONFIG.model.build().make(), settings)
    return list(describe_choices(model, settings))


def test_a_gpus_precision_on_processors_is_named() -> None:
    """`mics plan --write` names the dtype of the planned GPU: a trial on a processor says what it is."""
    for narrow in ("bf16", "fp16"):
        (said, *_), quiet = (
            run_ranks(1, _choices, ShardingSettings(param_dtype=dtype)) for dtype in (narrow, "auto")
        )
        assert said[-1] == (
            f"sharding.param_dtype {narrow}: meant for GPUs, and slow on most processors; "
            "--sharding.param-dtype auto is fp32 here"
        )
        assert quiet == [said[:-1]]
