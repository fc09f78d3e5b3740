"""What a check says: one line, with the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["ok", "warn", "fail"]
_ORDER: Final[tuple[Level, ...]] = ("fail", "warn", "ok")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    level: Level
    check: str
    """The check that found it: ``clocks``."""
    what: str
    """What was expected and what was found."""
    where: str = ""
    """Hosts and ranks; empty: everywhere."""
    way_out: str = ""
    """What to do; empty where all is well."""

    def as_line(self) -> str:
        """``host-2 (rank 4): expected ..., found ...; do ...``."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f"; {self.way_out}" if self.way_out else "")


def ok(check: str, what: str, where: str = "") -> Finding:
    return Finding(level="ok", check=check, what=what, where=where)


def warn(check: str, what: str, *, where: str = "", way_out: str) -> Finding:
    """A run would work, and be slower or more fragile than it need be."""
    return Finding(level="warn", check=check, what=what, where=where, way_out=way_out)


def fail(check: str, what: str, *, where: str = "", way_out: str) -> Finding:
    """A run would not start, not finish, compute wrong numbers or crawl."""
    return Finding(level="fail", check=check, what=what, where=where, way_out=way_out)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.level))


def is_go(findings: Iterable[Finding]) -> bool:
    return all(finding.level != "fail" for finding in findings)
