"""The names users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import mics


def test_exports() -> None:
    """Exactly these names are public."""
    assert sorted(mics.__all__) == [
        "Activations", "AuditReport", "CheckpointError", "Cluster", "CollectiveError", "Compression",
        "Emulation", "Link", "MemoryReport", "MicsError", "Precision", "Prefetch", "Profile", "ProfileReport",
        "ReplicaError", "Saving", "SettingsError", "Traffic", "allow_optimizer", "audit_replicas",
        "clip_grad_norm_", "emulate", "full_gradients", "full_optimizer_state_dict", "full_state_dict",
        "iter_full_params", "load", "load_full_state_dict", "memory_report", "microsteps", "nonfinite_units",
        "norms", "num_parameters", "profile", "register_forward_method", "save", "shard",
        "summon_full_params", "traffic",
    ]  # fmt: skip
    assert all(hasattr(mics, name) for name in mics.__all__)


def test_shard_takes_settings_by_keyword_only() -> None:
    """A model, and everything else by name."""
    parameters = list(inspect.signature(mics.shard).parameters.values())
    assert parameters[0].name == "model"
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[1:])


def test_public_calls_are_documented() -> None:
    """Every public name has a docstring."""
    assert all(inspect.getdoc(getattr(mics, name)) for name in mics.__all__)


def test_names_are_loaded_when_first_used() -> None:
    """``import mics`` costs nothing beside torch."""
    program = "import sys, mics; print(sorted(name for name in sys.modules if name.startswith('mics.')))"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "['mics.utils', 'mics.utils.deprecation', 'mics.utils.emulated_backend']"


def test_sharding_loads_the_engine_alone() -> None:
    """Tools and what they need are loaded when their names are first used."""
    tools = ("mics.bench", "mics.checkpoint", "mics.emulator", "mics.planner", "mics.train")
    heavy = (*tools, "matplotlib", "rich", "tyro", "yaml", "safetensors", "torch.distributed.tensor")
    program = (
        f"import sys; from mics import shard; print([name for name in {heavy!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mics' has no attribute 'shart'"):
        mics.shart  # noqa: B018


@pytest.mark.full
def test_plain_torch_finds_the_emulator() -> None:
    """By its backend's name, in a process that has imported mics alone."""
    program = (
        "import mics, torch.distributed as dist\n"
        "dist.init_process_group('emulated', init_method='emulated://p4d.24xlarge:2')\n"
        "print(dist.get_world_size())"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "16"
