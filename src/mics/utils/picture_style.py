"""Colours and lines that all our pictures share."""

from typing import Any, Final

INK: Final = "#22303c"
BLUE: Final = "#2f6db5"
ORANGE: Final = "#e07b39"
GREEN: Final = "#3f9b7a"
GREY: Final = "#9aa5ae"
GRID: Final = "#dfe4e8"

STYLE: Final[dict[Any, Any]] = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
}
