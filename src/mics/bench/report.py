"""What one emulated run has to say: where the time of a step goes, and what it takes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from mics.bench.provenance import caveats, emulated_title
from mics.bench.summary import Row, warning
from mics.bench.timeline import LINKS
from mics.utils.global_batch import GlobalBatch
from mics.utils.numbers import memory, milliseconds, percent, tflops, volume


def print_report(row: Row, batch: GlobalBatch, folder: Path, console: Console) -> int:
    """Print one run's figures; 1 if it could not run."""
    if row.error is not None:
        console.print(f"{row.run.system} did not run: {row.error}", markup=False)
        return 1
    outcome, exposure = row.good[0], row.good[0].exposure
    assert exposure is not None
    assert row.run.cluster is not None
    median, low, high = map(milliseconds, row.step_seconds)
    where = emulated_title([row.run.cluster], row.run.job.device, [row.run.clock])
    console.print(f"{row.run.title}\n{where}\n{batch}", markup=False, highlight=False)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("step", f"{median} ({low} to {high})")
    table.add_row(
        "model TFLOP/s", tflops(row.tflops) + ("" if row.mfu is None else f" (MFU {percent(row.mfu)})")
    )
    if outcome.host_seconds is not None:
        table.add_row("host, to issue a step", milliseconds(outcome.host_seconds))
    table.add_section()
    table.add_row("computing", milliseconds(exposure.compute_seconds))
    communicating = sum(exposure.link_seconds[link] for link in ("intra", "inter"))
    table.add_row("communicating", milliseconds(communicating))
    table.add_row("neither", milliseconds(exposure.idle_seconds))
    for link in LINKS:
        busy, exposed = exposure.link_seconds[link], exposure.exposed_seconds[link]
        if busy > 0:
            table.add_row(f"{link}: busy, exposed", f"{milliseconds(busy)}, {milliseconds(exposed)}")
    for kind, seconds in exposure.exposed_by_kind.items():
        table.add_row(f"  exposed {kind}", milliseconds(seconds))
    table.add_section()
    table.add_row("intra, sent per rank", volume(exposure.link_nbytes["intra"]))
    table.add_row("inter, sent per node", volume(exposure.link_nbytes["inter"]))
    if outcome.peak_allocated_nbytes is not None and outcome.peak_reserved_nbytes is not None:
        table.add_row("peak allocated", memory(outcome.peak_allocated_nbytes))
        table.add_row("peak reserved", memory(outcome.peak_reserved_nbytes))
        table.add_row("allocator retries", str(outcome.num_alloc_retries))
    console.print(table)
    if row.breakdown_differs:
        console.print(f"Warning: {warning(row)}", markup=False, highlight=False, style="yellow")
    for line in caveats([row.run.cluster], row.run.job.device, [row.run.clock]):
        console.print(line, markup=False, highlight=False)
    console.print(
        f"{folder}: *.trace.json (open in ui.perfetto.dev) and *.timeline.png", markup=False, highlight=False
    )
    return 0
