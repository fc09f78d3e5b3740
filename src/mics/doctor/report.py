"""The report: a line for each finding, worst first, and the verdict; or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.text import Text

from mics.doctor.findings import Finding, is_go, worst_first
from mics.doctor.survey import Survey
from mics.utils.numbers import plural, seconds

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_WIDTH: Final = 17


def show(findings: Sequence[Finding], *, took: float, console: Console) -> None:
    """Every finding on a line of its own: lines can be searched, and are not cut."""
    for finding in worst_first(findings):
        line = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
        line.append(f"{finding.check:<{_WIDTH}}", style="bold")
        line.append(finding.as_line(), style="default")
        console.print(line, soft_wrap=True, highlight=False)
    console.print(Text(verdict(findings, took=took), style="bold"), soft_wrap=True, highlight=False)


def verdict(findings: Sequence[Finding], *, took: float) -> str:
    """``no-go: 2 failures, 1 warning (in 12.3 s)``."""
    failures, warnings = (sum(each.level == level for each in findings) for level in ("fail", "warn"))
    counted = f"{plural(failures, 'failure')}, {plural(warnings, 'warning')}"
    return f"{'go' if is_go(findings) else 'no-go'}: {counted} (in {seconds(took)})"


def as_json(survey: Survey, findings: Sequence[Finding], *, took: float) -> str:
    """Findings, and the facts they come from."""
    found = {
        "go": is_go(findings),
        "seconds": round(took, 3),
        "num_ranks": survey.num_ranks,
        "hosts": survey.hosts,
        "findings": [asdict(finding) for finding in worst_first(findings)],
        "ranks": {rank: asdict(facts) for rank, facts in sorted(survey.ranks.items())},
        "clocks": {node: asdict(facts) for node, facts in survey.clocks.items()},
        "folders": {node: asdict(facts) for node, facts in survey.folders.items()},
        "computed": {rank: asdict(facts) for rank, facts in sorted(survey.computed.items())},
        "transfers": [asdict(each) for each in survey.transfers],
    }
    return json.dumps(found, indent=2)
