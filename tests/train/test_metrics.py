"""Numbers a reader relies on: speed, MFU, the learning rate, and how they are written."""

from itertools import pairwise

import pytest
import torch
from rich.console import Console

from mics.train.display import Display, format_measurement
from mics.train.hardware import memory_nbytes, peak_tflops
from mics.train.learning_rate import learning_rate_share
from mics.train.metrics import Measurement, Speedometer


def make_measurement(step: int, *, loss: float = 2.5, mfu: float | None = None) -> Measurement:
    return Measurement(
        step=step,
        loss=loss,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens_per_second=12345.6,
        tflops=0.0123,
        mfu=mfu,
        partition_nbytes=4_590_000,
        replication_nbytes=765_000,
        memory_nbytes=400_000_000,
        seconds=float(step),
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_are_known_by_whole_words(name: str, peak: float | None) -> None:
    """An L40S is no L4 and an unknown GPU has no peak."""
    assert peak_tflops(name) == peak


def test_speed_is_per_device_and_mfu_against_its_peak() -> None:
    """1e6 tokens/s at 1e9 FLOPs each on 4 devices are 250 TFLOP/s, half of a peak of 500."""
    speed = Speedometer(flops_per_token=10**9, num_devices=4, peak_tflops=500.0)
    assert speed.tflops(1e6) == pytest.approx(250.0)
    assert speed.mfu(1e6) == pytest.approx(0.5)
    assert Speedometer(flops_per_token=1, num_devices=1, peak_tflops=None).mfu(1e6) is None


def test_the_learning_rate_rises_and_falls() -> None:
    """Straight up over the warm-up, down to the final share at the last step, never outside (0, 1]."""
    shares = [
        learning_rate_share(step, num_steps=100, warmup_steps=10, final_share=0.1) for step in range(100)
    ]
    assert shares[0] > 0
    assert max(shares) == shares[10] == 1.0
    assert shares[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in pairwise(shares[:11]))
    assert all(a > b for a, b in pairwise(shares[10:]))


@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_run_shorter_than_its_warm_up_works(num_steps: int) -> None:
    """Few steps never divide by zero."""
    for step in range(num_steps + 1):
        assert 0 < learning_rate_share(step, num_steps=num_steps, warmup_steps=10, final_share=0.1) <= 1


def test_a_line_has_all_numbers_and_mfu_only_where_known() -> None:
    """The live line names both kinds of groups; an unknown peak leaves no empty place."""
    line = format_measurement(make_measurement(3), validation_loss=None)
    assert line == (
        "loss 2.500 | norm 0.50 | 12,346 tokens/s | 0.0123 TFLOP/s | "
        "moved 4.59 MB partition + 765 kB replication"
    )
    assert "MFU 43.2%" in format_measurement(make_measurement(3, mfu=0.4321), validation_loss=2.0)


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """First and last step are printed; steps shortly after another are not; no control characters."""
    with Display(Console(force_terminal=False), num_steps=3) as display:
        for step in (1, 2, 3):
            display.update(make_measurement(step), validation_loss=None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 1/3", "step 3/3"]
    assert all(line.isprintable() for line in lines)


def test_the_memory_of_this_process_is_plausible() -> None:
    """A process with torch loaded holds between 50 MB and 100 GB."""
    assert 5e7 < memory_nbytes(torch.device("cpu")) < 1e11
