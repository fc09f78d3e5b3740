"""The picture of a run."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from mics.train.picture import draw_run

from .test_metrics import make_measurement


@pytest.mark.parametrize("num_measurements", [1, 40])
def test_the_picture_is_a_png_one_can_look_at(tmp_path: Path, num_measurements: int) -> None:
    """A valid PNG of a readable size that is not empty, for a long run and for a single measurement."""
    file = tmp_path / "run.png"
    measurements = [make_measurement(step, loss=5.0 / step) for step in range(1, num_measurements + 1)]
    draw_run(file, measurements=measurements, validations=[(1, 4.0)], title="a run", on_gpu=False)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = imread(file)
    assert image.shape[0] >= 600
    assert image.shape[1] >= 1200
    assert image.min() < 0.5 < image.max()


def test_a_run_without_validation_can_be_drawn(tmp_path: Path) -> None:
    """Validation is optional in the picture."""
    draw_run(
        tmp_path / "run.png", measurements=[make_measurement(1)], validations=[], title="a run", on_gpu=True
    )
