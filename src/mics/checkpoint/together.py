"""What all ranks do, or none: an error that one rank meets is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mics.comm.host_group import HostGroup
from mics.errors import CheckpointError, MicsError, SettingsError

T = TypeVar("T")
Explain = Callable[[int, Exception], Exception]


def together(host: HostGroup, what: str, action: Callable[[], T], explain: Explain | None = None) -> T:
    """Do something on all ranks. The first rank that it fails on tells all others, so that none waits.

    ``explain`` makes an error of ours from one that is not, given the rank that met it.
    """
    error: Exception | None = None
    try:
        value = action()
    except Exception as caught:
        error = caught
        if explain is not None and not isinstance(caught, MicsError | SettingsError):
            error = explain(host.rank, caught)
            error.__cause__ = caught
    told = None if error is None else (isinstance(error, CheckpointError), f"{error}" or repr(error))
    for rank, found in enumerate(host.all_gather(told)):
        if found is None:
            continue
        if rank == host.rank and error is not None:
            raise error
        of_checkpoint, text = found
        if of_checkpoint:
            raise CheckpointError(text)
        raise SettingsError(f"{what}: expected all ranks to go on, found that rank {rank} cannot: {text}")
    return value
