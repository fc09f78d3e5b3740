"""The answer as one HTML page with pictures in it: nothing to load, nothing to install."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mics.planner.answer import Answer
from mics.planner.text import advice, count, lanes_of, money, neighbours
from mics.utils.picture_style import BLUE, GREEN, GREY, INK, ORANGE, STYLE

_GIB: Final = 2**30
_TERM_COLOURS: Final = (BLUE, "#6d9bd1", "#8a5a9e", "#b78fc9", GREEN, "#8cc7b0", ORANGE, "#b5892f")
_SERIES: Final = {"mics": BLUE, "hsdp": ORANGE, "fsdp2": GREY}
_LANES: Final = {"compute": GREY, "intra": GREEN, "inter": BLUE, "to host": ORANGE, "from host": ORANGE}
_SVG_STYLE: Final[dict[Any, Any]] = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "mics"}

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {ink}; max-width: 60rem; margin: 2rem auto; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
code {{ background: #f1f4f6; padding: .15em .35em; border-radius: 3px; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: right; padding: .3em .6em; border-bottom: 1px solid #dfe4e8; }}
th:last-child, td:last-child {{ text-align: left; }}
tr.best {{ background: #eef4fb; font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(found: Answer) -> str:
    """The whole page."""
    request, best = found.found.request, found.best
    prediction = best.prediction
    title = (
        f"{request.model.name} on {request.cluster.num_nodes} x {request.cluster.name}, "
        f"{request.global_batch} rows a step"
    )
    spent = f"<p>{html.escape(money(found.money))}.</p>" if found.money is not None else ""
    body = "\n".join(
        [
            f"<p><code>{html.escape(advice(best))}</code></p>",
            f"<p>{count(request.model.num_parameters)} parameters, {request.cluster.world_size} GPUs: "
            f"{prediction.step_seconds:.3g} s a step, {prediction.tokens_per_second:,.0f} tokens/s, "
            f"{prediction.tflops:.0f} TFLOP/s a GPU ({prediction.hardware_tflops:.0f} with recomputation), "
            f"limited by {best.limited_by}.</p>",
            spent,
            "<h2>Memory of a GPU</h2>",
            _draw(lambda axes: _memory(axes, found), height=2.6),
            "<h2>One step</h2>",
            _draw(lambda axes: _timeline(axes, found), height=0.9 + 0.5 * (1 + len(lanes_of(prediction)))),
            "<h2>Choices</h2>",
            _table(found),
            *(f"<p>{html.escape(line)}</p>" for line in neighbours(found)),
            "<h2>Weak scaling: the rows of a GPU stay the same</h2>",
            _draw(lambda axes: _curve(axes, found.weak), height=3.4),
            "<h2>Strong scaling: the rows of the step stay the same</h2>",
            _draw(lambda axes: _curve(axes, found.strong), height=3.4),
        ]
    )
    return _PAGE.format(title=html.escape(title), body=body, ink=INK)


def _draw(fill: Callable[[Axes], None], *, height: float) -> str:
    with mpl.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(9.6, height), layout="constrained")
        FigureCanvasSVG(figure)
        fill(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _memory(axes: Axes, found: Answer) -> None:
    left = 0.0
    terms = found.best.memory.on_device()
    for (name, nbytes), colour in zip(terms.items(), _TERM_COLOURS, strict=True):
        axes.barh(0, nbytes / _GIB, left=left, color=colour, label=f"{name} {nbytes / _GIB:.1f}")
        left += nbytes / _GIB
    limit = found.found.request.limit / _GIB
    axes.axvline(limit, color=INK, linestyle="--")
    axes.annotate(f" {limit:.0f} GiB usable", (limit, 0.42), va="top")
    axes.set_xlim(0, 1.2 * max(limit, left))
    axes.set_yticks([])
    axes.set_xlabel("GiB")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35), fontsize=8.5)


def _timeline(axes: Axes, found: Answer) -> None:
    prediction = found.best.prediction
    links = lanes_of(prediction)
    rows: dict[str, list[tuple[float, float]]] = {lane: [] for lane in ("compute", *links)}
    for task in prediction.tasks:
        if task.stream == "compute":
            rows["compute"].append((task.start - prediction.began, task.end - task.start))
        for link, seconds in task.links:
            rows[link].append((task.start - prediction.began, seconds))
    for number, (lane, bars) in enumerate(rows.items()):
        axes.broken_barh(bars, (number - 0.36, 0.72), color=_LANES[lane], linewidth=0)
    busy, exposed = prediction.link_seconds, prediction.exposed_seconds
    labels = [f"{link} {busy[link]:.3g} s\n{exposed[link]:.3g} s exposed" for link in links]
    labels.insert(0, f"compute {prediction.compute_seconds:.3g} s")
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    left_out = found.best.setting.accumulation > 3
    axes.set_xlabel("seconds" + ("; micro-steps in the middle are left out" if left_out else ""))


def _curve(axes: Axes, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for name, points in series.items():
        if points:
            worlds, values = zip(*points, strict=True)
            axes.plot(worlds, values, marker="o", color=_SERIES.get(name, INK), label=name)
    ticks = sorted({world for points in series.values() for world, _ in points})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(world) for world in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.12 * max(value for points in series.values() for _, value in points))
        axes.legend()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("model TFLOP/s a GPU")


def _table(found: Answer) -> str:
    heads = (
        "p", "replicas", "rows", "micro-steps", "activations", "s a step", "TFLOP/s", "GiB", "limited by"
    )  # fmt: skip
    lines = ["<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for number, choice in enumerate(found.found.choices[:10]):
        setting = choice.setting
        units = f", {setting.model.parts} units a block" if setting.model.parts > 1 else ""
        cells = (
            setting.partition_size,
            setting.num_replicas,
            setting.micro_batch,
            setting.accumulation,
            f"{setting.activations}{units}",
            f"{choice.step_seconds:.3g}",
            f"{choice.prediction.tflops:.0f}",
            f"{choice.memory.peak / _GIB:.1f}",
            choice.limited_by,
        )
        row = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
        lines.append(f"<tr{' class=best' if number == 0 else ''}>{row}</tr>")
    return "\n".join([*lines, "</table>"])
