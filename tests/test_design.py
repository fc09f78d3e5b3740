"""docs/design.md is a tour of files and functions: each of them must be there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).parent.parent
_DOCS: Final = sorted([_ROOT / "docs" / "design.md", *(_ROOT / "docs" / "decisions").glob("*.md")])
_MAX_COLUMNS: Final = 120
_NAMED: Final = re.compile(r"`((?:\w+/)*\w+\.py)(?:: ([\w.]+))?`")
_LINK: Final = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

pytestmark = pytest.mark.skipif(not _DOCS[0].exists(), reason="the tests run without the docs")


def _names(file: Path) -> Iterator[str]:
    """Functions, classes, their methods, and constants."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("page", _DOCS, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Files by their path in src/mics or in the repository, and what they are said to hold."""
    wrong = []
    for path, name in _NAMED.findall(page.read_text()):
        file = next((root / path for root in (_ROOT / "src" / "mics", _ROOT) if (root / path).exists()), None)
        if file is None or (name and name not in set(_names(file))):
            wrong.append(f"{path}: {name}".removesuffix(": "))
    assert wrong == []


@pytest.mark.parametrize("page", _DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", _DOCS, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > _MAX_COLUMNS] == []
