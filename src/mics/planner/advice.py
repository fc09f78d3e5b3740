"""A choice as code: what to type to train that way. The tests run it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Final

from mics.cost.clusters import PRESETS
from mics.cost.gpus import formats_of
from mics.cost.memory import ADAM_NBYTES
from mics.cost.setting import Setting
from mics.layout.compression import LOSSLESS, UNCOMPRESSED, Compression
from mics.planner.search import Choice
from mics.utils.numbers import plural

_WIDTH: Final = 80
_PARTS: Final = "[part for b in model.blocks for part in (b.attention, b.up, b.down)]"
_FLOAT8_MODULES: Final = 'module_filter_fn=lambda _, name: "head" not in name'
_OTHER_MODELS: Final = "# of mics.models.GPT; in other models: a block's attention, its MLP's matrices"


def advice(choice: Choice) -> str:
    """How to launch it, the call of ``mics.shard``, and one optimizer step.

    ``model`` and ``steps`` are the reader's: an ``nn.Module`` that returns its loss, and for each optimizer
    step as many pairs of tokens and targets as there are accumulation steps.
    """
    setting = choice.setting
    scales = _format(setting) == "float16"
    lines = [f"# {line}" for line in launch(setting)]
    lines.append("import torch")
    is_narrow = setting.state_nbytes < ADAM_NBYTES
    if is_narrow:
        lines.append("from torchao.optim import AdamW8bit  # or from bitsandbytes.optim")
    if _in_float8(setting):
        lines.append("from torchao.float8 import Float8LinearConfig, convert_to_float8_training")
    lines += ["", "import mics"]
    if setting.activations.checkpoint and setting.model.parts > 1:
        lines.append("from mics.models.gpt import Block  # or your model's class of blocks")
    lines.append("")
    if _in_float8(setting):
        lines.append("config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)")
        lines += _call("convert_to_float8_training", ["model", "config=config", _FLOAT8_MODULES])
    lines += _call("mics.shard", ["model", *_arguments(setting)])
    lines.append(f"optimizer = {'AdamW8bit' if is_narrow else 'torch.optim.AdamW'}(model.parameters())")
    if scales:
        gpu = setting.cluster.gpu.upper()
        lines.append(f"# A {gpu} has no bfloat16: train in float16, with a GradScaler.")
        lines.append("scaler = torch.amp.GradScaler(next(model.parameters()).device.type)")
    shape = f"[{setting.micro_batch}, {setting.model.seq_len}]"
    lines += [
        f"# {plural(setting.accumulation, 'gradient accumulation step')}, "
        f"{plural(setting.micro_batch, 'sequence')} per {setting.cluster.rank_word} in each:",
        f"for batches in steps:  # {plural(setting.accumulation, 'pair')} of tokens and targets {shape}",
    ]
    lines.append("    for tokens, targets in mics.microsteps(model, batches):")
    loss = "model(tokens, targets) / len(batches)"
    lines.append(f"        scaler.scale({loss}).backward()" if scales else f"        ({loss}).backward()")
    lines += ["    scaler.unscale_(optimizer)"] if scales else []
    lines.append("    mics.clip_grad_norm_(model, 1.0)")
    lines += ["    scaler.step(optimizer)", "    scaler.update()"] if scales else ["    optimizer.step()"]
    lines.append("    optimizer.zero_grad()")
    return "\n".join(lines)


def launch(setting: Setting) -> list[str]:
    """The command on every node, in lines for a shell."""
    cluster = setting.cluster
    named = f"MICS_CLUSTER={cluster.name} " if cluster.name in PRESETS else ""
    if cluster.num_nodes == 1:
        return [f"{named}torchrun --standalone --nproc-per-node {cluster.ranks_per_node} train.py"]
    return [
        f"{named}torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.ranks_per_node} \\",
        "    --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 train.py",
    ]


def _arguments(setting: Setting) -> list[str]:
    """Of ``mics.shard``, beside the model: what is not the default."""
    found = [f"partition_size={setting.partition_size}"]
    if setting.model.parts > 1:
        found += [_OTHER_MODELS, f"units={_PARTS}"]
    if setting.activations.checkpoint:
        how = ["checkpoint=Block"] if setting.model.parts > 1 else []
        how += ["offload=True"] if setting.activations.offload else []
        found.append(f"activations=mics.Activations({', '.join(how)})")
    found += _precision(setting)
    if not setting.over_replicas:
        found.append('optimizer_sharding="partition"')
    if setting.state_on_host:
        found.append('optimizer_state="host"')
    sent = _sent(setting)
    if sent != LOSSLESS:
        found.append(f"compression={_compression(sent)}")
    if setting.prefetch is not None:
        found.append(f"prefetch={setting.prefetch}")
    return found


def _in_float8(setting: Setting) -> bool:
    return any(unit.in_float8 for unit in setting.model.units)


def _precision(setting: Setting) -> list[str]:
    """None where the default will do: on GPUs bfloat16, with gradients in float32."""
    name = f"torch.{_format(setting)}"
    fields = [] if name == "torch.bfloat16" else [f"param_dtype={name}"]
    if setting.wire_nbytes == 2:
        fields.append(f"reduce_dtype={name}")
        between = setting.num_replicas > 1 and setting.compression.hop2 is None
        fields += [f"replica_reduce_dtype={name}"] if between else []
    return ["precision=" + "\n".join(_call("mics.Precision", fields, indent=4))] if fields else []


def _sent(setting: Setting) -> Compression:
    """Without formats in which nothing is sent: between one replica, or nodes of a group on one."""
    found = setting.compression
    if setting.num_replicas == 1:
        found = replace(found, hop2=None, hop2_error_feedback=True)
    if setting.partition.num_nodes == 1:
        found = replace(found, inter_gather=None, inter_reduce=None)
        found = found if setting.num_replicas > 1 else LOSSLESS
    return found


def _compression(compression: Compression) -> str:
    """What is not the default of ``mics.Compression``."""
    if compression == UNCOMPRESSED:
        return "None"
    changed = [
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in asdict(compression).items()
        if value != getattr(LOSSLESS, name)
    ]
    return "\n".join(_call("mics.Compression", changed, indent=4))


def _call(name: str, arguments: list[str], *, indent: int = 0) -> list[str]:
    """In one line where it fits, else an argument a line."""
    line = f"{name}({', '.join(arguments)})"
    if not any("#" in each or "\n" in each for each in arguments) and indent + len(line) <= _WIDTH:
        return [line]
    inside, outside = " " * (indent + 4), " " * indent
    listed = [inside + each + ("" if each.startswith("#") else ",") for each in arguments]
    return [f"{name}(", *"\n".join(listed).splitlines(), f"{outside})"]


def _format(setting: Setting) -> str:
    """The 16-bit format that the cluster's GPUs multiply in."""
    return formats_of(setting.cluster.gpu)[0]
