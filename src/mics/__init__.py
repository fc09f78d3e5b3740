"""Train PyTorch models too large for one GPU on clusters with ordinary networks.

Each name is loaded when it is first used, and torch with the first of them: ``import mics`` takes
milliseconds.
"""

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

from mics.utils.deprecation import OLD_NAMES, warn_of_old
from mics.utils.emulated_backend import register

if TYPE_CHECKING:
    from mics.activations.policy import Activations
    from mics.api import clip_grad_norm_, microsteps, register_forward_method, shard, traffic
    from mics.checkpoint import Saving, load, save
    from mics.comm import Traffic
    from mics.cost.clusters import Cluster, Link
    from mics.diagnostics.audit import AuditReport, audit_replicas
    from mics.diagnostics.memory import MemoryReport, memory_report
    from mics.diagnostics.nonfinite import nonfinite_units
    from mics.diagnostics.profiling import Profile, ProfileReport, profile
    from mics.emulator import Emulation, emulate
    from mics.errors import CheckpointError, CollectiveError, MicsError, ReplicaError, SettingsError
    from mics.full_params import iter_full_params
    from mics.gradients.optimizer import allow_optimizer
    from mics.guard import norms
    from mics.layout.compression import Compression
    from mics.layout.order import Prefetch
    from mics.layout.precision import Precision
    from mics.state_dict import (
        full_gradients,
        full_optimizer_state_dict,
        full_state_dict,
        load_full_state_dict,
        num_parameters,
        summon_full_params,
    )

__version__ = "0.1.0"  # the one place: pyproject.toml reads it here

__all__ = [
    "Activations",
    "AuditReport",
    "CheckpointError",
    "Cluster",
    "CollectiveError",
    "Compression",
    "Emulation",
    "Link",
    "MemoryReport",
    "MicsError",
    "Precision",
    "Prefetch",
    "Profile",
    "ProfileReport",
    "ReplicaError",
    "Saving",
    "SettingsError",
    "Traffic",
    "allow_optimizer",
    "audit_replicas",
    "clip_grad_norm_",
    "emulate",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_state_dict",
    "iter_full_params",
    "load",
    "load_full_state_dict",
    "memory_report",
    "microsteps",
    "nonfinite_units",
    "norms",
    "num_parameters",
    "profile",
    "register_forward_method",
    "save",
    "shard",
    "summon_full_params",
    "traffic",
]

_MODULES = {
    "activations.policy": ["Activations"],
    "api": ["clip_grad_norm_", "microsteps", "register_forward_method", "shard", "traffic"],
    "checkpoint": ["Saving", "load", "save"],
    "comm": ["Traffic"],
    "cost.clusters": ["Cluster", "Link"],
    "diagnostics.audit": ["AuditReport", "audit_replicas"],
    "diagnostics.memory": ["MemoryReport", "memory_report"],
    "diagnostics.nonfinite": ["nonfinite_units"],
    "diagnostics.profiling": ["Profile", "ProfileReport", "profile"],
    "emulator": ["Emulation", "emulate"],
    "errors": ["CheckpointError", "CollectiveError", "MicsError", "ReplicaError", "SettingsError"],
    "full_params": ["iter_full_params"],
    "gradients.optimizer": ["allow_optimizer"],
    "guard": ["norms"],
    "layout.compression": ["Compression"],
    "layout.order": ["Prefetch"],
    "layout.precision": ["Precision"],
    "state_dict": [
        "full_gradients",
        "full_optimizer_state_dict",
        "full_state_dict",
        "load_full_state_dict",
        "num_parameters",
        "summon_full_params",
    ],
}

register()  # init_process_group("emulated", ...) works from here on


_loading = RLock()  # threads that load parts of one package at once find each other's halves


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            with _loading:
                value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    if name in OLD_NAMES:
        warn_of_old(f"{__name__}.{name}", f"{__name__}.{OLD_NAMES[name]}")
        return getattr(import_module(__name__), OLD_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
