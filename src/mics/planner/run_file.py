"""A choice as a settings file: ``mics plan --write run.yaml``, then ``mics train --config run.yaml``.

``mics.train`` and ``mics.data`` stand above this package: the names of settings, and what an index of shards
is called, are written here as text. A test reads the file with them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mics.cost.clusters import PRESETS
from mics.cost.gpus import formats_of
from mics.cost.setting import Setting
from mics.errors import SettingsError
from mics.layout.compression import LOSSLESS, Compression
from mics.models.descriptions import ModelDescription
from mics.planner.answer import Answer
from mics.planner.text import result
from mics.utils.numbers import count, in_gib, plural

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16"}
_INDEX_FILE: Final = "index.json"
_USUAL_STEPS: Final = 1000  # where nobody says how many tokens there are
_USUAL_INTERVAL: Final = 100  # steps, and ten checkpoints in a short run


def write_run_file(
    path: Path, found: Answer, *, model: str, data: Sequence[Path], command: str
) -> Path | None:
    """Write the best choice. Another file that is there, perhaps edited, is renamed: to what."""
    text = run_file(found, model=model, data=data, command=command)
    try:
        kept = None
        if path.is_file() and path.read_bytes() != text.encode():
            kept = next(
                place for number in itertools.count(1) if not (place := Path(f"{path}.{number}")).exists()
            )
            path.rename(kept)
        path.write_text(text)
        return kept
    except OSError as error:
        raise SettingsError(
            f"--write {path}: expected a file that can be written, found: {error.strerror or error}"
        ) from None


def doubts_about_data(folders: Sequence[Path], model: ModelDescription) -> Iterator[str]:
    """What mics train would refuse in the data, if it is here: a plan may be made elsewhere."""
    for folder in folders:
        try:
            size = int(json.loads((folder / _INDEX_FILE).read_text())["vocab_size"])
        except FileNotFoundError:
            yield (
                f"--data {folder}: expected a folder that mics data prepare has made, found no {_INDEX_FILE} "
                "there; mics train needs one under this path"
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield f"--data {folder}: expected the index of mics data prepare, found: {error}"
        else:
            if 0 < model.vocab_size < size:
                yield (
                    f"--data {folder}: expected a vocabulary of at most the {model.vocab_size:,} tokens of "
                    f"{model.title}, found {size:,}; {model.way_to_more_tokens}"
                )


def run_file(found: Answer, *, model: str, data: Sequence[Path], command: str) -> str:
    """The text of the file: what the plan decided, with what it expects in comments."""
    best, setting = found.best, found.best.setting
    heading = [
        f"Written by: {command}",
        f"{setting.model.name}, {count(setting.model.num_parameters)} parameters, on "
        f"{plural(setting.cluster.num_nodes, 'node')} of {setting.cluster.name} "
        f"({plural(setting.cluster.world_size, setting.cluster.rank_word)})",
        f"Expected: {result(best)}",
        f"Expected: {in_gib(best.memory.peak)} GiB per {setting.cluster.rank_word} at the peak",
        "Before training: mics doctor --config FILE, mics train --config FILE --dry-run",
    ]
    lines = [f"# {line}" for line in heading]
    return "\n".join([*lines, *_yaml(_settings(found, model=model, data=data))]) + "\n"


def _settings(found: Answer, *, model: str, data: Sequence[Path]) -> dict[str, Any]:
    setting = found.best.setting
    batch = setting.micro_batch * setting.accumulation * setting.cluster.world_size
    steps = _USUAL_STEPS
    if found.money is not None:
        steps = max(1, round(found.money.tokens / setting.tokens_per_step))
    return {
        "name": _run_name(model),
        "steps": steps,
        "batch_size": setting.micro_batch,
        "global_batch": batch,
        "model": {"name": model, "seq_len": setting.model.seq_len},
        # Nothing else to train on is known; mics data prepare makes such a folder.
        "data": {"shards": [str(folder) for folder in data] or ["data"]},
        "sharding": _sharding(setting),
        "launch": {"hosts": setting.cluster.num_nodes, "ranks_per_node": setting.cluster.ranks_per_node},
        "checkpoint": {"interval": _interval(found, steps)},
    }


def _sharding(setting: Setting) -> dict[str, Any]:
    kept = setting.activations
    found: dict[str, Any] = {
        "partition_size": setting.partition_size,
        "optimizer_sharding": "world" if setting.over_replicas else "partition",
        "activations": "offload" if kept.offload else "checkpoint" if kept.checkpoint else "keep",
    }
    if setting.state_on_host:
        found["optimizer_state"] = "host"
    found |= _compression(setting.compression)
    if setting.cluster.name in PRESETS:
        found["cluster"] = setting.cluster.name
    short = _SHORT[formats_of(setting.cluster.gpu)[0]]
    if setting.cluster.gpu:
        found["param_dtype"] = short
    if setting.wire_nbytes == 2:
        found["reduce_dtype"] = short
        if setting.compression.hop2 is None:
            found["replica_reduce_dtype"] = short
    if setting.model.parts > 1:
        found["units"] = "parts"
    if setting.prefetch is not None:
        found["prefetch"] = setting.prefetch
    return found


def _compression(compression: Compression) -> dict[str, Any]:
    """What is not the default."""
    found = asdict(compression)
    found["lossless_refresh"] = found.pop("refresh") == "lossless"
    usual = asdict(LOSSLESS) | {"lossless_refresh": True}
    return {name: value for name, value in found.items() if value != usual[name]}


def _interval(found: Answer, steps: int) -> int:
    """Steps between checkpoints: the best by the failures that were given."""
    if found.goodput is None:
        return max(1, min(_USUAL_INTERVAL, steps // 10))
    return max(1, round(found.goodput.interval / found.best.step_seconds))


def _run_name(model: str) -> str:
    """A folder name that reminds of the model."""
    if model.endswith(".json"):
        model = str(Path(model).parent)
    found = Path(model).name.replace(":", "-")
    return found if found not in ("", ".", "..") else "run"


def _yaml(settings: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    import yaml  # of the extra that mics plan needs anyway

    for key, value in settings.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            in_brackets = yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()
            yield f"{indent}{key}: {in_brackets[1:-1]}"
