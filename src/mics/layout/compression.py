"""What travels in fewer bytes than it has in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mics.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How collectives save bytes.

    ``refresh``: how new parameters of 16 bits go to the other replicas after an optimizer step. "lossless":
    as how far each has moved, which most steps need a third of the bytes for, to the same bits. Moves that
    take more than expected cost a second collective, with the values. None: the values.
    """

    refresh: Literal["lossless"] | None = "lossless"

    def __post_init__(self) -> None:
        if self.refresh not in ("lossless", None):
            raise SettingsError(f'Compression.refresh: expected "lossless" or None, found {self.refresh!r}')
