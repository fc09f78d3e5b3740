"""The answer as one HTML page with pictures in it: nothing to load, nothing to install.

Colours are CSS variables, so that the page and its pictures are dark where the reader's browser is.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mics.planner.advice import advice
from mics.planner.answer import Answer
from mics.planner.page_pictures import draw_memory, draw_nodes, draw_step
from mics.planner.peers import HEADS, TITLE, peer_cells
from mics.planner.peers import KEY as PEER_KEY
from mics.planner.search import Choice
from mics.planner.sweep import KEY as SWEEP_KEY
from mics.planner.sweep import Sweep, advice_on_nodes, batches_of, cells
from mics.planner.text import lanes_of, money, neighbours, result
from mics.utils.numbers import count, fixed, in_gib, percent, plural, tflops
from mics.utils.picture_curves import Curves, draw_curves
from mics.utils.picture_style import DARK, LIGHT, Theme

_SVG_STYLE: Final[dict[Any, Any]] = {
    **LIGHT.style,
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize"), 11.0),
    "svg.fonttype": "none",
    "svg.hashsalt": "mics",
}
_SYSTEMS: Final = {
    "hsdp": "HSDP",
    "fsdp2": "FSDP2 over all GPUs",
    "deepspeed-zero3": "ZeRO-3",
    "deepspeed-zero2": "ZeRO-2",
}

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
p.small {{ color: var(--muted); }}
code {{ background: var(--grid); padding: .15em .35em; border-radius: 3px; }}
table {{ border-collapse: collapse; min-width: 50%; }}
th, td {{ text-align: right; padding: .3em .6em; border-bottom: 1px solid var(--grid); }}
th.left, td.left {{ text-align: left; }}
tr.best {{ background: var(--grid); font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(found: Answer) -> str:
    """The whole page."""
    cluster = found.found.request.cluster
    body = [
        _paragraph(_sentence(str(found.found.request.batch))),
        *_plan(found),
        "<h2>Weak scaling: the batch per GPU stays the same</h2>",
        _draw(lambda axes: _curves(axes, found.weak), height=3.2),
        "<h2>Strong scaling: the global batch stays the same</h2>",
        _draw(lambda axes: _curves(axes, found.strong), height=3.2),
    ]
    where = f"{cluster.num_nodes:,} x {cluster.name} ({plural(cluster.world_size, 'GPU')})"
    return _page(f"{found.found.request.model.name} on {where}", body)


def sweep_page(found: Sweep) -> str:
    """The whole page of several numbers of nodes: table and curves, and the plan that is advised."""
    nodes, advised = found.advised
    request = advised.found.request
    heads, lines = cells(found)
    best = [number for number, line in enumerate(lines) if line[0] == f"{nodes:,}"]
    body = [
        *(_paragraph(_sentence(line)) for line in batches_of(found.sizes)),
        _html_table(heads, lines, best=best[0], left="best setting"),
        _paragraph(_sentence(SWEEP_KEY), small=True),
        *map(_paragraph, advice_on_nodes(found)),
        "<h2>What more nodes gain and cost</h2>",
        _draw(lambda axes: draw_nodes(axes, found, LIGHT), height=3.4),
        f"<h2>The plan for {nodes:,} x {html.escape(request.cluster.name)}</h2>",
        *_plan(advised),
    ]
    return _page(f"{request.model.name} on how many nodes of {request.cluster.name}?", body)


def _page(title: str, body: Sequence[str]) -> str:
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in _variables(theme).items())
        for theme in (LIGHT, DARK)
    )
    return _PAGE.format(title=html.escape(title), body="\n".join(body), light=light, dark=dark)


def _variables(theme: Theme) -> dict[str, str]:
    """Names in CSS and their colours."""
    neutral = {"page": theme.page, "ink": theme.ink, "muted": theme.muted, "grid": theme.grid}
    return neutral | {role.replace(" ", "-"): colour for role, colour in theme.colours.items()}


def _paragraph(text: str, *, small: bool = False) -> str:
    return f"<p{' class=small' if small else ''}>{html.escape(text)}</p>"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _plan(found: Answer) -> list[str]:
    """What is said about one plan."""
    request, best = found.found.request, found.best
    lanes = 1 + len(lanes_of(best.prediction))
    return [
        f"<pre><code>{html.escape(advice(best))}</code></pre>",
        _paragraph(
            f"{count(request.model.num_parameters)} parameters, {plural(request.cluster.world_size, 'GPU')}: "
            f"{result(best)}."
        ),
        _paragraph(_division(found)),
        _paragraph(f"{money(found.money)}.") if found.money is not None else "",
        "<h2>Memory per GPU</h2>",
        _draw(lambda axes: draw_memory(axes, found, LIGHT), height=2.5),
        "<h2>One step of a GPU</h2>",
        _draw(lambda axes: draw_step(axes, found, LIGHT), height=1.7 + 0.62 * lanes),
        "<h2>Choices: the best setting of each partition size</h2>",
        *_choices(found),
        *map(_paragraph, neighbours(found)),
        *_systems(found),
    ]


def _systems(found: Answer) -> list[str]:
    """Other systems, each at its best; nothing where they were not looked for."""
    if not found.peers:
        return []
    return [
        f"<h2>{_sentence(TITLE)[:-1]}</h2>",
        _html_table(HEADS, peer_cells(found), best=0, left="best setting"),
        _paragraph(_sentence(f"{SWEEP_KEY.partition(': ')[2]}; {PEER_KEY}"), small=True),
    ]


def _division(found: Answer) -> str:
    """Partition size and replicas, explained by the best choice."""
    setting = found.best.setting
    size, replicas = setting.partition_size, setting.num_replicas
    copy = f"{size:,} GPUs together hold" if size > 1 else "every GPU holds"
    others = f"There are {replicas:,} such copies (replicas), each" if replicas > 1 else "There is one copy,"
    return (
        f"Partition size {size:,}: {copy} one copy of parameters and gradients. {others} with its own data."
    )


def _draw(fill: Callable[[Axes], None], *, height: float) -> str:
    with mpl.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(9.8, height), layout="constrained")
        FigureCanvasSVG(figure)
        fill(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    for name, colour in _variables(LIGHT).items():
        text = text.replace(colour, f"var(--{name})")
    return text[text.index("<svg") :]


def _curves(axes: Axes, curves: Curves) -> None:
    named = {f"deepspeed-{name}" if name.startswith("zero") else name: curves[name] for name in curves}
    draw_curves(axes, named, theme=LIGHT, words=_SYSTEMS)
    axes.set_ylabel("model TFLOP/s per GPU")


class _Column(NamedTuple):
    """What a table says of a choice under a heading, and what a sentence does."""

    head: str
    value: str
    phrase: str


def _choices(found: Answer) -> list[str]:
    """A table of what differs between partition sizes, and in words what does not."""
    rows = [_columns(choice) for choice in found.found.choices[:10]]
    columns = list(zip(*rows, strict=True))
    alike = [column for column in columns if len(rows) > 1 and len({cell.value for cell in column}) == 1]
    shown = [column for column in columns if column not in alike]
    lines = [[column[number].value for column in shown] for number in range(len(rows))]
    notes = []
    if alike:
        notes.append(f"The same for all of them: {', '.join(column[0].phrase for column in alike)}.")
    if any(column[0].head == "s per step" for column in alike):
        notes.append(
            "They are equally fast, so the smallest partition size is first: it depends least on the network."
        )
    return [
        _html_table([column[0].head for column in shown], lines, best=0, left="limited by"),
        *map(_paragraph, notes),
        _paragraph(
            " ".join(_KEYS[column[0].head] for column in shown if column[0].head in _KEYS), small=True
        ),
    ]


_KEYS: Final = {
    "partition size": "Partition size: GPUs that together hold one copy of parameters and gradients.",
    "replicas": "Replicas: how many such copies there are.",
    "batch": "Batch: sequences per GPU and micro-step.",
    "accum.": "Accum.: gradient accumulation steps.",
    "TFLOP/s": "TFLOP/s: of the model, per GPU.",
    "MFU": "MFU: model FLOP/s as a share of the GPU's peak.",
    "GiB": "GiB: at the peak, per GPU.",
}


def _columns(choice: Choice) -> list[_Column]:
    setting, prediction = choice.setting, choice.prediction
    units = f", {setting.model.parts} units per block" if setting.model.parts > 1 else ""
    activations = f"{setting.activations}{units}"
    step, speed, mfu = fixed(choice.step_seconds), tflops(prediction.tflops), percent(prediction.mfu)
    gib, limit = in_gib(choice.memory.peak), choice.limited_by
    batch, accumulation = plural(setting.micro_batch, "sequence"), setting.accumulation
    return [
        _Column(
            "partition size", f"{setting.partition_size:,}", f"partition size {setting.partition_size:,}"
        ),
        _Column("replicas", f"{setting.num_replicas:,}", plural(setting.num_replicas, "replica")),
        _Column("batch", str(setting.micro_batch), f"{batch} per GPU and micro-step"),
        _Column("accum.", str(accumulation), plural(accumulation, "gradient accumulation step")),
        _Column("activations", activations, f"activations {activations}"),
        _Column("s per step", step, f"{step} s per step"),
        _Column("TFLOP/s", speed, f"{speed} TFLOP/s per GPU"),
        _Column("MFU", mfu, f"MFU {mfu}"),
        _Column("GiB", gib, f"{gib} GiB per GPU"),
        _Column("limited by", limit, f"limited by {limit}"),
    ]


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, best: int, left: str) -> str:
    at = list(heads).index(left) if left in heads else -1

    def row(cells: Sequence[str], tag: str) -> str:
        sides = [" class=left" if number == at else "" for number in range(len(cells))]
        return "".join(
            f"<{tag}{side}>{html.escape(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True)
        )

    found = [f"<table><tr>{row(heads, 'th')}</tr>"]
    found += [
        f"<tr{' class=best' if number == best else ''}>{row(line, 'td')}</tr>"
        for number, line in enumerate(lines)
    ]
    return "\n".join([*found, "</table>"])
