"""Train PyTorch models too large for one GPU on clusters with ordinary networks."""

from importlib.metadata import PackageNotFoundError, version

from mics.activations import Activations
from mics.api import (
    audit,
    clip_grad_norm_,
    microsteps,
    nonfinite_units,
    register_forward_method,
    shard,
    traffic,
)
from mics.audit import AuditReport
from mics.checkpoint import Saving, load, save
from mics.comm import Traffic
from mics.comm.emulated import Emulation, emulate
from mics.errors import CheckpointError, CollectiveError, MicsError, ReplicaError, SettingsError
from mics.guard import norms
from mics.memory import MemoryReport, memory
from mics.optimizer_hooks import allow_optimizer
from mics.plans import Prefetch
from mics.precision import Precision
from mics.state import (
    full_gradients,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_state_dict,
    num_parameters,
    summon,
    summon_full_params,
)
from mics.topology import Cluster, Link

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
