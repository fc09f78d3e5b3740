"""Draw the pictures of docs/concepts: python scripts/draw_concepts.py [FOLDER]

Plain SVG on a white card, 480 units wide: it reads the same in light and dark pages and on a phone. The same
sources give the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from mics.cost.clusters import find_cluster
from mics.cost.memory import USABLE, Keeping
from mics.cost.modules import find_model
from mics.cost.setting import Setting
from mics.utils.picture_style import BLUE, INK

FOLDER = Path(__file__).resolve().parents[1] / "docs/concepts"
WIDTH = 480
WHITE, PAPER, EDGE, GREY = "#ffffff", "#f4f6f8", "#c8d0d7", "#6b7780"
# Dark enough for white words.
GREEN, ORANGE, PURPLE, SAND, ROSE, TEAL = "#2f8062", "#c05f1c", "#7b61a8", "#9a7420", "#b4506d", "#2b8799"
CHUNKS = (BLUE, GREEN, SAND, PURPLE)


class Drawing:
    """Shapes on a card."""

    def __init__(self, title: str, height: int) -> None:
        self._title = title
        self._height = height
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, **more: object) -> None:
        style = {"rx": 6, **more}
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"{attributes}/>'
        )

    def frame(self, x: float, y: float, w: float, h: float, color: str, *, dashed: bool = False) -> None:
        more = {"stroke_dasharray": "6 4"} if dashed else {}
        self.box(x, y, w, h, "none", stroke=color, stroke_width=2, rx=10, **more)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 15,
        color: str = INK,
        at: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{at}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], color: str, *, both: bool = False
    ) -> None:
        """A straight arrow, with heads drawn as paths: some viewers know no markers."""
        (x, y), (u, v) = start, end
        length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
        dx, dy = (u - x) / length, (v - y) / length
        line = (
            f'x1="{x + 8 * dx * both:g}" y1="{y + 8 * dy * both:g}" x2="{u - 8 * dx:g}" y2="{v - 8 * dy:g}"'
        )
        self._parts.append(f'<line {line} stroke="{color}" stroke-width="3"/>')
        for tip, sign in [(end, 1), (start, -1)][: 1 + both]:
            a, b = sign * dx, sign * dy
            back = tip[0] - 10 * a, tip[1] - 10 * b
            corners = [tip, (back[0] - 6 * b, back[1] + 6 * a), (back[0] + 6 * b, back[1] - 6 * a)]
            points = " ".join(f"{px:g},{py:g}" for px, py in corners)
            self._parts.append(f'<polygon points="{points}" fill="{color}"/>')

    def svg(self) -> str:
        card = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self._height - 2}" rx="12"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}"'
                f' width="{WIDTH}" height="{self._height}" role="img"'
                ' font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self._title)}</title>",
                f'{card} fill="{WHITE}" stroke="{EDGE}" stroke-width="2"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def groups() -> Drawing:
    """Two nodes of four ranks: rows are partition groups, columns are replication groups."""
    drawing = Drawing("Two partition groups of four ranks, and four replication groups of two", 408)
    drawing.text(240, 30, "8 GPUs: partition size p = 4, replicas R = 2", bold=True)
    columns = [28 + 112 * local for local in range(4)]
    for node, (top, caption, ranks) in enumerate([(48, 72, 84), (190, 282, 204)]):
        drawing.box(14, top, 452, 108, PAPER, rx=10, stroke=EDGE)
        drawing.text(28, caption, f"node {node}: one copy of the parameters", at="start", bold=True)
        for local, x in enumerate(columns):
            drawing.box(x, ranks, 86, 60, CHUNKS[local])
            drawing.text(x + 43, ranks + 25, f"rank {4 * node + local}", color=WHITE, bold=True)
            drawing.text(x + 43, ranks + 47, f"shard {local}", color=WHITE)
        for x in columns[:-1]:
            drawing.arrow((x + 86, ranks + 30), (x + 112, ranks + 30), BLUE, both=True)
    for x in columns:
        drawing.arrow((x + 43, 144), (x + 43, 204), ORANGE, both=True)
    for top, color, words in (
        (326, BLUE, "partition group: in every micro-batch"),
        (354, ORANGE, "replication group: once per optimizer step"),
    ):
        drawing.arrow((28, top), (68, top), color, both=True)
        drawing.text(82, top + 5, words, at="start")
    drawing.text(240, 390, "Rows hold one copy. Columns hold the same shard.", bold=True)
    return drawing


def two_stage_gather() -> Drawing:
    """Which chunks each of four ranks has, before, between and after the two stages."""
    drawing = Drawing("A hierarchical all-gather over two nodes of two ranks", 470)
    columns = [24, 132, 256, 364]
    owns = [0, 2, 1, 3]  # chunk l*N + n of rank (node n, local l)
    drawing.box(14, 14, 220, 420, PAPER, rx=10)
    drawing.box(246, 14, 220, 420, PAPER, rx=10)
    for node, x in enumerate((124, 356)):
        drawing.text(x, 38, f"node {node}", bold=True)
    for rank, x in enumerate(columns):
        drawing.text(x + 46, 62, f"rank {rank}")

    def row(top: float, has: Sequence[Sequence[int]], label: str) -> None:
        for x, chunks in zip(columns, has, strict=True):
            for chunk in range(4):
                there = chunk in chunks
                drawing.box(x + 23 * chunk, top, 22, 34, CHUNKS[chunk] if there else WHITE, rx=3, stroke=EDGE)
                drawing.text(
                    x + 23 * chunk + 11, top + 22, str(chunk), color=WHITE if there else GREY, bold=there
                )
        drawing.text(240, top + 56, label)

    row(74, [[chunk] for chunk in owns], "before: each rank has its own shard")
    for first, height in ((0, 166), (1, 186)):
        drawing.arrow((columns[first] + 46, height), (columns[first + 2] + 46, height), ORANGE, both=True)
    drawing.text(240, 214, "stage 1, network: same local rank, N = 2 ranks", color=ORANGE, bold=True)
    row(228, [[0, 1], [2, 3], [0, 1], [2, 3]], "each rank has half, already in place")
    for first in (0, 2):
        drawing.arrow((columns[first] + 30, 316), (columns[first + 1] + 62, 316), BLUE, both=True)
    drawing.text(240, 344, "stage 2, inside the node: k = 2 ranks", color=BLUE, bold=True)
    row(358, [[0, 1, 2, 3]] * 4, "after: each rank has the whole unit")
    drawing.text(240, 456, "Into each node: 1/2 of the unit. One flat ring: 3/4.", bold=True)
    return drawing


def two_hops() -> Drawing:
    """Four micro-steps on two replicas: hop 1 in each of them, hop 2 once."""
    drawing = Drawing("Gradient synchronisation in two hops, with four micro-steps", 500)
    sides = (72, 280)
    for number, x in enumerate(sides):
        drawing.text(x + 92, 32, f"partition group {number}", bold=True)
    for micro in range(4):
        top = 46 + 74 * micro
        drawing.text(14, top + 32, "micro-", at="start", size=14)
        drawing.text(14, top + 49, f"step {micro + 1}", at="start", size=14)
        for x in sides:
            drawing.box(x, top, 184, 30, PAPER, stroke=EDGE)
            drawing.text(x + 92, top + 20, "forward, backward", size=14)
            drawing.box(x, top + 34, 184, 30, BLUE)
            drawing.text(x + 92, top + 54, "hop 1: reduce-scatter", color=WHITE, size=14)
    drawing.box(72, 348, 392, 34, ORANGE)
    drawing.text(268, 370, "hop 2: reduce-scatter between replicas", color=WHITE, bold=True)
    for x in sides:
        drawing.box(x, 388, 184, 30, PAPER, stroke=EDGE)
        drawing.text(x + 92, 408, "optimizer step", size=14)
    drawing.box(72, 424, 392, 34, ORANGE)
    drawing.text(268, 446, "all-gather of new parameters", color=WHITE, bold=True)
    drawing.text(14, 390, "once", at="start", size=14)
    drawing.text(14, 407, "per step", at="start", size=14)
    drawing.text(240, 484, "Only the orange bars cross between replicas.", bold=True)
    return drawing


LIFE = """
forward 0      GATHERED   GATHERING  SHARDED    SHARDED
forward 1      SHARDED    GATHERED   GATHERING  SHARDED
forward 2      SHARDED    SHARDED    GATHERED   GATHERING
forward 3      SHARDED    SHARDED    GATHERING  GATHERED
backward 3     SHARDED    SHARDED    GATHERING  GATHERED
backward 2     SHARDED    GATHERING  GATHERED   SHARDED
backward 1     GATHERING  GATHERED   SHARDED    SHARDED
backward 0     GATHERED   SHARDED    SHARDED    SHARDED
after step     GATHERING  GATHERING  SHARDED    SHARDED
"""
"""What the script on docs/concepts/life-of-a-unit.md prints."""


def life_of_a_unit() -> Drawing:
    """Time runs down; one column for each unit."""
    drawing = Drawing("States of four units through one training step", 444)
    fills = {"SHARDED": (WHITE, GREY), "GATHERING": (TEAL, WHITE), "GATHERED": (BLUE, WHITE)}
    words = {"SHARDED": "sharded", "GATHERING": "gathering", "GATHERED": "in use"}
    kept = {("forward", "3", 2), ("backward", "3", 2)}
    for unit in range(4):
        drawing.text(150 + 92 * unit, 32, f"unit {unit}", bold=True)
    for number, line in enumerate(LIFE.strip().splitlines()):
        kind, which, *states = line.split()
        top = 46 + 36 * number + 10 * (number > 3) + 10 * (number > 7)
        drawing.text(14, top + 20, f"{kind} {which}", at="start", size=14)
        for unit, state in enumerate(states):
            fill, ink = fills[state]
            x = 106 + 92 * unit
            drawing.box(x, top, 88, 30, fill, stroke=EDGE)
            word = "kept" if (kind, which, unit) in kept else words[state]
            drawing.text(x + 44, top + 20, word, color=ink, size=14)
    for x, state in ((14, "SHARDED"), (158, "GATHERING"), (318, "GATHERED")):
        drawing.box(x, 408, 22, 22, fills[state][0], rx=3, stroke=EDGE)
        drawing.text(x + 30, 424, state, at="start", size=14)
    return drawing


TERMS = {
    "parameters": BLUE,
    "gradients": GREEN,
    "masters": PURPLE,
    "optimizer state": ROSE,
    "gathered units": TEAL,
    "reduce buffers": SAND,
    "activations": ORANGE,
    "logits or workspace": GREY,
}


def memory() -> Drawing:
    """Terms of one GPU by partition size, from the planner's own arithmetic."""
    model, cluster = find_model("gpt-13b", seq_len=None), find_cluster("p4d.24xlarge:8")
    drawing = Drawing("Memory per GPU by partition size", 440)
    drawing.text(240, 30, "gpt-13b on 64 GPUs of 40 GiB: GiB per GPU", bold=True)
    scale = 392 / 63
    limit = 60 + cluster.memory_nbytes * USABLE / 2**30 * scale
    for number, size in enumerate((2, 4, 8, 16, 64)):
        setting = Setting(
            model=model,
            cluster=cluster,
            partition_size=size,
            micro_batch=1,
            accumulation=16,
            activations=Keeping(checkpoint=False),
        )
        top, x = 62 + 46 * number, 60.0
        drawing.text(14, top + 23, f"p={size}", at="start")
        for name, nbytes in setting.memory().on_device().items():
            width = nbytes / 2**30 * scale
            drawing.box(round(x, 1), top, round(width, 1), 34, TERMS[name], rx=0)
            x += width
        drawing.text(x + 6, top + 23, f"{setting.memory().peak / 2**30:.1f}", at="start", size=14)
    drawing.box(round(limit, 1), 44, 2, 250, INK, rx=0)
    drawing.text(limit + 6, 54, "36.8 usable", at="start", size=13)
    for number, (name, color) in enumerate(TERMS.items()):
        x, top = (24, 250)[number % 2], 312 + 30 * (number // 2)
        drawing.box(x, top, 20, 20, color, rx=3)
        drawing.text(x + 28, top + 15, name, at="start")
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "groups": groups,
    "two-stage-gather": two_stage_gather,
    "two-hops": two_hops,
    "life-of-a-unit": life_of_a_unit,
    "memory": memory,
}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
