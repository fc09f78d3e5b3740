"""Checkpoints that DeepSpeed wrote at ZeRO stage 3, with or without MiCS.

    zero_pp_rank_0_mp_rank_00_model_states.pt    names and shapes, buffers, frozen parameters in parts
    zero_pp_rank_0_mp_rank_00_optim_states.pt    masters and optimizer state of rank 0, flat
    ...                                          and of the other ranks; with MiCS of one partition group

Each parameter is cut into as many equal parts as there are ranks, the last one padded. A rank's parts follow
each other in a few flat tensors, and optimizer state lies as they do::

    parameter of 7 on 2 ranks    rank 0   a a a a . . .      rank 1   . . . . a a a (and one of padding)

The files are archives of pickles, read as data: objects of DeepSpeed are never made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from mics.checkpoint.boxes import Box, boxes_of
from mics.checkpoint.formats.archive import Archive, Described, Slice, ints_of, open_archive
from mics.checkpoint.formats.pickle_data import Record
from mics.checkpoint.records import (
    MODEL,
    OPTIMIZER,
    Index,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_name,
    check_tensor,
    count_of,
)
from mics.checkpoint.storage import Place, open_file, read_part, size_of
from mics.errors import CheckpointError

FORMAT: Final = "deepspeed"
_OPTIM: Final = "*zero_pp_rank_*_optim_states.pt"
_FILE: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{2,9})_(optim|model)_states\.pt"
)
_MAX_DESCRIPTION_NBYTES: Final = 256 << 20
_MAX_STEP: Final = 1 << 53
_SETTINGS: Final = (  # of torch's optimizers; DeepSpeed's own have others beside them
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "alpha", "rho"),
    *("lr_decay", "initial_accumulator_value", "centered"),
)


def is_deepspeed(folder: Place) -> bool:
    """Whether ranks of DeepSpeed have written there."""
    return any(folder.glob(_OPTIM))


def open_deepspeed(folder: Place) -> Index:
    """The index of a checkpoint of DeepSpeed. Values are not looked at."""
    optim, model = _ranks(folder, "optim"), _ranks(folder, "model")
    states = [_a_dict(rank.top("optimizer_state_dict"), rank, "optimizer_state_dict") for rank in optim]
    _check_ranks(folder, optim, model, states)
    try:
        tensors, numbers, groups = _optimizer_tensors(optim, states, model[0])
        tensors.update(_frozen(model))
        tensors.update(_buffers(model[0]))
        aliases = _aliases(model[0], tensors)
        files = {rank.file: StoredFile(nbytes=rank.nbytes) for rank in (*optim, *model)}
        for name, tensor in tensors.items():
            check_tensor(name, tensor, files)
    except CheckpointError as error:
        said = str(error)
        raise CheckpointError(said if said.startswith(str(folder)) else f"{folder}: {said}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder}: expected a checkpoint of DeepSpeed at ZeRO stage 3, found another "
            f"({type(error).__name__}: {error})"
        ) from None
    return Index(
        tensors=tensors,
        files=files,
        aliases=aliases,
        numbers=numbers,
        param_groups=groups,
        about={"format": FORMAT},
    )


def read_plain(folder: Place) -> dict[str, Any]:
    """What the first rank saved beside the tensors: counters, the schedule, and what a program gave it.

    Only numbers, strings and containers of them; other values are left out, and named under ``""``.
    """
    rank = _ranks(folder, "model")[0]
    plain: dict[str, Any] = {}
    left_out = []
    for key, value in _a_dict(rank.archive.value, rank, "model states").items():
        if key in _OF_DEEPSPEED:
            continue
        try:
            plain[str(key)] = _plain(value)
        except CheckpointError as error:
            left_out.append(f"{key} ({error})")
    return {**plain, "": left_out}


_OF_DEEPSPEED: Final = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "data_sampler", "random_ltd", "ds_config", "ds_version"),
        *("sparse_tensor_module_names", "dp_world_size", "mp_world_size"),
        *("autotp_uc_info", "checkpoint_parallel_dimensions"),
    )
)


# -- ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One file that a rank wrote."""

    place: Place
    nbytes: int
    archive: Archive

    @property
    def file(self) -> str:
        return self.place.name

    def top(self, key: str, default: Any = None) -> Any:
        found = _a_dict(self.archive.value, self, "its contents")
        if key not in found and default is None:
            raise CheckpointError(f"{self.place}: expected {key}, found {', '.join(map(str, found))[:120]}")
        return found.get(key, default)

    def tensor(self, value: Any, what: str) -> Described:
        """A tensor whose values lie one after the other."""
        try:
            found = self.archive.tensor(value)
        except CheckpointError as error:
            raise CheckpointError(f"{self.place}: {what}: {error}") from None
        stop = (found.offset + math.prod(found.sizes)) * found.dtype.itemsize
        if not replace(found, offset=0).contiguous or stop > found.nbytes:
            raise CheckpointError(f"{self.place}: {what}: expected values one after the other, found others")
        return found


def _ranks(folder: Place, kind: str) -> list[_Rank]:
    """The files of one kind, in order of their ranks."""
    found: dict[int, Place] = {}
    for place in folder.glob(f"*zero_pp_rank_*_{kind}_states.pt"):
        match = _FILE.fullmatch(place.name)
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{place}: expected ranks of data parallelism alone, found {place.name}; mics has no model "
                "parallelism: convert the weights with zero_to_fp32.py, and load them as safetensors"
            )
        if int(match[1]) in found:
            raise CheckpointError(f"{folder}: expected a file of each rank, found two of rank {match[1]}")
        found[int(match[1])] = place
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder}: expected a *_{kind}_states.pt of each rank from 0 on, found those of "
            f"{', '.join(map(str, sorted(found))) or 'none'}; copy the missing files"
        )
    return [_opened(found[rank]) for rank in sorted(found)]


def _opened(place: Place) -> _Rank:
    nbytes = size_of(place)
    with open_file(place) as file:
        archive = open_archive(
            Slice(file, 0, nbytes, most=_MAX_DESCRIPTION_NBYTES), str(place), most=_MAX_DESCRIPTION_NBYTES
        )
    return _Rank(place=place, nbytes=nbytes, archive=archive)


def _check_ranks(folder: Place, optim: Sequence[_Rank], model: Sequence[_Rank], states: list[Any]) -> None:
    stage = states[0].get("zero_stage", 0)
    if isinstance(stage, Record):  # an enum of DeepSpeed's
        stage = stage.args[0] if isinstance(stage.args, tuple) and len(stage.args) == 1 else stage.callee
    if stage != 3:
        raise CheckpointError(
            f"{folder}: expected ZeRO stage 3 or MiCS, found stage {stage!s:.60}; convert the weights with "
            "zero_to_fp32.py, and load them as safetensors"
        )
    counts = {count_of(state.get("partition_count")) for state in states}
    if counts != {len(optim)} or len(model) != len(optim):
        raise CheckpointError(
            f"{folder}: expected the files of {', '.join(map(str, sorted(counts)))} ranks, found "
            f"{len(optim)} of optimizers and {len(model)} of models; copy the missing files"
        )


# -- tensors ---------------------------------------------------------------------------------------------


def _optimizer_tensors(
    optim: Sequence[_Rank], states: Sequence[dict[Any, Any]], first: _Rank
) -> tuple[dict[str, StoredTensor], dict[str, float], list[dict[str, Any]]]:
    """Masters, state and settings."""
    tensors: dict[str, StoredTensor] = {}
    numbers: dict[str, float] = {}
    shapes = [_shapes(group, first) for group in _a_list(first.top("param_shapes"), first, "param_shapes")]
    flats = [
        [
            rank.tensor(flat, "fp32_flat_groups")
            for flat in _a_list(state["fp32_flat_groups"], rank, "fp32_flat_groups")
        ]
        for rank, state in zip(optim, states, strict=True)
    ]
    inner = [
        _a_dict(state.get("optimizer_state_dict"), rank, "state")
        for rank, state in zip(optim, states, strict=True)
    ]
    kept = [_a_dict(each.get("state", {}), rank, "state") for rank, each in zip(optim, inner, strict=True)]
    groups = [
        _a_dict(group, optim[0], "param_groups")
        for group in _a_list(inner[0].get("param_groups", []), optim[0], "param_groups")
    ]
    walk = _Walk(flats)
    for group in shapes:
        for name, shape in group.items():
            spans = walk.take(math.prod(shape))
            tensors[MODEL + name] = _stored(optim, shape, flats, spans)
            found = sorted({index for _, index, *_ in spans})
            if len(found) != 1 or any(found[0] not in each for each in kept):
                continue  # nothing has been stepped
            entries = [_a_dict(each[found[0]], rank, "state") for rank, each in zip(optim, kept, strict=True)]
            for key in entries[0]:
                full = f"{OPTIMIZER}state.{name}.{key}"
                values = [each[key] for each in entries]
                if isinstance(values[0], int | float):
                    numbers[full] = _number_of(optim[0], values[0], full)
                    continue
                where = [rank.tensor(value, full) for rank, value in zip(optim, values, strict=True)]
                if not where[0].sizes:
                    numbers[full] = _number_of(optim[0], where[0], full)
                    continue
                like = [flat[found[0]] for flat in flats]
                if [each.sizes for each in where] != [each.sizes for each in like]:
                    raise CheckpointError(
                        f"{full}: expected as many values as parameters, {like[0].sizes}, found "
                        f"{where[0].sizes}; load the weights alone"
                    )
                lying = [{found[0]: each} for each in where]
                tensors[full] = _stored(optim, shape, lying, spans)
            steps = [each["step"] for each in groups if "step" in each and found[0] in each.get("params", ())]
            if entries[0] and "step" not in entries[0] and steps:
                # DeepSpeed's own Adam keeps it once for each group.
                numbers[f"{OPTIMIZER}state.{name}.step"] = _number_of(optim[0], steps[0], "step")
    walk.finish(optim[0])
    return tensors, numbers, _settings(groups, shapes)


class _Walk:
    """Goes through the flat tensors of all ranks at once, parameter by parameter."""

    def __init__(self, flats: Sequence[Sequence[Described]]) -> None:
        self._num_ranks = len(flats)
        self._lengths = [math.prod(flat.sizes) for flat in flats[0]]
        if any([math.prod(flat.sizes) for flat in each] != self._lengths for each in flats):
            raise CheckpointError("expected flat tensors of the same lengths from each rank, found others")
        self._index = 0
        self._at = 0

    def take(self, numel: int) -> list[tuple[int, int, int, range]]:
        """Where a parameter of ``numel`` elements lies: rank, flat tensor, offset in it, elements."""
        part = -(-numel // self._num_ranks)
        left, done = part, 0
        found = []
        while left:
            while self._index < len(self._lengths) and self._at == self._lengths[self._index]:
                self._index, self._at = self._index + 1, 0
            if self._index == len(self._lengths):
                raise CheckpointError("expected values of every parameter, found fewer: files are torn")
            count = min(left, self._lengths[self._index] - self._at)
            for rank in range(self._num_ranks):
                start = rank * part + done
                span = range(min(start, numel), min(start + count, numel, (rank + 1) * part))
                if span:
                    found.append((rank, self._index, self._at, span))
            self._at, left, done = self._at + count, left - count, done + count
        return found

    def finish(self, rank: _Rank) -> None:
        left = sum(self._lengths[self._index :]) - self._at
        if left:
            raise CheckpointError(
                f"{rank.place}: expected param_shapes to name every parameter, found {left:,} more values"
            )


def _stored(
    ranks: Sequence[_Rank], shape: tuple[int, ...], flats: Sequence[Any], spans: Sequence[Any]
) -> StoredTensor:
    dtypes = {flats[rank][index].dtype for rank, index, *_ in spans} or {torch.float32}
    if len(dtypes) > 1:
        raise CheckpointError(f"expected one format in all ranks, found {sorted(map(str, dtypes))}")
    (dtype,) = dtypes
    chunks = [
        chunk
        for rank, index, at, span in spans
        for chunk in _chunks(ranks[rank].file, shape, flats[rank][index], at, span)
    ]
    return StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _chunks(
    file: str, shape: tuple[int, ...], flat: Described, at: int, span: range
) -> Iterator[StoredChunk]:
    first = flat.position + (flat.offset + at) * flat.dtype.itemsize
    for start, box in boxes_of(shape, span):
        yield StoredChunk(box, file, first + (start - span.start) * flat.dtype.itemsize)


def _frozen(model: Sequence[_Rank]) -> dict[str, StoredTensor]:
    """Parameters that are not trained: each rank has its part of them beside the model."""
    shapes = _shapes(model[0].top("frozen_param_shapes", {}) or {}, model[0])
    tensors = {}
    for name, shape in shapes.items():
        parts = [_a_dict(rank.top("frozen_param_fragments"), rank, "fragments")[name] for rank in model]
        flats = [[rank.tensor(part, name)] for rank, part in zip(model, parts, strict=True)]
        tensors[MODEL + name] = _stored(model, shape, flats, _Walk(flats).take(math.prod(shape)))
    return tensors


def _buffers(first: _Rank) -> dict[str, StoredTensor]:
    module = _a_dict(first.top("module"), first, "module")
    tensors = {}
    for name in _a_list(first.top("buffer_names", []), first, "buffer_names"):
        check_name(name)
        if name not in module:
            continue  # it was not persistent
        found = first.tensor(module[name], name)
        numel = math.prod(found.sizes)
        box = Box((0,) * len(found.sizes), found.sizes)
        start = found.position + found.offset * found.dtype.itemsize
        chunks = (StoredChunk(box, first.file, start),) if numel else ()
        tensors[MODEL + name] = StoredTensor(dtype=found.dtype, shape=found.sizes, chunks=chunks, whole=True)
    return tensors


def _aliases(first: _Rank, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """Further names of tied parameters."""
    shared = first.top("shared_params", {}) or {}
    pairs = shared if isinstance(shared, list) else _a_dict(shared, first, "shared_params").items()
    found = {}
    for name, source in pairs:
        check_name(name)
        check_name(source)
        if MODEL + source in tensors and MODEL + name not in tensors:
            found[MODEL + name] = MODEL + source
    return found


def _settings(
    groups: Sequence[dict[Any, Any]], shapes: Sequence[dict[str, tuple[int, ...]]]
) -> list[dict[str, Any]]:
    """The optimizer's settings by group, as an index has them. The parameters of a group are flat tensors."""
    found: list[dict[str, Any]] = []
    for group in groups:
        own: dict[str, Any] = {"params": [name for index in group["params"] for name in shapes[index]]}
        for key in _SETTINGS:
            value = group.get(key)
            if isinstance(value, bool | int | float):
                own[key] = value
            elif isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value):
                own[key] = {"$tuple": list(value)}
        found.append(own)
    return found


# -- values ----------------------------------------------------------------------------------------------


def _shapes(value: Any, rank: _Rank) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, shape in _a_dict(value, rank, "shapes of parameters").items():
        check_name(name)
        found[name] = ints_of(shape)
    return found


def _number_of(rank: _Rank, value: Any, what: str) -> float:
    """A number, or the only value of a tensor: it is read here."""
    if isinstance(value, Record):
        value = rank.tensor(value, what)
    if isinstance(value, Described):
        if math.prod(value.sizes) != 1:
            raise CheckpointError(f"{rank.place}: {what}: expected one number, found {value.sizes}")
        start = value.position + value.offset * value.dtype.itemsize
        with open_file(rank.place) as file:
            raw = bytearray(read_part(file, start, value.dtype.itemsize))
        value = torch.frombuffer(raw, dtype=value.dtype).item()
    if not isinstance(value, int | float) or not abs(value) < _MAX_STEP:
        raise CheckpointError(f"{rank.place}: {what}: expected a number, found {type(value).__name__}")
    return float(value)


def _a_dict(value: Any, rank: _Rank, what: str) -> dict[Any, Any]:
    """A dict, or the record of an ordered one."""
    if isinstance(value, Record) and value.is_a("collections", "OrderedDict") and value.args in ((), ([],)):
        return dict(value.items)
    if not isinstance(value, dict):
        raise CheckpointError(f"{rank.place}: {what}: expected a dict, found {_named(value)}")
    return value


def _a_list(value: Any, rank: _Rank, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"{rank.place}: {what}: expected a list, found {_named(value)}")
    return list(value)


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > 50:
        raise CheckpointError("containers inside each other")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_plain(each, depth + 1) for each in value)
    if isinstance(value, Record) and value.is_a("collections", "OrderedDict"):
        value = dict(value.items)
    if isinstance(value, dict):
        return {_plain(key, depth + 1): _plain(each, depth + 1) for key, each in value.items()}
    raise CheckpointError(f"found {_named(value)}")


def _named(value: Any) -> str:
    return str(value.callee)[:80] if isinstance(value, Record) else type(value).__name__
