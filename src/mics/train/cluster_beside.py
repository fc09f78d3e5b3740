"""The cluster of a run: a file that ``mics calibrate`` left beside its settings, or the one they name."""

import os
from collections import Counter
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final

import torch

from mics.comm import World
from mics.config import why_not_cluster
from mics.cost.clusters import assumed_between_nodes, find_cluster
from mics.errors import SettingsError
from mics.train.config import TrainConfig

CLUSTER_FILE: Final = "cluster.yaml"


def use_cluster_beside(
    config: TrainConfig,
    world: World,
    device: torch.device,
    environ: MutableMapping[str, str] = os.environ,
) -> str | None:
    """Have the engine read ``cluster.yaml`` beside the settings file; a line that says so, or why not.

    Every rank calls it, and all come to the same answer. Whoever sets MICS_CLUSTER has chosen: no file is
    looked for. Nothing is said where there is none.
    """
    file = cluster_beside(config)
    found = world.gather_objects(None if "MICS_CLUSTER" in environ else _content(file))
    nodes = Counter(world.node_names())
    if not any(content is not None for content in found):
        return _use_named(config, environ)
    reason = _why_not(file, found, device, ranks_per_node=max(nodes.values()))
    reasons = [each for each in world.gather_objects(reason) if each is not None]
    if reasons:
        _use_named(config, environ)
        return f"warning: {file} is passed over: {reasons[0]}"
    environ["MICS_CLUSTER"] = str(file)
    assumed = assumed_between_nodes(str(file), num_nodes=len(nodes))
    return f"cluster: {file}, {assumed}" if assumed else f"cluster: {file}"


def _use_named(config: TrainConfig, environ: MutableMapping[str, str]) -> str | None:
    """Have the engine read the cluster that the settings name."""
    named = config.sharding.cluster
    if named is None or "MICS_CLUSTER" in environ:
        return None
    environ["MICS_CLUSTER"] = named
    return f"cluster: {named}"


def cluster_beside(config: TrainConfig) -> Path:
    """Where it would be: in the folder of the settings file, or in the working directory."""
    folder = Path() if config.config is None else config.config.parent
    return folder / CLUSTER_FILE


def _content(file: Path) -> str | None:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _why_not(
    file: Path, contents: Sequence[str | None], device: torch.device, *, ranks_per_node: int
) -> str | None:
    """What speaks against using it, if anything does."""
    other = next((rank for rank, content in enumerate(contents) if content != contents[0]), None)
    if other is not None:
        missing = next((rank for rank in (0, other) if contents[rank] is None), None)
        what = f"another on rank {other} than on rank 0" if missing is None else f"none on rank {missing}"
        return (
            f"expected the same file on all ranks, found {what}; copy it to every node, or name one in "
            "MICS_CLUSTER"
        )
    try:
        return why_not_cluster(find_cluster(str(file)), device, ranks_per_node=ranks_per_node)
    except SettingsError as error:
        return str(error)
