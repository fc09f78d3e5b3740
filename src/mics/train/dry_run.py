"""``mics train --dry-run``: units, layout, memory and bytes of a run, by arithmetic. Nothing is started."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mics.cost.clusters import Cluster, assumed_between_nodes, assumed_cluster, find_cluster
from mics.cost.memory import ADAM_NBYTES, DRIVER_NBYTES, MASTER_NBYTES, USABLE, Keeping
from mics.cost.modules import shape_of_description
from mics.cost.setting import Setting, fitting_partition, partition_sizes
from mics.cost.shapes import ModelShape
from mics.cost.step_bytes import step_bytes
from mics.errors import SettingsError
from mics.layout.assign import assign_sites
from mics.train.cluster_beside import cluster_beside
from mics.train.config import TrainConfig
from mics.train.data import Dealing
from mics.train.hosts import plan_hosts
from mics.train.launch import LaunchPlan, check_plan, plan_launch
from mics.train.sequences import NO_VALIDATION
from mics.train.sharding import block_parts
from mics.utils.global_batch import GlobalBatch
from mics.utils.numbers import count, memory, plural, volume, whole

_PARTS: Final = 3  # units of a block with sharding.units=parts, in our own models
_WIDTHS: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run that is not started."""

    config: TrainConfig
    launch: LaunchPlan
    cluster: Cluster
    setting: Setting
    dealing: Dealing
    param_nbytes: int
    assumed: str = ""
    """What of the cluster is assumed, though its file was measured; empty: nothing."""

    @property
    def limit(self) -> float:
        """Bytes of a device that a rank may use; 0: not known."""
        return self.cluster.memory_nbytes * USABLE


def dry_run(config: TrainConfig, console: Console) -> int:
    """Print what a run would be. 0: nothing speaks against it; 1: it would not fit into memory."""
    found = plan_run(config)
    sequences = check_plan(config, found.launch, write=False)  # what is wrong is an error here too
    for line in _heading(found):
        console.print(line, highlight=False, markup=False)
    if not sequences.has_validation:
        console.print(NO_VALIDATION, highlight=False, markup=False)
    console.print(_unit_table(found))
    fits = _memory(found, console)
    _bytes(found, console)
    return 0 if fits else 1


def plan_run(config: TrainConfig) -> DryRun:
    """Everything that follows from the settings."""
    num_gpus = torch.cuda.device_count()
    launch = _ranks(config, num_gpus)
    named = _named_cluster(config)
    cluster = _cluster(named, launch)
    dealing = Dealing.asked(config, num_ranks=launch.num_ranks, before=None)
    model = shape_of_description(config.model.build())
    usual = 2 if cluster.gpu or launch.device == "cuda" else 4
    if cluster.computing is not None:
        usual = cluster.computing.param_nbytes
    setting = Setting(
        model=model.split(_PARTS) if config.sharding.units == "parts" else model,
        cluster=cluster,
        partition_size=_partition_size(config, model, cluster),
        micro_batch=dealing.batch_size,
        accumulation=dealing.micro_steps,
        activations=Keeping(
            checkpoint=config.sharding.activations != "keep",
            offload=config.sharding.activations == "offload",
        ),
        wire_nbytes=_WIDTHS[config.sharding.reduce_dtype],
        over_replicas=config.sharding.optimizer_sharding != "partition",
        state_on_host=config.sharding.optimizer_state == "host",
        compression=config.sharding.compression,
        prefetch=config.sharding.prefetch,
    )
    width = _WIDTHS.get(config.sharding.param_dtype, usual)
    return DryRun(
        config=config,
        launch=launch,
        cluster=cluster,
        setting=setting,
        dealing=dealing,
        param_nbytes=width,
        assumed=assumed_between_nodes(named, num_nodes=launch.num_nodes) if named else "",
    )


def _ranks(config: TrainConfig, num_gpus: int) -> LaunchPlan:
    """Those of the launcher that started this process, or those that would be started."""
    if "WORLD_SIZE" in os.environ:
        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = config.launch.device
        on_gpu = device == "cuda" or (device == "auto" and num_gpus > 0)
        return LaunchPlan(
            device="cuda" if on_gpu else "cpu",
            num_nodes=max(1, world // here),
            ranks_per_node=here,
            ranks_per_gpu=config.launch.ranks_per_gpu or 1,
        )
    if (config.launch.hosts or 1) > 1:
        return plan_hosts(config, num_gpus=num_gpus)
    return plan_launch(config.launch, num_gpus=num_gpus)


def _named_cluster(config: TrainConfig) -> str | None:
    """As the engine would look for it."""
    beside = cluster_beside(config)
    found = str(beside) if beside.is_file() else config.sharding.cluster
    return os.environ.get("MICS_CLUSTER", found)


def _cluster(named: str | None, launch: LaunchPlan) -> Cluster:
    """What the engine would reckon with there."""
    if named:
        return replace(find_cluster(named), num_nodes=launch.num_nodes, ranks_per_node=launch.ranks_per_node)
    device = torch.cuda.get_device_name() if launch.device == "cuda" else None
    return assumed_cluster(device, num_nodes=launch.num_nodes, ranks_per_node=launch.ranks_per_node)


def _partition_size(config: TrainConfig, model: ModelShape, cluster: Cluster) -> int:
    """As asked for, or as the engine would choose it."""
    size, world = config.sharding.partition_size, cluster.world_size
    if size is None:
        usable = cluster.memory_nbytes - DRIVER_NBYTES
        on_host = config.sharding.optimizer_state == "host"
        found = None
        if usable > 0:
            found = fitting_partition(
                model,
                cluster,
                memory_nbytes=usable,
                state_on_host=on_host,
                compression=config.sharding.compression,
            )
        return found or (cluster.ranks_per_node if usable <= 0 else world)
    if world % size:
        near = ", ".join(map(str, partition_sizes(cluster)))
        raise SettingsError(
            f"sharding.partition_size: expected a divisor of the {world} ranks, found {size}; such as {near}"
        )
    return size


def _heading(found: DryRun) -> Iterator[str]:
    config, setting, launch = found.config, found.setting, found.launch
    batch = GlobalBatch(
        num_sequences=found.dealing.num_sequences,
        seq_len=setting.model.seq_len,
        asked_tokens=config.global_batch_tokens,
    )
    asked = "asked for" if config.sharding.partition_size is not None else "chosen"
    stages = "two stages" if setting.two_stage else "one stage"
    yield f"{config.model.title}: {count(setting.model.num_parameters)} parameters, {config.model.beginning}"
    yield (
        f"{plural(launch.num_ranks, 'rank')} = {plural(launch.num_nodes, 'node')} x {launch.ranks_per_node} "
        f"({found.cluster.name}); partition size {setting.partition_size} ({asked}), "
        f"{plural(setting.num_replicas, 'replica')}; collectives in {stages}, prefetch {setting.depth}"
    )
    if found.assumed:
        yield f"cluster {found.cluster.name}: {found.assumed}"
    each = plural(found.dealing.batch_size, "sequence")
    times = plural(found.dealing.micro_steps, "gradient accumulation step")
    in_all = count(config.steps * setting.tokens_per_step)
    yield f"{batch}: {each} per rank and micro-step, {times}"
    yield f"{plural(config.steps, 'step')} = {in_all} tokens"
    nbytes = setting.model.num_parameters * (MASTER_NBYTES + ADAM_NBYTES)
    if config.checkpoint.interval:
        yield (
            f"checkpoints of {volume(nbytes)} every {plural(config.checkpoint.interval, 'step')} in "
            f"{config.checkpoint_dir}, {config.checkpoint.keep} kept"
        )


def _unit_table(found: DryRun) -> Table:
    """A row for each group of equal units."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("unit", overflow="fold")
    for head in ("number", "parameters each", "unsharded", "shard per rank"):
        table.add_column(head, justify="right")
    groups = _parts(found.config) if found.config.sharding.units == "parts" else _blocks(found.setting.model)
    for name, number, numel in groups:
        unsharded = numel * found.param_nbytes
        shard = memory(unsharded / found.setting.partition_size)
        table.add_row(name, whole(number), count(numel), memory(unsharded), shard)
    return table


def _blocks(model: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Each run of equal units: its name, how many they are, and the elements of one."""
    units = [unit for unit in model.units if unit.numel]
    for (_, numel), run in groupby(units, key=lambda unit: (unit.kind, unit.numel)):
        names = [unit.name for unit in run]
        yield names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}", len(names), numel


def _parts(config: TrainConfig) -> Iterator[tuple[str, int, int]]:
    """The same of parts of blocks, as the engine finds them. The cost model takes those of a block for equal.

    Parts that differ in the number of their block alone are one group: layers.*.mlp.
    """
    with torch.device("meta"):
        model = config.model.build().make()
    groups: Counter[tuple[str, int]] = Counter()
    for site in assign_sites(model, block_parts(model)):
        name = re.sub(r"\.\d+(?=\.|$)", ".*", site.name) or type(site.module).__name__
        groups[name, sum(ref.param.numel() for ref in site.params)] += 1
    for (name, numel), number in groups.items():
        yield name, number, numel


def _memory(found: DryRun, console: Console) -> bool:
    """The terms at the peak. Returns whether they fit, as far as that is known."""
    setting = found.setting
    terms = setting.terms_of(replace(setting.division, param_nbytes=found.param_nbytes))
    of = f" of {memory(found.limit)}" if found.limit else ""
    host = f", and {memory(terms.host)} of host memory" if terms.host else ""
    console.print(f"memory per rank: {memory(terms.peak)}{of} at the peak{host}", highlight=False)
    for name, nbytes in terms.on_device().items():
        if nbytes >= 1:
            console.print(f"  {memory(nbytes):>10}  {name}", highlight=False)
    if setting.model.num_calls > 1:
        console.print(
            f"activations are of one call of each layer, and this model calls each {setting.model.num_calls} "
            "times: watch the memory of the first steps",
            highlight=False,
        )
    if found.limit and terms.peak > found.limit:
        console.print(
            f"does not fit: expected at most {memory(found.limit)}, found {memory(terms.peak)}; raise "
            "sharding.partition_size, lower batch_size, or set sharding.activations=checkpoint",
            highlight=False,
        )
        return False
    return True


def _bytes(found: DryRun, console: Console) -> None:
    setting = found.setting
    sent = step_bytes(setting, param_nbytes=found.param_nbytes)
    between = replace(setting, wire_nbytes=_WIDTHS[found.config.sharding.replica_reduce_dtype])
    sent = replace(sent, hop_2=step_bytes(between, param_nbytes=found.param_nbytes).hop_2)
    inside = "inside the node" if setting.partition.num_nodes == 1 else "over the network too"
    across = "inside the node" if setting.replication.num_nodes == 1 else "over the network"
    console.print(f"sent per rank and step: {volume(sent.total)}", highlight=False)
    for nbytes, about in (
        (sent.gathers, f"parameters, in the partition group ({inside})"),
        (sent.hop_1, f"gradients, in the partition group ({inside})"),
        (sent.hop_2, f"gradients, between replicas ({across})"),
        (sent.refresh, f"new parameters, between replicas ({across})"),
    ):
        console.print(f"  {volume(nbytes):>10}  {about}", highlight=False)
