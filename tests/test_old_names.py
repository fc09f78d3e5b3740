"""Old public names still work, and each warns with the new name on the caller's line."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import mics
from mics.cli import main
from mics.engine import engine_of
from mics.train.config import ShardingSettings, TrainConfig
from mics.train.settings_file import parse_train_config
from mics.utils.deprecation import OLD_NAMES, OLD_SETTINGS, new_flags
from tests.ranks import run_ranks

_BF16 = torch.bfloat16


@contextmanager
def _warns(old: str, new: str) -> Iterator[None]:
    """One FutureWarning, about this file, that names both and the version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    text = f"{old} is now {new}; the old name will be removed in mics 0.3"
    assert [(w.category, str(w.message), w.filename) for w in caught] == [(FutureWarning, text, __file__)]


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_names(old: str, new: str) -> None:
    with _warns(f"mics.{old}", f"mics.{new}"):
        found = getattr(mics, old)
    assert found is getattr(mics, new)
    assert old not in mics.__all__ and old not in dir(mics)


def test_names_that_are_imported() -> None:
    with pytest.warns(FutureWarning, match=r"mics\.audit is now mics\.audit_replicas") as caught:
        from mics import audit
    assert audit is mics.audit_replicas
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("param", "param_dtype", _BF16),
        ("reduce", "reduce_dtype", _BF16),
        ("master", "master_dtype", torch.float64),
        ("replica_reduce", "replica_reduce_dtype", _BF16),
    ],
)
def test_precision(old: str, new: str, value: torch.dtype) -> None:
    """Keywords and attributes."""
    with _warns(f"mics.Precision({old}={value})", f"mics.Precision({new}={value})"):
        precision = mics.Precision(**{old: value})
    assert precision == mics.Precision(**{new: value})
    with _warns(f"mics.Precision.{old}", f"mics.Precision.{new}"):
        found = getattr(precision, old)
    assert found is getattr(precision, new) is value
    assert [field.name for field in dataclasses.fields(precision)] == [
        *("param_dtype", "reduce_dtype", "master_dtype", "replica_reduce_dtype")
    ]


@pytest.mark.parametrize(
    ("value", "new"),
    [(0.5, "offload_fraction"), (0.0, "offload_fraction"), (1 << 30, "offload_bytes"), (0, "offload_bytes")],
)
def test_offload_by_type(value: float, new: str) -> None:
    old = f"mics.Activations(offload={value})"
    with _warns(old, f"mics.Activations({new}={value})"):
        policy = mics.Activations(offload=value)  # type: ignore[arg-type]
    assert policy == mics.Activations(**{new: value})  # type: ignore[arg-type]
    assert policy.offload is bool(value)


def test_offload_that_is_a_bool_is_not_old() -> None:
    assert mics.Activations(offload=True).offload
    assert not mics.Activations(offload=False).offload


def test_an_old_keyword_beside_its_new_one() -> None:
    with pytest.raises(TypeError, match="expected param_dtype, found it and its old name param; drop param"):
        mics.Precision(param=_BF16, param_dtype=_BF16)  # type: ignore[call-arg]


def _calls() -> tuple[bool, bool]:
    """`shard(lean=)` and the calls that have other names now, on a model."""
    torch.manual_seed(0)
    with _warns("mics.shard(lean=True)", "mics.shard(low_memory=True)"):
        old = mics.shard(nn.Linear(4, 4), partition_size=2, lean=True)  # type: ignore[call-arg]
    new = mics.shard(nn.Linear(4, 4), partition_size=2, low_memory=True)
    with pytest.warns(FutureWarning, match="is now"):
        reports = mics.memory(new, show=False), mics.audit(new)
    assert reports == (mics.memory_report(new, show=False), mics.audit_replicas(new))
    with pytest.warns(FutureWarning, match="is now"), mics.summon(new, writeback=True), torch.no_grad():
        new.weight.fill_(3.0)  # type: ignore[operator, union-attr]
    with mics.summon_full_params(new):
        weight = float(new.weight.sum())  # type: ignore[operator, arg-type]
    assert weight == 48.0
    with _warns("mics.summon_full_params(writeback=False)", "mics.summon_full_params(write=False)"):
        mics.summon_full_params(new, writeback=False)  # type: ignore[call-arg]
    return engine_of(old).hops.lends_memory, engine_of(new).hops.lends_memory


def test_calls_on_a_sharded_model() -> None:
    assert run_ranks(2, _calls) == [(True, True)] * 2


def test_files_of_mics_train(tmp_path: Path) -> None:
    """Settings files that were written with the old names."""
    file = tmp_path / "run.yaml"
    file.write_text("sharding: {precision: bf16, reduce: bf16, replica-reduce: bf16}\n")
    with pytest.warns(FutureWarning) as caught:
        found = parse_train_config(["--config", str(file)])
    assert [str(warning.message).split(";")[0] for warning in caught] == [
        "sharding.precision is now sharding.param_dtype",
        "sharding.reduce is now sharding.reduce_dtype",
        "sharding.replica_reduce is now sharding.replica_reduce_dtype",
    ]
    new = ShardingSettings(param_dtype="bf16", reduce_dtype="bf16", replica_reduce_dtype="bf16")
    assert found == TrainConfig(config=file, sharding=new)
    file.write_text("sharding: {reduce: bf16, reduce_dtype: bf16}\n")
    with (
        pytest.warns(FutureWarning, match="sharding.reduce is now"),
        pytest.raises(mics.SettingsError, match=r"sharding\.reduce_dtype: expected once, found twice"),
    ):
        parse_train_config(["--config", str(file)])


def test_flags() -> None:
    """Of `mics train` and `mics plan`, in both spellings."""
    args = ["--sharding.precision", "fp32", "--sharding.reduce=bf16", "--sharding.replica_reduce", "bf16"]
    with pytest.warns(FutureWarning) as caught:
        found = new_flags("train", [*args, "--steps", "3"])
    assert [str(warning.message).split(";")[0] for warning in caught] == [
        "--sharding.precision is now --sharding.param-dtype",
        "--sharding.reduce is now --sharding.reduce-dtype",
        "--sharding.replica_reduce is now --sharding.replica-reduce-dtype",
    ]
    new = ShardingSettings(param_dtype="fp32", reduce_dtype="bf16", replica_reduce_dtype="bf16")
    assert parse_train_config(found) == TrainConfig(steps=3, sharding=new)


def test_flags_of_mics_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", "gpt-1.3b", "--cluster", "p4d.24xlarge:1", "--global-batch", "64"]
    assert main([*args, "--reduce-dtype", "bf16"]) == 0
    expected = capsys.readouterr().out
    with pytest.warns(FutureWarning, match="--wire is now --reduce-dtype"):
        assert main([*args, "--wire", "bf16"]) == 0
    assert capsys.readouterr().out == expected
    assert "reduce_dtype=torch.bfloat16" in re.sub(r"\s", "", expected)


def test_every_old_setting_has_a_command() -> None:
    assert set(OLD_SETTINGS) == {"plan", "train"}


def test_no_public_name_shadows_a_module() -> None:
    """Neither `mics.x` nor any `mics.package.x` is a module where `x` is a public name."""
    names = [found.name for found in pkgutil.walk_packages(mics.__path__, "mics.")]
    modules = {name.rpartition(".")[2] for name in names}
    assert "residency" in modules
    assert modules & {*mics.__all__, *OLD_NAMES} == {"audit", "memory"}, "the old names alone"
    assert not modules & {*mics.__all__}
