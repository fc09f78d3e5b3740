"""Pages of the site that list what the source has: flags, environment variables, messages of errors."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import mics
from mics.cli import COMMANDS

_ROOT: Final = Path(__file__).resolve().parents[1]
_DOCS: Final = _ROOT / "docs"
_FOREIGN: Final = ("torch.OutOfMemoryError",)
_GAP: Final = "\0"
pytestmark = pytest.mark.skipif(not _DOCS.exists(), reason="the tests run without the docs")


def _sources(folder: str = "src/mics") -> Iterator[str]:
    for file in sorted((_ROOT / folder).rglob("*.py")):
        yield file.read_text()


def test_every_public_name_is_on_the_page() -> None:
    """docs/reference.md has each name of `mics` once."""
    named = re.findall(r"^::: mics\.(\w+)$", (_DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(mics.__all__)


# -- Environment variables --------------------------------------------------------------------------


def _variables() -> set[str]:
    """Our own, wherever their names are written, and others that are read."""
    found: set[str] = set()
    for text in (*_sources(), *_sources("benchmarks")):
        found |= set(re.findall(r'"(MICS_[A-Z_]+)"', text))
    for text in _sources():
        found |= set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"', text))
        found |= set(re.findall(r'"([A-Z_]+)" (?:not )?in (?:os\.)?environ', text))
    return found


def test_every_variable_is_on_the_page() -> None:
    """docs/environment.md has each variable that mics reads or sets by name."""
    found = _variables()
    assert {"MICS_CLUSTER", "RANK", "LOCAL_RANK", "NCCL_HOSTID"} <= found, "nothing is found any more"
    page = (_DOCS / "environment.md").read_text()
    assert not {name for name in found if f"`{name}`" not in page}


def test_every_variable_of_ours_exists() -> None:
    """And it has no MICS_ variable that the tree does not know."""
    named = set(re.findall(r"`(MICS_[A-Z_]+)`", (_DOCS / "environment.md").read_text()))
    assert named <= _variables()


# -- Errors -----------------------------------------------------------------------------------------


def _text(node: ast.expr) -> str | None:
    """A string as written, with a gap for each value in it; None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or _GAP for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or _GAP) + (_text(node.right) or _GAP)
    return None


def _messages() -> str:
    """All strings of the source, one a line."""
    found = []
    for source in _sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.expr) and (text := _text(node)):
                found.append(text.replace("\n", " "))
    return "\n".join(found)


@pytest.mark.full
def test_quoted_messages_are_those_of_the_source() -> None:
    """Each message in docs/errors.md is one string of the source; `...` stands for what is filled in."""
    quoted = re.findall(r"^- (.+)<br>$", (_DOCS / "errors.md").read_text(), re.MULTILINE)
    quoted = [each for line in quoted for each in re.findall(r"`([^`]+)`", line)]
    assert len(quoted) >= 50
    messages = _messages()
    for message in quoted:
        pattern = ".*".join(re.escape(part) for part in message.split("..."))
        assert message in _FOREIGN or re.search(pattern, messages), f"no message: {message}"


def test_every_error_class_is_on_the_page() -> None:
    """Those of `mics.errors`, which all who catch them may import."""
    page = (_DOCS / "errors.md").read_text()
    classes = [name for name, value in vars(mics.errors).items() if isinstance(value, type)]
    assert "SettingsError" in classes
    assert not [name for name in classes if name not in page]


# -- Results ---------------------------------------------------------------------------------------


def test_every_result_is_on_the_page() -> None:
    """docs/results.md links to each dated table."""
    page = (_DOCS / "results.md").read_text()
    files = sorted((_ROOT / "benchmarks" / "results").glob("*.md"))
    assert files and not [file.name for file in files if f"../benchmarks/results/{file.name}" not in page]


# -- Commands ---------------------------------------------------------------------------------------


def test_page_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has each flag of each command's parser with a meaning, and is the same when made again."""
    monkeypatch.syspath_prepend(str(_ROOT / "scripts"))
    import cli_reference

    page = cli_reference.page()
    assert page == cli_reference.page()
    for command in COMMANDS:
        assert f"## mics {command}\n" in page
        for parser in cli_reference.parsers_of(command, gpu=False):
            for action in cli_reference._actions(parser):
                for flag in action.option_strings:
                    assert f"`{flag}" in page, flag
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    assert len(rows) > 100
    assert not [row for row in rows if len(row.split(" | ")) != 3 or len(row.split(" | ")[2]) < 8]
    sys.modules.pop("cli_reference")
