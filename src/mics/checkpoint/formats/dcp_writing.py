"""What torch.distributed.checkpoint reads: its plans, its items in a file, its metadata.

A part's boxes are items of DCP, each an archive as ``torch.save`` writes it, so FSDP2 and DCP's tools read
what we write. DCP's ``.metadata`` is a pickle, which we never read: our index stands beside it, and knows
where in the archives the values begin.

``dcp.load`` into the state dicts of FSDP2 also asks for every entry of the optimizer's ``param_groups``,
pickled. So they are written, beside the index, which has them too. mics itself never reads them.

    optimizer.param_groups.0.lr          in the nested form: by the group's number
    optimizer.param_groups.a.bias.lr     in the flattened form: by parameter
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mics.checkpoint.boxes import Box, item_boxes
from mics.checkpoint.records import MODEL, OPTIMIZER, StoredChunk, TensorPart
from mics.errors import CheckpointError

ITEM_NBYTES: Final = 64 << 20
"""Larger boxes are written as several: an item is copied once on its way to the disk."""


class Archives(Protocol):
    """A file that archives are appended to."""

    def tell(self) -> int: ...

    def write(self, content: bytes, /) -> int: ...

    def save(self, values: Tensor, /) -> int:
        """Append what ``torch.save`` makes of a tensor; the position of its values."""


class WrittenItem(NamedTuple):
    """What DCP calls an item: a box of a tensor, or a pickled value."""

    key: MetadataIndex
    place: _StorageInfo
    chunk: StoredChunk | None  # None: a value, for DCP's readers alone


def _alone(values: Tensor) -> Tensor:
    """The same memory as a storage of its own: torch.save would write all of the buffer that it lies in."""
    flat = torch.from_numpy(values.reshape(-1).view(torch.uint8).numpy())
    return flat.view(values.dtype).view(values.shape)


def _items_of(part: TensorPart) -> Iterator[tuple[Box, Tensor]]:
    at = 0
    for box in item_boxes(part.shape, part.span, ITEM_NBYTES // part.values.element_size()):
        yield box, part.values[at : at + box.numel].view(box.sizes)
        at += box.numel


def _write_item(part: TensorPart, index: MetadataIndex, box: Box) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
            properties=TensorProperties(dtype=part.values.dtype),
            size=torch.Size(part.shape),
        ),
    )


def divided(plan: SavePlan, num_plans: int) -> list[SavePlan]:
    """A plan as several of about as many bytes."""
    plans: list[list[WriteItem]] = [[] for _ in range(num_plans)]
    nbytes = [0] * num_plans
    for item in plan.items:
        least = nbytes.index(min(nbytes))
        plans[least].append(item)
        data = item.tensor_data
        nbytes[least] += 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
    return [SavePlan(items) for items in plans]


def _box_of(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _check_covered(name: str, tensor: TensorStorageMetadata) -> None:
    written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
    if written != tensor.size.numel():
        raise CheckpointError(
            f"{name}: expected ranks to have its {tensor.size.numel():,} elements once, found {written:,}; "
            "do all ranks save the same model and optimizer?"
        )


class ItemWriter:
    """Writes a rank's parts as items of DCP, and from what all ranks wrote DCP's metadata."""

    def __init__(
        self,
        parts: Sequence[TensorPart],
        *,
        aliases: Mapping[str, str],
        values: PickledValues,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._parts = parts
        self._aliases = {**aliases, **values.aliases}
        self._pickled = values.pickled
        self._progress = progress
        self._values: dict[MetadataIndex, Tensor] = {}

    def plan(self) -> SavePlan:
        """What this rank will write."""
        items = []
        for part in self._parts:
            for box, values in _items_of(part):
                index = MetadataIndex(part.name, box.offsets)
                self._values[index] = values
                items.append(_write_item(part, index, box))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._pickled]
        return SavePlan(items)

    def describe(self, plans: list[SavePlan]) -> Metadata:
        """What all ranks will write; raises where that is not every element once."""
        _, metadata = create_default_global_save_plan(plans)
        tensors = metadata.state_dict_metadata
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorStorageMetadata):
                _check_covered(name, tensor)
        for alias, name in self._aliases.items():
            if name in tensors:  # a parameter without elements is written by nobody
                tensors[alias] = tensors[name]
        # Where each name belongs in the nested dicts that DCP's tools make of it.
        metadata.planner_data = {name: _nested_path(name) for name in tensors}
        return metadata

    def write(self, plan: SavePlan, name: str, file: Archives) -> list[WrittenItem]:
        """Write this rank's items to the file of that name."""
        written = []
        for item in plan.items:
            start = file.tell()
            chunk = None
            if item.tensor_data is None:
                file.write(self._pickled[item.index.fqn])
            else:
                position = file.save(self._resolved(item.index))
                chunk = StoredChunk(_box_of(item.tensor_data.chunk), name, position)
            place = _StorageInfo(name, start, file.tell() - start)
            written.append(WrittenItem(item.index, place, chunk))
        return written

    def pickled_metadata(self, metadata: Metadata, written: Iterable[WrittenItem]) -> bytes:
        """What DCP's readers look for first, given the items of all ranks."""
        storage = {item.key: item.place for item in written}
        by_name: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {}
        for index, place in storage.items():
            by_name.setdefault(index.fqn, []).append((index, place))
        for alias, name in self._aliases.items():
            for index, place in by_name.get(name, ()):
                storage[MetadataIndex(alias, index.offset, index.index)] = place
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        return pickle.dumps(metadata)

    def _resolved(self, index: MetadataIndex) -> Tensor:
        values = _alone(self._values[index].to("cpu"))
        if self._progress is not None:
            self._progress(values.nbytes)
        return values


@dataclass(frozen=True, kw_only=True)
class PickledValues:
    """Pickled values by name, and further names that mean the same value."""

    pickled: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def pickled_values(
    groups: Sequence[Mapping[str, Any]] | None, module_state: Mapping[str, Any]
) -> PickledValues:
    """An optimizer's settings (parameters by name) and what modules returned from get_extra_state."""
    pickled = {MODEL + name: _pickled(value) for name, value in module_state.items()}
    aliases = {}
    for number, group in enumerate(groups or ()):
        for key, value in group.items():
            name = f"{OPTIMIZER}param_groups.{number}.{key}"
            pickled[name] = _pickled(value)
            if key != "params":
                aliases.update({f"{OPTIMIZER}param_groups.{param}.{key}": name for param in group["params"]})
    # A parameter may be called 0: then the group's number is what the name means.
    return PickledValues(
        pickled=pickled, aliases={alias: name for alias, name in aliases.items() if alias not in pickled}
    )


def _nested_path(name: str) -> tuple[str | int, ...]:
    """Where a name belongs in the nested dicts that DCP's tools make.

    model.a.bias: model, a.bias. optimizer.state.a.bias.step: optimizer, state, a.bias, step.
    """
    first, _, rest = name.partition(".")
    if f"{first}." != OPTIMIZER:
        return (first, rest) if rest else (first,)
    kind, _, within = rest.partition(".")
    if kind == "state":
        return first, kind, *within.rsplit(".", 1)
    number, _, key = within.partition(".")
    if number.isdigit() and key and "." not in key:
        return first, kind, int(number), key
    return first, rest


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value.detach().cpu() if isinstance(value, Tensor) else value, stream)
    return stream.getvalue()
