"""``mics plan``."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from mics.cost.clusters import PRESETS, Cluster, assumed_between_nodes
from mics.cost.constants import Kernels
from mics.cost.gpus import formats_of, has_float8
from mics.cost.memory import ADAM_8BIT_NBYTES, ADAM_NBYTES
from mics.cost.modules import find_model
from mics.cost.shapes import NAMES, ModelShape
from mics.errors import SettingsError
from mics.layout.compression import Compression, Hop2
from mics.models.descriptions import describe_model
from mics.models.huggingface import refuse_kind
from mics.planner.answer import Answer, answer, as_dict, complete, num_stages
from mics.planner.goodput import Faults, goodput
from mics.planner.hardware import planned_cluster
from mics.planner.run_file import doubts_about_data, write_run_file
from mics.planner.search import MAX_NODES, Request, divided_batch, nearest, search
from mics.planner.sweep import Size, Sweep, sweep_as_dict
from mics.planner.text import show, show_sweep
from mics.utils.command_line import parse
from mics.utils.extras import require
from mics.utils.global_batch import AskedBatch, GlobalBatch
from mics.utils.numbers import TokenCount
from mics.utils.progress import long_work

_MODELS = (
    f"{', '.join(NAMES)}; a Hugging Face config.json or a folder with one; or module:function that builds an "
    "nn.Module"
)
_CLUSTERS = f"NAME:NODES or FILE.yaml:NODES (NAME alone with --nodes); names: {', '.join(PRESETS)}"


_BOUNDS = {
    "nodes": (1, MAX_NODES),
    "seq": (1, 10**9),
    "memory-gib": (0.001, 10**5),
    "price": (0, 10**6),
    "tokens": (1, 10**18),
    "node-mtbf-hours": (0.01, 10**9),
    "checkpoint-seconds": (0, 10**6),
    "restart-seconds": (0, 10**7),
}
"""By option: what is possible. Beyond, a figure would be of no use, and is likely a slip."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Where the plan goes."""

    json: bool = False
    """Print everything as JSON instead."""
    html: Path | None = None
    """Also write a page with pictures to this file."""
    write: Path | None = None
    """Also write the best setting to this file, for mics train --config; an existing file is renamed. It has
    steps: 1000 unless --tokens says how many."""
    data: tuple[Path, ...] = ()
    """With --write: folders that mics data has prepared, to be named in the file; unset: data."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a training run will cost, how to shard it, and whether it fits, before renting anything.

    From arithmetic alone: memory term by term, and a simulated step with its compute and every link. Say what
    you want to train on what; the best settings come out, with reasons.
    """

    model: Annotated[str, tyro.conf.arg(help=_MODELS)]
    cluster: Annotated[str, tyro.conf.arg(help=_CLUSTERS)]
    nodes: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: those of --cluster)")] = ()
    """Numbers of nodes to compare, such as 1 2 4 8 16: one table with days and dollars, and advice."""
    global_batch: int | None = None
    """Sequences per optimizer step, over all GPUs. Give this or --global-batch-tokens."""
    global_batch_tokens: TokenCount | None = None
    """Tokens per optimizer step, over all GPUs (1M, 4e6, 4_000_000): rounded to as many sequences per GPU."""
    seq: int | None = None
    """Tokens per sequence; unset: the model's usual length."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of gradients in communication; fp16 on a V100, which has no bf16."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """Whose state is kept: AdamW in float32, or torchao's or bitsandbytes' AdamW8bit."""
    optimizer_state: Literal["device", "host"] = "device"
    """Where masters and optimizer state are between steps; host: 12 bytes per parameter less on the GPU."""
    lossless_refresh: bool = True
    """Send new parameters to the replicas as how far they have moved."""
    hop2: Hop2 | None = None
    """Round gradients between replicas to this format."""
    hop2_error_feedback: bool = True
    """With --hop2: keep what rounding loses, 2 bytes per element of the shard, and send it in later steps."""
    inter_gather: Literal["int8"] | None = None
    """Round parameters that a partition group sends from node to node."""
    inter_reduce: Literal["int8"] | None = None
    """Round gradients that a partition group sends from node to node."""
    float8: bool = False
    """Matrices of blocks are torchao's Float8Linear and gathered in float8; they compute as in
    bfloat16 here."""
    kernels: Kernels = "current"
    """Whose kernels compute. 2022: unfused attention and slower matrices, as in the published results."""
    memory_gib: float | None = None
    """Memory per GPU in GiB; unset: the cluster's."""
    price: float | None = None
    """Dollars per node and hour."""
    tokens: TokenCount | None = None
    """Tokens to train on (300B, 1e12): gives the time and, with --price, the cost of the run."""
    node_mtbf_hours: float | None = None
    """Mean hours between failures of one node: gives goodput and the best checkpoint interval."""
    checkpoint_seconds: float = 30.0
    """Seconds training pauses per checkpoint."""
    restart_seconds: float = 300.0
    """Seconds from a failure until training continues."""
    output: Annotated[PlanOutput, tyro.conf.arg(name="")] = field(default_factory=PlanOutput)

    def check(self) -> None:
        """Raise if a number makes no sense, or settings exclude each other."""
        self._check_numbers()
        self._check_formats()
        if self.price is not None and self.tokens is None:
            raise SettingsError(
                "--price: expected --tokens beside it, found none; add what is to be trained on, such as "
                "--tokens 300B"
            )
        if self.output.write is not None and self.nodes:
            raise SettingsError(
                "--write: expected one number of nodes, found --nodes; give them in --cluster NAME:NODES"
            )
        if ":" in self.cluster and self.nodes:
            numbers = " ".join(map(str, self.nodes))
            raise SettingsError(
                f"--cluster, --nodes: expected one number of nodes, found {self.cluster} and {numbers}; "
                f"say --cluster {self.cluster.partition(':')[0]}"
            )
        if self.output.write is not None and self.float8:
            raise SettingsError(
                "--write: expected a model that mics train builds, found --float8, for which your program "
                "converts it; leave --write out"
            )
        if self.output.write is not None and self.optimizer != "adamw":
            raise SettingsError(
                f"--write: expected --optimizer adamw, found {self.optimizer}: mics train has AdamW alone; "
                "leave --write out"
            )
        if self.output.data and self.output.write is None:
            raise SettingsError("--data: expected --write FILE beside it, found none; add it")
        if not self.batch.given:
            raise SettingsError(
                "--global-batch, --global-batch-tokens: expected one of them, found neither; say how large "
                "an optimizer step is, such as --global-batch-tokens 4M"
            )

    def _check_numbers(self) -> None:
        given = [(name, getattr(self, name.replace("-", "_"))) for name in _BOUNDS if name != "nodes"]
        for name, value in (*given, *(("nodes", number) for number in self.nodes)):
            low, high = _BOUNDS[name]
            if value is not None and not low <= value <= high:
                raise SettingsError(
                    f"--{name}: expected a number from {low:,} to {high:,}, found {value:,}; "
                    f"{'give whole nodes' if name == 'nodes' else 'check its unit'}"
                )

    def _check_formats(self) -> None:
        if self.optimizer_state == "host" and self.optimizer != "adamw":
            raise SettingsError(
                f"--optimizer-state: expected device with --optimizer {self.optimizer}, found host; leave "
                "one of them out"
            )
        if self.float8 and self.optimizer_state == "host":
            raise SettingsError(
                "--optimizer-state: expected device with --float8, found host; leave one of them out"
            )
        if self.hop2 is None and not self.hop2_error_feedback:
            raise SettingsError(
                "--no-hop2-error-feedback: expected --hop2 FORMAT beside it, found none; add it, or leave "
                "this out"
            )

    @property
    def batch(self) -> AskedBatch:
        return AskedBatch(sequences=self.global_batch, tokens=self.global_batch_tokens)

    @property
    def compression(self) -> Compression:
        return Compression(
            refresh="lossless" if self.lossless_refresh else None,
            hop2=self.hop2,
            hop2_error_feedback=self.hop2_error_feedback,
            inter_gather=self.inter_gather,
            inter_reduce=self.inter_reduce,
        )

    @property
    def faults(self) -> Faults | None:
        if self.node_mtbf_hours is None:
            return None
        return Faults(
            node_mtbf=3600 * self.node_mtbf_hours,
            checkpoint=self.checkpoint_seconds,
            restart=self.restart_seconds,
        )


def plan(args: Sequence[str]) -> int:
    """Parse, plan, print."""
    config = parse(PlanConfig, args, prog="mics plan")
    try:
        config.check()
        if config.output.html is not None:
            require("plot", "--html")
        model, cluster = find_model(config.model, seq_len=config.seq), planned_cluster(config.cluster)
        model = model.with_float8(config.float8)
        _check_sizes(config, model, cluster)
        _check_formats(config, cluster)
        _say_what_is_assumed(config, cluster)
        if config.output.write is not None:
            _check_trainable(config)
        if config.nodes:
            return _publish(_sweep(config, model, cluster), config)
        found = _answer(config, model, cluster)
        if config.output.write is not None:
            command = shlex.join(["mics", "plan", *args])
            kept = write_run_file(
                config.output.write, found, model=config.model, data=config.output.data, command=command
            )
            renamed = "" if kept is None else f"; what was there is {kept} now"
            print(f"written: {config.output.write}{renamed}", file=sys.stderr)
            for doubt in doubts_about_data(config.output.data, describe_model(config.model)):
                print(f"mics plan: warning: {doubt}", file=sys.stderr)
        return _publish(found, config)
    except SettingsError as error:
        print(f"mics plan: {error}", file=sys.stderr)
        return 2


def _say_what_is_assumed(config: PlanConfig, cluster: Cluster) -> None:
    """On stderr: it stands beside a report in JSON too."""
    if config.float8:
        print("mics plan: --float8: matrices are taken to multiply as fast as in bfloat16", file=sys.stderr)
    most = max(config.nodes, default=cluster.num_nodes)
    assumed = assumed_between_nodes(config.cluster, num_nodes=most)
    if assumed:
        print(f"mics plan: warning: --cluster {config.cluster}: {assumed}", file=sys.stderr)


def _check_sizes(config: PlanConfig, model: ModelShape, cluster: Cluster) -> None:
    """Raise if the cluster or the batch is larger than anybody's."""
    if cluster.num_nodes > MAX_NODES:
        raise SettingsError(
            f"--cluster {config.cluster!r}: expected at most {MAX_NODES:,} nodes, found {cluster.num_nodes:,}"
        )
    config.batch.check_size(model.seq_len)


def _check_formats(config: PlanConfig, cluster: Cluster) -> None:
    """Raise if the GPUs have no float8, or train in another format than gradients are to be sent in."""
    if config.float8 and not has_float8(cluster.gpu):
        gpu = cluster.gpu.partition("-")[0].upper() or "GPU"
        raise SettingsError(
            f"--float8: expected GPUs of compute capability 8.9 or more, found {cluster.name}, whose {gpu} "
            "has no float8; leave it out"
        )
    usual = {"bfloat16": "bf16", "float16": "fp16"}[formats_of(cluster.gpu)[0]]
    if config.reduce_dtype not in ("fp32", usual):
        why = "has no bfloat16" if usual == "fp16" else "trains in bfloat16"
        gpu = cluster.gpu.partition("-")[0].upper() or "GPU"
        raise SettingsError(
            f"--reduce-dtype: expected fp32 or {usual} on {cluster.name}, whose {gpu} {why}, found "
            f"{config.reduce_dtype}; say {usual}"
        )


def _check_trainable(config: PlanConfig) -> None:
    """Raise if mics train would refuse the model that is to be written."""
    found = describe_model(config.model)
    if found.objective is None:
        raise refuse_kind(found.title)
    if found.gpt is None and 0 < found.seq_len < (config.seq or 0):
        raise SettingsError(
            f"--seq: expected at most the {found.seq_len:,} positions of {found.title}, found "
            f"{config.seq:,}; leave --write out to plan it all the same"
        )


def _request(
    config: PlanConfig, model: ModelShape, cluster: Cluster, common: GlobalBatch | None = None
) -> Request:
    batch = common or divided_batch(config.batch, model, cluster)
    return Request(
        model=model,
        cluster=cluster,
        global_batch=batch.num_sequences,
        asked_tokens=batch.asked_tokens,
        wire_nbytes=4 if config.reduce_dtype == "fp32" else 2,
        state_nbytes=ADAM_8BIT_NBYTES if config.optimizer == "adamw8bit" else ADAM_NBYTES,
        memory_nbytes=None if config.memory_gib is None else config.memory_gib * 2**30,
        kernels=config.kernels,
        state_on_host=config.optimizer_state == "host",
        compression=config.compression,
    )


def _answer(config: PlanConfig, model: ModelShape, cluster: Cluster) -> Answer:
    """For one cluster."""
    curves = config.output.json or config.output.html is not None
    request = _request(config, model, cluster)
    with long_work("plan", num_stages(cluster, curves=curves), unit="stages") as work:
        return answer(
            request,
            faults=config.faults,
            tokens=config.tokens,
            price=config.price,
            curves=curves,
            advance=work.advance,
        )


def _sweep(config: PlanConfig, model: ModelShape, cluster: Cluster) -> Sweep:
    """Every number of nodes, in order; one that is not possible keeps its reason."""
    clusters = [replace(cluster, num_nodes=nodes) for nodes in sorted(set(config.nodes))]
    common = _common_batch(config, model, cluster)
    stages = sum(num_stages(here, curves=config.output.json, peers=config.output.json) for here in clusters)
    with long_work("plan", stages, unit="stages") as work:
        return Sweep(sizes=tuple(_size(config, model, here, common, work.advance) for here in clusters))


def _size(
    config: PlanConfig,
    model: ModelShape,
    cluster: Cluster,
    common: GlobalBatch | None,
    advance: Callable[[], object],
) -> Size:
    """One number of nodes: an answer, or why there is none."""
    size = Size(nodes=cluster.num_nodes, gpus=cluster.world_size)
    try:
        found = search(_request(config, model, cluster, common), advance=advance)
    except SettingsError:  # the batch, which is all that depends on the number of nodes
        asked = "the batch" if config.global_batch is None else f"{config.global_batch:,} sequences"
        return replace(size, problem=f"{asked} cannot be divided over {cluster.world_size:,} GPUs")
    if not found.choices:
        return replace(size, problem=f"does not fit: {nearest(found.too_large.values())}")
    if config.faults is not None and not goodput(config.faults, cluster.num_nodes).share:
        return replace(size, problem="never done: failures come faster than work is done")
    filled = complete(
        found,
        faults=config.faults,
        tokens=config.tokens,
        price=config.price,
        curves=config.output.json,
        peers=config.output.json,
        advance=advance,
    )
    return replace(size, answer=filled)


def _common_batch(config: PlanConfig, model: ModelShape, cluster: Cluster) -> GlobalBatch | None:
    """Tokens rounded once for all numbers of nodes, if there is a batch that all of them can divide."""
    gpus = math.lcm(*(nodes * cluster.ranks_per_node for nodes in config.nodes))
    if config.global_batch_tokens is None or 2 * config.global_batch_tokens < gpus * model.seq_len:
        return None
    return config.batch.fit(seq_len=model.seq_len, multiple=gpus, because="as many for each GPU")


def _publish(found: Answer | Sweep, config: PlanConfig) -> int:
    """Print it, and write the page."""
    if config.output.json:
        shown = sweep_as_dict(found) if isinstance(found, Sweep) else as_dict(found)
        print(json.dumps(shown, indent=2, allow_nan=False))
    elif isinstance(found, Sweep):
        show_sweep(found, Console(emoji=False))
    else:
        show(found, Console(emoji=False))
    if config.output.html is not None:
        from mics.planner.page import page, sweep_page  # matplotlib takes a second, which only this needs

        text = sweep_page(found) if isinstance(found, Sweep) else page(found)
        try:
            config.output.html.write_text(text)
        except OSError as error:
            print(f"mics plan: --html {config.output.html}: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"written: {config.output.html}", file=sys.stderr)
    return 0
