"""One style for all our pictures: sizes, a colour for each role, and a light and a dark theme.

A picture is 1,600 pixels wide and is still readable at half of that, as a README shows it. Colours differ in
lightness too, so that they can be told apart by people who see fewer of them. Pictures for the docs are drawn
in both themes, ``name.png`` and ``name-dark.png``; what a command draws is a light card.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

WIDTH: Final = 10.67  # inches
DPI: Final = 150
TEXT: Final = 12.0  # points: 12 pixels at half size
_TITLE: Final = 15.0
_TITLE_CHARACTERS: Final = 86  # of a line over the whole width
_SUBTITLE_CHARACTERS: Final = 114
_MARGIN: Final = 0.16  # inches


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours by role."""

    name: str
    page: str
    ink: str
    muted: str
    grid: str
    colours: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        """The colour of a role. A variant of a system (``megatron-fsdp-bf16``) has that of the system."""
        while role not in self.colours and "-" in role:
            role = role.rpartition("-")[0]
        return self.colours.get(role, self.muted)

    @property
    def style(self) -> dict[Any, Any]:
        """For ``matplotlib.rc_context``."""
        return {
            "font.size": TEXT,
            "axes.titlesize": TEXT,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 8.0,
            "axes.labelsize": TEXT,
            "axes.facecolor": self.page,
            "figure.facecolor": self.page,
            "savefig.facecolor": self.page,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "text.color": self.ink,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": self.grid,
            "lines.linewidth": 2.4,
            "lines.markersize": 7.0,
            "legend.frameon": True,  # so that no line runs through its words
            "legend.facecolor": self.page,
            "legend.edgecolor": self.page,
            "legend.framealpha": 1.0,
            "legend.fancybox": False,
            "legend.fontsize": TEXT,
        }


LIGHT: Final = Theme(
    name="light",
    page="#ffffff",
    ink="#1f2933",
    muted="#66727f",
    grid="#e3e7eb",
    colours={
        "forward": "#56b4e9",
        "recomputation": "#9fb8d0",
        "backward": "#0a6ab0",
        "optimizer": "#cc79a7",
        "all-gather": "#009e73",
        "reduce-scatter": "#ddb310",
        "hop 2": "#882255",
        "refresh": "#8f7fd0",
        "host copy": "#a0793d",
        "exposed": "#d9480f",
        "other": "#9aa5ae",
        "mics": "#0b69ae",
        "mics-partition": "#57b3e8",
        "hsdp": "#c8700a",
        "hsdp-kept": "#7d4300",
        "fsdp2": "#00855f",
        "ddp": "#c0659a",
        "deepspeed": "#872154",
        "megatron": "#5a4a9c",
    },
)
DARK: Final = Theme(
    name="dark",
    page="#0d1117",
    ink="#e6edf3",
    muted="#97a3af",
    grid="#2a313a",
    colours={
        "forward": "#8ad0f7",
        "recomputation": "#62798f",
        "backward": "#3183cb",
        "optimizer": "#e39bc4",
        "all-gather": "#2cc495",
        "reduce-scatter": "#e9c93f",
        "hop 2": "#c44f82",
        "refresh": "#a797e6",
        "host copy": "#c99e5f",
        "exposed": "#ff7a3d",
        "other": "#76828d",
        "mics": "#58a6ff",
        "mics-partition": "#8bd1f8",
        "hsdp": "#f0a13c",
        "hsdp-kept": "#ffdcaa",
        "fsdp2": "#2fc797",
        "ddp": "#e08fbd",
        "deepspeed": "#c55083",
        "megatron": "#a895e7",
    },
)
THEMES: Final = (LIGHT, DARK)

WORDS: Final[Mapping[str, str]] = {
    "forward": "forward",
    "recomputation": "recomputation",
    "backward": "backward",
    "optimizer": "optimizer",
    "all-gather": "all-gather of parameters",
    "reduce-scatter": "reduce-scatter of gradients (hop 1)",
    "hop 2": "reduction between replicas (hop 2)",
    "refresh": "new parameters to replicas",
    "host copy": "activations to host memory and back",
    "other": "other",
    "exposed": "exposed: a link is busy, nothing computes",
}
"""What a legend calls a role of a timeline, in the order of legends."""


@contextmanager
def picture(
    file: Path, *, height: float, title: str, subtitle: str = "", theme: Theme = LIGHT
) -> Iterator[Figure]:
    """An empty picture under a heading, to be filled; it is written at the end. Needs no screen."""
    with mpl.rc_context(theme.style):
        titles = textwrap.wrap(title, _TITLE_CHARACTERS)
        subtitles = textwrap.wrap(subtitle, _SUBTITLE_CHARACTERS)
        head = _MARGIN + (1.35 * _TITLE * len(titles) + 1.35 * TEXT * len(subtitles) + 6) / 72
        height += head
        figure = Figure(
            figsize=(WIDTH, height),
            layout=ConstrainedLayoutEngine(
                w_pad=_MARGIN / 2, h_pad=_MARGIN / 2, rect=(0.005, 0.0, 0.99, 1 - head / height)
            ),
        )
        FigureCanvasAgg(figure)
        left, top = _MARGIN / WIDTH, 1 - _MARGIN / height
        figure.text(
            left, top, "\n".join(titles), fontsize=_TITLE, fontweight="bold", va="top", linespacing=1.2
        )
        top -= 1.35 * _TITLE * len(titles) / 72 / height
        figure.text(left, top, "\n".join(subtitles), color=theme.muted, va="top", linespacing=1.2)
        yield figure
        figure.savefig(file, dpi=DPI)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in the order of ``wanted``, as near to it as ``gap`` between neighbours allows."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    blocks: list[tuple[float, list[int]]] = []  # the middle of a run of neighbours, and who is in it
    for number in order:
        middle, members = wanted[number], [number]
        while blocks and middle - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            other, others = blocks.pop()
            middle = (other * len(others) + middle * len(members)) / (len(others) + len(members))
            members = others + members
        blocks.append((middle, members))
    found = [0.0] * len(wanted)
    for middle, members in blocks:
        for place, number in enumerate(members):
            found[number] = middle + gap * (place - (len(members) - 1) / 2)
    return found
