"""The systems of a comparison train the same job to the same losses, and say so when they cannot run."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics.bench.job import Job
from mics.bench.systems import SYSTEMS, Batch, SystemUnavailable, find_deepspeed
from mics.bench.systems.start import build_model, materialise, meta_model
from mics.bench.systems.with_zero2 import build_zero2
from mics.bench.systems.with_zeropp import build_zeropp
from mics.models import GPTConfig
from tests.ranks import RankPool, run_ranks

NUM_RANKS = 4
NUM_STEPS = 3
TORCH_SYSTEMS = ("mics", "fsdp2", "hsdp", "hsdp-kept", "ddp", "zero2", "zero2-reduce")

SHAPE = GPTConfig(num_layers=2, num_heads=2, hidden_size=32, vocab_size=61, seq_len=16)
JOB = Job(
    model=SHAPE,
    partition_size=2,
    micro_batch=2,
    accumulation=2,
    checkpoint=False,
    param_dtype="float32",
    reduce_dtype="float32",
    device="cpu",
    learning_rate=1e-2,
    seed=3,
)
CLIPPED = replace(JOB, model=replace(SHAPE, tie_weights=True), checkpoint=True, max_norm=0.1)
LOWERED = replace(JOB, param_dtype="bfloat16", checkpoint=True)


def _batches(job: Job, step: int, rank: int) -> list[Batch]:
    """The micro-batches of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = (job.accumulation, job.micro_batch, job.model.seq_len + 1)
    tokens = torch.randint(job.model.vocab_size, size, generator=generator).to(job.device)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]


def _train(names: tuple[str, ...], job: Job) -> dict[str, list[float]]:
    """Mean losses over ranks and micro-steps, of each step and system. Runs on every rank."""
    losses = {}
    for name in names:
        trainer = SYSTEMS[name].build(job)
        of_rank = [trainer.step(_batches(job, step, dist.get_rank())) for step in range(NUM_STEPS)]
        assert all(loss.shape == () and not loss.requires_grad for loss in of_rank)
        assert trainer.same_start or job.param_dtype != "float32"
        trainer.close()
        mean = torch.stack(of_rank)
        dist.all_reduce(mean)
        losses[name] = (mean / dist.get_world_size()).tolist()
    return losses


def _train_alone(job: Job, num_ranks: int = NUM_RANKS) -> list[float]:
    """The same losses from one process that sees the global batch of each step at once."""
    model = build_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    losses = []
    for step in range(NUM_STEPS):
        micro_batches = [batch for rank in range(num_ranks) for batch in _batches(job, step, rank)]
        loss = model(*(torch.cat(part) for part in zip(*micro_batches, strict=True)))
        loss.backward()
        if job.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(JOB, id="plain", marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param(CLIPPED, id="tied, recomputed, clipped", marks=pytest.mark.full),
    ],
)
def test_systems_equal_training_in_one_process(job: Job) -> None:
    """mics and torch's own systems, two nodes of two ranks, each rank with micro-batches of its own."""
    expected = pytest.approx(_train_alone(job), abs=1e-5)
    found = run_ranks(NUM_RANKS, _train, TORCH_SYSTEMS, job, ranks_per_node=2)[0]
    assert found == dict.fromkeys(TORCH_SYSTEMS, expected)


@pytest.mark.full
@pytest.mark.long  # the same systems in float32 are above
def test_systems_agree_in_bf16() -> None:
    """bf16 parameters with fp32 masters, and DDP's autocast: the same up to the format's rounding."""
    expected = pytest.approx(_train_alone(LOWERED), abs=5e-3)
    # Ranks of its own: after autocast to bfloat16 some builds of torch multiply float32 differently from
    # then on, and other tests compare bits.
    with RankPool() as pool:
        found = pool.run(NUM_RANKS, _train, TORCH_SYSTEMS, LOWERED, ranks_per_node=2)[0]
    assert found == dict.fromkeys(TORCH_SYSTEMS, expected)


_COUNTED = {
    "all_gather_into_tensor": "all-gather",  # torch 2.11
    "all_gather_single": "all-gather",  # torch 2.13
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
}


def _count_collectives(name: str, job: Job) -> dict[str, int]:
    """Collectives of one optimizer step once the system has settled."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for function, kind in _COUNTED.items():
            original = getattr(dist, function, None)
            if original is None:
                continue

            def counted(*args: Any, original: Any = original, kind: str = kind, **kwargs: Any) -> Any:
                counts[kind] += 1
                return original(*args, **kwargs)

            patch.setattr(dist, function, counted)
        trainer = SYSTEMS[name].build(job)
        for step in range(2):
            counts.clear()
            trainer.step(_batches(job, step, dist.get_rank()))
        trainer.close()
    return dict(counts)


@pytest.mark.full
def test_peers_communicate_no_more_than_they_must() -> None:
    """FSDP2 gathers blocks twice a micro-step, embedding and head once; HSDP's replicas meet once a step."""
    num_gathers = 2 * 2 + 1 + 1  # blocks, embedding, head
    expected = {"all-gather": num_gathers * JOB.accumulation, "reduce-scatter": 4 * JOB.accumulation}
    assert run_ranks(NUM_RANKS, _count_collectives, "fsdp2", JOB, ranks_per_node=2)[0] == expected
    expected["all-reduce"] = 4
    assert run_ranks(NUM_RANKS, _count_collectives, "hsdp", JOB, ranks_per_node=2)[0] == expected
    expected["all-gather"] = 4  # once a step
    assert run_ranks(NUM_RANKS, _count_collectives, "hsdp-kept", JOB, ranks_per_node=2)[0] == expected


def _train_zero2(job: Job, bucket_numel: int, joins_owners: bool) -> tuple[list[float], dict[str, int]]:
    """Losses with buckets of so many elements, and the collectives of a step."""
    trainer = build_zero2(job, bucket_numel=bucket_numel, joins_owners=joins_owners)
    counts: Counter[str] = Counter()
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "all_gather_into_tensor", "all_gather_single"):
            original = getattr(dist, name, None)
            if original is None:
                continue

            def counted(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
                counts["all_gather" if "gather" in name else name] += 1
                return original(*args, **options)

            patch.setattr(dist, name, counted)
        for step in range(NUM_STEPS):
            counts.clear()
            losses.append(trainer.step(_batches(job, step, dist.get_rank())))
    trainer.close()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist(), dict(counts)


@pytest.mark.parametrize(
    ("num_ranks", "bucket_numel", "joins_owners", "expected"),
    [
        # Five buckets in each of two micro-steps, and one more all-reduce for the norm.
        pytest.param(
            4, 8_000, True, {"all_reduce": 11, "all_gather": 1}, id="all-reduce", marks=pytest.mark.full
        ),
        pytest.param(4, 1 << 30, False, {"reduce": 8, "all_reduce": 1, "all_gather": 1}, id="reduce"),
        pytest.param(2, 500, True, None, id="smaller than a matrix"),
        pytest.param(3, 5_000, False, None, id="ranks that do not divide"),
    ],
)
def test_zero2_equals_training_in_one_process(
    num_ranks: int, bucket_numel: int, joins_owners: bool, expected: dict[str, int] | None
) -> None:
    """Whatever buckets there are: clipped, tied, recomputed; and the collectives of DeepSpeed's stage 2."""
    losses, counts = run_ranks(num_ranks, _train_zero2, CLIPPED, bucket_numel, joins_owners)[0]
    assert losses == pytest.approx(_train_alone(CLIPPED, num_ranks), abs=1e-5)
    if expected is not None:
        assert counts == expected


def _train_zeropp(job: Job) -> tuple[list[float], dict[tuple[str, int, str], int]]:
    """Losses, and the collectives of a step by kind, size of the group and format."""
    trainer = build_zeropp(job)
    counts: Counter[tuple[str, int, str]] = Counter()
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
            original = getattr(dist, name, None)
            if original is None:
                continue

            def counted(out: Any, own: Any, *args: Any, original: Any = original, **options: Any) -> Any:
                kind = "gather" if "gather" in original.__name__ else "exchange"
                counts[kind, options["group"].size(), str(own.dtype)] += 1
                return original(out, own, *args, **options)

            patch.setattr(dist, name, counted)
        for step in range(NUM_STEPS):
            counts.clear()
            losses.append(trainer.step(_batches(job, step, dist.get_rank())))
    trainer.close()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist(), dict(counts)


@pytest.mark.parametrize(
    ("job", "ranks_per_node", "expected"),
    [
        # Forward: embedding, two blocks, head over the world. Backward: blocks inside the node. Four
        # reductions in two stages. All in each of two micro-steps; both stages have groups of two.
        pytest.param(
            JOB,
            2,
            {
                ("gather", 4, "torch.int8"): 8,
                ("gather", 2, "torch.int8"): 4,
                ("exchange", 2, "torch.uint8"): 16,
            },
            id="two nodes",
        ),
        # No copy of the node's own, and one stage.
        pytest.param(
            LOWERED,
            4,
            {("gather", 4, "torch.int8"): 12, ("exchange", 4, "torch.uint8"): 8},
            id="one node",
            marks=pytest.mark.full,
        ),
    ],
)
def test_zeropp_is_near_training_in_one_process(
    job: Job, ranks_per_node: int, expected: dict[tuple[str, int, str], int]
) -> None:
    """Losses differ by its rounding alone, and its collectives are those of ZeRO++, all in fewer bits."""
    losses, counts = run_ranks(NUM_RANKS, _train_zeropp, job, ranks_per_node=ranks_per_node)[0]
    exact = _train_alone(job)
    assert losses == pytest.approx(exact, abs=0.01)
    assert losses != pytest.approx(exact, abs=1e-5)
    assert counts == expected


def test_deepspeed_zeropp_needs_cuda() -> None:
    """Its quantiser is compiled for CUDA; the error names the system that runs anywhere."""
    with pytest.raises(
        SystemUnavailable, match=r"expected device 'cuda', found 'cpu'.* zeropp is its schedule"
    ):
        SYSTEMS["deepspeed-zeropp"].build(JOB)


@pytest.mark.parametrize("tied", [False, True])
def test_values_do_not_depend_on_the_order_of_building(tied: bool) -> None:
    """A model materialised piece by piece, in any order, has the values of the whole one."""
    job = replace(JOB, model=replace(SHAPE, tie_weights=tied))
    pieces = meta_model(job)
    for piece in (pieces.blocks[1], pieces.norm, pieces):
        materialise(piece, torch.device("cpu"))
    whole = build_model(job).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in pieces.state_dict().items())
    assert (pieces.head.weight is pieces.embedding.weight) == tied
    assert not torch.equal(whole["blocks.0.up.weight"], whole["blocks.1.up.weight"])


@pytest.mark.parametrize(
    ("name", "wrong"), [("accumulation", 0), ("param_dtype", "float64"), ("device", "tpu"), ("max_norm", 0.0)]
)
def test_jobs_check_themselves(name: str, wrong: object) -> None:
    """A job that cannot be trained is refused where it is written down."""
    with pytest.raises(ValueError, match=f"{name}: expected .* found"):
        replace(JOB, **{name: wrong})


# -- peers -------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, for every system that needs a package; nobody needs a process group to learn it."""
    monkeypatch.setitem(sys.modules, "megatron_fsdp", None)
    monkeypatch.setattr(find_deepspeed, "_versions", dict)
    peers = [system for system in SYSTEMS.values() if system.needs]
    assert len(peers) == 6
    for system in peers:
        with pytest.raises(SystemUnavailable, match="pip install ") as caught:
            system.build(replace(JOB, device="cuda"))
        assert system.needs[0] in str(caught.value)


def test_deepspeed_mics_takes_no_version_that_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version's MiCS would hang: it is refused, with the reason."""
    monkeypatch.setattr(find_deepspeed, "_versions", lambda: {"0.19.6": None, "0.19.8": None})
    with pytest.raises(
        SystemUnavailable, match=r"expected deepspeed 0\.19\.2 \(its MiCS deadlocks.*found 0\.19\.6"
    ):
        SYSTEMS["deepspeed-mics"].build(JOB)


@pytest.mark.parametrize(
    ("job", "reason"),
    [(JOB, "expected device 'cuda', found 'cpu'"), (replace(CLIPPED, device="cuda"), "tie_weights")],
)
def test_megatron_says_what_it_cannot_train(job: Job, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA only, and no tied weights: known before anything is built."""
    for name in ("megatron_fsdp", "megatron_fsdp.experimental"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(SystemUnavailable, match=reason):
        SYSTEMS["megatron-fsdp"].build(job)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "partition_size"),
    [("deepspeed-zero2", 1), ("deepspeed-zero3", 4), ("deepspeed-mics", 2), ("deepspeed-mics", 4)],
)
def test_deepspeed_equals_training_in_one_process(name: str, partition_size: int) -> None:
    """Where a DeepSpeed is at hand, its systems in processes of their own; MiCS on one node and on two."""
    versions = find_deepspeed._versions()
    if not versions or (name == "deepspeed-mics" and "0.19.2" not in versions):
        pytest.skip(f"needs {SYSTEMS[name].needs[0]}, found {list(versions)}")
    job = replace(CLIPPED, partition_size=partition_size)
    with RankPool() as pool:
        found = pool.run(NUM_RANKS, _train, (name,), job, ranks_per_node=2)[0]
    assert found[name] == pytest.approx(_train_alone(job), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("megatron_fsdp") is None, reason="needs megatron-fsdp")
def test_megatron_agrees_with_the_others() -> None:
    """Where Megatron-FSDP is at hand, on four ranks that share a GPU: the same losses up to rounding."""
    job = replace(LOWERED, device="cuda")
    names = (*TORCH_SYSTEMS, "megatron-fsdp")  # accumulating in bf16, it gives nan from the second step on
    found = run_ranks(NUM_RANKS, _train, names, job, ranks_per_node=2, backend="nccl")[0]
    assert found == dict.fromkeys(names, pytest.approx(_train_alone(job), abs=1e-2))
