"""Whole parameters out of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import tiers, toys
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import adamw

Found = list[tuple[str, Tensor]]


def _model(build: Any = toys.Language, *, steps: int = 0, bf16: bool = False, **options: Any) -> nn.Module:
    import mics

    torch.manual_seed(0)
    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32)
    model = mics.shard(build(), precision=precision, **options)
    optimizer = adamw(model)
    for step in range(steps):
        model(*toys.language_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _named(model: nn.Module, **options: Any) -> Found:
    """What comes, and what should: the state dict's, cast, in the order of the parameters."""
    import mics

    state = mics.full_state_dict(model, rank0_only=False)
    expected = [(name, state[name]) for name, _ in model.named_parameters()]
    if "dtype" in options and options["dtype"] is not None:
        expected = [(name, value.to(options["dtype"])) for name, value in expected]
    return expected


def _same(found: Found, expected: Found) -> bool:
    return [name for name, _ in found] == [name for name, _ in expected] and all(
        type(one) is Tensor
        and one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.cpu(), two)
        for (_, one), (_, two) in zip(found, expected, strict=True)
    )


def _streams(settings: list[dict[str, Any]], **options: Any) -> list[str]:
    """Which of these settings do not stream what they should."""
    import mics

    model = _model(**options)
    wrong = []
    for setting in settings:
        expected = _named(model, **setting)
        for rank in (None, 0, dist.get_world_size() - 1):
            found = list(mics.iter_full_params(model, rank=rank, **setting))
            if not _same(found, expected if rank in (None, dist.get_rank()) else []):
                wrong.append(f"{setting} to {rank}")
    return wrong


_SETTINGS = [
    {"bucket_nbytes": nbytes, "dtype": dtype}
    for nbytes, dtype in [(1, None), (700, torch.bfloat16), (1 << 20, torch.float64), (400, torch.float16)]
]


@pytest.mark.parametrize(
    ("partition_size", "optimizer_sharding", "bf16", "options"),
    tiers.first(
        [
            (2, "world", True, {}),
            (2, "partition", True, {"low_memory": True}),
            (4, "world", False, {"hierarchical": True}),
            (1, "world", True, {}),
            (2, "world", False, {}),
            (2, "partition", True, {}),
            (4, "world", True, {"hierarchical": False, "prefetch": 0}),
        ],
        3,
    ),
)
def test_values_are_those_of_the_state_dict(
    partition_size: int, optimizer_sharding: str, bf16: bool, options: dict[str, Any]
) -> None:
    """To all ranks, to the first and to the last; masters or copies, cast before or after they travel."""
    options = {**options, "partition_size": partition_size, "optimizer_sharding": optimizer_sharding}
    wrong = run_ranks(4, _streams, _SETTINGS, ranks_per_node=2, kwargs={"steps": 1, "bf16": bf16, **options})
    assert wrong == [[]] * 4


def _without_gloo() -> list[str]:
    """As over NCCL: one batch of messages from rank to rank."""
    from unittest.mock import patch

    from mics.comm.calls import GroupCalls

    with patch.object(GroupCalls, "is_gloo", lambda *_: False):
        return _streams(_SETTINGS[1:2], partition_size=2)


def test_values_over_a_backend_with_batches_of_messages() -> None:
    assert run_ranks(4, _without_gloo) == [[]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("partition_size", [2, 4])
def test_values_on_a_gpu(partition_size: int) -> None:
    """Over NCCL, with the consumer on the computation's stream."""
    options = {"build": _cuda_language, "partition_size": partition_size, "bf16": True}
    wrong = run_ranks(4, _streams, _SETTINGS, backend="nccl", ranks_per_node=2, kwargs=options)
    assert wrong == [[]] * 4


def _cuda_language() -> nn.Module:
    return toys.Language().cuda()


def _with_mesh() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh

    return _streams(_SETTINGS[:2], steps=1, bf16=True, mesh=DeviceMesh("cpu", [[0, 3], [2, 1]]))


def test_values_over_a_mesh_in_another_order() -> None:
    """Ranks of one partition group have different places among their replicas."""
    assert run_ranks(4, _with_mesh) == [[]] * 4


def _with_a_new_head() -> list[str]:
    import mics

    model = _model(toys.FrozenMiddle, partition_size=2)
    model.head = mics.shard(nn.Linear(toys.DIM, 3), partition_size=4)
    expected = _named(model)
    wrong = []
    for rank in (None, 1):
        found = list(mics.iter_full_params(model, bucket_nbytes=700, rank=rank))
        if not _same(found, expected if rank in (None, dist.get_rank()) else []):
            wrong.append(f"to {rank}")
    return wrong


def test_values_of_parts_that_were_sharded_later() -> None:
    """A bucket may have parameters of several partition sizes."""
    assert run_ranks(4, _with_a_new_head) == [[]] * 4


# -- names -----------------------------------------------------------------------------------------------


def _chosen(build: Any, names: list[str] | None) -> list[str]:
    import mics

    model = _model(build, partition_size=2)
    state = mics.full_state_dict(model, rank0_only=False)
    found = []
    for name, value in mics.iter_full_params(model, names, bucket_nbytes=300):
        assert torch.equal(value, state[name]) and not value.requires_grad
        found.append(name)
    return found


@pytest.mark.parametrize("build", [toys.Language, toys.TiedBlocks, toys.LoRA, toys.Convolutional])
def test_names_are_those_of_named_parameters(build: Any) -> None:
    """Tied parameters once, frozen ones too, no buffers; more ranks than some parameters have elements."""
    expected = [name for name, _ in build().named_parameters()]
    assert run_ranks(4, _chosen, build, None) == [expected] * 4


def test_only_some_names() -> None:
    """In the model's order; a tied parameter under the names that are asked for."""
    names = ["head.weight", "blocks.1.gain", "blocks.0.up.weight"]
    expected = ["blocks.0.up.weight", "blocks.1.gain", "head.weight"]
    assert run_ranks(4, _chosen, toys.Language, names) == [expected] * 4
    both = ["embedding.weight", "head.weight"]
    assert run_ranks(4, _chosen, toys.Language, both) == [both] * 4
    assert run_ranks(4, _chosen, toys.Language, []) == [[]] * 4


# -- what is refused -------------------------------------------------------------------------------------


_WRONG = [
    ({"names": ["blocks.0.nothing", "x"]}, "names: expected .*found 'blocks.0.nothing' and 1 more"),
    ({"names": "head.weight"}, "names: expected names of parameters, found 'head.weight'; pass a list"),
    ({"names": [3]}, "names: expected names of parameters, found 3"),
    ({"bucket_nbytes": 0}, "bucket_nbytes: expected a number of bytes, found 0"),
    ({"dtype": torch.int8}, "dtype: expected a floating-point format .*found torch.int8"),
    ({"rank": 4}, "rank: expected None .* from 0 to 3, found 4"),
    ({"rank": True}, "rank: expected None .*found True"),
]


def _refusals() -> list[str]:
    """Bad arguments, on all ranks and on one: nothing travels, and nobody waits."""
    import mics

    model = _model(partition_size=2)
    before = mics.traffic(model)
    for options, message in _WRONG:
        with pytest.raises(mics.SettingsError, match=message):
            mics.iter_full_params(model, **options)
    one = {"dtype": torch.int8} if dist.get_rank() == 2 else {}
    message = "dtype" if one else "found that rank 2 cannot: .*dtype"
    with pytest.raises(mics.SettingsError, match=message):
        mics.iter_full_params(model, **one)
    other = {"rank": 0} if dist.get_rank() == 1 else {}
    with pytest.raises(mics.SettingsError, match="expected the same arguments on every rank"):
        mics.iter_full_params(model, **other)
    assert mics.traffic(model) == before
    return [name for name, _ in mics.iter_full_params(model)]


def test_what_is_refused() -> None:
    expected = [name for name, _ in toys.Language().named_parameters()]
    assert run_ranks(4, _refusals) == [expected] * 4


def _inside() -> None:
    import mics

    model = _model(partition_size=2)
    with mics.summon_full_params(model), pytest.raises(mics.MicsError, match="whole already"):
        mics.iter_full_params(model)
    found: list[str] = []

    def look(*_: Any) -> None:
        with pytest.raises(mics.MicsError, match=r"inside a (forward|backward)") as caught:
            mics.iter_full_params(model)
        found.append(str(caught.value))

    handles = [model.blocks[0].register_forward_hook(look), model.norm.register_full_backward_hook(look)]
    model(*toys.language_batch(0, 0, 0)).backward()
    for handle in handles:
        handle.remove()
    assert ["forward" in found[0], "backward" in found[1]] == [True, True]


def test_inside_forward_backward_and_summon() -> None:
    run_ranks(2, _inside)


# -- weights that change ---------------------------------------------------------------------------------


def _after_changes(folder: str, bf16: bool, optimizer_sharding: str) -> list[str]:
    """Edits, a summoned write, a state dict, a checkpoint, micro-steps: what comes is what there is."""
    import mics

    options: dict[str, Any] = {"partition_size": 2, "optimizer_sharding": optimizer_sharding}
    model = _model(bf16=bf16, **options)
    optimizer, wrong = adamw(model), []

    def look(what: str) -> None:
        for setting in ({"dtype": None}, {"dtype": torch.bfloat16}):
            expected = _named(model, **setting)
            for rank in (None, 3):
                found = list(mics.iter_full_params(model, bucket_nbytes=600, rank=rank, **setting))
                if not _same(found, expected if rank in (None, dist.get_rank()) else []):
                    wrong.append(f"{what}: {setting} to {rank}")

    mics.save(folder, model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    look("in place")
    model.head.weight.data.add_(0.3)
    look("data")
    with mics.summon_full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    look("summoned")
    for batch in mics.microsteps(model, [toys.language_batch(1, micro, 0) for micro in range(2)]):
        model(*batch).backward()
        look("between micro-steps")
    optimizer.step()
    look("step")
    mics.load(folder, model, optimizer)
    look("checkpoint")
    with torch.no_grad():
        if dist.get_rank() == 1:  # which the next forward would not forgive
            model.spare.bias.add_(1.0)
    look("on one rank")
    return wrong


@pytest.mark.parametrize(
    ("bf16", "optimizer_sharding"), tiers.first([(True, "world"), (False, "world"), (True, "partition")])
)
def test_after_changes(tmp_path: Any, bf16: bool, optimizer_sharding: str) -> None:
    """Copies that replicas have of each other's masters are not trusted after an edit."""
    assert run_ranks(4, _after_changes, str(tmp_path), bf16, optimizer_sharding) == [[]] * 4


def _change_meanwhile() -> None:
    import mics

    model = _model(partition_size=2)
    stream = mics.iter_full_params(model, bucket_nbytes=300)
    next(stream)[1].zero_()  # the consumer's own
    with torch.no_grad():
        model.norm.weight.add_(1.0)
    with pytest.raises(mics.MicsError, match="expected the parameters to stay as they were"):
        list(stream)
    expected = _named(model)
    found = []
    for each in mics.iter_full_params(model, bucket_nbytes=300):
        found.append(each)
        with torch.no_grad():
            model(*toys.language_batch(0, 0, 0))  # reads
    assert _same(found, expected)


def test_weights_that_change_meanwhile_are_refused() -> None:
    """A consumer may run the model between two parameters, and not change it."""
    run_ranks(2, _change_meanwhile)


# -- bytes, memory and time ------------------------------------------------------------------------------


def _sent(dtype: torch.dtype | None, rank: int | None, names: list[str] | None = None) -> Any:
    """Bytes that this rank sends, collectives that it joins, and bytes of whole parameters that come."""
    import mics

    model = _model(bf16=True, partition_size=2)
    before = mics.traffic(model)
    stream = mics.iter_full_params(model, names, bucket_nbytes=1000, dtype=dtype, rank=rank)
    came = sum(value.nbytes for _, value in stream)
    after = mics.traffic(model)
    nbytes = {
        axis: after.axis_nbytes(axis) - before.axis_nbytes(axis) for axis in ("partition", "replication")
    }
    calls = sum(after.calls.values()) - sum(before.calls.values())
    return nbytes["partition"], nbytes["replication"], calls, came


def _whole_nbytes(itemsize: int) -> int:
    """Of the toy model; what is frozen has the format of the parameters."""
    return sum(
        param.numel() * (itemsize if param.requires_grad else 2) for param in toys.Language().parameters()
    )


def _num_buckets(itemsize: int) -> int:
    buckets: list[int] = []
    for param in toys.Language().parameters():
        nbytes = param.numel() * (itemsize if param.requires_grad else 2)
        if not buckets or buckets[-1] + nbytes > 1000:
            buckets.append(0)
        buckets[-1] += nbytes
    return len(buckets)


def test_bytes_to_all_ranks() -> None:
    """Two replicas of two ranks. The copies in bfloat16 stay inside a replica; masters cross once."""
    whole = _whole_nbytes(2)
    partition, replication, calls, came = zip(*run_ranks(4, _sent, torch.bfloat16, None), strict=True)
    assert sum(partition) == 2 * whole and sum(replication) == 0
    assert calls == (_num_buckets(2),) * 4 and came == (whole,) * 4
    masters = _whole_nbytes(4)
    frozen = sum(param.nbytes // 2 for param in toys.Language().parameters() if not param.requires_grad)
    partition, replication, _, came = zip(*run_ranks(4, _sent, None, None), strict=True)
    assert sum(partition) == 2 * masters and sum(replication) == masters - frozen and came == (masters,) * 4


def test_bytes_to_one_rank() -> None:
    """Only its partition group sends, each element that the rank does not have once."""
    first, second = (run_ranks(4, _sent, torch.bfloat16, rank) for rank in (2, 3))
    whole = _whole_nbytes(2)
    assert [came for *_, came in first] == [0, 0, whole, 0]
    assert [came for *_, came in second] == [0, 0, 0, whole]
    assert first[0] == first[1] == second[0] == second[1] == (0, 0, 0, 0)
    assert first[2][0] == second[3][0] == 0  # to itself
    assert first[3][0] + second[2][0] == whole
    names = ["embedding.weight"]
    few = [run_ranks(4, _sent, torch.bfloat16, rank, names) for rank in (2, 3)]
    assert few[0][3][0] + few[1][2][0] == 2 * toys.VOCAB * toys.DIM


def _peak(bucket_nbytes: int, rank: int | None) -> tuple[int, int]:
    """The most bytes that stood in whole parameters at once, and those of all of them."""
    from unittest.mock import patch
    from weakref import finalize

    import mics

    model = _model(toys.Chain, partition_size=2)
    empty, alive, peak, total = torch.empty, 0, 0, 0

    def freed(nbytes: int) -> None:
        nonlocal alive
        alive -= nbytes

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal alive, peak, total
        made = empty(*args, **kwargs)
        finalize(made.untyped_storage(), freed, made.nbytes)
        alive += made.nbytes
        peak, total = max(peak, alive), total + made.nbytes
        return made

    stream = mics.iter_full_params(model, bucket_nbytes=bucket_nbytes, rank=rank)
    value = None
    with patch("torch.empty", counted):
        for _, value in stream:
            assert value.isfinite().all()
        value = None
    mics.traffic(model)  # lanes hold what they work on
    assert alive == 0
    return peak, total


def test_two_buckets_of_memory() -> None:
    """The bucket that is consumed, the one in flight, and the parameter that the consumer still names."""
    whole = sum(param.nbytes for param in toys.Chain().parameters())
    largest = max(param.nbytes for param in toys.Chain().parameters())
    for bucket_nbytes in (400, 800):
        for peak, total in run_ranks(2, _peak, bucket_nbytes, None):
            assert total == whole
            assert bucket_nbytes < peak <= 2 * bucket_nbytes + largest < whole
        assert run_ranks(2, _peak, bucket_nbytes, 1)[1] == (peak, whole)


def _ahead() -> list[int]:
    """Collectives after each of the first parameters, a bucket each."""
    import mics

    model = _model(toys.Chain, partition_size=2)
    before = sum(mics.traffic(model).calls.values())
    stream, counts = mics.iter_full_params(model, bucket_nbytes=1), []
    for _ in range(3):
        next(stream)
        counts.append(sum(mics.traffic(model).calls.values()) - before)
    stream.close()
    return counts


def test_the_next_bucket_comes_beside_the_consumer() -> None:
    assert run_ranks(2, _ahead) == [[2, 3, 4]] * 2


# -- consumers that stop ---------------------------------------------------------------------------------


def _stop_early() -> None:
    """On all ranks, and on the one rank that gets something: the next time all comes."""
    import mics

    model = _model(partition_size=2)
    expected, own = _named(model), dist.get_rank()
    for _ in mics.iter_full_params(model, bucket_nbytes=300):
        break
    assert _same(list(mics.iter_full_params(model, bucket_nbytes=300)), expected)
    for _ in mics.iter_full_params(model, bucket_nbytes=300, rank=1):
        break
    with pytest.raises(KeyError) if own == 1 else nullcontext():
        for name, _ in mics.iter_full_params(model, bucket_nbytes=300, rank=1):
            raise KeyError(name)
    weights = mics.iter_full_params(model, bucket_nbytes=300, rank=1)  # where only one rank iterates
    if own == 1:
        assert _same(list(weights), expected)
    kept = dict(mics.iter_full_params(model, bucket_nbytes=300))  # each is memory of its own
    assert _same(list(kept.items()), expected)
    with torch.inference_mode():
        assert _same(list(mics.iter_full_params(model, bucket_nbytes=300)), expected)
    model(*toys.language_batch(0, 0, own)).backward()


def test_consumers_that_stop() -> None:
    run_ranks(4, _stop_early)


def _stop_alone() -> None:
    import mics

    model = _model(partition_size=2)
    for _ in mics.iter_full_params(model, bucket_nbytes=1):
        if dist.get_rank() == 1:
            break
    model(*toys.language_batch(0, 0, 0))


@pytest.mark.full
def test_one_rank_that_stops_alone_is_named() -> None:
    """Nobody waits for ever: within the timeout all ranks say who made which call."""
    errors = run_expecting_error(2, _stop_alone)
    assert all(error.is_a("CollectiveError") for error in errors)
    assert any("mics.iter_full_params" in error.message for error in errors)


# -- elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 0, 5])
def test_under_the_emulator(rank: int | None) -> None:
    """One process plays rank 0 of 16: every shape is right, and this rank's own elements are."""
    import mics

    with mics.emulate("p4d.24xlarge:2"):
        model = mics.shard(toys.Language(), partition_size=8)
        shapes = {name: param.shape for name, param in toys.Language().named_parameters()}
        found = {
            name: value.shape
            for name, value in mics.iter_full_params(
                model, rank=rank, dtype=torch.bfloat16, bucket_nbytes=500
            )
        }
    assert found == ({} if rank == 5 else shapes)


def test_in_one_process() -> None:
    """Without a process group: copies, which leave the model alone."""
    import mics

    torch.manual_seed(3)
    model, plain = toys.Language(), toys.Language()
    plain.load_state_dict(model.state_dict())
    mics.shard(model)
    for (name, value), (expected_name, expected) in zip(
        mics.iter_full_params(model), plain.named_parameters(), strict=True
    ):
        assert name == expected_name and torch.equal(value, expected)
        value.zero_()
    assert all(value.any() for _, value in mics.iter_full_params(model, ["embedding.weight"], rank=0))


class _InferenceEngine:
    """What vLLM's models have: whole weights one after the other, some of which it stacks."""

    def __init__(self) -> None:
        self.params = {f"blocks.{i}.gain_and_norm": torch.full((1 + toys.DIM,), torch.nan) for i in range(2)}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            prefix = name.rpartition(".")[0]
            if name.endswith(".gain"):
                name = f"{prefix}.gain_and_norm"
                self.params[name][:1].copy_(weight)
            elif name.startswith("blocks") and name.endswith("norm.weight"):
                name = f"{prefix.removesuffix('.norm')}.gain_and_norm"
                self.params[name][1:].copy_(weight)
            else:
                self.params[name] = weight.clone()
            loaded.add(name)
        return loaded


def _load_engine() -> bool:
    import mics

    model, engine = _model(partition_size=2, steps=1), _InferenceEngine()
    loaded = engine.load_weights(mics.iter_full_params(model, bucket_nbytes=500))
    state = mics.full_state_dict(model, rank0_only=False)
    stacked = torch.cat([state["blocks.1.gain"], state["blocks.1.norm.weight"]])
    return (
        loaded == set(engine.params)
        and torch.equal(engine.params["blocks.1.gain_and_norm"], stacked)
        and torch.equal(engine.params["blocks.0.up.weight"], state["blocks.0.up.weight"])
    )


def test_an_inference_engine_takes_them_as_they_come() -> None:
    assert run_ranks(4, _load_engine) == [True] * 4
