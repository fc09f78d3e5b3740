"""What benchmarks.compression_accuracy found: a table, and curves of validation losses and gradient norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from mics.utils.numbers import plural
from mics.utils.picture_style import THEMES, Theme, picture

_BASE: Final = "float32"
_NAMES: Final = {"gpt": "GPT", "bert": "BERT"}
_WITHOUT: Final = ", no feedback"
_ROLES: Final = {
    "disturbed": "other",
    "hop 2 bf16": "all-gather",
    "hop 2 int8": "mics",
    "hop 2 int4": "exposed",
    "gathers int8": "refresh",
    "hop 1 int8": "reduce-scatter",
    "all int8": "hop 2",
}
_ORDER: Final = (_BASE, *_ROLES, *(f"{name}{_WITHOUT}" for name in _ROLES))
_HEAD: Final = (
    "| model | setting | validation loss, mean (min to max) | less float32's | bytes between nodes |"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One setting of one model, with a value for each seed."""

    model: str
    setting: str
    finals: tuple[float, ...]
    beside: tuple[float, ...]
    """Final loss less that of float32 with the same seed; of seeds that have both."""
    nbytes: float
    """Per step, of those of float32."""


def found_of(figures: Mapping[str, Any]) -> list[Found]:
    """In the order of settings, one model after the other."""
    runs = figures["runs"]
    pairs = dict.fromkeys((run["model"], run["setting"]) for run in _in_order(runs))
    found = []
    for model, setting in pairs:
        own = {run["seed"]: run for run in runs if (run["model"], run["setting"]) == (model, setting)}
        base = {run["seed"]: run for run in runs if (run["model"], run["setting"]) == (model, _BASE)}
        both = [seed for seed in own if seed in base]
        found.append(
            Found(
                model=model,
                setting=setting,
                finals=tuple(final(run) for run in own.values()),
                beside=tuple(final(own[seed]) - final(base[seed]) for seed in both),
                nbytes=mean(own[seed]["nbytes"] / base[seed]["nbytes"] for seed in both) if both else 1.0,
            )
        )
    return found


def table(figures: Mapping[str, Any]) -> list[str]:
    """Markdown: a row for each model and setting."""
    lines = [_HEAD, "|---|---|---:|---:|---:|"]
    for each in found_of(figures):
        low, high = min(each.finals), max(each.finals)
        beside = "" if not each.beside or each.setting == _BASE else _differences(each.beside)
        lines.append(
            f"| {_NAMES[each.model]} | {each.setting} | {mean(each.finals):.4f} ({low:.4f} to {high:.4f}) | "
            f"{beside} | {each.nbytes:.3f} |"
        )
    lines += [
        "",
        "| model | lossless refreshes, steps | equal to the bit | bytes sent |",
        "|---|---:|---|---:|",
    ]
    lines += [
        f"| {_NAMES[check['model']]} | {check['steps']} | {'yes' if check['equal'] else 'NO'} | "
        f"{check['bytes']:.3f} |"
        for check in figures["lossless"]
    ]
    return lines


def final(run: Mapping[str, Any]) -> float:
    loss: float = run["validation"][-1][1]
    return loss


def draw_both(file: Path, figures: Mapping[str, Any]) -> None:
    """``file``, and beside it a dark one."""
    for theme in THEMES:
        draw(file if theme.name == "light" else file.with_stem(f"{file.stem}-dark"), figures, theme)


def draw(file: Path, figures: Mapping[str, Any], theme: Theme) -> None:
    """A column for each model: validation losses, gradient norms, and where each setting ended."""
    models = list(dict.fromkeys(run["model"] for run in _in_order(figures["runs"])))
    config = figures["config"]
    num_seeds = len({run["seed"] for run in figures["runs"]})
    hollow = any(run["setting"].endswith(_WITHOUT) for run in figures["runs"])
    trained = {run["setting"] for run in figures["runs"]}
    shown = [setting for setting in _ORDER if setting != _BASE and setting in trained]
    with picture(
        file,
        height=10.4,
        title="Rounded on the wire: validation losses and gradient norms beside float32",
        subtitle=(
            f"{config['parameters'] / 1e6:.1f} M parameters, {config['shape']['steps']:,} steps, "
            f"{config['ranks']} ranks in partition groups of {config['partition_size']} over nodes of "
            f"{config['ranks_per_node']}, means of {plural(num_seeds, 'seed')}. "
            "Thick: float32; shaded: its seeds. Colours as below"
            f"{'; dashed and hollow: without error feedback' if hollow else ''}."
        ),
        theme=theme,
    ) as figure:
        grid = figure.subplots(
            3, len(models), sharey="row", squeeze=False, gridspec_kw={"height_ratios": [1.0, 0.8, 1.25]}
        )
        for column, model in enumerate(models):
            runs = [run for run in figures["runs"] if run["model"] == model]
            _draw_losses(grid[0][column], runs, theme)
            grid[0][column].set_title(_NAMES[model])
            _draw_norms(grid[1][column], runs, theme)
            found = [each for each in found_of(figures) if each.model == model]
            _draw_ends(grid[2][column], found, shown, theme)
        grid[0][0].set_ylabel("validation loss")
        grid[1][0].set_ylabel("gradient norm")


def _draw_losses(axes: Axes, runs: Sequence[Mapping[str, Any]], theme: Theme) -> None:
    base = [run["validation"] for run in runs if run["setting"] == _BASE]
    if base:
        steps = [step for step, _ in base[0]]
        values = list(zip(*([loss for _, loss in each] for each in base), strict=True))
        axes.fill_between(
            steps, [min(each) for each in values], [max(each) for each in values], color=theme.grid
        )
    for setting, own in _by_setting(runs).items():
        steps = [step for step, _ in own[0]["validation"]]
        losses = zip(*([loss for _, loss in run["validation"]] for run in own), strict=True)
        axes.plot(steps, [mean(each) for each in losses], **_line(setting, theme))
    axes.set_xlabel("step")
    axes.set_xlim(left=0)


def _draw_norms(axes: Axes, runs: Sequence[Mapping[str, Any]], theme: Theme) -> None:
    """Means over seeds, and over a fiftieth of the steps."""
    for setting, own in _by_setting(runs).items():
        norms = [mean(each) for each in zip(*(run["norms"] for run in own), strict=True)]
        width = max(1, len(norms) // 50)
        middles = [start + (width + 1) / 2 for start in range(0, len(norms), width)]
        axes.plot(middles, list(_means(norms, width)), **_line(setting, theme))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step")
    axes.set_xlim(left=0)


def _draw_ends(axes: Axes, found: Sequence[Found], shown: Sequence[str], theme: Theme) -> None:
    """Final losses less that of float32, a dot for each seed and their mean; shaded: its own seeds' range.

    A line for each setting that is ``shown``: models share the axis, though one may lack some.
    """
    base = next((each for each in found if each.setting == _BASE), None)
    if base is not None:
        middle = mean(base.finals)
        axes.axvspan(min(base.finals) - middle, max(base.finals) - middle, color=theme.grid, zorder=0)
    others = [each for each in found if each.setting != _BASE and each.beside]
    for each in others:
        place = shown.index(each.setting)
        colour = _line(each.setting, theme)["color"]
        hollow = each.setting.endswith(_WITHOUT)
        axes.plot(
            each.beside,
            [place] * len(each.beside),
            linestyle="none",
            marker="o",
            markersize=6.0,
            color=colour,
            markerfacecolor=theme.page if hollow else colour,
        )
        axes.plot(
            [mean(each.beside)], [place], linestyle="none", marker="|", markersize=18.0, color=theme.ink
        )
    axes.axvline(0.0, color=theme.muted, linewidth=1.2)
    ends = [0.0, *(value for each in others for value in each.beside)]
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("final validation loss less that of float32")


def _line(setting: str, theme: Theme) -> dict[str, Any]:
    if setting == _BASE:
        return {"color": theme.ink, "linewidth": 3.2, "zorder": 2}
    return {
        "color": theme[_ROLES[setting.removesuffix(_WITHOUT)]],
        "linewidth": 1.4,
        "linestyle": (0, (4, 2)) if setting.endswith(_WITHOUT) else "-",
        "zorder": 3,
    }


def _differences(values: Sequence[float]) -> str:
    return f"{mean(values):+.4f} ({min(values):+.4f} to {max(values):+.4f})"


def _means(values: Sequence[float], width: int) -> Iterator[float]:
    for start in range(0, len(values), width):
        yield mean(values[start : start + width])


def _in_order(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Models share an axis, so all have the same order of settings, whichever was trained first."""
    models = list(_NAMES)
    return sorted(runs, key=lambda run: (models.index(run["model"]), _ORDER.index(run["setting"])))


def _by_setting(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["setting"], []).append(run)
    return found
