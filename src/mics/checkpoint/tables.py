"""What is in a checkpoint, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mics.checkpoint.contents import is_lost
from mics.checkpoint.names import is_state, tensors_of_model
from mics.checkpoint.records import Index, StoredTensor, dtype_name
from mics.checkpoint.storage import Place
from mics.utils.numbers import volume

_MAX_FILES: Final = 16
_LOST: Final = "lost in rounding"  # as the memory report says


def tables_of(folder: Place, index: Index, *, tensors: bool) -> RenderableType:
    """Everything that is known without reading values."""
    parts: list[RenderableType] = [_summary(folder, index), Text(), _contents(index), Text(), _files(index)]
    if tensors:
        parts += [Text(), _tensors(index)]
    return Group(*parts)


def _summary(folder: Place, index: Index) -> Table:
    table = Table.grid(padding=(0, 2))
    about = index.about
    known = {
        "checkpoint": str(folder),
        "format": about.get("format", "mics"),
        "step": about.get("step"),
        "saved": about.get("time"),
        "ranks": about.get("world_size"),
        "partition size": about.get("partition_size"),
        "torch": about.get("torch"),
        "imported from": about.get("imported_from"),
        "parameters": f"{_num_parameters(index):,}",
        "note": about.get("not_read") or None,
    }
    for name, value in known.items():
        if value is not None:
            shown = str(value)
            table.add_row(name, Text(shown if shown.isprintable() else repr(shown)))
    return table


def _num_parameters(index: Index) -> int:
    found = [index.tensors[key] for key in tensors_of_model(index).values()]
    return sum(math.prod(tensor.shape) for tensor in found if not tensor.whole)  # those are buffers


def _kinds(index: Index) -> dict[str, str]:
    """Each tensor: model, optimizer, what rounding has lost, or other."""
    model = set(tensors_of_model(index).values())

    def kind(key: str) -> str:
        if key in model:
            return "model"
        return "optimizer" if is_state(key) else _LOST if is_lost(key) else "other"

    return {key: kind(key) for key in index.tensors}


def _contents(index: Index) -> Table:
    table = Table(title="Contents", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (("", "left"), ("tensors", "right"), ("size", "right"), ("formats", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    kinds = _kinds(index)
    for kind in ("model", "optimizer", _LOST, "other"):
        found = [index.tensors[key] for key, each in kinds.items() if each == kind]
        if found:
            nbytes = sum(tensor.nbytes for tensor in found)
            table.add_row(kind, f"{len(found):,}", volume(nbytes), ", ".join(_formats(found)))
    own = [file.nbytes for name, file in index.files.items() if name.startswith("rank-")]
    if own:
        table.add_row("each rank's own", "", volume(sum(own)), "random state, extra state")
    if index.aliases:
        table.add_row("tied names", f"{len(index.aliases):,}", "", "written once")
    return table


def _formats(tensors: Iterable[StoredTensor]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for tensor in tensors:
        name = dtype_name(tensor.dtype)
        seen[name] = seen.get(name, 0) + tensor.nbytes
    yield from sorted(seen, key=lambda name: -seen[name])


def _files(index: Index) -> Table:
    table = Table(title="Files", title_justify="left", box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("size", justify="right")
    table.add_column("digests", justify="right")
    shown = list(index.files.items())
    for name, file in shown[:_MAX_FILES]:
        table.add_row(name, volume(file.nbytes), f"{len(file.digests):,}" if file.digests else "none")
    rest = shown[_MAX_FILES:]
    if rest:
        table.add_row(f"and {len(rest):,} more", volume(sum(file.nbytes for _, file in rest)), "")
    total = sum(file.nbytes for _, file in shown)
    table.add_row("together", volume(total), "")
    return table


def _tensors(index: Index) -> Table:
    table = Table(title="Tensors", title_justify="left", box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("shape")
    table.add_column("format")
    table.add_column("size", justify="right")
    table.add_column("parts", justify="right")
    for name, tensor in index.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "-"
        table.add_row(name, shape, dtype_name(tensor.dtype), volume(tensor.nbytes), str(tensor.num_parts))
    for alias, name in index.aliases.items():
        table.add_row(alias, f"tied to {name}", "", "", "")
    return table
