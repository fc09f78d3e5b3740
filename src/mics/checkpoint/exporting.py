"""From a checkpoint to a folder that ``transformers.from_pretrained`` loads.

    OUT/
        model-00001-of-00003.safetensors
        model-00002-of-00003.safetensors
        model-00003-of-00003.safetensors
        model.safetensors.index.json         which tensor is in which of them
        config.json, tokenizer.json, ...     copied

A file is reserved at its full length and mapped, and values are read into their places there: the memory
needed is a few blocks, whatever the size of the model.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

import mics.checkpoint.folders as folders
from mics.checkpoint.blocks import BlockWriter
from mics.checkpoint.files import sync_folder, write_durably
from mics.checkpoint.formats.safetensors_files import MAP_NAME, Planned, map_text, plan_file
from mics.checkpoint.names import tensors_of_model
from mics.checkpoint.reading import PartReader
from mics.checkpoint.records import BLOCK_NBYTES, Index, TensorPart, dtype_name
from mics.checkpoint.storage import Draft, Place, storage_of
from mics.errors import CheckpointError, SettingsError

_CONFIG: Final = "config.json"
_BESIDE: Final = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
)


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """What will be written."""

    folder: Place
    index: Index
    called: dict[str, str]  # the model's names, and what the checkpoint calls them
    files: dict[str, list[Planned]]

    @property
    def nbytes(self) -> int:
        """That will be read."""
        return sum(self.index.tensors[key].nbytes for key in self.called.values())


def plan_export(
    folder: Place, index: Index, *, dtype: torch.dtype | None = None, shard_nbytes: int
) -> Exporting:
    """Divide the model of a checkpoint into files of at most ``shard_nbytes``, or of one tensor."""
    called = tensors_of_model(index)
    if not called:
        raise CheckpointError(f"{folder}: expected the tensors of a model, found none")
    tensors = []
    for name, key in called.items():
        stored = index.tensors[key]
        convert = dtype is not None and stored.dtype.is_floating_point
        wanted = dtype if convert and dtype else stored.dtype
        tensors.append(Planned(name=name, dtype=wanted, shape=stored.shape))
    files = divide_files(tensors, shard_nbytes=shard_nbytes)
    return Exporting(folder=folder, index=index, called=called, files=files)


def divide_files(tensors: Iterable[Planned], *, shard_nbytes: int) -> dict[str, list[Planned]]:
    """Tensors in files of at most ``shard_nbytes``, or of one tensor."""
    shards: list[list[Planned]] = [[]]
    room = shard_nbytes
    for planned in tensors:
        if shards[-1] and planned.nbytes > room:
            shards.append([])
            room = shard_nbytes
        shards[-1].append(planned)
        room -= planned.nbytes
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def write_export(
    exporting: Exporting,
    out: Place,
    *,
    config: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write it. ``out`` has its name when everything in it is on disk; on a store, the map is put last."""
    folders.check_new(out)
    beside = [] if config is None else _beside(config)
    storage = storage_of(out)
    try:
        draft = storage.begin(out)
    except OSError as error:
        raise CheckpointError(f"{out}: could not be written: {error.strerror or error}") from error
    try:
        with _desk(draft) as desk:
            reader = PartReader(exporting.folder, exporting.index)
            for file in beside:
                shutil.copyfile(file, desk / (_CONFIG if file == config else file.name))
            if (desk / _CONFIG).is_file():
                _tell_dtype(desk / _CONFIG, exporting.files.values())
            _hand_over(desk, draft)
            for name, planned in exporting.files.items():
                _write_file(desk / name, planned, exporting, reader, progress)
                _hand_over(desk, draft)
            write_durably(desk / MAP_NAME, map_text(exporting.files).encode())
            _hand_over(desk, draft)
            sync_folder(desk)
        storage.publish(draft)
    except OSError as error:
        storage.abandon(draft)
        raise CheckpointError(f"{out}: could not be written: {error.strerror or error}") from error
    except BaseException:
        storage.abandon(draft)
        raise


@contextmanager
def _desk(draft: Draft) -> Iterator[Path]:
    """A folder on a disk to make files in, which are mapped: the draft's own, or one to upload from."""
    if isinstance(draft.where, Path):
        yield draft.where
        return
    with TemporaryDirectory(prefix="mics-export-") as folder:
        yield Path(folder)


def _hand_over(desk: Path, draft: Draft) -> None:
    """Upload what is ready, where the draft is not on this disk: it holds one file at a time."""
    if desk == draft.where:
        return
    for file in sorted(desk.iterdir()):
        with BlockWriter(draft.where / file.name) as stream, file.open("rb") as content:
            while block := content.read(BLOCK_NBYTES):
                stream.write(block)
            stream.finish()
        file.unlink()


def _write_file(
    path: Path,
    planned: Sequence[Planned],
    exporting: Exporting,
    reader: PartReader,
    progress: Callable[[int], None] | None,
) -> None:
    file = MappedFile(path, planned)
    wanted = [
        (_part_of(tensor, file.values[tensor.name]), exporting.called[tensor.name])
        for tensor in planned
        if tensor.nbytes
    ]
    reader.read(reader.plan(wanted), progress)
    file.finish()


class MappedFile:
    """A file of safetensors at its full length, mapped: what is written to ``values`` is in it."""

    def __init__(self, path: Path, tensors: Sequence[Planned]) -> None:
        beginning, places, length = plan_file(tensors)
        self._path = path
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, length)  # a full disk is an error here, not a signal later
            self._memory = mmap.mmap(file.fileno(), length)
        self._memory[: len(beginning)] = beginning
        self.values = {
            tensor.name: self._values(tensor, places[tensor.name]) for tensor in tensors if tensor.nbytes
        }
        """Of each tensor all elements, [numel]."""

    def finish(self) -> None:
        """Have everything on disk."""
        self._memory.flush()
        with self._path.open("r+b") as file:
            os.fsync(file.fileno())

    def _values(self, tensor: Planned, place: int) -> Tensor:
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, offset=place, count=tensor.nbytes)
        return raw.view(tensor.dtype)


def _part_of(tensor: Planned, values: Tensor) -> TensorPart:
    """All of a tensor, in its place in a file."""
    return TensorPart(name=tensor.name, shape=tensor.shape, span=range(values.numel()), values=values)


def _beside(config: Path) -> list[Path]:
    """The files that a model of transformers has beside its tensors."""
    if config.is_file():
        return [config]
    if not (config / _CONFIG).is_file():
        found = "no such folder" if not config.exists() else f"no {_CONFIG} there"
        raise SettingsError(
            f"--config {config}: expected a {_CONFIG} or a folder that has one, found {found}"
        )
    return files_beside(config)


def files_beside(folder: Path) -> list[Path]:
    """Config, generation settings and tokenizer in a folder, as far as they are there."""
    return sorted({file for pattern in _BESIDE for file in folder.glob(pattern) if file.is_file()})


def _tell_dtype(file: Path, shards: Iterable[Iterable[Planned]]) -> None:
    """Let the config name the format that the tensors now have: ``from_pretrained`` loads them in it."""
    dtypes = {tensor.dtype for shard in shards for tensor in shard if tensor.dtype.is_floating_point}
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise SettingsError(f"--config: expected JSON in {_CONFIG}, found {error}") from None
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = dtype_name(dtypes.pop())
    write_durably(file, json.dumps(config, indent=2).encode() + b"\n")
