"""Save, load on any world size, export."""

from mics.checkpoint.load import load
from mics.checkpoint.save import Saving, save

__all__ = ["Saving", "load", "save"]
