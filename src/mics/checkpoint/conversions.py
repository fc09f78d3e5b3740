"""Checkpoints of Hugging Face whose tensors transformers rename, stack or split while they load.

Only the index changes: a tensor of the model is chunks of files, whatever those files call them. So experts
that were saved one by one are read into the fused tensor of the model without a copy::

    experts.0.w1.weight [I, H]    chunk [0, :I, :]
    experts.0.w3.weight [I, H]    chunk [0, I:, :]    of    experts.gate_up_proj [E, 2 I, H]
    experts.1.w1.weight [I, H]    chunk [1, :I, :]

Which tensors these are, transformers say from version 5 on (``transformers.conversion_mapping``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch.nn as nn

from mics.checkpoint.boxes import Box
from mics.checkpoint.contents import Tensors
from mics.checkpoint.names import model_names
from mics.checkpoint.records import Index, StoredChunk, StoredTensor
from mics.errors import CheckpointError


def converted(index: Index, model: nn.Module, contents: Tensors) -> Index:
    """The index with the names of ``model``, where some are not there and transformers know other ones."""
    base = getattr(model, "base_model_prefix", "")
    called = model_names(index, contents.names, base=base)
    has_all = all(any(index.find(called.stored(name)) for name in held.names) for held in contents.params)
    rules = None if index.is_ours or has_all else _rules(model)
    if rules is None:
        return index
    tensors: dict[str, StoredTensor] = {}
    gathered: dict[str, _Gathered] = {}
    known = dict.fromkeys(contents.names, True)
    for key in sorted(index.tensors, key=_natural):
        name, pattern = rules.rename(key, base, known)
        if pattern is None:
            tensors[name] = index.tensors[key]
        else:
            found = gathered.setdefault(name, _Gathered(rules.converters[pattern]))
            found.parts.setdefault(pattern, []).append(index.tensors[key])
    for name, found in gathered.items():
        tensors |= found.tensors(name)
    return replace(index, tensors=tensors)


@dataclass(frozen=True)
class _Rules:
    """What transformers do with a model's checkpoints."""

    renamings: list[Any]
    converters: dict[str, Any]  # by each of their patterns

    def rename(self, key: str, base: str, known: dict[str, bool]) -> tuple[str, str | None]:
        """The model's name, and the pattern of the converter that makes it."""
        from transformers.core_model_loading import rename_source_key

        each = list(dict.fromkeys(self.converters.values()))
        found: tuple[str, str | None] = rename_source_key(key, self.renamings, each, base or None, known)
        return found


def _rules(model: nn.Module) -> _Rules | None:
    if not hasattr(getattr(model, "config", None), "model_type"):
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:  # none, or 4: its models have the names of their checkpoints
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    found = get_model_conversion_mapping(model)
    converters = [each for each in found if isinstance(each, WeightConverter)]
    return _Rules(
        [each for each in found if isinstance(each, WeightRenaming)],
        {pattern: each for each in converters for pattern in each.source_patterns},
    )


@dataclass
class _Gathered:
    """Tensors of a checkpoint that one converter makes tensors of the model from."""

    converter: Any
    parts: dict[str, list[StoredTensor]] = field(default_factory=dict)  # by pattern

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """By the model's names."""
        values = {
            pattern: self.parts[pattern]
            for pattern in self.converter.source_patterns
            if pattern in self.parts
        }
        targets = self.converter.target_patterns
        for operation in self.converter.operations:
            kind, dim = type(operation).__name__, getattr(operation, "dim", None)
            if kind == "MergeModulelist" and dim == 0:
                values = {pattern: [_stacked(name, found)] for pattern, found in values.items()}
            elif kind == "Concatenate" and isinstance(dim, int):
                parts = [each for found in values.values() for each in found]
                values = {targets[0]: [_joined(name, parts, dim)]}
            elif kind == "Chunk" and dim == 0 and len(values) == 1:
                ((whole,),) = values.values()
                pieces = _split(name, whole, len(targets))
                values = {target: [piece] for target, piece in zip(targets, pieces, strict=True)}
            else:
                raise CheckpointError(
                    f"{name}: expected tensors that are read as they are, found some that transformers "
                    f"convert by {kind}; load them with from_pretrained, and pass that model to mics.shard"
                )
        if len(values) != len(targets) or any(len(found) != 1 for found in values.values()):
            raise CheckpointError(f"{name}: expected tensors for it, found {len(values)} of {len(targets)}")
        return {
            name.replace(targets[0], target, 1): found[0]
            for target, found in zip(targets, values.values(), strict=True)
        }


def _stacked(name: str, tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Along a new first dim."""
    return _joined(name, [_row(each) for each in tensors], 0)


def _joined(name: str, tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    dim %= len(tensors[0].shape)

    def alike(tensor: StoredTensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape[:dim], tensor.shape[dim + 1 :]

    if any(alike(each) != alike(tensors[0]) for each in tensors):
        raise CheckpointError(
            f"{name}: expected parts of one format and width, found "
            f"{', '.join(sorted({f'{each.dtype} {each.shape}' for each in tensors}))}"
        )

    def join(first: StoredTensor, other: StoredTensor) -> StoredTensor:
        size = first.shape[dim]
        shape = (*first.shape[:dim], size + other.shape[dim], *first.shape[dim + 1 :])
        return replace(first, shape=shape, chunks=first.chunks + tuple(_shifted(other.chunks, dim, size)))

    return reduce(join, tensors)


def _split(name: str, tensor: StoredTensor, num: int) -> list[StoredTensor]:
    """Along the first dim, of which a file has one row after the other."""
    if len(tensor.chunks) != 1 or tensor.shape[0] % num:
        raise CheckpointError(f"{name}: expected a tensor that can be cut in {num}, found {tensor.shape}")
    (chunk,) = tensor.chunks
    shape = (tensor.shape[0] // num, *tensor.shape[1:])
    box = Box((0,) * len(shape), shape)
    nbytes = box.numel * tensor.dtype.itemsize
    return [
        replace(
            tensor,
            shape=shape,
            chunks=(replace(chunk, box=box, position=chunk.position + number * nbytes),),
        )
        for number in range(num)
    ]


def _row(tensor: StoredTensor) -> StoredTensor:
    """The same with a first dim of 1."""
    chunks = (
        replace(chunk, box=Box((0, *chunk.box.offsets), (1, *chunk.box.sizes))) for chunk in tensor.chunks
    )
    return replace(tensor, shape=(1, *tensor.shape), chunks=tuple(chunks))


def _shifted(chunks: Iterable[StoredChunk], dim: int, by: int) -> Iterable[StoredChunk]:
    for chunk in chunks:
        offsets = list(chunk.box.offsets)
        offsets[dim] += by
        yield replace(chunk, box=Box(tuple(offsets), chunk.box.sizes))


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Expert 10 comes after expert 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in key.split(".")]
