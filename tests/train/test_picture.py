"""The picture of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from mics.train.picture import draw_run
from mics.utils.picture_style import THEMES, Theme
from tests import tiers
from tests.pictures import readable

from .test_metrics import make_measurement

_TITLE = "demo: nano on 4 ranks (2 nodes x 2), partition groups of 2"


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("num_measurements", tiers.first([40, 1]))
def test_the_picture_is_a_png_one_can_read(tmp_path: Path, num_measurements: int, theme: Theme) -> None:
    """A valid PNG of a readable size that is not empty, for a long run and for a single measurement."""
    file = tmp_path / "run.png"
    measurements = [make_measurement(step, loss=5.0 / step) for step in range(1, num_measurements + 1)]
    with readable() as words:
        draw_run(
            file, measurements=measurements, validations=[(1, 4.0)], title=_TITLE, on_gpu=False, theme=theme
        )
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = imread(file)
    assert image.shape[0] >= 600
    assert image.shape[1] == 1600
    assert image.min() < 0.5 < image.max()
    assert _TITLE in words
    assert "Throughput, tokens/s of all ranks" in words
    assert "Rank 0: process memory (RSS), MiB" in words
    assert "validation, last 4.00" in words


@pytest.mark.full
def test_a_run_on_gpus_without_validation(tmp_path: Path) -> None:
    """Validation is optional in the picture, and memory is what it is called."""
    large = replace(
        make_measurement(1, mfu=0.5),
        memory_nbytes=100 * 2**30,
        tokens_per_second=12_345_678.9,
        partition_nbytes=10**12,
        learning_rate=0.0,
    )
    with readable() as words:
        draw_run(tmp_path / "run.png", measurements=[large], validations=[], title=_TITLE, on_gpu=True)
    assert "Rank 0: GPU peak allocated, GiB" in words
    assert not any("validation" in word or "RSS" in word for word in words)
