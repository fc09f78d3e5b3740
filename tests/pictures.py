"""What a reader of a picture sees of its words: all of them, none upon another or upon a line."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

from matplotlib.axis import Axis, Tick
from matplotlib.figure import Figure
from matplotlib.text import Text

_SMALLEST = 11.0  # points: 11 pixels where a picture of 1,600 pixels is shown at half size
_SAVE = Figure.savefig


@contextmanager
def readable() -> Iterator[list[str]]:
    """Pictures drawn inside are checked as they are written. Yields their words, to which they are added."""
    words: list[str] = []

    def save(figure: Figure, *args: Any, **settings: Any) -> None:
        _SAVE(figure, *args, **settings)
        words.extend(_check(figure))

    with patch.object(Figure, "savefig", save):
        yield words


def _check(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    axes = [axis for found in figure.axes for axis in (found.xaxis, found.yaxis)]
    ticks = {
        text for axis in axes for tick in [*axis.majorTicks, *axis.minorTicks] for text in tick.findobj(Text)
    }
    drawn = {tick.label1 for axis in axes for tick in _ticks_inside(axis)}
    texts = [
        found
        for found in figure.findobj(Text)
        if isinstance(found, Text)
        and found.get_visible()
        and found.get_text().strip()
        and (found not in ticks or found in drawn)
    ]
    boxes = [(found.get_text(), found.get_window_extent()) for found in texts]
    for found, (text, box) in zip(texts, boxes, strict=True):
        assert found.get_fontsize() >= _SMALLEST, text
        assert figure.bbox.x0 <= box.x0 + 1 and box.x1 <= figure.bbox.x1 + 1, f"cut off: {text}"
        assert figure.bbox.y0 <= box.y0 + 1 and box.y1 <= figure.bbox.y1 + 1, f"cut off: {text}"
    for (one, here), (other, there) in combinations(boxes, 2):
        wide = min(here.x1, there.x1) - max(here.x0, there.x0)
        high = min(here.y1, there.y1) - max(here.y0, there.y0)
        assert wide <= 2 or high <= 2, f"{one!r} lies on {other!r}"
    for axes in figure.axes:
        drawn_lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        for line, found in product(drawn_lines, axes.texts):
            path = line.get_transform().transform_path(line.get_path())
            box = found.get_window_extent().padded(-1)
            crossed = bool(found.get_text().strip()) and path.intersects_bbox(box, filled=False)
            assert not crossed, f"a line runs through {found.get_text()!r}"
    return [text for text, _ in boxes]


def _ticks_inside(axis: Axis) -> list[Tick]:
    """Those that are drawn: others lie beyond the axes."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick for tick in ticks if low <= tick.get_loc() <= high]
