"""A comparison as a table: for the terminal, for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from mics.bench.summary import Row
from mics.utils.numbers import in_gib, percent, tflops, whole


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else whole(1e3 * seconds)


def _exposed(link: str) -> Callable[[Row], str | None]:
    return lambda row: _milliseconds(
        row.median(lambda found: None if found.exposure is None else found.exposure.exposed_seconds[link])
    )


def _sent(link: str) -> Callable[[Row], str | None]:
    def sent(row: Row) -> str | None:
        nbytes = row.median(
            lambda found: None if found.exposure is None else found.exposure.link_nbytes[link]
        )
        return None if nbytes is None else f"{nbytes / 1e9:,.2f}"

    return sent


def _gib(name: str) -> Callable[[Row], str | None]:
    def gib(row: Row) -> str | None:
        nbytes = row.median(lambda found: getattr(found, name))
        return None if nbytes is None else in_gib(nbytes)

    return gib


def _step(row: Row) -> str:
    median, low, high = (1e3 * seconds for seconds in row.step_seconds)
    return f"{whole(median)} ({whole(low)} to {whole(high)})"


def _compute(row: Row) -> str | None:
    """With an asterisk where it is not of a step like those that were timed."""
    found = _milliseconds(row.compute_seconds)
    return f"{found}*" if found is not None and row.breakdown_differs else found


def _uplink(row: Row) -> str | None:
    nbytes = row.median(lambda found: found.uplink_nbytes)
    return None if nbytes is None else f"{nbytes / 1e6:,.1f}"


def _uplink_ratio(row: Row) -> str | None:
    nbytes = row.median(lambda found: found.uplink_nbytes)
    size = row.run.job.param.itemsize
    return None if nbytes is None else f"{nbytes / (size * row.run.job.model.num_parameters):.2f}"


_COLUMNS: Final[tuple[tuple[str, Callable[[Row], str | None]], ...]] = (
    ("step ms", _step),
    ("TFLOP/s", lambda row: tflops(row.tflops)),
    ("MFU", lambda row: None if row.mfu is None else percent(row.mfu)),
    ("compute ms", _compute),
    ("exposed intra ms", _exposed("intra")),
    ("exposed inter ms", _exposed("inter")),
    (
        "idle ms",
        lambda row: _milliseconds(
            row.median(lambda found: None if found.exposure is None else found.exposure.idle_seconds)
        ),
    ),
    ("host ms", lambda row: _milliseconds(row.median(lambda found: found.host_seconds))),
    ("intra GB per rank", _sent("intra")),
    ("inter GB per node", _sent("inter")),
    ("uplink MB per host", _uplink),
    ("uplink / S", _uplink_ratio),
    ("peak GiB", _gib("peak_allocated_nbytes")),
    ("reserved GiB", _gib("peak_reserved_nbytes")),
    ("retries", lambda row: _count(row.median(lambda found: found.num_alloc_retries))),
    ("last loss", lambda row: f"{row.good[0].losses[-1]:.5f}" if row.run.cluster is None else None),
    ("blocks", lambda row: row.run.blocks or None),
)


def _count(number: float | None) -> str | None:
    return None if number is None else f"{number:.0f}"


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns that no row has anything for are left out."""
    ran = [row for row in rows if row.error is None]
    clusters = {row.run.cluster.name for row in rows if row.run.cluster is not None}
    columns = [(name, value) for name, value in _COLUMNS if any(value(row) is not None for row in ran)]
    heads = ["ranks", "p", "accum.", "system", *(name for name, _ in columns)]
    if len(clusters) > 1:
        heads.append("cluster")
    lines = []
    for row in rows:
        job = row.run.job
        line = [str(row.world_size), str(row.partition_size), str(job.accumulation), row.run.system]
        if row.error is not None:
            line += ["did not run", *["" for _ in columns[1:]]]
        else:
            line += [value(row) or "" for _, value in columns]
        if len(clusters) > 1:
            line.append("" if row.run.cluster is None else row.run.cluster.name)
        lines.append(line)
    return heads, lines


def terminal_table(rows: Sequence[Row], *, title: str) -> Table:
    heads, lines = cells(rows)
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, head in enumerate(heads):
        table.add_column(
            head, justify="left" if number == 3 else "right", no_wrap=head in ("system", "step ms")
        )
    for line in lines:
        table.add_row(*line, style="bold" if line[3] == "mics" else None)
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    heads, lines = cells(rows)
    rule = ["---" if number == 3 else "---:" for number in range(len(heads))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, rule, *lines])
