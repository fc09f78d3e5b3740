"""Code blocks of Markdown pages and how they run on ranks; `test_docs.py` says what a page may write."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

ROOT: Final = Path(__file__).resolve().parents[1]
NOT_RUN: Final = ("log.md", "decisions")
"""Pages that say what was so at the time."""
_FENCE: Final = re.compile(r"(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)(?P<rest>.*)")
_EXAMPLES: Final = {file.read_text() for file in (ROOT / "examples").glob("*.py")}
"""`tests/test_examples.py` runs these."""
_SNIPPET: Final = re.compile(r'--8<-- "(.+)"')
_OWN_GROUP: Final = ("init_process_group(", "mics.emulate(")

SHORTER: Final = {
    "docs/guide.md": {"randint(256, (256, 33))": "randint(256, (64, 33))"},
    "docs/tutorials/fine-tune-hugging-face.md": {
        '"num_hidden_layers": 4': '"num_hidden_layers": 2',
        "epoch in range(4)": "epoch in range(2)",
        "text[: 640 * 64])).view(640, 64)": "text[: 96 * 64])).view(96, 64)",
        "sequences[:512], sequences[512:]": "sequences[:64], sequences[64:]",
        ", 64)[512:]": ", 64)[64:]",
    },
    "docs/tutorials/one-gpu-to-eight-nodes.md": {
        "randint(97, (4096, 16))": "randint(97, (256, 16))",
        "step % 32": "step % 2",
    },
    "docs/tutorials/survive-failures.md": {
        "NUM_STEPS, GLOBAL_BATCH = 400, 64": "NUM_STEPS, GLOBAL_BATCH = 30, 64",
        "step % 50": "step % 10",
    },
}
"""Pages that train for long: what is replaced in their blocks. They still report, save and prune."""

_PLAIN: Final = """
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mics
from mics.models import GPT, GPTConfig

device = torch.device("cpu")
torch.manual_seed(0)
model = GPT(GPTConfig(num_layers=3, num_heads=2, hidden_size=32, vocab_size=64, seq_len=16))
batches = [torch.randint(64, (2, 17)) for _ in range(2)]

def loss_of(model, tokens):
    return model(tokens[:, :-1], tokens[:, 1:])
"""
SETUPS: Final = {
    "plain": _PLAIN,
    "sharded": _PLAIN
    + """
mics.shard(model, partition_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
step = 1
loss = loss_of(model, batches[0])
""",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code: its place on the page, its language and what the comment before it says."""

    page: str
    line: int
    language: str  # as the fence has it; "hidden" for a comment, "indented" for a block without a fence
    code: str
    title: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        is_code = self.language in ("python", "diff", "hidden")
        return is_code and "skip" not in self.options and self.code not in _EXAMPLES

    @property
    def source(self) -> str:
        """What runs: of a diff, the new side; with lines numbered as on the page."""
        code = self.code
        if self.language == "diff":
            code = "\n".join(line[2:] for line in code.splitlines() if not line.startswith("-"))
        if "replace" in self.options:
            old, _, new = self.options["replace"].partition(" => ")
            assert old in code, f"{self.page}:{self.line}: expected {old!r} in the block, found none"
            code = code.replace(old, new)
        for old, new in SHORTER.get(self.page, {}).items():
            code = code.replace(old, new)
        return "\n" * self.line + textwrap.dedent(code)


def pages() -> list[str]:
    """README.md and every page under docs/ whose code holds today."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT) for path in found]
    return [name.as_posix() for name in names if not set(NOT_RUN) & set(name.parts)]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page in order."""
    return list(_Reader(page, (ROOT / page).read_text().splitlines()).blocks())


class _Reader:
    """Walks over the lines of a page."""

    def __init__(self, page: str, lines: list[str]) -> None:
        self._page = page
        self._lines = lines
        self._at = 0
        self._options: dict[str, str] = {}  # of the comment before the next block

    def blocks(self) -> Iterator[Block]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if found := re.fullmatch(r"\s*<!-- test: (.+) -->", line):
                self._options |= _options(found[1])
                self._at += 1
            elif line.strip() == "<!-- test":
                yield self._until("-->", "hidden")
            elif (fence := _FENCE.fullmatch(line)) is not None:
                title = re.search(r'title="([^"]+)"', fence["rest"])
                language = fence["language"] or "text"
                yield self._until(fence["fence"], language, title[1] if title else None)
            elif line.startswith("    ") and (self._at == 0 or not self._lines[self._at - 1].strip()):
                yield self._indented()
            else:
                self._at += 1

    def _until(self, end: str, language: str, title: str | None = None) -> Block:
        first = self._at + 1
        last = next(n for n in range(first, len(self._lines)) if self._lines[n].strip() == end)
        self._at = last + 1
        return self._block(first, last, language, title)

    def _indented(self) -> Block:
        first = last = self._at
        while last < len(self._lines) and (
            self._lines[last].startswith("    ") or not self._lines[last].strip()
        ):
            last += 1
        self._at = last
        return self._block(first, last, "indented", None)

    def _block(self, first: int, last: int, language: str, title: str | None) -> Block:
        options, self._options = self._options, {}
        code = textwrap.dedent("\n".join(self._lines[first:last]) + "\n")
        if snippet := _SNIPPET.fullmatch(code.strip()):
            code = (ROOT / snippet[1]).read_text()
        return Block(page=self._page, line=first, language=language, code=code, title=title, options=options)


def _options(text: str) -> dict[str, str]:
    """``ranks=8 setup=plain full``, ``skip`` with a reason, or ``replace OLD => NEW``."""
    first, _, rest = text.partition(" ")
    if first in ("skip", "replace"):
        return {first: rest.strip()}
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def option(blocks: list[Block], name: str) -> str | None:
    """What any block of a page says about the whole of it."""
    return next((block.options[name] for block in blocks if name in block.options), None)


def write_files(blocks: list[Block], folder: Path) -> None:
    """Blocks with a title, as files of a folder that also has what a clone has."""
    for name in ("benchmarks", "examples", "src", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "examples" / "minimal.py", folder)
    for block in blocks:
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.code)


def run_blocks(blocks: list[Block], folder: str, ports: list[int]) -> None:
    """On a rank: every block in order, in one namespace. Each process group takes the next port's store."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    stores = iter(ports)
    before = Path.cwd()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # env:// joins a store and makes none
    os.chdir(folder)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("error", FutureWarning)
            warnings.filterwarnings("ignore", ".*treespec", FutureWarning)  # torch of Lightning
            for block in blocks:
                _enter_group(block, stores)
                _run(block, namespace)
    finally:
        os.chdir(before)
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        namespace.clear()
        _leave_group()


def _enter_group(block: Block, stores: Iterator[int]) -> None:
    """A block that makes its own process group finds none, others find one."""
    makes_one = any(name in block.code for name in _OWN_GROUP)
    if makes_one or "setup" in block.options:
        _leave_group()
    if not dist.is_initialized():
        os.environ["MASTER_PORT"] = str(next(stores))
        if not makes_one:
            dist.init_process_group("gloo")


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(block: Block, namespace: dict[str, Any]) -> None:
    if "setup" in block.options:
        exec(SETUPS[block.options["setup"]], namespace)
    code = compile(block.source, str(ROOT / block.page), "exec")
    expected = block.options.get("raises")
    try:
        exec(code, namespace)
    except Exception as error:
        if expected in [each.__name__ for each in type(error).__mro__]:
            return
        raise AssertionError(f"{block.page}:{block.line}: {traceback.format_exc()}") from None
    assert expected is None, f"{block.page}:{block.line}: expected {expected}, nothing was raised"
