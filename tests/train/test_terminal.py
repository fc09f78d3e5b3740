"""`mics train` in a real terminal, on two ranks: what a person sees, also when it ends badly."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.terminal import Terminal, drawn, processes_with

pytestmark = pytest.mark.full

SMALL = [
    *("--launch.device", "cpu", "--launch.simulated-nodes", "1", "--report.interval", "1"),
    *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.seq-len", "32"),
    *("--report.sample-tokens", "8", "--launch.max-restarts", "0"),
]


def _train(folder: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "mics.cli", "train", "--output-dir", str(folder), *SMALL, *args]


def test_the_small_emulator_reads_what_rich_writes() -> None:
    assert drawn("a\r\nbc\r\x1b[2K\x1b[1A\x1b[2Kx\x1b[1m1\x1b[0m\r\n\x1b[?25hd") == ["x1", "d"]
    assert drawn("abc\rx\x1b[K") == ["x"]


def test_a_run_is_drawn_and_leaves_its_board_and_results(tmp_path: Path) -> None:
    """The board with every figure and results below it, each once. What was waited for is gone."""
    args = ["--steps", "8", "--checkpoint.interval", "4", "--logger", "tensorboard", "--profile", "1"]
    with Terminal(_train(tmp_path, *args)) as terminal:
        assert terminal.wait(timeout=200) == 0, terminal.screen()
    screen = terminal.screen()
    for word in ("starting 2 ranks", "writing results"):
        assert word in terminal.content and word not in screen
    assert screen.count("step 8/8") == screen.count("100%") == 1
    order = ["2 ranks = 1 node x 2 (CPU)", "1 step, 2 ranks", "step 8/8", "tokens/s", "RSS", "sent per step"]
    order += ["of a step waits for communication"]
    order += ["checkpoint  step ", "loss 5.", "The model writes:", "picture  ", "events   "]
    places = [screen.index(word) for word in order]
    assert places == sorted(places), screen
    assert "█" in screen and terminal.has_cursor
    assert (tmp_path / "demo" / "profile" / "rank-0.trace.json").exists()
    assert list((tmp_path / "demo" / "tensorboard").glob("events.out.*"))


@pytest.mark.long  # test_stopping.py interrupts runs, and the test above looks at the board
def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    """The board stays, the ranks save, the cursor is there, and no process is left."""
    args = ["--steps", "1000000", "--name", "ctrl-c-in-a-terminal"]
    with Terminal(_train(tmp_path, *args)) as terminal:
        terminal.read_until("tokens/s", timeout=120)
        terminal.type("\x03")
        assert terminal.wait(timeout=100) == 130, terminal.screen()
    screen = terminal.screen()
    assert "asked to leave: saved" in screen and "mics: interrupted; all ranks have been stopped" in screen
    latest = (tmp_path / "ctrl-c-in-a-terminal/checkpoints/latest").read_text().strip()
    assert f"{latest}, --checkpoint.resume latest goes on from it" in terminal.content.replace("\r\n", "")
    assert screen.index("tokens/s") < screen.index("mics: interrupted")
    assert "Ctrl-C again" in terminal.content and "Ctrl-C again" not in screen
    assert terminal.has_cursor
    time.sleep(0.5)
    assert processes_with("ctrl-c-in-a-terminal") == []


@pytest.mark.long  # test_faults.py kills a rank, and Ctrl-C leaves a board and an error too
def test_a_dead_rank_leaves_an_error_to_read(tmp_path: Path) -> None:
    """Rank 0 is killed: the board stays, the error is below it, and the cursor is there."""
    args = ["--steps", "1000000", "--checkpoint.interval", "0", "--name", "killed-in-a-terminal"]
    with Terminal(_train(tmp_path, *args)) as terminal:
        terminal.read_until("tokens/s", timeout=120)
        (rank_0,) = [pid for pid in processes_with("killed-in-a-terminal") if _rank(pid) == "0"]
        os.kill(rank_0, signal.SIGKILL)
        assert terminal.wait(timeout=100) == 137, terminal.screen()
    screen = terminal.screen()
    assert "mics: rank 0 (node 0) failed with signal SIGKILL; logs are in" in screen
    assert screen.index("tokens/s") < screen.index("failed with signal")
    assert terminal.has_cursor


def _rank(pid: int) -> str | None:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return entry.removeprefix(b"RANK=").decode()
    return None
