"""Train PyTorch models too large for one GPU on clusters with ordinary networks."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from mics.activations.policy import Activations
from mics.api import (
    clip_grad_norm_,
    microsteps,
    register_forward_method,
    shard,
    traffic,
)
from mics.comm import Traffic
from mics.cost.clusters import Cluster, Link
from mics.diagnostics.audit import AuditReport, audit
from mics.diagnostics.nonfinite import nonfinite_units
from mics.errors import CheckpointError, CollectiveError, MicsError, ReplicaError, SettingsError
from mics.gradients.optimizer import allow_optimizer
from mics.guard import norms
from mics.layout.order import Prefetch
from mics.layout.precision import Precision
from mics.state_dict import (
    full_gradients,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_state_dict,
    num_parameters,
    summon,
    summon_full_params,
)

if TYPE_CHECKING:
    from mics.checkpoint.background import Saving
    from mics.checkpoint.loading import load
    from mics.checkpoint.saving import save
    from mics.diagnostics.memory import MemoryReport, memory
    from mics.emulator import Emulation, emulate

try:
    __version__ = version("mics-torch")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "Activations",
    "AuditReport",
    "CheckpointError",
    "Cluster",
    "CollectiveError",
    "Emulation",
    "Link",
    "MemoryReport",
    "MicsError",
    "Precision",
    "Prefetch",
    "ReplicaError",
    "Saving",
    "SettingsError",
    "Traffic",
    "allow_optimizer",
    "audit",
    "clip_grad_norm_",
    "emulate",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load",
    "load_full_state_dict",
    "memory",
    "microsteps",
    "nonfinite_units",
    "norms",
    "num_parameters",
    "register_forward_method",
    "save",
    "shard",
    "summon",
    "summon_full_params",
    "traffic",
]

# What not every training program needs is loaded when its name is first used.
_LAZY = {
    "Emulation": "mics.emulator",
    "MemoryReport": "mics.diagnostics.memory",
    "Saving": "mics.checkpoint",
    "emulate": "mics.emulator",
    "load": "mics.checkpoint",
    "memory": "mics.diagnostics.memory",
    "save": "mics.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
