"""The tables of docs/published.md, made of dated results. What is not run is said to be not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.published import ablations
from benchmarks.published.dated import latest
from benchmarks.published.emulate import Measured
from benchmarks.published.predict import BESIDE_HSDP, PEERS, PeerAtBest, Range
from benchmarks.published.results import HOST_BOUND, RESULTS, Result, error_of, newest, read
from benchmarks.published.rows import BY_KEY, EXPERIMENTS, FITTED_TO, Measure, Row, rows_of

from mics.cost.shapes import named_shape

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "published.md"
NOT_RUN: Final = "not run"
_WORDS: Final = {
    "micro_batch": "micro-batch",
    "accumulation": "accumulation",
    "seq_len": "sequence",
    "activations": "activations",
}
_UNITS: Final = {
    Measure.TFLOPS: "TFLOP/s",
    Measure.SPEEDUP: "x",
    Measure.SCALING: "%",
    Measure.SLOWDOWN: "%",
    Measure.DROP: "x",
}
_PLACEHOLDERS: Final = {"zero3": "fsdp2", BESIDE_HSDP: "mics"}  # what runs in place of a system
_MARKER: Final = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def in_words(row: Row, found: Range | None) -> str:
    """``118 to 122``."""
    if found is None:
        return NOT_RUN
    low, high = (_number(row, value) for value in (found.low, found.high))
    return low if low == high else f"{low} to {high}"


def _number(row: Row, value: float) -> str:
    digits = {Measure.TFLOPS: 0, Measure.SPEEDUP: 2}
    return f"{value:,.{digits.get(row.measure, 1)}f}"


def published_in_words(row: Row) -> str:
    return ("up to " if row.at_most else "") + f"{_number(row, row.published)} {_UNITS[row.measure]}"


def open_in_words(row: Row) -> str:
    """``micro-batch 8, 16, 32; accumulation 1, 4``."""
    parts = [f"{_WORDS[name]} {', '.join(map(str, found))}" for name, found in row.open_values.items()]
    return "; ".join(parts) or "nothing"


def rows_table(experiment: str, result: Result | None) -> Iterator[str]:
    """A row for each published figure."""
    yield (
        "| | published | left open | planner | difference | emulated | difference | "
        "kernels of 2022 | difference |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|"
    for row in rows_of(experiment):
        planned = None if result is None else result.predicted[row.key]
        emulated = None if result is None else result.emulated(row)
        then = None if result is None else result.with_kernels_of_2022(row)
        of_2022 = ["", ""] if then is None else [in_words(row, then), error_of(row, then)]
        if then is not None and row.key in FITTED_TO:
            of_2022[1] += ", fitted"
        cells = [
            row.what,
            published_in_words(row),
            open_in_words(row),
            "it does not fit" if result is not None and planned is None else in_words(row, planned),
            error_of(row, planned),
            _emulated(row, result, emulated),
            error_of(row, emulated),
            *of_2022,
        ]
        yield f"| {' | '.join(cells)} |"


def _emulated(row: Row, result: Result | None, found: Range | None) -> str:
    if result is None or found is None:
        return (result is not None and result.why_not(row)) or NOT_RUN
    return in_words(row, found) + _of_blocks(row, result.blocks(row))


def _of_blocks(row: Row, ran: Sequence[int | None]) -> str:
    """`` (20 and 4 of 62)``: scaled from so many blocks; nothing where all ran."""
    words = " and ".join("all" if layers is None else str(layers) for layers in ran)
    return "" if words in ("", "all") else f" ({words} of {named_shape(row.model).num_blocks})"


def peers_table(result: Result | None) -> Iterator[str]:
    """Systems beside it, each at its own best setting, predicted and emulated."""
    yield "| system | its best setting | planner: step | of mics | emulated: step | of mics |"
    yield "|---|---|---:|---:|---:|---:|"
    key, peers = ("", []) if result is None else next(iter(result.peers.items()), ("", []))
    runs = [] if result is None else [each for each in result.measured if each.role == "peer"]
    ours = next((peer for peer in peers if peer.system == "mics"), None)
    our_seconds = None if ours is None else ours.step_seconds
    our_run = None if ours is None else _run_of(ours, runs)
    here = None if our_run is None or our_run.host_bound else our_run.step_seconds
    for peer in peers:
        name = PEERS[peer.system]
        if peer.step_seconds is None:
            yield f"| {name} | {peer.problem} | | | | |"
            continue
        found = _run_of(peer, runs)
        cells = [_seconds(peer.step_seconds), _times(peer.step_seconds, our_seconds)]
        if found is None:
            cells += [NOT_RUN, ""]
        elif found.host_bound:
            cells += [HOST_BOUND, ""]
        elif found.step_seconds is None:
            cells += [f"did not run: {found.error}", ""]
        else:
            ran = _of_blocks(BY_KEY[key], [found.layers])
            cells += [_seconds(found.step_seconds) + ran, _times(found.step_seconds, here)]
        yield f"| {name} | {_setting(peer)} | {' | '.join(cells)} |"
    if not peers:
        yield f"| {NOT_RUN} | | | | | |"


def _run_of(peer: PeerAtBest, runs: Sequence[Measured]) -> Measured | None:
    """The measurement of its best setting; one of a setting that was its best before is another row."""
    system = _PLACEHOLDERS.get(peer.system, peer.system)
    found = [each for each in runs if each.system == system and each.setting.startswith(f"{_setting(peer)},")]
    return found[0] if found else None


def _times(seconds: float, ours: float | None) -> str:
    return "" if ours is None else f"{seconds / ours:.2f} x"


def _setting(peer: PeerAtBest) -> str:
    return f"p={peer.partition_size}, {peer.micro_batch} x {peer.accumulation}, {peer.activations}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:,.2f} s"


def ablation_table(place: str, folder: Path = RESULTS) -> Iterator[str]:
    """Of the newest result that has this setting."""
    file = latest(folder, "ablations")
    found = [] if file is None else [row for row in ablations.read(file) if row.place == place]
    if found:
        yield from ablations.table(found)
        return
    yield "| mechanism | taken away | step ms |"
    yield "|---|---|---:|"
    known = ablations.PLACES[place].ways
    for way in ablations.WAYS:
        if way.key in known:
            yield f"| {way.mechanism} | {way.without} | {NOT_RUN} |"


def section(result: Result) -> list[str]:
    """One experiment in a dated Markdown file."""
    lines = [f"## {result.experiment}", "", f"    {result.command}", ""]
    lines += [f"{result.versions}. {result.seconds:.0f} s.", ""]
    lines += [*rows_table(result.experiment, result), ""]
    lines += [*peers_table(result), ""] if result.peers else []
    lines += [f"    {each.command}" for each in result.measured]
    return lines + ([""] if result.measured else [])


def document(file: Path) -> str:
    """The Markdown of a dated JSON file."""
    title = f"# Published experiments, {file.stem.removeprefix('published_').replace('_', ', ')}"
    lines = [line for result in read(file) for line in section(result)]
    return "\n".join([title, "", *lines])


def tables(folder: Path = RESULTS) -> Mapping[str, Callable[[], Iterator[str]]]:
    """By the name in a marker."""
    of = cache(lambda experiment: newest(experiment, folder))  # once, for both tables
    found: dict[str, Callable[[], Iterator[str]]] = {}
    for name in EXPERIMENTS:
        found[name] = lambda name=name: rows_table(name, of(name))  # type: ignore[misc]
        found[f"{name}-peers"] = lambda name=name: peers_table(of(name))  # type: ignore[misc]
    for place in ablations.PLACES:
        found[f"ablations-{place}"] = lambda place=place: ablation_table(place, folder)  # type: ignore[misc]
    return found


def regenerate(text: str, folder: Path = RESULTS) -> str:
    """The page with its tables as the results say; everything else stays."""
    known = tables(folder)

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in known:
            raise SystemExit(f"docs/published.md: expected a table of {', '.join(known)}, found {name!r}")
        return match.group(1) + "\n".join(["", *known[name](), "", match.group(3)])

    return _MARKER.sub(fill, text)


def main(page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Write the page again."""
    page.write_text(regenerate(page.read_text(), folder))
