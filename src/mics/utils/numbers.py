"""Numbers as people write them, for every table and sentence that a command prints.

Three digits that count, thousands with commas, units that fit, and never an exponent. Memory is in GiB and
MiB, as allocators count it; what is sent or stored is in GB and MB, as networks and disks count it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from mics.errors import SettingsError

GIB: Final = 2**30
_MIB: Final = 2**20
_DIGITS: Final = 3
_COUNTS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_LETTERS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WRITTEN: Final = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d{1,3})?)\s*([kKmMbBgGtT]?)")


class TokenCount(int):
    """Tokens, in settings: 1M, 4e6 and 4_000_000 are read as well as 4000000."""


def parse_count(text: str, *, setting: str) -> int:
    """``1M``, ``1.5B``, ``4e6``, ``4_000_000``, ``4,000,000``: a whole number above 0."""
    match = _WRITTEN.fullmatch(text.strip())
    found = math.nan
    if match is not None:
        found = float(re.sub("[_,]", "", match[1])) * _LETTERS[match[2].upper()]
    if not math.isfinite(found) or found < 1 or found != (whole_number := round(found)):
        raise SettingsError(
            f"{setting}: expected a whole number above 0, such as 1M, 1.5B, 4e6 or 4_000_000, found "
            f"{text!r}; K, M, B and T are thousands, millions, billions and trillions"
        )
    return whole_number


def fixed(number: float, digits: int = _DIGITS) -> str:
    """``6.47``, ``12.0``, ``214``, ``1,250``, ``0.0358``: so many digits that count, and no exponent."""
    if not math.isfinite(number):
        return {math.inf: "infinite", -math.inf: "-infinite"}.get(number, "NaN")
    if number == 0:
        return "0"
    return f"{number:,.{max(0, digits - 1 - _exponent(number, digits))}f}"


def whole(number: float) -> str:
    """``648,525``."""
    return f"{number:,.0f}"


def count(number: float) -> str:
    """``20.2 B``, ``100 B``, ``1.05 M``; below a million every digit: ``12,345``."""
    for unit, name in _COUNTS:
        if number >= unit or float(f"{number:.{_DIGITS - 1}e}") >= unit:
            shown = fixed(number / unit)
            return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {name}"
    return whole(number) if number == round(number) else fixed(number)


def tokens(number: float) -> str:
    """``300 B tokens``."""
    return f"{count(number)} token{'' if number == 1 else 's'}"


def plural(number: int, word: str) -> str:
    """``1 node``, ``2,048 sequences``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def seconds(number: float) -> str:
    """``12.0 s``, ``1,250 s``, ``35.8 ms``, ``120 us``."""
    shown = float(f"{number:.{_DIGITS - 1}e}")
    if shown >= 1 or shown <= 0:
        return f"{fixed(number)} s"
    return f"{fixed(1e3 * number)} ms" if shown >= 1e-3 else f"{fixed(1e6 * number)} us"


def milliseconds(number: float) -> str:
    """Seconds as ``934.2 ms``, for figures that are compared with each other."""
    return f"{1e3 * number:,.1f} ms"


def duration(number: float) -> str:
    """Seconds as ``90 s``, ``45 min``, ``12.5 h`` or ``4.5 days``: how long to wait."""
    if number < 120:
        return seconds(number)
    if number < 2 * 3600:
        return f"{number / 60:.0f} min"
    return f"{number / 3600:,.1f} h" if number < 48 * 3600 else days(number)


def roughly(number: float) -> str:
    """Seconds as ``8 s``, ``45 min``, ``12.5 h`` or ``4.5 days``: how long something took, or has left."""
    return f"{number:.0f} s" if number < 119.5 else duration(max(number, 120.0))


def clock(number: float) -> str:
    """Seconds as ``0:21``, ``12:05`` or ``26:02:03``: what changes while somebody looks at it."""
    whole_hours, rest = divmod(max(0, int(number)), 3600)
    return f"{whole_hours}:{rest // 60:02}:{rest % 60:02}" if whole_hours else f"{rest // 60}:{rest % 60:02}"


def hours(number: float) -> str:
    """Seconds as ``2,000 h``."""
    found = number / 3600
    return f"{whole(found) if found >= 100 else fixed(found)} h"


def days(number: float) -> str:
    """Seconds as ``4.5 days``, ``0.059 days``."""
    found = number / 86400
    return f"{found:,.1f} days" if found >= 0.95 else f"{fixed(found, 2)} days"


def dollars(number: float) -> str:
    """``$45.20``, ``$12,300``, ``$1.2 M``."""
    for unit, name in _COUNTS:
        if number >= 0.9995 * unit:
            found = number / unit
            return f"${whole(found) if found >= 99.95 else f'{found:.1f}'} {name}"
    return f"${whole(number) if number >= 100 else f'{number:.2f}'}"


def percent(share: float) -> str:
    """``43.1%``; of what is very small two digits: ``0.0012%``."""
    found = 100 * share
    return f"{fixed(found, 2)}%" if 0 < abs(found) < 0.05 else f"{found:,.1f}%"


def times(ratio: float) -> str:
    """``1.29 x``."""
    return f"{ratio:,.2f} x"


def tflops(number: float) -> str:
    """TFLOP/s without the unit: ``156``, ``0.0451``."""
    return fixed(number)


def in_gib(nbytes: float) -> str:
    """Memory in GiB without the unit: ``36.0``, ``4.70``."""
    found = nbytes / GIB
    return f"{found:,.1f}" if abs(found) >= 9.995 else f"{found:.2f}"


def memory(nbytes: float) -> str:
    """``36.0 GiB``, ``4.70 GiB``, ``12.5 MiB``, ``16.0 KiB``: what memory holds."""
    if 0 < abs(nbytes) < _MIB / 10:
        return f"{fixed(nbytes / 1024)} KiB"
    return f"{in_gib(nbytes)} GiB" if abs(nbytes) >= GIB else f"{fixed(nbytes / _MIB)} MiB"


def volume(nbytes: float) -> str:
    """``12.3 GB``, ``512 B``: what is sent or stored."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{whole(nbytes) if unit == 'B' else fixed(nbytes)} {unit}"
        nbytes /= 1000
    return f"{fixed(nbytes)} TB"


def _exponent(number: float, digits: int) -> int:
    """Of ten, once it is rounded to so many digits."""
    return int(f"{number:.{digits - 1}e}".partition("e")[2])
