"""``mics checkpoint``: show, verify, export, import."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
import tyro
from rich.console import Console

from mics.checkpoint.arguments import as_place
from mics.checkpoint.blocks import verify_file
from mics.checkpoint.exporting import plan_export, write_export
from mics.checkpoint.formats.dcp import located
from mics.checkpoint.importing import import_safetensors
from mics.checkpoint.opening import find_checkpoint, open_checkpoint
from mics.checkpoint.records import Index
from mics.checkpoint.storage import Place
from mics.checkpoint.tables import tables_of
from mics.errors import CheckpointError, SettingsError
from mics.utils.command_line import parse_commands
from mics.utils.numbers import volume
from mics.utils.progress import long_work

_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "keep": None}
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WIDE: Final = 240
_PATH: Final = (
    "a checkpoint of mics, a folder of them (the latest is taken), one of torch.distributed.checkpoint, or a "
    "folder of safetensors. A path, or a URL such as s3://bucket/run"
)
_OUT: Final = "The folder to make: a path or a URL."

_Source = Annotated[tyro.conf.Positional[str], tyro.conf.arg(help=_PATH, metavar="PATH")]
_Out = Annotated[tyro.conf.Positional[str], tyro.conf.arg(help=_OUT, metavar="OUT")]


def checkpoint(args: Sequence[str]) -> int:
    """Parse and run one of the commands."""
    try:
        return parse_commands(
            {"show": show, "verify": verify, "export": export, "import": import_},
            args,
            prog="mics checkpoint",
            description="Look into checkpoints, check them, and convert them. No pickle is ever loaded.",
        )
    except CheckpointError as error:
        print(f"mics checkpoint: error: {error}", file=sys.stderr)
        return 1


def show(path: _Source, *, tensors: bool = False) -> int:
    """What is inside, with sizes. No values are read.

    Args:
        path: the checkpoint.
        tensors: List every tensor.
    """
    folder, index = _open(path)
    # Lines of a table that goes to a file or to grep are not folded.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(tables_of(folder, index, tensors=tensors))
    return 0


def verify(path: _Source) -> int:
    """Read every block of every file. Exit code 1 where one is not what was written.

    Args:
        path: the checkpoint.
    """
    folder, index = _open(path)
    nbytes = sum(file.nbytes for file in index.files.values())
    with long_work("verify", nbytes) as work:
        torn = [*_torn_files(folder, index, work.advance), *_torn_items(folder, index)]
    for problem in torn:
        print(problem, file=sys.stderr)
    if torn:
        return 1
    whole = all(file.digests for file in index.files.values())
    what = "every block is what was written" if whole else "sizes are right; it has no digests to compare"
    print(f"ok: {len(index.files)} files, {volume(nbytes)}: {what}")
    return 0


def export(
    path: _Source,
    out: _Out,
    *,
    dtype: Literal["keep", "bf16", "fp32"] = "keep",
    shard_size: str = "5GB",
    config: Path | None = None,
) -> int:
    """Write the model as safetensors that transformers' from_pretrained loads.

    Args:
        path: the checkpoint.
        out: the folder to make.
        dtype: Format of the floating-point tensors; keep: as they are, which is that of the masters.
        shard_size: The most that one file may have: 5GB, 500MB, 2GiB.
        config: A config.json, or a folder of a model with one: it is copied, with generation settings and
            tokenizer.
    """
    most = parse_size(shard_size)
    folder, index = _open(path)
    exporting = plan_export(folder, index, dtype=_DTYPES[dtype], shard_nbytes=most)
    with long_work("export", exporting.nbytes) as work:
        write_export(exporting, as_place(out, "OUT"), config=config, progress=work.advance)
    written = sum(tensor.nbytes for file in exporting.files.values() for tensor in file)
    print(
        f"written: {out}: {len(exporting.called):,} tensors, {volume(written)}, {len(exporting.files)} files"
    )
    if config is None:
        print("from_pretrained also needs a config.json there; --config copies it", file=sys.stderr)
    return 0


def import_(
    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="a folder of safetensors", metavar="PATH")],
    out: _Out,
) -> int:
    """Make a checkpoint of mics from safetensors. mics.load reads safetensors directly too.

    Args:
        path: the folder.
        out: the folder to make.
    """
    folder, index = _open(path)
    nbytes = sum(tensor.nbytes for tensor in index.tensors.values())
    with long_work("import", nbytes) as work:
        import_safetensors(folder, index, as_place(out, "OUT"), progress=work.advance)
    print(f"written: {out}: {len(index.tensors):,} tensors, {volume(nbytes)}")
    return 0


def parse_size(text: str) -> int:
    """5GB, 500MB, 2GiB or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B?)", text.strip().upper())
    if match is None or (match[3] and not match[2]) or float(match[1]) <= 0:
        raise SettingsError(f"--shard-size: expected a size such as 5GB or 500MB, found {text!r}")
    unit = _BINARY[match[2]] if match[3] else _UNITS[match[2]]
    return max(1, int(float(match[1]) * unit))


def _open(path: str) -> tuple[Place, Index]:
    folder = find_checkpoint(as_place(path, "PATH"))
    try:
        return folder, open_checkpoint(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be read: {error.strerror or error}") from None


def _torn_files(folder: Place, index: Index, advance: Callable[[int], None]) -> list[str]:
    def problem(name: str) -> str | None:
        try:
            verify_file(folder / name, index.files[name], advance)
        except CheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        return [found for found in workers.map(problem, index.files) if found is not None]


def _torn_items(folder: Place, index: Index) -> Iterator[str]:
    """Parts of tensors whose archives are not what the index says."""
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            try:
                located(folder, name, tensor.dtype, chunk)
            except (CheckpointError, OSError) as error:
                yield str(error)
