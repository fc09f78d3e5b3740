"""Every code block of README.md and docs/ runs, and every command line on them parses.

What a page may write:

- The ```python blocks of a page run in order, in one namespace and one temporary folder, on 4 gloo ranks: two
  nodes of two, with torchrun's variables. A block that calls `init_process_group` starts without a group;
  the others find one.
- Of a ```diff block the new side runs. A file of examples/ is left to `test_examples.py`.
- A comment right before a fence has options: `<!-- test: setup=sharded -->`.
      ranks=N         for the whole page: 1 to 8 ranks
      full            for the whole page: in `make test-all` alone
      setup=NAME      run one of `doc_blocks.SETUPS` first, in a process group of its own
      raises=NAME     every rank must raise this error
      replace A => B  run with this text replaced, such as a number of steps
      skip REASON     not run: what no CPU can
      printed         of a ```text block: what the command before it prints, line by line
- A comment that begins with the line `<!-- test` holds Python that runs there, unseen by readers.
- A fence with `title="NAME"` is also a file NAME in the folder.
- Lines of ```bash blocks, lines of ```console blocks that begin with `$`, and what looks like a command in an
  indented block go through the real parsers. ```text is not looked at, unless it is ``printed``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist

from mics.cli import main
from tests.doc_blocks import SHORTER, Block, blocks_of, option, pages, run_blocks, write_files
from tests.doc_commands import check_command, command_lines
from tests.ranks import run_ranks

_BLOCKS: Final = {page: blocks_of(page) for page in pages()}
pytestmark = pytest.mark.skipif(len(_BLOCKS) < 2, reason="the tests run without the docs")


def _with_code() -> list[object]:
    """Pages with something to run; a page that shows what another one shows is run once."""
    found, seen = [], set()
    for page, blocks in _BLOCKS.items():
        code = tuple(block.code for block in blocks if block.runs)
        if any(block.runs for block in blocks if block.language != "hidden") and code not in seen:
            seen.add(code)
            marks = [pytest.mark.full] if option(blocks, "full") is not None else []
            found.append(pytest.param(page, id=page, marks=marks))
    return found


@pytest.mark.parametrize("page", _with_code())
def test_code_runs(page: str, tmp_path: Path) -> None:
    """On ranks, as the reader would run it."""
    write_files(_BLOCKS[page], tmp_path)
    num_ranks = int(option(_BLOCKS[page], "ranks") or 4)
    blocks = [block for block in _BLOCKS[page] if block.runs]
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in blocks]
    run_ranks(
        num_ranks,
        run_blocks,
        blocks,
        str(tmp_path),
        [store.port for store in stores],
        launch="variables",
        ranks_per_node=2 if num_ranks == 4 else num_ranks,
    )


def _commands(page: str) -> list[tuple[Block, list[str]]]:
    return [(block, words) for block in _BLOCKS[page] for words in command_lines(block)]


@pytest.mark.parametrize("page", [page for page in _BLOCKS if _commands(page)])
def test_commands_parse(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags exist, values are accepted, and files, modules, extras and targets are there."""
    write_files(_BLOCKS[page], tmp_path)
    monkeypatch.chdir(tmp_path)
    for block, words in _commands(page):
        try:
            check_command(words)
        except (Exception, SystemExit) as error:
            found = capsys.readouterr()
            pytest.fail(f"{page}:{block.line}: {' '.join(words)}\n{error!r}\n{found.out}{found.err}")


def _printed(page: str) -> list[tuple[list[str], Block]]:
    """What is shown of a command's output, with the last command before it."""
    found, words = [], []
    for block in _BLOCKS[page]:
        words = next(iter([*command_lines(block)][::-1]), words)
        if "printed" in block.options:
            found.append((words, block))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "words", "block"),
    [
        pytest.param(page, words, block, id=f"{page}:{block.line}")
        for page in _BLOCKS
        for words, block in _printed(page)
    ],
)
def test_what_a_command_prints_is_what_it_prints_today(
    page: str,
    words: list[str],
    block: Block,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a terminal of 80 columns. A failure prints the block as it should be."""
    monkeypatch.setenv("COLUMNS", "80")
    assert words[0] == "mics" and main(words[1:]) == 0
    found = "\n".join(line.rstrip() for line in capsys.readouterr().out.strip().splitlines())
    if found != block.code.strip():
        pytest.fail(f"{page}:{block.line}: replace the block by what the command prints:\n{found}")


def test_skipped_blocks_say_why() -> None:
    """A block that is not run has a reason of more than a word."""
    for page, blocks in _BLOCKS.items():
        for block in blocks:
            assert len(block.options.get("skip", "two words").split()) > 1, f"{page}:{block.line}"


@pytest.mark.parametrize("page", SHORTER)
def test_pages_that_are_run_shorter_have_what_is_replaced(page: str) -> None:
    code = "".join(block.code for block in _BLOCKS[page] if block.runs)
    assert [old for old in SHORTER[page] if old not in code] == []
