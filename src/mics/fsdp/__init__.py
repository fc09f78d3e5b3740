"""FSDP2's calls on mics: an FSDP2 program changes its import lines and runs on partition groups.

    from mics.fsdp import MixedPrecisionPolicy, fully_shard

Every call of ``fully_shard`` records what is asked for one module. The outermost recorded module is the root,
and it is sharded when somebody first takes parameters of it or computes with it (``waiting.py``).
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from mics.fsdp.calls import fully_shard, register_fsdp_forward_method
from mics.fsdp.module import FSDPModule, UnshardHandle
from mics.fsdp.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "StateDictOptions",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
