"""One process plays rank 0 of any cluster: collectives become waits that a cost model gives.

Every other rank is imagined to do what this one does and to hold what this one holds. What a collective
writes therefore has the right shape and a plausible size, and the engine, the kernels, the streams and the
memory are the real ones. See docs/emulator.md for what this models and what it does not.
"""

from mics.emulator.fabric import Imagined
from mics.emulator.log import Collective
from mics.emulator.start import Emulation, emulate, emulated_cluster

__all__ = ["Collective", "Emulation", "Imagined", "emulate", "emulated_cluster"]
