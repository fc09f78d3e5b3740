"""The model every system starts from: the same values, made piece by piece, and the same recomputation.

Each module draws its values from a seed of its own. So they do not depend on the order in which a system
asks for them, and a system that shards unit by unit never needs memory for the whole model.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mics.bench.job import Job
from mics.models import GPT


def device_of(job: Job) -> torch.device:
    """The device this rank trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")


def meta_model(job: Job, *, own_activations: bool = False) -> GPT:
    """The job's model on the ``meta`` device, with initialisers that give the job's values wherever they run.

    A system with ``own_activations`` recomputes and offloads by its own means.

    Values depend on the job's seed and on the kind of device, not on the system.
    """
    with torch.device("meta"):
        model = GPT(job.model)
    order = {param: index for index, param in enumerate(model.parameters())}
    for module in model.modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None:
            # Tied modules share the parameter, hence the seed: whichever runs last gives the same values.
            _seed_initialiser(module, job.seed * len(order) + order[own])
    if not own_activations and job.checkpoint:
        _recompute_blocks(model)
    if not own_activations and job.offload:
        _offload_blocks(model, pin=job.device == "cuda")
    return model


def inner_units(model: GPT) -> list[nn.Module]:
    """What peers shard before the root, in the forward's order. A tied embedding stays with the head."""
    return [*([] if model.config.tie_weights else [model.embedding]), *model.blocks]


def materialise(module: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Give memory on ``device`` and initial values to the parameters of ``module`` that are still on meta.

    Returns those parameters.
    """
    holders = [m for m in module.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
    real: dict[nn.Parameter, nn.Parameter] = {}  # one for each, so that tied parameters stay tied
    for holder in holders:
        for name, param in list(holder.named_parameters(recurse=False)):
            if param not in real:
                real[param] = nn.Parameter(torch.empty_like(param, device=device))
            setattr(holder, name, real[param])
    for holder in holders:
        _initialiser(holder)()
    return list(real.values())


def build_model(job: Job) -> GPT:
    """The job's whole model with its initial values, for systems that take no less, and as a reference."""
    model = meta_model(job)
    materialise(model, device_of(job))
    return model


def _initialiser(module: nn.Module) -> Callable[[], None]:
    return cast(Callable[[], None], module.reset_parameters)


def _seed_initialiser(module: nn.Module, seed: int) -> None:
    draw = _initialiser(module)

    def draw_seeded() -> None:
        torch.manual_seed(seed)
        draw()

    module.reset_parameters = draw_seeded  # type: ignore[assignment]


def _recompute_blocks(model: GPT) -> None:
    """Keep only the input of each block for the backward.

    Inside the block's own call, so that what a system hooks onto the block stays outside: it runs once in the
    forward and once in the backward, not a third time in the recomputation.
    """
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=model.config.dropout > 0
        )


def _offload_blocks(model: GPT, *, pin: bool) -> None:
    """Keep what each block saves in host memory, as torch does it."""
    for block in model.blocks:
        block.forward = partial(_call_with_saved_on_cpu, block.forward, pin)


def _call_with_saved_on_cpu(forward: Callable[..., Tensor], pin: bool, *args: object) -> Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        return forward(*args)
