"""What rounding saves and takes, in the arithmetic that engine and planner share."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import mics
from mics.cli import main
from mics.cost.auto import move_seconds, two_stages_pay
from mics.cost.clusters import PRESETS, find_cluster
from mics.cost.collectives import Kind, Span, cost
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape
from mics.cost.stages import Shares, hop_2_stages, move_stages, with_moves
from mics.cost.step_bytes import step_bytes
from mics.layout.compression import LOSSLESS, UNCOMPRESSED
from mics.planner.step_costs import StepCosts
from mics.planner.systems import SYSTEMS, predict
from mics.train.config import ShardingSettings, TrainConfig
from mics.train.settings_file import load_settings

_INT8 = mics.Compression(hop2="int8", inter_gather="int8", inter_reduce="int8")
_INT8_NBYTES = 1 + 2 / 64
_MIB = 1 << 20
_NODE = PRESETS["p4d.24xlarge"]
_ORDINARY = find_cluster("benchmarks/clusters/ordinary.yaml:64")


def _over(num_nodes: int, on_a_node: int = 8) -> Span:
    return Span(size=num_nodes * on_a_node, num_nodes=num_nodes, on_a_node=on_a_node)


def _setting(partition_size: int, compression: mics.Compression = _INT8) -> Setting:
    return Setting(
        model=named_shape("gpt-3.6b"),
        cluster=_ORDINARY,
        partition_size=partition_size,
        micro_batch=4,
        accumulation=2,
        activations=Keeping(checkpoint=True),
        compression=compression,
    )


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_only_what_goes_from_node_to_node_is_narrower(kind: Kind) -> None:
    """Two stages: the one between nodes. One stage: all of it over several nodes, and nothing inside one."""
    span, nbytes = _over(4), 400 * _MIB
    sent = Kind.ALL_TO_ALL if kind is Kind.REDUCE_SCATTER else kind
    plain, rounded = (
        {s.link: s for s in move_stages(_NODE, kind, span, nbytes, two_stage=True, share=share)}
        for share in (1.0, 0.25)
    )
    assert plain["intra"] == rounded["intra"]
    assert rounded["inter"].cost == cost(_NODE, sent, _over(4, 1), nbytes // 8 // 4)
    assert plain["inter"].seconds == plain["inter"].cost.seconds, "no kernels"
    (flat,) = move_stages(_NODE, kind, span, nbytes, two_stage=False, share=0.25)
    assert flat.cost == cost(_NODE, sent, span, nbytes // 4)
    inside = move_stages(_NODE, kind, _over(1), nbytes, two_stage=False, share=0.25)
    assert inside == move_stages(_NODE, kind, _over(1), nbytes, two_stage=False)


def test_kernels_read_and_write_memory_once() -> None:
    """Gradients of 4 bytes and what was lost before, codes of a quarter, and the sum of what came."""
    numel, replicas = 1e9, _over(64, 1)
    for feedback, errors in ((True, 4), (False, 0)):
        compression = mics.Compression(hop2="int8", hop2_error_feedback=feedback)
        (stage,) = hop_2_stages(
            _ORDINARY, replicas, numel, wire_nbytes=4, compression=compression, exchanges=False, whole=False
        )
        assert stage.cost == cost(_ORDINARY, Kind.ALL_TO_ALL, replicas, int(_INT8_NBYTES * numel))
        read = stage.encode_seconds * _ORDINARY.memory_bandwidth / numel
        added = stage.decode_seconds * _ORDINARY.memory_bandwidth / numel
        assert (read, added) == pytest.approx((4 + errors + _INT8_NBYTES, _INT8_NBYTES + 4 / 64))
    reduction, gather = hop_2_stages(
        _ORDINARY, replicas, numel, wire_nbytes=4, compression=_INT8, exchanges=False, whole=True
    )
    assert gather.cost == cost(_ORDINARY, Kind.ALL_GATHER, replicas, int(2 * numel)), "sums are bfloat16"
    assert reduction.seconds > reduction.cost.seconds


def test_fewer_bytes_change_what_is_chosen() -> None:
    """Stages, how far ahead and what stays: where gathers are no longer what takes long."""
    shares = Shares.of(_INT8, param_nbytes=4, wire_nbytes=4)
    share = shares.gather
    assert share == pytest.approx(_INT8_NBYTES / 4)
    unit = {"gathered": 400 * _MIB, "reduced": 800 * _MIB}
    assert two_stages_pay(_ORDINARY, _over(4), **unit)
    assert two_stages_pay(_ORDINARY, _over(4), **unit, shares=shares), "an exchange of 8 ranks a node"
    frozen = {"gathered": 400 * _MIB, "reduced": 0}
    assert not two_stages_pay(_ORDINARY, _over(4), **frozen, shares=shares)
    seconds = [
        move_seconds(_NODE, Kind.ALL_GATHER, _over(64), 400 * _MIB, two_stage=True, share=each)
        for each in (1.0, share)
    ]
    assert seconds[1] < seconds[0]
    plain, rounded = _setting(16, LOSSLESS), _setting(16)
    assert plain.stay_nbytes > 0 == rounded.stay_nbytes
    slow = [
        replace(each, cluster=replace(_NODE, num_nodes=64), partition_size=512) for each in (plain, rounded)
    ]
    assert [each.depth for each in slow] == [2, 1]


def test_steps_are_shorter_and_those_of_peers_are_not() -> None:
    for size in (8, 512):
        plain, rounded = _setting(size, LOSSLESS), _setting(size)
        assert predict(rounded).step_seconds < 0.985 * predict(plain).step_seconds
    with patch("mics.cost.stages._kernel_seconds", lambda cluster, nbytes: 0.0):
        free = predict(_setting(512)).step_seconds
    assert free < predict(rounded).step_seconds, "kernels are in the way of what waits for them"
    for name in ("hsdp", "fsdp2", "zero3", "zero2"):
        assert SYSTEMS[name].adapt(rounded) == SYSTEMS[name].adapt(plain)
        assert SYSTEMS[name].need(rounded) == SYSTEMS[name].need(plain)


def test_what_rounding_loses_takes_memory_where_there_are_replicas() -> None:
    plain, rounded = _setting(8, LOSSLESS).need().on_device(), _setting(8).need().on_device()
    lost = 2 * named_shape("gpt-3.6b").num_parameters / 8
    assert rounded["lost in rounding"] == pytest.approx(lost, rel=0.01)
    assert plain == {name: nbytes for name, nbytes in rounded.items() if name in plain}
    assert "lost in rounding" not in _setting(512).need().on_device()
    without = replace(_INT8, hop2_error_feedback=False)
    assert "lost in rounding" not in _setting(8, without).need().on_device()


def test_moves_take_memory_and_kernels() -> None:
    """Of own values, and of two units of all members; of units that stay where there are no replicas."""
    shape = named_shape("gpt-3.6b")
    for size, over, stays in ((8, 512, None), (512, 512, _setting(512, LOSSLESS).stay_nbytes / 2)):
        moved, plain = _setting(size, LOSSLESS), _setting(size, UNCOMPRESSED)
        own, received = (shape.num_parameters, 1 / 8) if stays is None else (stays, 1.0)
        expected = 0.66 * (own / over + 2 * shape.largest_numel * received)
        assert moved.memory().between_blocks["moves"] == pytest.approx(expected, rel=0.01)
        assert "moves" not in plain.memory().between_blocks
        with patch("mics.cost.stages._kernel_seconds", lambda cluster, nbytes: 0.0):
            free = predict(_setting(size, LOSSLESS)).step_seconds
        assert free <= predict(moved).step_seconds < predict(plain).step_seconds
    (stage,) = with_moves(
        _ORDINARY,
        move_stages(_ORDINARY, Kind.ALL_GATHER, _over(4), 400, two_stage=False),
        own_nbytes=14e6,
        nbytes=6e9,
    )
    assert 505e9 < 14e6 / stage.encode_seconds < 532e9, "as measured"
    assert 627e9 < 6e9 / stage.decode_seconds < 644e9, "as measured"


@pytest.mark.parametrize(("micro_batch", "at_most"), [(1, 0.9), (2, 1.0)])
def test_moves_of_units_that_stay_do_not_hold_up_gathers(micro_batch: int, at_most: float) -> None:
    """All of them before the first gather: 0.95 and 1.07 of a step without moves. In turn: 0.86 and 0.99."""
    moved = replace(
        _setting(32, LOSSLESS),
        model=named_shape("gpt-1.3b"),
        cluster=find_cluster("p3dn.24xlarge:4"),
        micro_batch=micro_batch,
        accumulation=1,
    )
    assert 0 < moved.staying_share < 1
    with_moves, without = (
        predict(each).step_seconds for each in (moved, replace(moved, compression=UNCOMPRESSED))
    )
    assert with_moves < at_most * without


def test_any_number_of_terms_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """More than there are colours."""
    with (
        patch("mics.planner.text._COLOURS", ("blue", "cyan")),
        patch("mics.planner.page_pictures._TERMS", ("forward", "backward")),
    ):
        page = tmp_path / "plan.html"
        plan = ["plan", "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:2", "--global-batch", "64"]
        assert main([*plan, "--html", str(page)]) == 0
    assert page.exists() and "GiB  moves" in capsys.readouterr().out


def test_bytes_of_a_step() -> None:
    """Between replicas a byte and a scale; whole masters need sums in 16 bits too; inside a node nothing."""
    plain, rounded = (step_bytes(_setting(8, each), param_nbytes=2) for each in (LOSSLESS, _INT8))
    assert rounded.hop_2 == pytest.approx(plain.hop_2 * _INT8_NBYTES / 4)
    assert (rounded.gathers, rounded.hop_1, rounded.refresh) == (plain.gathers, plain.hop_1, plain.refresh)
    whole = step_bytes(replace(_setting(8), over_replicas=False), param_nbytes=2)
    assert whole.hop_2 == pytest.approx(plain.hop_2 * (_INT8_NBYTES + 2) / 4)
    flat, staged = (replace(_setting(16), hierarchical=stages) for stages in (False, True))
    plain = step_bytes(_setting(16, UNCOMPRESSED), param_nbytes=2)
    assert step_bytes(flat, param_nbytes=2).gathers == pytest.approx(plain.gathers * _INT8_NBYTES / 2)
    spread = replace(_setting(1), cluster=replace(_NODE, num_nodes=2))
    plain = step_bytes(replace(spread, compression=UNCOMPRESSED), param_nbytes=2)
    rounded, in_one = (
        step_bytes(replace(spread, hierarchical=stages), param_nbytes=2) for stages in (True, False)
    )
    assert in_one.hop_2 == pytest.approx(plain.hop_2 * _INT8_NBYTES / 4)
    assert rounded.hop_2 == pytest.approx(plain.hop_2 * (14 + _INT8_NBYTES / 4) / 15)
    plain = step_bytes(_setting(16, UNCOMPRESSED), param_nbytes=2)
    # Of 15 chunks one goes to the other node.
    expected = plain.hop_1 * (14 + _INT8_NBYTES / 4) / 15
    assert step_bytes(staged, param_nbytes=2).hop_1 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected", "printed"),
    [
        (
            ["--hop2", "int4", "--inter-gather", "int8", "--inter-reduce", "int8"],
            replace(_INT8, hop2="int4"),
            'compression=mics.Compression(hop2="int4"),',  # every group is on one node
        ),
        (
            ["--hop2", "bf16", "--no-hop2-error-feedback", "--no-lossless-refresh"],
            mics.Compression(refresh=None, hop2="bf16", hop2_error_feedback=False),
            'compression=mics.Compression(refresh=None, hop2="bf16", hop2_error_feedback=False),',
        ),
        (["--no-lossless-refresh"], UNCOMPRESSED, "compression=None"),
    ],
)
def test_flags_reach_the_run(
    flags: list[str],
    expected: mics.Compression,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`mics plan --write`, then `mics train --config`, and the printed call, without what sends nothing."""
    file = tmp_path / "run.yaml"
    plan = ["plan", "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:2", "--global-batch", "64"]
    assert main([*plan, "--reduce-dtype", "bf16", *flags, "--write", str(file)]) == 0
    found = load_settings(TrainConfig, file).sharding
    assert found.compression == expected
    assert found.reduce_dtype == "bf16"
    assert found.replica_reduce_dtype == ("bf16" if expected.hop2 is None else "fp32")
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("over_replicas", [True, False])
def test_replicas_on_a_node_meet_before_they_round(over_replicas: bool) -> None:
    """As many rounded bytes leave a node with eight replicas as with one."""
    found = {}
    for size in (1, 8):
        setting = replace(_setting(size), over_replicas=over_replicas)
        unit = setting.model.units[2]
        stages = StepCosts(setting).hop_2(unit, whole=not over_replicas)
        found[size] = [stage.cost.inter_nbytes for stage in stages if stage.cost.inter_nbytes]
        exact = StepCosts(replace(setting, compression=UNCOMPRESSED)).hop_2(unit, whole=not over_replicas)
        assert sum(found[size]) < 0.4 * sum(stage.cost.inter_nbytes for stage in exact)
        links = [stage.link for stage in stages if stage.link != "inter"]
        assert links == (["intra"] * (1 if over_replicas else 2) if size == 1 else [""] * len(stages))
    assert found[1] == pytest.approx(found[8], rel=0.01)
    narrow = replace(_setting(1, UNCOMPRESSED), wire_nbytes=2, over_replicas=over_replicas)
    sent = sum(stage.cost.inter_nbytes for stage in StepCosts(narrow).hop_2(unit, whole=not over_replicas))
    assert sum(found[1]) < sent < 0.6 * sum(stage.cost.inter_nbytes for stage in exact)
    assert narrow.replicas_two_stage and not SYSTEMS["hsdp"].adapt(narrow).replicas_two_stage
    assert predict(_setting(1)).step_seconds < predict(replace(_setting(1), hierarchical=False)).step_seconds
    staged = [_setting(1), replace(_setting(1), hierarchical=False)]
    assert staged[0].division.staged_nbytes == pytest.approx(staged[1].division.staged_nbytes / 8)


def test_a_dry_run_counts_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MICS_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    sent = []
    for flags in ([], ["--sharding.hop2", "int8"]):
        assert main(["train", "--dry-run", "--launch.device", "cpu", *flags]) == 0
        printed = capsys.readouterr().out
        found = re.search(r"([\d.]+) (\w+)  gradients, between replicas", printed)
        assert found is not None
        sent.append(float(found[1]) * {"kB": 1e3, "MB": 1e6}[found[2]])
        assert ("lost in rounding" in printed) == bool(flags)
    assert sent[1] == pytest.approx(sent[0] * _INT8_NBYTES / 4, rel=0.05)
    with pytest.raises(mics.MicsError, match=r"replica_reduce_dtype: expected fp32 with hop2=int8.*'bf16'"):
        ShardingSettings(hop2="int8", replica_reduce_dtype="bf16")
