"""Save, load on any world size, export."""

from mics.checkpoint.background import Saving
from mics.checkpoint.load import load
from mics.checkpoint.save import save

__all__ = ["Saving", "load", "save"]
