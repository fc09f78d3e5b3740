"""DeepSpeed: ZeRO-2 and ZeRO-3 over the world, and its MiCS over partition groups."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from mics.bench.job import Job
from mics.bench.phases import begin
from mics.bench.systems.find_deepspeed import find_deepspeed
from mics.bench.systems.loop import adamw
from mics.bench.systems.mesh import ranks_per_node
from mics.bench.systems.protocol import Batch, SystemUnavailable, check_batches
from mics.bench.systems.start import device_of, inner_units, materialise, meta_model
from mics.models import GPT

MICS_VERSION: Final = "0.19.2"


def build_deepspeed_zero2(job: Job) -> DeepSpeedTrainer:
    """ZeRO-2: whole parameters; gradients go to their owners in every micro-step."""
    deepspeed = find_deepspeed("deepspeed-zero2", job)
    return DeepSpeedTrainer(job, _initialise(deepspeed, job, {"stage": 2, "reduce_scatter": True}, None))


def build_zero3(job: Job) -> DeepSpeedTrainer:
    """ZeRO-3: everything sharded over the world, gradients reduced there in every micro-step."""
    deepspeed = find_deepspeed("deepspeed-zero3", job)
    return DeepSpeedTrainer(job, _initialise(deepspeed, job, {}, deepspeed.zero.Init))


def build_deepspeed_zeropp(job: Job) -> DeepSpeedTrainer:
    """ZeRO-3 with int8 weights, a second copy divided over the node, and int4 gradients in two stages."""
    if job.device != "cuda":
        raise SystemUnavailable(
            f"deepspeed-zeropp: expected device 'cuda', found {job.device!r}; its quantiser is a CUDA "
            "extension. zeropp is its schedule on any backend"
        )
    deepspeed = find_deepspeed("deepspeed-zeropp", job)
    sharding = {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": ranks_per_node(),
        "zero_quantized_gradients": True,
    }
    return DeepSpeedTrainer(job, _initialise(deepspeed, job, sharding, deepspeed.zero.Init))


def build_deepspeed_mics(job: Job) -> DeepSpeedTrainer:
    """MiCS: shards over partition groups; gathers in two stages where a group fills several whole nodes."""
    deepspeed = find_deepspeed(
        "deepspeed-mics",
        job,
        only=MICS_VERSION,
        reason="its MiCS deadlocks from 0.19.3 to 0.19.6 and is gone from 0.19.7",
    )
    here = ranks_per_node()
    spans_nodes = job.partition_size > here > 1 and job.partition_size % here == 0
    if spans_nodes:
        os.environ["NDEV_PER_NODE"] = str(here)  # what it would else take from the number of GPUs
    sharding = {"mics_shard_size": job.partition_size, "mics_hierarchical_params_gather": spans_nodes}
    return DeepSpeedTrainer(job, _initialise(deepspeed, job, sharding, deepspeed.zero.MiCS_Init))


class DeepSpeedTrainer:
    """A ``Trainer`` around DeepSpeed's engine, which counts micro-steps and divides the loss itself."""

    def __init__(self, job: Job, engine: Any) -> None:
        # With bfloat16 parameters it makes its masters from parameters that are rounded already.
        self.same_start = job.param is torch.float32
        self._job = job
        self._engine = engine

    def step(self, batches: Sequence[Batch]) -> Tensor:
        check_batches(self._job, batches)
        losses = []
        for number, (tokens, targets) in enumerate(batches):
            begin("forward", number)
            loss = self._engine(tokens, targets)
            begin("backward", number)
            self._engine.backward(loss)
            if number == len(batches) - 1:
                begin("optimizer")
            self._engine.step()  # the optimizer's, in the last micro-step only
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def close(self) -> None:
        self._engine.destroy()
        del self._engine
        gc.collect()


def _initialise(deepspeed: Any, job: Job, sharding: dict[str, Any], init: Any) -> Any:
    # An operator for inference that it would compile at the first start on every machine without GPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It takes the GPU of this number. Ranks that share one, and a process nobody launched, know better.
    os.environ["LOCAL_RANK"] = str(device_of(job).index or 0)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    if dist.get_backend() != "nccl":
        _unroll_gathers(deepspeed.comm.comm.cdb)
    config = _config(job, sharding)
    model = _shard(job, config, init)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, job), config=config)
    return engine


def _shard(job: Job, config: dict[str, Any], init: Any) -> GPT:
    """The model, sharded unit by unit as it gets its values, so that only one unit is ever whole."""
    model = meta_model(job)
    if init is None:  # nothing to shard: every rank has it whole
        materialise(model, device_of(job))
        return model
    first = None
    for unit in (*inner_units(model), model):
        fresh = materialise(unit, device_of(job))
        for param in fresh:
            param.data = param.data.to(job.param)
        if first is None:
            init(module=unit, config_dict_or_path=config, dtype=job.param)
            first = fresh[0]
        else:  # another ``init`` would make another set of process groups
            first.convert_to_zero_parameters(param_list=fresh)  # type: ignore[attr-defined]
    return model


def _config(job: Job, sharding: dict[str, Any]) -> dict[str, Any]:
    """Its settings, with sizes that follow the model as those of Hugging Face's integration do.

    By default it keeps a billion parameters gathered, which is no sharding at all for the models one compares
    with. A reuse distance of 0 releases each after use, as the other systems do; two blocks may be live, so
    that it can prefetch one while the other computes, and does not gather again what it has just recomputed.
    """
    block_numel = 12 * job.model.hidden_size**2
    shards_params = sharding.get("stage") != 2
    reduction = {"reduce_bucket_size": block_numel} if shards_params else {}  # stage 2: its own, 5e8
    of_stage_3 = {
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 2 * block_numel,
        "stage3_prefetch_bucket_size": block_numel,
        "stage3_param_persistence_threshold": 10 * job.model.hidden_size,
    }
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.max_norm or 0.0,
        "bf16": {"enabled": job.param is torch.bfloat16},
        "fp16": {"enabled": job.scales_loss},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[
            job.reduce_dtype
        ],
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            **reduction,
            **(of_stage_3 if shards_params else {}),
            **sharding,
        },
        "steps_per_print": 1 << 30,  # never
    }


class _Works:
    """Several collectives under way that are waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _unroll_gathers(backend: Any) -> None:
    """Issue the coalesced gathers of its MiCS one by one: "Backend gloo does not implement startCoalescing".

    The bytes that move are the same. On the emulated backend each pays its own latency, where NCCL would send
    them as one.
    """

    def all_gather_coalesced(
        outputs: list[Tensor], shards: list[Tensor], group: Any = None, async_op: bool = False
    ) -> _Works | None:
        works = _Works(
            [
                dist.all_gather_into_tensor(output, shard, group=group, async_op=True)
                for output, shard in zip(outputs, shards, strict=True)
            ]
        )
        if async_op:
            return works
        works.wait()
        return None

    backend.all_gather_coalesced = all_gather_coalesced
