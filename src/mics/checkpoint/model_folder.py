"""From a sharded model in memory to a folder of safetensors, one parameter after the other.

The first rank maps the files at their full length and writes each parameter to its place there. No rank holds
more than two buckets of whole parameters (``mics.iter_full_params``), and pages of the files leave the host's
memory as they are written to disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from mics.checkpoint.contents import Contents, contents_of
from mics.checkpoint.exporting import MappedFile, divide_files
from mics.checkpoint.files import sync_folder, write_durably
from mics.checkpoint.formats.safetensors_files import MAP_NAME, Planned, map_text
from mics.checkpoint.saving import engine_in, join_hosts
from mics.checkpoint.storage import Draft, LocalStorage, partial_of
from mics.checkpoint.together import together
from mics.comm.journal import collective_call
from mics.errors import CheckpointError
from mics.full_params import iter_full_params
from mics.guard import plainly
from mics.utils.progress import long_work

SHARD_NBYTES: Final = 5 * 10**9
_WHAT: Final = "export"


@collective_call
def export_model(
    model: nn.Module,
    out: Path,
    *,
    beside: Callable[[Path], None],
    shard_nbytes: int = SHARD_NBYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a sharded model to ``out``, parameters in master precision. All ranks must call it.

    ``beside`` writes what belongs to it (config, tokenizer) into a folder, on the first rank. ``out`` has its
    name when everything in it is on disk; a folder of that name is replaced then. What is floating-point is
    cast to ``dtype`` before it travels.
    """
    world, host = join_hosts(_WHAT)
    engine = engine_in(world, model, _WHAT)
    with torch.inference_mode(False), torch.no_grad(), plainly():
        contents = contents_of(model, engine)
        first = world.rank == 0
        writing = together(
            host, _WHAT, lambda: _Writing(out, contents, shard_nbytes, dtype) if first else None
        )
        with long_work(f"{_WHAT} {out}", 0 if writing is None else writing.nbytes) as work:
            for name, value in iter_full_params(model, dtype=dtype, rank=0):
                assert writing is not None
                writing.take(name, value)
                work.advance(value.nbytes)
        together(host, _WHAT, lambda: None if writing is None else writing.finish(beside))


class _Writing:
    """The first rank's part: what fails is raised at the end, since the other ranks send all the same."""

    def __init__(self, out: Path, contents: Contents, shard_nbytes: int, dtype: torch.dtype | None) -> None:
        self._out = out
        self._storage = LocalStorage()
        self._buffers = contents.buffers
        planned = [
            Planned(name=held.name, dtype=_cast(held.unit.master.dtype, dtype), shape=held.shape)
            for held in contents.params
        ]
        self.nbytes = sum(each.nbytes for each in planned)
        planned += [
            Planned(name=name, dtype=_cast(buffer.dtype, dtype), shape=tuple(buffer.shape))
            for name, buffer in contents.buffers.items()
        ]
        self._error: Exception | None = None
        self._tensors = divide_files(planned, shard_nbytes=shard_nbytes)
        self._draft: Draft | None = None
        try:
            self._draft = self._storage.begin(out)
            self._partial = partial_of(out)
            self._files = [MappedFile(self._partial / name, each) for name, each in self._tensors.items()]
        except OSError as error:
            raise self._failed(error) from error
        self._values: dict[str, Tensor] = {}
        for file in self._files:
            self._values.update(file.values)

    def take(self, name: str, value: Tensor) -> None:
        """Write one parameter."""
        if self._error is not None:
            return
        try:
            if name in self._values:  # one without elements has no place
                self._values[name].copy_(value.reshape(-1))
        except (OSError, RuntimeError) as error:
            self._error = error

    def finish(self, beside: Callable[[Path], None]) -> None:
        """Have the folder under its name."""
        try:
            if self._error is not None:
                raise self._error
            for name, buffer in self._buffers.items():
                if name in self._values:
                    self._values[name].copy_(buffer.reshape(-1))
            for file in self._files:
                file.finish()
            write_durably(self._partial / MAP_NAME, map_text(self._tensors).encode())
            beside(self._partial)
            sync_folder(self._partial)
            assert self._draft is not None
            self._storage.publish(self._draft)
        except (OSError, RuntimeError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        if self._draft is not None:
            self._storage.abandon(self._draft)
        reason = error.strerror if isinstance(error, OSError) else None
        return CheckpointError(f"{self._out}: could not be written: {reason or error}")


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own
