"""Host memory that a save copies to, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mics.checkpoint.contents import Part
from mics.host_memory import HostPool
from mics.layout import round_up

_ALIGNMENT_NBYTES = 64


class Staging:
    """One buffer for a rank's parts, kept from save to save. On a GPU it is pinned."""

    def __init__(self, device: torch.device, *, num_sharing: int) -> None:
        self._device = device
        self._pool = HostPool(
            pin=device.type == "cuda",
            num_sharing=num_sharing,
            user="mics.save(wait=False)",
            remedy="save with wait=True, which needs none",
        )

    def copy(self, parts: Sequence[Part]) -> tuple[list[Part], torch.cuda.Event | None]:
        """The parts in host memory, and when their values are there."""
        needed = sum(round_up(part.nbytes, _ALIGNMENT_NBYTES) for part in parts)
        buffer = self._pool.take(
            needed, "a copy of what is saved"
        )  # the save before is over: there is only this one
        self._pool.give_back(buffer)
        copied, start = [], 0
        for part in parts:
            place = buffer[start : start + part.nbytes].view(part.values.dtype)
            copied.append(replace(part, values=_copy(part.values, place)))
            start += round_up(part.nbytes, _ALIGNMENT_NBYTES)
        if self._device.type != "cuda":
            return copied, None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return copied, ready


def _copy(values: Tensor, place: Tensor) -> Tensor:
    # On the stream of the computation: the next update of these very tensors is ordered behind it.
    return place.copy_(values, non_blocking=True)
