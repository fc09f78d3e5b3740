"""The accuracy study of compression: what it says and draws of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import compression_picture

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
