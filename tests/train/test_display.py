"""What a run shows: the board, plain lines, and the launcher's view of its ranks."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mics.train.board import Board
from mics.train.config import CheckpointSettings, TrainConfig
from mics.train.display import Display, RankConsole
from mics.train.metrics import Measurement
from mics.train.watch import Tail, TerminalWatch
from tests.train.test_metrics import make_measurement

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _console(width: int, height: int = 30) -> Console:
    return Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=True, highlight=False
    )


def _board(tmp_path: Path | None = None, **changes: Any) -> Board:
    board = Board(num_steps=120, on_gpu=bool(changes.get("mfu")), checkpoint_dir=tmp_path)
    for step in range(5, 90, 5):
        measurement = make_measurement(step, loss=2.0 + 10.0 / step)
        board.note(replace(measurement, **changes), now=time.monotonic() - 85 + step)
    board.validation = (60, 2.401)
    return board


def _save(folder: Path, step: int) -> None:
    (folder / f"step-{step}").mkdir(parents=True)
    (folder / f"step-{step}" / "mics.json").write_text("{}")
    (folder / "latest").write_text(f"step-{step}\n")


@pytest.mark.parametrize("width", [80, 120])
def test_the_board_has_every_figure_in_its_width(width: int, tmp_path: Path) -> None:
    """A bar with the time left, the curve with its range, and the figures; nothing is cut off."""
    _save(tmp_path, 80)
    console = _console(width)
    console.print(_board(tmp_path))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert "step 85/120" in shown and "━" in shown and "71%" in shown
    assert re.search(r"0:00 elapsed, 0:3[45] left", shown)
    for label, value in (
        ("loss", "2.118"),
        ("validation", "2.401 (step 60)"),
        ("lr, norm", "0.00100, 0.50"),
        ("speed", "12,346 tokens/s"),
        ("compute", "0.0123 TFLOP/s"),
        ("memory", "381 MiB RSS"),
        ("intra-node", "4.59 MB sent per step"),
        ("inter-node", "765 kB sent per step"),
        ("checkpoint", "step 80, 0 s ago"),
    ):
        assert re.search(rf"{re.escape(label)} +{re.escape(value)}", shown), label
    assert "4.00 █" in shown and "2.12 ██" in shown
    assert "MFU" not in shown


def test_on_a_gpu_there_is_mfu_and_the_peak(tmp_path: Path) -> None:
    console = _console(80)
    console.print(_board(mfu=0.4321, tflops=156.0, memory_nbytes=36 << 30, inter_nbytes=0))
    shown = console.export_text()
    assert re.search(r"MFU +43.2%, 156 TFLOP/s/GPU", shown) and "36.0 GiB GPU peak" in shown
    assert "inter-node" not in shown and "checkpoint" not in shown
    assert "MFU 43.2%" in _board(mfu=0.4321).as_line()


@pytest.mark.parametrize(("width", "height"), [(60, 40), (120, 12)])
def test_a_small_terminal_has_the_curve_in_a_line(width: int, height: int) -> None:
    console = _console(width, height)
    console.print(_board())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("█" in line or "▁▁" in line for line in lines) == 1


def test_a_board_before_the_first_measurement_and_one_that_is_done() -> None:
    console = _console(80)
    console.print(Board(num_steps=10, on_gpu=False))
    assert "step 0/10" in console.export_text(clear=True)
    done = Board(num_steps=10, on_gpu=False)
    for step in (5, 10):
        done.note(make_measurement(step, loss=float("nan")), now=float(step))
    console.print(done)
    shown = console.export_text()
    assert "step 10/10" in shown and "100%" in shown and "left" not in shown and "nan" in shown


def test_the_time_left_is_by_the_wall_clock_of_this_attempt() -> None:
    """Measurements of before the run went on come at once and say nothing about speed."""
    board = Board(num_steps=100, on_gpu=False)
    for step in range(1, 51):
        board.note(make_measurement(step), now=1000.0)
    assert board.seconds_left(1000.0) is None
    board.note(make_measurement(60), now=1030.0)
    assert board.seconds_left(1030.0) == pytest.approx(120.0)
    assert board.seconds_left(1050.0) == pytest.approx(100.0)
    assert board.seconds_left(9999.0) == pytest.approx(90.0)  # it stands still
    board.note(make_measurement(100), now=10000.0)
    assert board.seconds_left(10000.0) == 0.0


def test_a_checkpoint_is_named_when_it_is_on_disk(tmp_path: Path) -> None:
    board = Board(num_steps=10, on_gpu=False, checkpoint_dir=tmp_path)
    board.note(make_measurement(5))
    assert "checkpoint" not in board.as_line()
    found = []
    for begun, on_disk in ((4, None), (4, 4), (8, None)):
        board.saving_step = begun
        if on_disk is not None:
            _save(tmp_path, on_disk)
        board._saved = (-math.inf, "")  # looked up some time ago
        found.append(board.as_line().split("checkpoint ")[1].split(" | ")[0])
    assert found == ["step 4, being written", "step 4, 0 s ago", "step 8, being written"]


def test_a_line_has_the_same_figures() -> None:
    board = _board()
    board.num_steps = 1200
    line = board.as_line()
    assert line.startswith(
        "step   85/1200 | loss 2.118 | val 2.401 | norm 0.50 | lr 0.00100 | 12,346 tokens/s | "
        "0.0123 TFLOP/s | 381 MiB RSS | sent 4.59 MB intra-node + 765 kB inter-node | "
    )
    assert re.search(r"\| 19 min left$", line)


@pytest.mark.parametrize(("show", "expected"), [("lines", ["step 1/3", "step 3/3"]), ("none", [])])
def test_without_a_terminal_there_are_plain_lines(
    show: Any, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """First and last step are printed; steps shortly after another are not; no control characters."""
    board = Board(num_steps=3, on_gpu=False)
    with Display(RankConsole(quiet=False), board, show=show) as display:
        for step in (1, 2, 3):
            board.note(make_measurement(step))
            display.update()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == expected
    assert all(line.isprintable() for line in lines)


def test_a_rank_in_a_terminal_draws_the_board_and_prints_above_it() -> None:
    """As under torchrun. The cursor is never left hidden, whatever ends the process."""
    console = _console(80)
    board = Board(num_steps=3, on_gpu=False)
    with Display(console, board, show="live") as display:
        begun = _output(console)
        board.note(make_measurement(1))
        display.update()
        console.print("a warning")
    shown = _output(console)
    assert begun.rindex("\x1b[?25h") > begun.rindex("\x1b[?25l")
    assert "a warning" in shown and "step 1/3" in shown[shown.index("a warning") :]


def _output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_the_library_logs_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("mics")
    before = log.level, list(log.handlers)
    with RankConsole(quiet=False).showing_log():
        log.info("saving: 1 GB of [3 GB]")
        log.warning("no such tensor")
    assert capsys.readouterr().out == "mics: saving: 1 GB of [3 GB]\nmics: warning: no such tensor\n"
    assert (log.level, list(log.handlers)) == before


class _Attempt:
    """A watch, and what ranks would do."""

    def __init__(self, folder: Path, *, steps: int = 10) -> None:
        self.config = TrainConfig(
            output_dir=folder, name="run", steps=steps, checkpoint=CheckpointSettings(interval=5)
        )
        self.config.run_dir.mkdir(exist_ok=True)
        self.console = _console(100)
        self.watch = TerminalWatch(self.console, self.config, num_ranks=4, on_gpu=False)
        reading, self._writing = os.pipe()
        self.watch.attach(os.fdopen(reading, "rb", buffering=0))

    def print(self, text: str) -> None:
        os.write(self._writing, text.encode())

    def measure(self, *measurements: Measurement) -> None:
        with (self.config.run_dir / "metrics.jsonl").open("a") as file:
            for measurement in measurements:
                file.write(json.dumps(measurement.as_dict()) + "\n")

    def tick(self) -> str:
        """What is drawn and printed by the next tick."""
        before = len(_output(self.console))
        self.watch._drawn = 0.0
        self.watch.tick()
        return _CONTROL.sub("", _output(self.console)[before:])

    def close(self) -> str:
        """What is on the screen at last."""
        os.close(self._writing)
        self.watch.close()
        return _output(self.console)


def test_the_launcher_shows_an_attempt_from_start_to_end(tmp_path: Path) -> None:
    """Starting, first step, the board, results: what ranks print comes above, and the board stays."""
    attempt = _Attempt(tmp_path)
    assert "starting 4 ranks" in attempt.tick()
    attempt.print("4 ranks = 2 nodes x 2\nhalf a ")
    drawn = attempt.tick()
    assert "4 ranks = 2 nodes x 2" in drawn and "first step" in drawn and "half" not in drawn
    attempt.measure(make_measurement(1, loss=5.0))
    attempt.print("line\n")
    drawn = attempt.tick()
    assert "half a line" in drawn and "step 1/10" in drawn
    attempt.measure(make_measurement(10, loss=2.0))
    assert "writing results" in attempt.tick()
    attempt.print("\x1b[1mloss 5.000 -> 2.000\x1b[0m\npicture  run.png")
    screen = attempt.close()
    assert screen.index("10/10") < screen.index("5.000 -> 2.000") < screen.index("picture  run.png")
    last = screen[screen.rindex("picture  run.png") :]
    assert "writing results" not in last[last.rindex("\x1b[2K") :]
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_an_attempt_that_is_stopped_keeps_its_board(tmp_path: Path) -> None:
    attempt = _Attempt(tmp_path)
    attempt.measure(make_measurement(4))
    assert "step 4/10" in attempt.tick()
    attempt.watch.stopping()
    attempt.measure(make_measurement(5))
    drawn = attempt.tick()
    assert "asked the ranks to leave" in drawn and "step 5/10" not in drawn
    attempt.print("asked to leave: saved step-5\n")
    assert "saved step-5" in attempt.close()


def test_a_terminal_that_is_closed_does_not_keep_ranks_from_leaving(tmp_path: Path) -> None:
    """Writing fails; their output is still taken, or they would wait for it."""
    attempt = _Attempt(tmp_path)

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    attempt.console.file = Gone()
    for _ in range(3):
        attempt.print("x" * 50_000 + "\n")
        attempt.watch.tick()
    attempt.watch.stopping()
    os.close(attempt._writing)
    attempt.watch.close()


def test_rows_of_an_earlier_run_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    os.utime(file, (1.0, 1.0))
    rows = Tail(file)
    assert rows.read() == []
    file.unlink()
    file.write_text('{"step": 2}\nbroken\n{"st')
    assert rows.read() == [{"step": 2}]
    with file.open("a") as more:
        more.write('ep": 3}\n')
    assert rows.read() == [{"step": 3}]
