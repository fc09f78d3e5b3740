"""Bytes through this host's uplink, from the interface's own counter."""

import os
from pathlib import Path
from typing import Final

DEVICE_VARIABLE: Final = "MICS_UPLINK_DEV"


def sent_nbytes() -> int | None:
    """Bytes sent so far, frames included, or None where no interface is named by MICS_UPLINK_DEV."""
    device = os.environ.get(DEVICE_VARIABLE)
    if device is None:
        return None
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
