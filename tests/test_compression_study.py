"""The accuracy study of compression: what it says and draws of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import compression_picture
from matplotlib.figure import Figure

from mics.utils.picture_style import THEMES
from tests.pictures import readable

_ENDS = {"float32": 2.0, "hop 2 int8": 2.1, "hop 2 int8, no feedback": 2.2, "all int8": 1.9}


def _figures() -> dict[str, Any]:
    """Two seeds of two models, as benchmarks.compression_accuracy keeps them."""
    runs = [
        {
            "model": model,
            "setting": setting,
            "seed": seed,
            "validation": [(0, 5.0), (50, 3.0), (100, end + 0.2 * seed)],
            "norms": [1.0 + seed] * 100,
            "nbytes": 100.0 if setting == "float32" else 25.0,
        }
        for seed in range(2)
        for model in ("bert", "gpt")
        for setting, end in _ENDS.items()
    ]
    config = {
        "parameters": 400_000,
        "shape": {"steps": 100},
        "ranks": 4,
        "partition_size": 2,
        "ranks_per_node": 1,
    }
    lossless = [{"model": "gpt", "steps": 20, "equal": True, "bytes": 0.5}]
    return {"config": config, "runs": runs, "lossless": lossless}


def test_the_table_of_the_study() -> None:
    """Models in one order; means over seeds, differences seed by seed; bytes beside float32."""
    lines = compression_picture.table(_figures())
    rows = [line for line in lines if line.startswith(("| GPT | hop 2 int8 |", "| BERT | float32"))]
    assert rows == [
        "| GPT | hop 2 int8 | 2.2000 (2.1000 to 2.3000) | +0.1000 (+0.1000 to +0.1000) | 0.250 |",
        "| BERT | float32 | 2.1000 (2.0000 to 2.2000) |  | 1.000 |",
    ]
    assert lines[-1] == "| GPT | 20 | yes | 0.500 |"


@pytest.mark.full
def test_the_picture_of_the_study(tmp_path: Path) -> None:
    """Curves and ends of both models, light and dark, every word to be read."""
    with readable() as words:
        compression_picture.draw_both(tmp_path / "c.png", _figures())
    assert {"GPT", "BERT", "hop 2 int8, no feedback"} <= set(words)
    assert (tmp_path / "c-dark.png").is_file()


def test_a_line_of_the_picture_is_one_setting() -> None:
    """Models share the names at the left, whichever setting was trained first, and if one is not there."""
    figures = _figures()
    figures["runs"].reverse()
    missing = ("gpt", "hop 2 int8")
    figures["runs"] = [run for run in figures["runs"] if (run["model"], run["setting"]) != missing]
    shown = ["hop 2 int8", "all int8", "hop 2 int8, no feedback"]
    ends = {"hop 2 int8": 0.1, "all int8": -0.1, "hop 2 int8, no feedback": 0.2}
    found = compression_picture.found_of(figures)
    assert [each.setting for each in found] == ["float32", *shown[1:], "float32", *shown]
    for model in ("gpt", "bert"):
        axes = Figure().subplots()
        own = [each for each in found if each.model == model]
        compression_picture._draw_ends(axes, own, shown, THEMES[0])
        assert [label.get_text() for label in axes.get_yticklabels()] == shown
        means = [line for line in axes.get_lines() if line.get_marker() == "|"]
        drawn = {
            shown[int(np.asarray(line.get_ydata())[0])]: np.asarray(line.get_xdata())[0] for line in means
        }
        expected = {each.setting: ends[each.setting] for each in own if each.setting != "float32"}
        assert drawn == pytest.approx(expected)
