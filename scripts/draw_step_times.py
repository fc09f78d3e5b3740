#!/usr/bin/env python3
"""Draw the README's picture from a dated result, in both themes.

    scripts/draw_step_times.py docs/step-times.png

writes docs/step-times.png and docs/step-times-dark.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from mics.utils.picture_curves import draw_curves
from mics.utils.picture_style import THEMES, picture

RESULT: Final = (
    Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "step-times_h200_2026-11-17.md"
)
TITLE: Final = "gpt-3.6b: step time from 8 to 512 GPUs, the same batch on each"
SUBTITLE: Final = (
    "One H200 runs rank 0, the network (400 Gbit/s per node) is simulated. "
    "mics and HSDP shard over nodes of 8 GPUs."
)
WORDS: Final = {
    "fsdp2": "FSDP2, over all GPUs",
    "hsdp": "HSDP",
    "hsdp-kept": "HSDP, parameters kept",
    "mics": "mics",
}


def step_times(result: Path) -> dict[str, list[tuple[int, float]]]:
    """By system, (GPUs, milliseconds per step), from the table of ``mics bench``."""
    lines = [line for line in result.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = rows[0]
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows[2:]:
        cells = dict(zip(heads, row, strict=True))
        if cells["accum."] == "2":
            median = float(cells["step ms"].split()[0].replace(",", ""))
            found.setdefault(cells["system"], []).append((int(cells["ranks"]), median))
    return found


def main(output: Path) -> None:
    times = step_times(RESULT)
    for theme in THEMES:
        file = output if theme.name == "light" else output.with_stem(f"{output.stem}-{theme.name}")
        with picture(file, height=4.3, title=TITLE, subtitle=SUBTITLE, theme=theme) as figure:
            axes = figure.subplots()
            draw_curves(axes, {name: times[name] for name in WORDS}, theme=theme, words=WORDS, unit=" ms")
            axes.set_ylabel("ms per step")
        print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/step-times.png"))
