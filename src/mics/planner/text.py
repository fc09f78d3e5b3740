"""The answer on a terminal: memory and time as bars, the choices as a table."""

from __future__ import annotations

from itertools import cycle
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from mics.planner.advice import advice
from mics.planner.answer import Answer, Money
from mics.planner.peers import HEADS, TITLE, peer_cells
from mics.planner.peers import KEY as PEER_KEY
from mics.planner.search import Choice
from mics.planner.simulate import LINKS
from mics.planner.sweep import KEY as SWEEP_KEY
from mics.planner.sweep import Sweep, advice_on_nodes, batches_of, cells, curves_of
from mics.planner.systems import Prediction
from mics.utils.numbers import (
    GIB,
    count,
    days,
    dollars,
    duration,
    fixed,
    hours,
    in_gib,
    memory,
    percent,
    plural,
    seconds,
    tflops,
    tokens,
    whole,
)

KEY: Final = "p: partition size; batch: sequences per GPU and micro-step; accum.: gradient accumulation steps"
_LINK_WORDS: Final = {
    "intra": "links inside the node",
    "inter": "the network between nodes",
    "to host": "copies to the host",
    "from host": "copies from the host",
}
_WORTH_SAYING: Final = 0.01  # of a step
_WIDTH: Final = 44
_BAR: Final = 20
_COLOURS: Final = (
    "blue",
    "cyan",
    "green",
    "yellow",
    "magenta",
    "red",
    "bright_blue",
    "bright_black",
    "bright_magenta",
    "bright_cyan",
)


def show(found: Answer, console: Console) -> None:
    """Print everything, the recommendation first."""
    request, best = found.found.request, found.best
    cluster = request.cluster
    console.print(
        f"[bold]{request.model.name}[/] ({count(request.model.num_parameters)} parameters) on "
        f"{cluster.num_nodes:,} x {cluster.name} ({plural(cluster.world_size, cluster.rank_word)})\n"
        f"{request.batch}",
        highlight=False,
    )
    console.print(f"\n{advice(best)}\n", highlight=False, markup=False, style="bold", soft_wrap=True)
    console.print(f"{result(best)}\n", highlight=False)
    _memory(found, console)
    _time(best, console)
    _choices(found, console)
    for line in neighbours(found):
        console.print(line, highlight=False)
    _systems(found, console)
    _money(found, console)


def show_sweep(found: Sweep, console: Console) -> None:
    """One table over the number of nodes, and what to make of it."""
    request = found.advised[1].found.request
    console.print(
        f"[bold]{request.model.name}[/] ({count(request.model.num_parameters)} parameters) on nodes of "
        f"{request.cluster.name} ({plural(request.cluster.ranks_per_node, 'GPU')} per node)",
        highlight=False,
    )
    for line in batches_of(found.sizes):
        console.print(line, highlight=False)
    spent = found.advised[1].money
    if spent is not None:
        console.print(f"to train on {tokens(spent.tokens)}", highlight=False)
    heads, lines = cells(found)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        justify: JustifyMethod = "left" if head == "best setting" else "right"
        table.add_column(head.replace(" per GPU", "\nper GPU"), justify=justify)
    for row in lines:
        table.add_row(*row, style="bold" if row[0] == f"{found.advised[0]:,}" else None)
    console.print(table)
    console.print(f"{SWEEP_KEY}\n", highlight=False, style="dim")
    _curve(found, console)
    for line in advice_on_nodes(found):
        console.print(line, highlight=False)
    best = found.advised[1].best
    console.print(f"\n{advice(best)}\n", highlight=False, markup=False, style="bold", soft_wrap=True)
    console.print(result(best), highlight=False)
    if spent is None:
        console.print("--tokens adds days, --price dollars.", highlight=False, style="dim")


def _curve(found: Sweep, console: Console) -> None:
    """Time and cost over the number of nodes, a bar for each: as far as they are known."""
    if len(found.possible) < 2:
        return
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("nodes", justify="right", no_wrap=True)
    columns = curves_of(found)
    for head in columns:
        table.add_column(head, justify="left", no_wrap=True)
    for number, (nodes, _) in enumerate(found.possible):
        cells = []
        for points in columns.values():
            most = max(value for value, _ in points) or 1.0  # nodes may be free
            value, words = points[number]
            cells.append(f"{'█' * max(1, round(_BAR * value / most))} {words}")
        table.add_row(f"{nodes:,}", *cells, style="bold" if nodes == found.advised[0] else None)
    console.print(table)
    console.print()


def result(choice: Choice) -> str:
    """What a step takes, in one sentence."""
    found = choice.prediction
    recomputes = choice.setting.activations.checkpoint
    again = f" ({tflops(found.hardware_tflops)} with recomputation)" if recomputes else ""
    each = choice.setting.cluster.rank_word
    return (
        f"{seconds(found.step_seconds)} per step, {whole(found.tokens_per_second)} tokens/s "
        f"({whole(found.tokens_per_second_per_gpu)} per {each}), {tflops(found.tflops)} TFLOP/s per {each}"
        f"{again}, MFU {percent(found.mfu)}, {waiting(choice)}"
    )


def waiting(choice: Choice) -> str:
    """``5.1% waits for the network between nodes``, and what limits the step where that is much of it."""
    link, share = choice.prediction.worst_wait
    if share < _WORTH_SAYING:
        return f"limited by {choice.limited_by}"
    share_of_it = f"{percent(share)} waits for {_LINK_WORDS[link]}"
    return share_of_it if choice.limited_by == "compute" else f"limited by {choice.limited_by}: {share_of_it}"


def _memory(found: Answer, console: Console) -> None:
    best = found.best
    limit, each = found.found.request.limit, best.setting.cluster.rank_word
    console.print(
        f"[bold]memory per {each}[/]: {in_gib(best.memory.peak)} of {memory(limit)} at the peak"
        + (f", {memory(best.memory.host)} of host memory" if best.memory.host else ""),
        highlight=False,
    )
    bar, used = Text("  "), 0
    terms = best.memory.on_device()
    for (_, nbytes), colour in zip(terms.items(), cycle(_COLOURS), strict=False):
        width = round(_WIDTH * (used + nbytes) / limit) - round(_WIDTH * used / limit)
        used += int(nbytes)
        bar.append("█" * width, style=colour)
    bar.append("░" * max(0, _WIDTH - round(_WIDTH * used / limit)), style="dim")
    console.print(bar)
    for (name, nbytes), colour in zip(terms.items(), cycle(_COLOURS), strict=False):
        console.print(Text.assemble(("  █ ", colour), f"{nbytes / GIB:7.2f} GiB  {name}"))
    console.print()


def _time(best: Choice, console: Console) -> None:
    """One step from left to right: a row for the computation and for each link."""
    found = best.prediction
    console.print(
        "[bold]one step[/]"
        + (" (micro-steps in the middle are left out)" if best.setting.accumulation > 3 else "")
    )
    ended = max(task.end for task in found.tasks)
    span = ended - found.began
    rows = {"compute": [(t.start, t.end) for t in found.tasks if t.stream == "compute"]}
    for link in lanes_of(found):
        rows[link] = [(t.start, t.start + s) for t in found.tasks for name, s in t.links if name == link]
    margin = max(map(len, rows)) + 1
    for name, intervals in rows.items():
        cells = [0.0] * _WIDTH
        for start, end in intervals:
            low, high = (_WIDTH * (moment - found.began) / span for moment in (start, end))
            for cell in range(max(0, int(low)), min(_WIDTH, int(high) + 1)):
                cells[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
        bar = "".join(" ░▒▓█"[min(4, round(4 * min(1.0, cell)))] for cell in cells)
        busy = found.compute_seconds if name == "compute" else found.link_seconds[name]
        exposed = "" if name == "compute" else f", {seconds(found.exposed_seconds[name])} exposed"
        console.print(Text(f"  {name:{margin}}{bar}  {seconds(busy)}{exposed}"))
    console.print()


def lanes_of(found: Prediction) -> list[str]:
    """Links to show: those of the network always, those to the host where something is offloaded."""
    return [link for link in LINKS if link in ("intra", "inter") or found.link_seconds[link]]


def _choices(found: Answer, console: Console) -> None:
    table = Table(
        title="choices: the best setting of each partition size",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for header in ("p", "batch", "accum.", "activations", "s/step", "MFU", "GiB"):
        table.add_column(header, justify="left" if header == "activations" else "right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for choice in found.found.choices[:8]:
        setting = choice.setting
        table.add_row(
            str(setting.partition_size),
            str(setting.micro_batch),
            str(setting.accumulation),
            str(setting.activations) + (f", units/{setting.model.parts}" if setting.model.parts > 1 else ""),
            fixed(choice.step_seconds),
            percent(choice.prediction.mfu),
            in_gib(choice.memory.peak),
            choice.limited_by,
        )
    console.print(table)
    key = KEY.replace("GPU", found.best.setting.cluster.rank_word)
    console.print(f"{key}\n", highlight=False, style="dim")


def neighbours(found: Answer) -> list[str]:
    """What the next smaller and the next larger partition size would change."""
    best = found.best
    size, each = best.setting.partition_size, best.setting.cluster.rank_word
    by_size = {choice.setting.partition_size: choice for choice in found.found.choices}
    every = sorted([*by_size, *found.found.too_large])
    place = every.index(size)
    lines = []
    for word, other in (("smaller", every[place - 1] if place else None), ("larger", _after(every, place))):
        if other is None:
            lines.append(f"There is no {word} partition size.")
        elif other in by_size:
            change = 100 * (by_size[other].step_seconds / best.step_seconds - 1)
            time = f"step time {change:+.1f}%" if round(change, 1) else "as fast"
            gib = (by_size[other].memory.peak - best.memory.peak) / GIB
            lines.append(
                f"The next {word} partition size, {other}: {time}, {gib:+.1f} GiB per {each}, "
                f"{waiting(by_size[other])}."
            )
        else:
            needed = found.found.too_large[other]
            lines.append(
                f"The next {word} partition size, {other}, does not fit: it needs {needed} per {each}."
            )
    return lines


def _after(every: list[int], place: int) -> int | None:
    return every[place + 1] if place + 1 < len(every) else None


def _systems(found: Answer, console: Console) -> None:
    """Only where they were asked for."""
    if not found.peers:
        return
    table = Table(title=TITLE, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in HEADS:
        left = head in ("system", "best setting")
        table.add_column(
            head.replace("same ", "same\n"), justify="left" if left else "right", no_wrap=not left
        )
    for row in peer_cells(found):
        table.add_row(*row)
    console.print()
    console.print(table)
    key = PEER_KEY.replace("GPU", found.best.setting.cluster.rank_word)
    console.print(key, highlight=False, style="dim")


def _money(found: Answer, console: Console) -> None:
    left = found.goodput
    if left is not None:
        console.print(
            f"Failures: one every {_hours_or_less(left.mtbf)}; the best checkpoint interval is "
            f"{duration(max(left.interval, 1))} and leaves {percent(left.share)} of the time to training",
            highlight=False,
        )
    if found.money is not None:
        console.print(money(found.money), highlight=False)


def _hours_or_less(found: float) -> str:
    """``500 h``, as failures are counted; ``36 s`` where that would be a fraction of one."""
    return hours(found) if found >= 3600 else duration(found)


def money(spent: Money) -> str:
    """Time and price of a number of tokens."""
    if spent.hours is None:
        return f"{tokens(spent.tokens)}: never, failures come faster than work is done"
    price = "" if spent.dollars is None else f", {dollars(spent.dollars)}"
    return f"{tokens(spent.tokens)}: {hours(3600 * spent.hours)} ({days(3600 * spent.hours)}){price}"
