"""What a checkpoint calls the tensors of a model and its optimizer.

ours                           model.a.bias        optimizer.state.a.bias.exp_avg
{"model": ..., "optim": ...}   model.a.bias        optim.state.a.bias.exp_avg
{"app": AppState}              app.model.a.bias    app.optim.state.a.bias.exp_avg
a model alone, safetensors     a.bias
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from mics.checkpoint.records import Index

_STATE: Final = re.compile(r"(?:^|(?<=\.))state\.")


@dataclass(frozen=True, kw_only=True)
class ModelNames:
    """How the model's names become those of the checkpoint."""

    prefix: str
    without: str = ""
    """What the checkpoint leaves out: it was made from a part of the model."""

    def stored(self, name: str) -> str:
        return self.prefix + name.removeprefix(self.without)


def model_names(index: Index, names: Collection[str], *, base: str = "") -> ModelNames:
    """The prefix under which most of ``names`` are found.

    ``base`` is the part of the model that checkpoints may have been made from alone: transformers save
    GPT2Model as wte.weight, which is transformer.wte.weight of GPT2LMHeadModel.
    """
    if index.is_ours:
        return ModelNames(prefix=index.model_prefix)
    found = _best_prefix(index, names)
    if found is None and base:
        shorter = {name.removeprefix(f"{base}.") for name in names if name.startswith(f"{base}.")}
        found = _best_prefix(index, shorter)
        if found is not None:
            return ModelNames(prefix=found, without=f"{base}.")
    return ModelNames(prefix=index.model_prefix if found is None else found)


def _best_prefix(index: Index, names: Collection[str]) -> str | None:
    names = set(names)
    counts: Counter[str] = Counter()
    for key in (*index.tensors, *index.aliases):
        counts.update(key[:at] for at in _starts(key) if key[at:] in names)
    if not counts:
        return None
    return max(counts, key=lambda prefix: (counts[prefix], prefix == index.model_prefix, -len(prefix)))


def state_entries(index: Index, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each parameter its entries of optimizer state, and what the checkpoint calls them."""
    wanted = set(names)
    by_prefix: dict[str, dict[str, dict[str, str]]] = {}
    for key in (*index.tensors, *index.numbers):
        for match in _STATE.finditer(key):
            param, _, entry = key[match.end() :].rpartition(".")
            if param in wanted:
                by_prefix.setdefault(key[: match.start()], {}).setdefault(param, {})[entry] = key
    return max(by_prefix.values(), key=len, default={})


def is_state(key: str) -> bool:
    """Whether a name looks like an optimizer's, where no model is at hand to compare with."""
    return re.search(r"(?:^|\.)optim(?:izers?)?\.(?:state|param_groups)\.", key) is not None


def tensors_of_model(index: Index) -> dict[str, str]:
    """The names of the model's tensors, where no model is at hand, and what the checkpoint calls them."""
    prefix = index.model_prefix
    return {
        key.removeprefix(prefix): key
        for key in index.tensors
        if key.startswith(prefix) and key not in index.beside and not is_state(key)
    }


def _starts(key: str) -> Iterator[int]:
    """Where a name may begin in ``key``: at its start and behind every dot."""
    yield 0
    at = key.find(".")
    while at >= 0:
        yield at + 1
        at = key.find(".", at + 1)
