"""Draw the README's picture from dated results: python scripts/draw_step_times.py docs/step-times.png"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
HIDING, STAYING = RESULTS / "hiding_h200_2026-11-15.md", RESULTS / "staying_h200_2026-11-16.md"
SYSTEMS = {
    "mics": ("mics", "#1f6feb"),
    "peer": ("HSDP (sharded over 512: FSDP2)", "#b4532a"),
    "kept": ("HSDP, parameters kept unsharded within a step", "#e0a458"),
}


def rows(path: Path) -> list[list[str]]:
    """The cells of every table row."""
    found = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in found]


def step_times() -> dict[tuple[int, int], dict[str, float]]:
    """Milliseconds per step by (ranks, p) and system, float32 gradients, two micro-batches."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for cells in rows(HIDING):
        if len(cells) == 12 and cells[2:4] == ["2", "float32"]:
            system = "mics" if cells[4] == "mics" else "peer" if cells[4] in ("hsdp", "fsdp2") else ""
            found.setdefault((int(cells[0]), int(cells[1])), {}).setdefault(system, float(cells[5]))
    for cells in rows(STAYING):  # the same settings, with blocks that stay unsharded
        if (match := re.fullmatch(r"p (\d+)", cells[0])) and cells[1] == "float32" and len(cells) == 9:
            found[512, int(match.group(1))] |= {"mics": float(cells[3]), "kept": float(cells[6])}
    return found


def main(output: Path) -> None:
    times = step_times()
    settings = sorted(times)
    figure, axes = plt.subplots(figsize=(8.4, 3.6), dpi=150, layout="constrained")
    width = 0.27
    for number, (system, (label, color)) in enumerate(SYSTEMS.items()):
        points = [(place, times[key][system]) for place, key in enumerate(settings) if system in times[key]]
        places = [place + (number - 1) * width for place, _ in points]
        bars = axes.bar(places, [ms for _, ms in points], width * 0.94, label=label, color=color)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_xticks(
        range(len(settings)),
        [f"{ranks} GPUs\nsharded over {p}" for ranks, p in settings],
    )
    axes.set_ylabel("step time, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_title("gpt-3.6b; one H200 runs rank 0, the 400 Gbit/s network per node is simulated", fontsize=9)
    figure.savefig(output)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/step-times.png"))
