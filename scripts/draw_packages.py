#!/usr/bin/env python3
"""Draw the rooms of a source tree (packages and modules at its top) on floors, with an arrow for each import.

A room stands one floor above the highest room that it imports, so that all arrows point down. Arrows that
follow from others (a imports b, b imports c, and a imports c too) are thin and pale. The root package's own
``__init__`` is no room: it only collects public names.

    scripts/draw_packages.py src packages.png
    git archive 84ec213 src | tar x -C /tmp/before && scripts/draw_packages.py /tmp/before/src before.png
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

_STYLE_FILE: Final = Path(__file__).parent.parent / "src" / "mics" / "utils" / "picture_style.py"
_FORMATS: Final = (".png", ".svg", ".pdf")
_NUM_SWEEPS: Final = 24  # over the floors, to bring rooms near those they share arrows with
_CHARACTER: Final = 0.105  # inches
_ROOM_HEIGHT: Final = 0.42
_FLOOR_HEIGHT: Final = 0.95
_GAP: Final = 0.28  # between rooms

_BOWS: Final = tuple(step / 25 for step in range(-8, 9))  # how far an arrow may swerve, of its length
_FEW_BOWS: Final = (-0.12, 0.12)
_NUM_POINTS: Final = 40  # of an arrow, at which is looked for rooms in its way

Point = tuple[float, float]
Edge = tuple[str, str]
"""Who imports whom."""


class DrawingError(Exception):
    """What stands in the way of a picture, in words for the user."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A package, or a module at the top of the tree."""

    name: str
    num_files: int
    num_lines: int
    is_package: bool

    @property
    def about(self) -> str:
        files = f"{self.num_files} files, " if self.is_package else ""
        return f"{files}{self.num_lines:,} lines"

    @property
    def width(self) -> float:
        return _CHARACTER * max(len(self.name), 0.72 * len(self.about)) + 0.2


@dataclass(frozen=True, kw_only=True)
class House:
    """Rooms, and who imports whom."""

    rooms: Mapping[str, Room]
    imports: frozenset[Edge]

    @cached_property
    def below(self) -> dict[str, set[str]]:
        """What each room imports."""
        found: dict[str, set[str]] = {name: set() for name in self.rooms}
        for importer, imported in self.imports:
            found[importer].add(imported)
        return found

    @cached_property
    def _from_below(self) -> list[str]:
        try:
            return list(TopologicalSorter(self.below).static_order())
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            raise DrawingError(f"expected imports without a cycle, found {cycle}") from None

    @cached_property
    def floors(self) -> list[list[str]]:
        """Rooms from the ground up."""
        number: dict[str, int] = {}
        for name in self._from_below:
            number[name] = 1 + max((number[other] for other in self.below[name]), default=-1)
        found: list[list[str]] = [[] for _ in range(1 + max(number.values()))]
        for name in sorted(number):
            found[number[name]].append(name)
        return found

    @cached_property
    def needed(self) -> set[Edge]:
        """Imports that do not follow from others."""
        reach: dict[str, set[str]] = {}
        for name in self._from_below:
            reach[name] = self.below[name].union(*(reach[other] for other in self.below[name]))
        return {
            (name, imported)
            for name, imported in self.imports
            if not any(imported in reach[other] for other in self.below[name])
        }


def read_house(source: Path, package: str) -> House:
    """The rooms of ``package`` in the folder ``source``, from its text alone: nothing of it is imported."""
    try:
        import grimp
    except ImportError:
        raise DrawingError("expected grimp, found none; pip install import-linter brings it") from None
    root = source / package
    if not (root / "__init__.py").is_file():
        raise DrawingError(f"expected a package at {root}, found no __init__.py there")
    sys.path.insert(0, str(source.resolve()))
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or Path(spec.origin).parent != root.resolve():
        raise DrawingError(f"expected {package} from {root}, found it at {spec and spec.origin}")
    graph = grimp.build_graph(package, cache_dir=None)
    edges = {
        (_room_of(module), _room_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    rooms = {name: _measure(root, name) for name in map(_room_of, graph.modules) if name}
    return House(rooms=rooms, imports=frozenset((a, b) for a, b in edges if a and b and a != b))


def _room_of(module: str) -> str:
    """The room of a module by its dotted name; of the root itself: none."""
    return f"{module}..".split(".")[1]


def _measure(root: Path, name: str) -> Room:
    folder = root / name
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    num_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return Room(name=name, num_files=len(files), num_lines=num_lines, is_package=folder.is_dir())


# -- where rooms stand ----------------------------------------------------------------------------------


def place(house: House) -> dict[str, Point]:
    """The middle of each room, in inches: floors one above the other, rooms near what they are tied to."""
    floors = [list(floor) for floor in house.floors]
    ties: dict[str, list[str]] = {name: [] for name in house.rooms}
    for importer, imported in house.needed:
        ties[importer].append(imported)
        ties[imported].append(importer)
    middles = {name: x for floor in floors for name, x in _in_a_row(floor, house.rooms).items()}
    for sweep in range(_NUM_SWEEPS):
        for floor in floors if sweep % 2 == 0 else reversed(floors):
            wanted = {name: _mean([middles[other] for other in ties[name]], middles[name]) for name in floor}
            floor.sort(key=lambda name: (wanted[name], name))
            middles |= _spread(floor, wanted, house.rooms)
    return {
        name: (middles[name], number * _FLOOR_HEIGHT) for number, floor in enumerate(floors) for name in floor
    }


def _in_a_row(floor: Sequence[str], rooms: Mapping[str, Room]) -> dict[str, float]:
    """Rooms one beside the other, the row's middle at zero."""
    found, x = {}, 0.0
    for name in floor:
        found[name] = x + rooms[name].width / 2
        x += rooms[name].width + _GAP
    return {name: middle - (x - _GAP) / 2 for name, middle in found.items()}


def _spread(floor: Sequence[str], wanted: Mapping[str, float], rooms: Mapping[str, Room]) -> dict[str, float]:
    """Rooms in this order, as near to where they are ``wanted`` as their widths allow.

    Neighbours that would overlap become one block, whose middle is the mean of what they want.
    """
    row = _in_a_row(floor, rooms)
    blocks: list[tuple[float, list[str]]] = []  # shift of the row, and the rooms that take it
    for name in floor:
        shift, names = wanted[name] - row[name], [name]
        while blocks and blocks[-1][0] > shift:
            earlier, others = blocks.pop()
            shift = (earlier * len(others) + shift * len(names)) / (len(others) + len(names))
            names = others + names
        blocks.append((shift, names))
    return {name: row[name] + shift for shift, names in blocks for name in names}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


# -- the picture ----------------------------------------------------------------------------------------


def draw(house: House, picture: Path, title: str) -> None:
    """Write ``picture``."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    theme = runpy.run_path(str(_STYLE_FILE))["LIGHT"]  # as a file: importing mics would load torch
    style = {"STYLE": theme.style, "INK": theme.ink, "GRID": theme.grid, "BLUE": theme["mics"]}
    places = place(house)
    left = min(x - house.rooms[name].width / 2 for name, (x, _) in places.items()) - 0.3
    right = max(x + house.rooms[name].width / 2 for name, (x, _) in places.items()) + 0.3
    bottom, top = -0.5, (len(house.floors) - 1) * _FLOOR_HEIGHT + 1.0
    with plt.rc_context(style["STYLE"]):
        figure = plt.figure(figsize=(right - left, top - bottom))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(left, right), ylim=(bottom, top))
        axes.set_axis_off()
        _draw_arrows(axes, house, places, style)
        for name, middle in places.items():
            _draw_room(axes, house.rooms[name], middle, style)
        axes.text(left + 0.3, top - 0.3, title, fontsize=13, fontweight="bold", va="center")
        axes.text(left + 0.3, top - 0.55, _summary(house), fontsize=9.5, va="center", color=style["INK"])
        figure.savefig(picture, dpi=110)
        plt.close(figure)
    if picture.suffix == ".png":
        _shrink(picture)


def _shrink(picture: Path) -> None:
    """Few colours are enough, and a third of the bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)


def _summary(house: House) -> str:
    return (
        f"{len(house.rooms)} rooms on {len(house.floors)} floors, {len(house.imports)} imports between them "
        f"({len(house.needed)} that do not follow from others: dark)"
    )


def _draw_arrows(axes: Any, house: House, places: Mapping[str, Point], style: Mapping[str, Any]) -> None:
    for edge in sorted(house.imports, key=lambda edge: (edge in house.needed, edge)):
        is_needed = edge in house.needed
        (x, y), (to_x, to_y) = places[edge[0]], places[edge[1]]
        start, end = (x, y - _ROOM_HEIGHT / 2), (to_x, to_y + _ROOM_HEIGHT / 2)
        others = [(house.rooms[name], middle) for name, middle in places.items() if name not in edge]
        bows = _BOWS if is_needed else _FEW_BOWS
        bow = min(bows, key=lambda bow: (_num_crossed(start, end, bow, others), abs(bow)))
        axes.annotate(
            "",
            xy=end,
            xytext=start,
            arrowprops={
                "arrowstyle": "-|>" if is_needed else "-",
                "mutation_scale": 9,
                "color": style["BLUE"] if is_needed else style["GRID"],
                "linewidth": 1.1 if is_needed else 0.6,
                "connectionstyle": f"arc3,rad={bow}",
                "shrinkA": 0,
                "shrinkB": 0,
            },
            zorder=2 if is_needed else 1,
        )


def _num_crossed(start: Point, end: Point, bow: float, rooms: Sequence[tuple[Room, Point]]) -> int:
    """How many of ``rooms`` an arrow runs through: a parabola, as matplotlib's "arc3" draws it."""
    (x, y), (to_x, to_y) = start, end
    control_x, control_y = (x + to_x) / 2 + bow * (to_y - y), (y + to_y) / 2 - bow * (to_x - x)
    points = []
    for number in range(1, _NUM_POINTS):
        t = number / _NUM_POINTS
        a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t**2
        points.append((a * x + b * control_x + c * to_x, a * y + b * control_y + c * to_y))
    return sum(
        any(abs(px - mx) < room.width / 2 + 0.05 and abs(py - my) < _ROOM_HEIGHT / 2 for px, py in points)
        for room, (mx, my) in rooms
    )


def _draw_room(axes: Any, room: Room, middle: Point, style: Mapping[str, Any]) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = middle
    axes.add_patch(
        FancyBboxPatch(
            (x - room.width / 2, y - _ROOM_HEIGHT / 2),
            room.width,
            _ROOM_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="#e8f0f9" if room.is_package else "white",
            edgecolor=style["INK"],
            linewidth=1.2 if room.is_package else 0.8,
            zorder=3,
        )
    )
    weight = "bold" if room.is_package else "normal"
    axes.text(x, y + 0.08, room.name, ha="center", va="center", fontsize=10, fontweight=weight, zorder=4)
    axes.text(
        x, y - 0.1, room.about, ha="center", va="center", fontsize=7, color=style["INK"], alpha=0.7, zorder=4
    )


# -- the command ----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns an exit code."""
    arguments = _parser().parse_args(argv)
    try:
        _check_picture(arguments.picture)
        house = read_house(arguments.source, arguments.package)
        draw(house, arguments.picture, arguments.title or f"{arguments.package} in {arguments.source}")
    except (DrawingError, OSError) as error:
        print(f"draw_packages: error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.picture}: {_summary(house)}")
    return 0


def _check_picture(picture: Path) -> None:
    if picture.suffix not in _FORMATS:
        raise DrawingError(f"{picture}: expected a name that ends in {_listed(_FORMATS)}")
    if not picture.parent.is_dir():
        raise DrawingError(f"{picture}: expected a folder at {picture.parent}, found none")


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draw_packages.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder that holds the package, for example src")
    parser.add_argument("picture", type=Path, help=f"file to write: {_listed(_FORMATS)}")
    parser.add_argument("--package", default="mics", help="its name (default: %(default)s)")
    parser.add_argument("--title", help="of the picture (default: the package and the folder)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
