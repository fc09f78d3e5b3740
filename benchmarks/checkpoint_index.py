"""The index of a checkpoint of 10^12 parameters on 512 ranks: bytes and seconds, gathered and in parts.

    python benchmarks/checkpoint_index.py
    python benchmarks/checkpoint_index.py --model gpt-small --layers 2 --ranks 16 --gathered-ranks 16

No rank runs and no values exist: what ranks tell each other, write and read is made from the layout alone,
by the library's own functions. With one index the first rank gathers what all ranks have of all tensors:
that is done for ``--gathered-ranks`` of them, and everything but "bytes of a rank" grows with their number.
With parts each rank writes its own; the first has one line for each rank and one for each tensor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import dumps, loads
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mics.bench.models import BENCH_MODELS
from mics.checkpoint import apart
from mics.checkpoint.formats.dcp_writing import ITEM_NBYTES, ItemWriter, PickledValues, WrittenItem
from mics.checkpoint.index import _to_json, read_index, write_head
from mics.checkpoint.parts import WrittenPart, write_part
from mics.checkpoint.records import BLOCK_NBYTES, Index, StoredChunk, StoredFile, StoredTensor, TensorPart
from mics.checkpoint.storage import Draft, LocalStorage
from mics.layout.flat import UnitLayout, plan_layout
from mics.models.gpt import GPT, Attention, Linear

_ARCHIVE_NBYTES = 1 << 10  # what torch.save adds to values, about


@dataclass(frozen=True)
class Model:
    """Units of a model over ranks, with AdamW: what each rank writes follows from them."""

    layouts: list[UnitLayout]
    num_ranks: int

    @classmethod
    def of(cls, name: str, layers: int | None, num_ranks: int) -> Model:
        config = BENCH_MODELS[name].config
        with torch.device("meta"):
            model = GPT(replace(config, num_layers=layers or config.num_layers))
        units: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        owners = _owners(model)
        for param_name, param in model.named_parameters():
            units.setdefault(owners.get(id(param), 0), []).append((param_name, tuple(param.shape)))
        return cls(
            [plan_layout(each, num_chunks=num_ranks, num_pieces=1) for each in units.values()], num_ranks
        )

    def parts(self, rank: int) -> Iterator[TensorPart]:
        """Masters and AdamW's state, as ``parts_to_save`` has them."""
        for layout in self.layouts:
            span = layout.piece_span(rank, 0)
            for slot in layout.slots:
                overlap = slot.overlap(span)
                own = range(overlap.start - slot.start, overlap.stop - slot.start)
                if not own:
                    continue
                values = torch.empty(len(own), device="meta")
                state = f"optimizer.state.{slot.name}"
                for name in (f"model.{slot.name}", f"{state}.exp_avg", f"{state}.exp_avg_sq"):
                    yield TensorPart(
                        name=name, shape=slot.shape, span=own, values=values,
                        division=(slot.start, layout.piece_numel),
                    )  # fmt: skip
                if own.start == 0:
                    one = torch.empty(1, device="meta")
                    yield TensorPart(name=f"{state}.step", shape=(), span=range(1), values=one, whole=True)

    def nbytes(self, rank: int) -> int:
        return sum(part.nbytes for part in self.parts(rank))


def _owners(model: nn.Module) -> dict[int, int]:
    """Parameters by the unit inside a block that they belong to."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, Attention | Linear):
            for param in module.parameters():
                found.setdefault(id(param), id(module))
    return found


def written(model: Model, rank: int) -> tuple[ItemWriter, list[WrittenItem], dict[str, StoredFile]]:
    """What a rank would have written, without values."""
    writer = ItemWriter(list(model.parts(rank)), aliases={}, values=PickledValues())
    name, at, items = f"__{rank}_0.distcp", 0, []
    for item in writer.plan().items:
        assert item.tensor_data is not None
        box = apart_box(item.tensor_data.chunk)
        nbytes = 4 * box.numel
        chunk = StoredChunk(box, name, at + _ARCHIVE_NBYTES // 2)
        items.append(WrittenItem(item.index, _StorageInfo(name, at, nbytes + _ARCHIVE_NBYTES), chunk))
        at += nbytes + _ARCHIVE_NBYTES
    digests = tuple(f"{number:032x}" for number in range(-(-at // BLOCK_NBYTES)))
    return writer, items, {name: StoredFile(nbytes=at, digest="xxh3_128", digests=digests)}


def apart_box(chunk: object) -> object:
    from mics.checkpoint.formats.dcp_writing import _box_of

    return _box_of(chunk)  # type: ignore[arg-type]


def gathered(model: Model, num_ranks: int) -> dict[str, float]:
    """One index, made by the first rank of what ``num_ranks`` of the ranks tell it."""
    plans, reports = [], []
    for rank in range(num_ranks):
        writer, items, files = written(model, rank)
        tensors = {
            part.name: StoredTensor(dtype=torch.float32, shape=part.shape, whole=part.whole)
            for part in model.parts(rank)
        }
        plans.append(dumps(writer.plan()))
        reports.append(dumps((items, tensors, files)))
    began = time.process_time()
    every = [loads(plan) for plan in plans]
    metadata = _described(writer, every)
    found = [loads(report) for report in reports]
    chunks: dict[str, list[StoredChunk]] = {}
    tensors, files = {}, {}
    for items, theirs, own in found:
        tensors.update(theirs)
        files.update(own)
        for item in items:
            chunks.setdefault(item.key.fqn, []).append(item.chunk)
    tensors = {name: replace(each, chunks=tuple(chunks[name])) for name, each in tensors.items()}
    dcp = writer.pickled_metadata(metadata, (item for items, _, _ in found for item in items))
    text = json.dumps(_to_json(Index(tensors=tensors, files=files)), separators=(",", ":")).encode()
    made = time.process_time()
    json.loads(text)
    return {
        "bytes of a rank, to the first": len(plans[-1]) + len(reports[-1]),
        "bytes at the first rank": sum(map(len, plans)) + sum(map(len, reports)),
        "CPU seconds to make and write": made - began,
        "bytes of mics.json": len(text),
        "bytes of .metadata": len(dcp),
        "CPU seconds to parse it, on every rank": time.process_time() - made,
    }


def _described(writer: ItemWriter, plans: list) -> object:  # type: ignore[type-arg]
    """Of some of the ranks: what the others have is missing, and not looked for."""
    import mics.checkpoint.formats.dcp_writing as dcp_writing

    check, dcp_writing._check_covered = dcp_writing._check_covered, lambda name, tensor: None
    try:
        return writer.describe(plans)
    finally:
        dcp_writing._check_covered = check


def in_parts(model: Model, folder: Path) -> dict[str, float]:
    """A part from each rank: all of one rank's, and the head of all of them."""
    num_ranks = model.num_ranks
    draft = Draft(folder=folder, where=folder)
    writers = tuple(range(num_ranks))
    tables = [apart.described(model.parts(rank), writers, rank) for rank in range(num_ranks)]
    told = [len(dumps(table)) for table in tables]
    began = time.process_time()
    tensors = apart.joined(tables)
    joined = time.process_time() - began
    lines, seconds = [], []
    for rank in range(num_ranks):
        if rank < 3 or rank == num_ranks - 1:
            _, items, files = written(model, rank)
            began = time.process_time()
            apart.check_parts(model.parts(rank), tensors, rank)
            found = apart.items_of(model.parts(rank), items)
            lines.append(write_part(draft, rank, found, files))
            seconds.append(time.process_time() - began)
        else:
            name = f"__{rank}_0.distcp"
            lines.append(
                WrittenPart(
                    name=f"rank-{rank}.index.json", nbytes=lines[1].nbytes, sha256="0" * 64, files={name: 0}
                )
            )
    began = time.process_time()
    write_head(draft, Index(tensors=tensors, files={}), lines, ITEM_NBYTES)
    head = time.process_time() - began
    return {
        "bytes of a rank, to the first": told[1] + len(dumps(lines[1])),
        "bytes at the first rank": sum(told[1:]) + sum(len(dumps(line)) for line in lines[1:]),
        "bytes of the table, to all": len(dumps(tensors)),
        "CPU seconds to make and write": joined + max(seconds) + head,
        "bytes of mics.json": (folder / "mics.json").stat().st_size,
        "bytes of a rank's part": lines[1].nbytes,
        "bytes of all parts": lines[1].nbytes * (num_ranks - 1) + lines[0].nbytes,
        "CPU seconds to read, rank 1 of as many": _read(model, folder, 1, num_ranks),
        "CPU seconds to read, rank 0 of half as many": _read(model, folder, 0, num_ranks // 2),
    }


def _read(model: Model, folder: Path, rank: int, num_ranks: int) -> float:
    """All chunks that a rank of another world needs: the head, and the parts that it overlaps."""
    own = [replace(layout, num_chunks=num_ranks) for layout in model.layouts]
    wanted = list(Model(own, num_ranks).parts(rank))
    began = time.process_time()
    index = read_index(folder)
    for part in wanted:
        index.chunks_of(part.name, part.span)
    return time.process_time() - began


def main() -> None:
    """Print both, side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-1t")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--gathered-ranks", type=int, default=16)
    args = parser.parse_args()
    model = Model.of(args.model, args.layers, args.ranks)
    names = {part.name for part in model.parts(0)}
    items = len(written(model, 1)[1])
    print(
        f"{args.model}, {args.ranks} ranks: {len(model.layouts)} units, {len(names):,} tensors on rank 0, ",
        end="",
    )
    print(f"{items:,} boxes and {model.nbytes(1) / 1e9:.1f} GB of each rank\n")
    once = gathered(model, args.gathered_ranks)
    scale = args.ranks / args.gathered_ranks
    with TemporaryDirectory() as folder:
        assert isinstance(LocalStorage(), LocalStorage)
        parts = in_parts(model, Path(folder))
    print(f"| | one index, {args.gathered_ranks} ranks | times {scale:g} | in parts |\n|---|---:|---:|---:|")
    for name in {**once, **parts}:
        alone = name == "bytes of a rank, to the first"
        cells = [once.get(name), None if name not in once else once[name] * (1 if alone else scale)]
        print(f"| {name} | {' | '.join(_shown(each) for each in [*cells, parts.get(name)])} |")


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


if __name__ == "__main__":
    main()
