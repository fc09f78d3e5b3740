"""What one emulated run has to say: where the time of a step goes, and what it takes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from mics.bench.summary import Row
from mics.bench.timeline import LINKS


def print_report(row: Row, folder: Path, console: Console) -> int:
    """Print one run's figures; 1 if it could not run."""
    if row.error is not None:
        console.print(f"{row.run.system} did not run: {row.error}", markup=False)
        return 1
    outcome, exposure = row.good[0], row.good[0].exposure
    assert exposure is not None
    median, low, high = (1e3 * seconds for seconds in row.step_seconds)
    table = Table(title=f"{row.run.system}: {row.setting}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("step", f"{median:.1f} ms ({low:.1f} to {high:.1f})")
    table.add_row(
        "model TFLOP/s", f"{row.tflops:.3g}" + ("" if row.mfu is None else f" (MFU {100 * row.mfu:.1f}%)")
    )
    if outcome.host_seconds is not None:
        table.add_row("host, to issue a step", f"{1e3 * outcome.host_seconds:.1f} ms")
    table.add_section()
    table.add_row("computing", f"{1e3 * exposure.compute_seconds:.1f} ms")
    communicating = sum(exposure.link_seconds[link] for link in ("intra", "inter"))
    table.add_row("communicating", f"{1e3 * communicating:.1f} ms")
    table.add_row("neither", f"{1e3 * exposure.idle_seconds:.1f} ms")
    for link in LINKS:
        busy, exposed = exposure.link_seconds[link], exposure.exposed_seconds[link]
        if busy > 0:
            table.add_row(f"{link}: busy, exposed", f"{1e3 * busy:.1f} ms, {1e3 * exposed:.1f} ms")
    for kind, seconds in exposure.exposed_by_kind.items():
        table.add_row(f"  exposed {kind}", f"{1e3 * seconds:.1f} ms")
    table.add_section()
    table.add_row("intra, sent by a rank", f"{exposure.link_nbytes['intra'] / 1e9:.3f} GB")
    table.add_row("inter, sent by a node", f"{exposure.link_nbytes['inter'] / 1e9:.3f} GB")
    if outcome.peak_allocated_nbytes is not None and outcome.peak_reserved_nbytes is not None:
        table.add_row("peak allocated", f"{outcome.peak_allocated_nbytes / 2**30:.2f} GiB")
        table.add_row("peak reserved", f"{outcome.peak_reserved_nbytes / 2**30:.2f} GiB")
        table.add_row("allocator retries", str(outcome.num_alloc_retries))
    console.print(table)
    console.print(
        f"{folder}: *.trace.json (open in ui.perfetto.dev) and *.timeline.png", markup=False, highlight=False
    )
    return 0
