"""Save, load on any world size, export."""

from mics.checkpoint.background import Saving
from mics.checkpoint.loading import load
from mics.checkpoint.saving import save

__all__ = ["Saving", "load", "save"]
