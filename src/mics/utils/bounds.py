"""What the numbers of settings may be, said where they are declared.

For example ``steps: Annotated[int, Bounds(least=1, most=10**9)] = 120``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_type_hints

from mics.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """From ``least``, or ``above`` a number, to ``most`` or ``below`` one. An end that is NaN is open."""

    least: float = math.nan
    above: float = math.nan
    most: float = math.nan
    below: float = math.nan

    def expected(self, value: float) -> str:
        """What ``value`` is not; empty: it is inside."""
        if math.isnan(value):
            return "a number"
        if value < self.least:
            return f"at least {self.least:,}"
        if value <= self.above:
            return f"a number above {self.above:,}"
        if value > self.most:
            return f"at most {self.most:,}"
        return f"a number below {self.below:,}" if value >= self.below else ""


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Raise if a number of a settings class is outside of its bounds. What is unset is inside."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        for each in getattr(hint, "__metadata__", ()):
            expected = each.expected(value) if isinstance(each, Bounds) and value is not None else ""
            if expected:
                raise SettingsError(f"{prefix}{name}: expected {expected}, found {value!r}")
