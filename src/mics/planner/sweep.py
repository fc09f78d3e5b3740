"""How many nodes: the same question for several cluster sizes, side by side, and what to make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from mics.errors import SettingsError
from mics.planner.answer import Answer, as_dict
from mics.planner.search import Choice
from mics.utils.numbers import count, days, dollars, listed, percent, plural, roughly, times, whole

_AS_CHEAP: Final = 0.05  # of the cost: a limit that we chose, and `mics plan` says it


@dataclass(frozen=True, kw_only=True)
class Size:
    """One number of nodes: what was found for it, or why there is nothing."""

    nodes: int
    gpus: int
    answer: Answer | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Cluster sizes in the order in which they were asked for."""

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.possible:
            raise SettingsError(
                "--nodes: expected a number of nodes that can train this, found none: "
                + "; ".join(f"{plural(size.nodes, 'node')}: {size.problem}" for size in self.sizes)
            )

    @property
    def possible(self) -> list[tuple[int, Answer]]:
        """Nodes and answer, fewest nodes first."""
        found = [(size.nodes, size.answer) for size in self.sizes if size.answer is not None]
        return sorted(found, key=lambda pair: pair[0])

    @property
    def advised(self) -> tuple[int, Answer]:
        """The most nodes that cost about as little as the cheapest."""
        lowest = min(map(_node_seconds, self.possible))
        return [pair for pair in self.possible if _node_seconds(pair) <= (1 + _AS_CHEAP) * lowest][-1]


def _speed(pair: tuple[int, Answer]) -> float:
    """Tokens per second that count, failures considered."""
    found = pair[1]
    return found.best.prediction.tokens_per_second * (1 if found.goodput is None else found.goodput.share)


def _node_seconds(pair: tuple[int, Answer]) -> float:
    """Per token: what it costs, whatever the price of a node."""
    return pair[0] / _speed(pair)


def advice_on_nodes(sweep: Sweep) -> list[str]:
    """Which number of nodes to take, and what each further step up gains and costs."""
    possible, (nodes, found) = sweep.possible, sweep.advised
    cheapest, fastest = min(possible, key=_node_seconds), max(possible, key=_speed)
    others = {"the cheapest": cheapest, "the fastest": fastest}
    reasons = [why for why, (number, _) in others.items() if number == nodes]
    rule = f"the most nodes that cost within {100 * _AS_CHEAP:.0f}% of the cheapest"
    lines = [f"Advice: {plural(nodes, 'node')}{_bill(found)}: {' and '.join(reasons) or rule}."]
    lines += [
        f"{why.removeprefix('the ').capitalize()}: {plural(number, 'node')}{_bill(answer)}."
        for why, (number, answer) in others.items()
        if number != nodes
    ]
    lines += [_step_up(fewer, more) for fewer, more in pairwise(possible)]
    missing = [size for size in sweep.sizes if size.answer is None]
    if missing:
        names = listed([f"{size.nodes:,}" for size in missing])
        lines.append(f"Not possible: {names} node{'s' if len(missing) > 1 or missing[0].nodes > 1 else ''}.")
    return lines


def _bill(found: Answer) -> str:
    """``, 11.1 days, $1.1 M``, as far as it is known."""
    money = found.money
    if money is None:
        return f", {percent(found.best.prediction.mfu)} MFU"
    assert money.hours is not None, "a size that is never done has no answer"
    price = "" if money.dollars is None else f", {dollars(money.dollars)}"
    return f", {roughly(3600 * money.hours)}{price}"


def _step_up(fewer: tuple[int, Answer], more: tuple[int, Answer]) -> str:
    dearer = _node_seconds(more) / _node_seconds(fewer) - 1
    cost = (
        "costs the same"
        if abs(dearer) < 5e-4
        else f"costs {percent(abs(dearer))} {'more' if dearer > 0 else 'less'}"
    )
    return (
        f"{fewer[0]:,} to {more[0]:,} nodes: {times(_speed(more) / _speed(fewer))} as fast, {cost} per token."
    )


def setting_in_words(choice: Choice) -> str:
    """``p=8, 4 x 2, checkpoint``: short enough for a table."""
    setting = choice.setting
    split = f", units/{setting.model.parts}" if setting.model.parts > 1 else ""
    return (
        f"p={setting.partition_size}, {setting.micro_batch} x {setting.accumulation}, "
        f"{setting.activations}{split}"
    )


KEY: Final = (
    "best setting: partition size p, sequences per GPU and micro-step x accumulation steps, activations"
)


def cells(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, of the terminal's table and of the page's."""
    priced = [found.money for _, found in sweep.possible]
    heads = ["nodes", "GPUs", "best setting", "tokens/s per GPU", "MFU"]
    with_days = priced[0] is not None
    with_dollars = any(money is not None and money.dollars is not None for money in priced)
    heads += (["days"] if with_days else []) + (["dollars"] if with_dollars else [])
    lines = []
    for size in sweep.sizes:
        line = [f"{size.nodes:,}", f"{size.gpus:,}"]
        if size.answer is None:
            lines.append([*line, size.problem, *[""] * (len(heads) - 3)])
            continue
        best, money = size.answer.best.prediction, size.answer.money
        line += [setting_in_words(size.answer.best), whole(best.tokens_per_second_per_gpu), percent(best.mfu)]
        if with_days and money is not None:
            assert money.hours is not None
            line.append(days(3600 * money.hours).removesuffix(" days"))
        if with_dollars and money is not None:
            line.append("" if money.dollars is None else dollars(money.dollars))
        lines.append(line)
    return heads, lines


def curves_of(sweep: Sweep) -> dict[str, list[tuple[float, str]]]:
    """By heading, a value and its words for each number of nodes that is possible.

    Time and cost where they are known, speed otherwise.
    """
    bills = [found.money for _, found in sweep.possible]
    best = [found.best.prediction for _, found in sweep.possible]
    hours = [bill.hours for bill in bills if bill is not None and bill.hours is not None]
    prices = [bill.dollars for bill in bills if bill is not None and bill.dollars is not None]
    if len(hours) == len(bills):
        curves = {"days of training": [(spent, days(3600 * spent)) for spent in hours]}
    else:
        speeds = [each.tokens_per_second for each in best]
        curves = {"tokens/s": [(speed, count(round(speed))) for speed in speeds]}
    if len(prices) == len(bills):
        return curves | {"dollars": [(price, dollars(price)) for price in prices]}
    speeds = [each.tokens_per_second_per_gpu for each in best]
    return curves | {"tokens/s per GPU": [(speed, whole(speed)) for speed in speeds]}


def sweep_as_dict(sweep: Sweep) -> dict[str, Any]:
    """For JSON: for each number of nodes what a single plan has, or its problem."""
    return {
        "advised_nodes": sweep.advised[0],
        "advice": advice_on_nodes(sweep),
        "sizes": [
            {
                "nodes": size.nodes,
                "gpus": size.gpus,
                "problem": size.problem or None,
                "plan": None if size.answer is None else as_dict(size.answer),
            }
            for size in sweep.sizes
        ],
    }


def batches_of(sizes: Sequence[Size]) -> list[str]:
    """What the global batch is, once if it is one for all sizes."""
    texts = [str(size.answer.found.request.batch) for size in sizes if size.answer is not None]
    if len(set(texts)) == 1:
        return texts[:1]
    of_size = [(size.nodes, size.answer.found.request.batch) for size in sizes if size.answer is not None]
    return [f"{plural(nodes, 'node')}: {batch}" for nodes, batch in of_size]
