"""Calls of torch's collectives over one group: counted, in the journal, and explained where they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mics.comm.counter import TrafficCounter
from mics.comm.liveness import Liveness
from mics.errors import CollectiveError


class GroupCalls:
    """One process group, as this rank calls it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        axis: str,
        counter: TrafficCounter,
        liveness: Liveness | None,
        purpose: str,
    ) -> None:
        self._group = group  # None: a world of one process that never called init_process_group
        self.axis = axis
        self._counter = counter
        self.size = 1 if group is None else dist.get_world_size(group)
        self.position = 0 if group is None else dist.get_rank(group)
        self.is_real = not hasattr(group, "imagined_cluster")  # gloo then, as far as CPU tensors go
        self._liveness = None if group is None else liveness
        self._journal = None
        if self._liveness is not None and group is not None:
            self._journal = self._liveness.journal(purpose, group)

    def is_gloo(self, tensor: Tensor) -> bool:
        """Whether gloo moves it."""
        return self.is_real and tensor.device.type == "cpu"

    def count(self, kind: str, nbytes: int) -> None:
        """This rank sends so many bytes in a collective."""
        self._counter.add(self.axis, kind, nbytes)

    def call(self, kind: str, label: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Join a collective. If it fails, the error names it and who is gone."""
        if self._liveness is not None and self._journal is not None:
            self._liveness.enter(self._journal, kind, label)
        try:
            collective(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            culprits = "" if self._liveness is None else self._liveness.explain()
            members = dist.get_process_group_ranks(self._group) if self._group is not None else [0]
            raise CollectiveError(
                f"{kind} of {label} failed in the {self.axis} group of ranks {members}. {culprits}"
                f"The backend said: {error}"
            ) from error
