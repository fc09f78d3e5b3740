"""The answer on a terminal: memory and time as bars, the choices as a table."""

from __future__ import annotations

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mics.planner.answer import Answer, Money
from mics.planner.search import Choice
from mics.planner.simulate import LINKS
from mics.planner.systems import Prediction

_GIB: Final = 2**30
_WIDTH: Final = 44
_COLOURS: Final = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_black")


def show(found: Answer, console: Console) -> None:
    """Print everything, the recommendation first."""
    request, best = found.found.request, found.best
    cluster = request.cluster
    console.print(
        f"[bold]{request.model.name}[/] ({count(request.model.num_parameters)} parameters, "
        f"{request.model.seq_len} tokens a row) on {cluster.num_nodes} x {cluster.name} "
        f"({cluster.world_size} GPUs), {request.global_batch} rows a step"
    )
    console.print(f"\n{advice(best)}", highlight=False, markup=False, style="bold")
    console.print(f"{_result(best)}\n", highlight=False)
    _memory(found, console)
    _time(best, console)
    _choices(found, console)
    for line in neighbours(found):
        console.print(line, highlight=False)
    _systems(found, console)
    _money(found, console)


def count(number: float) -> str:
    """12.3 B, 1.06 T."""
    unit, name = next(
        (u, n) for u, n in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1, "")) if number >= u or u == 1
    )
    return f"{number / unit:.3g} {name}".rstrip()


def advice(choice: Choice) -> str:
    """The call that does it."""
    setting = choice.setting
    extra = ""
    if setting.activations.checkpoint:
        extra = f", activations=mics.Activations({'offload=True' if setting.activations.offload else ''})"
    if not setting.over_replicas:
        extra += ', optimizer_sharding="partition"'
    if setting.wire_nbytes == 2:
        extra += (
            ", precision=mics.Precision(reduce_dtype=torch.bfloat16, replica_reduce_dtype=torch.bfloat16)"
        )
    if setting.prefetch is not None:
        extra += f", prefetch={setting.prefetch}"
    if setting.model.parts > 1:
        extra += ", units=[block, attention and MLP classes]"
    return (
        f"mics.shard(model, partition_size={setting.partition_size}{extra}), "
        f"{_plural(setting.micro_batch, 'row')} a micro-step, {_plural(setting.accumulation, 'micro-step')}"
    )


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _result(choice: Choice) -> str:
    found = choice.prediction
    again = (
        f" ({found.hardware_tflops:.0f} with recomputation)" if choice.setting.activations.checkpoint else ""
    )
    return (
        f"{found.step_seconds:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s, {found.tflops:.0f} "
        f"TFLOP/s a GPU{again}, limited by {choice.limited_by}"
    )


def _memory(found: Answer, console: Console) -> None:
    best = found.best
    limit = found.found.request.limit
    console.print(
        f"[bold]memory of a GPU[/]: {best.memory.peak / _GIB:.1f} of {limit / _GIB:.1f} GiB at the peak"
        + (f", {best.memory.host / _GIB:.1f} GiB of host memory" if best.memory.host else ""),
        highlight=False,
    )
    bar, used = Text("  "), 0
    terms = best.memory.on_device()
    for (_, nbytes), colour in zip(terms.items(), _COLOURS, strict=True):
        width = round(_WIDTH * (used + nbytes) / limit) - round(_WIDTH * used / limit)
        used += int(nbytes)
        bar.append("█" * width, style=colour)
    bar.append("░" * max(0, _WIDTH - round(_WIDTH * used / limit)), style="dim")
    console.print(bar)
    for (name, nbytes), colour in zip(terms.items(), _COLOURS, strict=True):
        console.print(Text.assemble(("  █ ", colour), f"{nbytes / _GIB:7.2f} GiB  {name}"))
    console.print()


def _time(best: Choice, console: Console) -> None:
    """One step from left to right: a row for the computation and for each link."""
    found = best.prediction
    console.print(
        "[bold]one step[/]" + (" (middle micro-steps left out)" if best.setting.accumulation > 3 else "")
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
        seconds = found.compute_seconds if name == "compute" else found.link_seconds[name]
        exposed = "" if name == "compute" else f", {found.exposed_seconds[name]:.3g} exposed"
        console.print(Text(f"  {name:{margin}}{bar}  {seconds:.3g} s{exposed}"))
    console.print()


def lanes_of(found: Prediction) -> list[str]:
    """Links to show: those of the network always, those to the host where something is offloaded."""
    return [link for link in LINKS if link in ("intra", "inter") or found.link_seconds[link]]


def _choices(found: Answer, console: Console) -> None:
    table = Table(
        title="choices, the best of each partition size",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for header in ("p", "rows", "micro", "activations", "s/step", "TFLOP/s", "GiB"):
        table.add_column(header, justify="left" if header == "activations" else "right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for choice in found.found.choices[:8]:
        setting = choice.setting
        table.add_row(
            str(setting.partition_size),
            str(setting.micro_batch),
            str(setting.accumulation),
            str(setting.activations) + (f", units/{setting.model.parts}" if setting.model.parts > 1 else ""),
            f"{choice.step_seconds:.3g}",
            f"{choice.prediction.tflops:.0f}",
            f"{choice.memory.peak / _GIB:.1f}",
            choice.limited_by,
        )
    console.print(table)


def neighbours(found: Answer) -> list[str]:
    """What the next smaller and the next larger partition size would change."""
    best = found.best
    size = best.setting.partition_size
    by_size = {choice.setting.partition_size: choice for choice in found.found.choices}
    every = sorted([*by_size, *found.found.too_large])
    place = every.index(size)
    lines = []
    for word, other in (("smaller", every[place - 1] if place else None), ("larger", _after(every, place))):
        if other is None:
            lines.append(f"There is no {word} partition size.")
        elif other in by_size:
            change = 100 * (by_size[other].step_seconds / best.step_seconds - 1)
            time = f"{change:+.1f}% time a step" if round(change, 1) else "as fast"
            gib = (by_size[other].memory.peak - best.memory.peak) / _GIB
            lines.append(
                f"The next {word} size, {other}: {time}, {gib:+.1f} GiB a GPU, limited by "
                f"{by_size[other].limited_by}."
            )
        else:
            needed = found.found.too_large[other] / _GIB
            lines.append(f"The next {word} size, {other}, does not fit: {needed:.1f} GiB at the least.")
    return lines


def _after(every: list[int], place: int) -> int | None:
    return every[place + 1] if place + 1 < len(every) else None


def _systems(found: Answer, console: Console) -> None:
    best = found.peers["mics"].step_seconds
    parts = [
        f"{name} {each.step_seconds:.3g} s ({each.step_seconds / best:.2f} x)"
        for name, each in found.peers.items()
    ]
    console.print(f"\nThe same micro-batch in other systems: {', '.join(parts)}", highlight=False)


def _money(found: Answer, console: Console) -> None:
    left = found.goodput
    if left is not None:
        console.print(
            f"Failures: one every {left.mtbf / 3600:.3g} h; a checkpoint every "
            f"{max(left.interval, 1) / 60:.3g} min is best and leaves "
            f"{100 * left.share:.1f}% of the time to training",
            highlight=False,
        )
    if found.money is not None:
        console.print(money(found.money), highlight=False)


def money(spent: Money) -> str:
    """Time and price of a number of tokens."""
    if spent.hours is None:
        return f"{spent.tokens:.3g} tokens: never, failures come faster than work is done"
    dollars = "" if spent.dollars is None else f", {spent.dollars:,.0f} dollars"
    return f"{spent.tokens:.3g} tokens: {spent.hours:,.0f} h ({spent.hours / 24:,.1f} days){dollars}"
