"""Models by the names that commands take."""

from __future__ import annotations

from pathlib import Path

import pytest

import mics
from mics.cost.modules import find_model


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise KeyError('missing')", "KeyError: 'missing'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def build(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_imported(
    source: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module raises is said in one line, whatever it is; not with its own exit code."""
    name = f"module_{found[:4].lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(mics.SettingsError, match=f"expected a module that can be imported, found {found}"):
        find_model(f"{name}:build", seq_len=16)


def test_a_module_needs_a_name() -> None:
    with pytest.raises(mics.SettingsError, match="expected module:function"):
        find_model(".x:build", seq_len=16)
