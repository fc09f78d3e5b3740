"""The sections of a ``ds_config.json``, whose keys are taken one by one."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mics.errors import SettingsError
from mics.integrations.deepspeed.keys import IGNORED, REFUSED
from mics.integrations.deepspeed.schedules import is_number

_MISSING: Final = object()


@dataclass(frozen=True)
class Ignored:
    """A key of the config that changes nothing, and why."""

    key: str
    reason: str


@dataclass
class Section:
    """A dict of the config, whose keys are taken one by one. What is left at the end is told or refused."""

    name: str
    values: dict[str, Any]
    ignored: list[Ignored]
    taken: set[str] = field(default_factory=set)

    def section(self, key: str) -> Section:
        found = self.take(key, {})
        if key == "zero_optimization" and isinstance(found, bool):
            found = {"stage": int(found)}  # as DeepSpeed had it once
        if found is not None and not isinstance(found, Mapping):
            raise self.error(key, "a dict", found=found)
        return Section(self._full(key), dict(found or {}), self.ignored)

    def take(self, key: str, default: Any) -> Any:
        self.taken.add(key)
        return self.values.get(key, default)

    def flag(self, key: str, *, default: bool = False) -> bool:
        found = self.take(key, default)
        if not isinstance(found, bool):
            raise self.error(key, "true or false", found=found)
        return found

    def number(self, key: str, default: float) -> float:
        found = self.take(key, default)
        if not is_number(found) or found < 0:
            raise self.error(key, "a number of at least 0", found=found)
        return float(found)

    def whole(
        self, key: str, default: int | None, *, least: int | None = None, most: int | None = None
    ) -> Any:
        found = self.take(key, default)
        if found is default:
            return found
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or (least is not None and found < least):
            expected = "a whole number" if least is None else f"a whole number of at least {least}"
            raise self.error(key, expected, found=found)
        if most is not None and found > most:
            raise self.error(key, f"at most {most}", found=found)
        return found

    def arguments_of(self, kind: type, name: str) -> dict[str, Any]:
        """What is left, as arguments of a torch class."""
        known = [key for key in inspect.signature(kind).parameters if key not in ("params", "optimizer")]
        left = {key: value for key, value in self.values.items() if key not in self.taken}
        for key in left:
            if key not in known:
                raise self.error(key, f"a setting of {name} ({', '.join(known)})", found="another")
        return left

    def ignore(self, key: str, reason: str) -> None:
        self.ignored.append(Ignored(self._full(key), reason))

    def finish(self) -> None:
        """Keys that nobody took: those that mean nothing here are told, the others refused."""
        for key, value in self.values.items():
            full = self._full(key)
            if key in self.taken:
                continue
            if full in IGNORED:
                self.ignore(key, IGNORED[full])
            elif full in REFUSED:
                if not _is_off(key, value):
                    raise self.error(key, "it to be off or left out", REFUSED[full], found=value)
            else:
                near = difflib.get_close_matches(str(key), [*self._known(), *self.taken], 1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise self.error(
                    key, "a key of DeepSpeed's config", hint, found="one that mics does not know"
                )

    def error(self, key: str, expected: str, advice: str = "", *, found: Any = _MISSING) -> SettingsError:
        if found is _MISSING:
            found = self.values.get(key)
        shown = found if isinstance(found, str) else json.dumps(found, default=str)
        return SettingsError(
            f"{self._full(key)}: expected {expected}, found {shown[:120]}" + (f"; {advice}" if advice else "")
        )

    def _full(self, key: str) -> str:
        # bfloat16 is what bf16 was called once.
        return f"{self.name}.{key}".replace("bfloat16.", "bf16.") if self.name else key

    def _known(self) -> Iterable[str]:
        prefix = f"{self.name}." if self.name else ""
        for full in (*IGNORED, *REFUSED):
            if full.startswith(prefix):
                yield full.removeprefix(prefix)


def _is_off(key: str, value: Any) -> bool:
    """Whether a setting is there and does nothing."""
    if isinstance(value, Mapping):
        if key.startswith("offload"):
            return value.get("device", "none") in ("none", None)
        if "enabled" in value:
            return value["enabled"] is False
        return not value or (key == "tensor_parallel" and value.get("autotp_size", 0) in (0, 1))
    return value in (None, False, 0, 1) and value is not True


def load_config(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | Path):
        raise SettingsError(
            f"config: expected the path of a ds_config.json or a dict, found {type(config).__name__}"
        )
    try:
        found = json.loads(Path(config).read_text(), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise SettingsError(f"config: expected a JSON file, found {config}: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"config: expected a JSON object in {config}, found {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} stands there twice")
    return found


def refuse_auto(value: Any, where: str) -> None:
    """``"auto"`` is Hugging Face's: its Trainer fills it in."""
    if value == "auto":
        raise SettingsError(
            f'{where}: expected a value, found "auto", which the Trainer of Hugging Face fills in; '
            f"write {_AUTO.get(where, 'the value itself, or leave the key out')}"
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_auto(inner, f"{where}.{key}" if where else str(key))


_AUTO: Final = {
    "train_batch_size": "sequences of an optimizer step on all ranks, or leave the key out",
    "train_micro_batch_size_per_gpu": "sequences of a micro-step on one rank",
    "gradient_accumulation_steps": "micro-steps of an optimizer step, for example 1",
    "gradient_clipping": "the greatest norm, for example 1.0",
    "bf16.enabled": "true or false",
    "fp16.enabled": "true or false",
    "optimizer.params.lr": "the learning rate, for example 3e-4",
    "optimizer.params.betas": "both numbers, for example [0.9, 0.95]",
    "scheduler.params.total_num_steps": "optimizer steps of the run",
    "scheduler.params.warmup_num_steps": "optimizer steps of the warmup",
}
