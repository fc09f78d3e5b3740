"""The names users rely on."""

from __future__ import annotations

import inspect

import mics


def test_exports() -> None:
    """Exactly these names are public."""
    assert sorted(mics.__all__) == [
        "Activations", "AuditReport", "CheckpointError", "Cluster", "CollectiveError", "Emulation",
        "Link", "MemoryReport", "MicsError", "Precision", "Prefetch", "ReplicaError", "Saving",
        "SettingsError", "Traffic", "allow_optimizer", "audit", "clip_grad_norm_", "emulate",
        "full_gradients", "full_optimizer_state_dict", "full_state_dict", "load",
        "load_full_state_dict", "memory", "microsteps", "nonfinite_units",
        "norms", "num_parameters", "register_forward_method", "save", "shard",
        "summon", "summon_full_params", "traffic",
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
