"""ZeRO stage 2: DeepSpeed's schedule of collectives, our implementation.

As ``deepspeed/runtime/zero/stage_1_and_2.py`` orders them with ``overlap_comm``, ``contiguous_gradients``:

- Whole parameters on every rank, in one flat buffer. Masters and optimizer state are divided over the world
  by position in it.
- Backward copies gradients into a bucket. A full bucket is divided by the world size and reduced in every
  micro-step, on a stream of its own, while backward fills the other bucket; it waits for the one before.
- By default (``use_multi_rank_bucket_allreduce``) that is one all-reduce of the bucket, of which each owner
  takes its slices. Otherwise it is one reduce to each owner.
- After the update one all-gather of the whole flat buffer: DeepSpeed goes by ``allgather_bucket_size`` only
  where torch has no all-gather into one tensor.

Kinder than DeepSpeed in two ways: the host never waits, and masters start from values that nobody rounded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics.bench.job import Job
from mics.bench.phases import begin
from mics.bench.systems.protocol import Batch, check_batches
from mics.bench.systems.start import device_of, inner_units, materialise, meta_model

BUCKET_NUMEL: Final = 500_000_000  # DeepSpeed's reduce_bucket_size
_EPSILON: Final = 1e-6  # of the norm, as torch and DeepSpeed clip


def build_zero2(job: Job, *, bucket_numel: int = BUCKET_NUMEL, joins_owners: bool = True) -> Zero2Trainer:
    """``joins_owners``: one all-reduce for a bucket; False: one reduce to each owner of a part of it."""
    return Zero2Trainer(job, bucket_numel=bucket_numel, joins_owners=joins_owners)


build_zero2_reduce = partial(build_zero2, joins_owners=False)
"""As DeepSpeed did before buckets of several ranks were joined: half of the bytes, in more collectives."""


@dataclass
class _Bucket:
    """Gradients on their way: where they lie in ``memory``, and where that is in the flat buffer."""

    memory: Tensor  # [bucket_numel] in the parameters' dtype; written by backward, then by the lane
    numel: int = 0
    slices: list[range] = field(default_factory=list)  # in the flat buffer, one after the other in memory


class _Lane:
    """Where collectives run: beside the computation, each after the one before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._left: Callable[[], None] | None = None

    def wait(self) -> None:
        """The computation goes on once everything here is over."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        elif self._left is not None:
            finish, self._left = self._left, None
            finish()

    def run(self, start: Callable[[], Callable[[], None]]) -> None:
        """Call ``start``, which issues collectives, and some time later what it returns."""
        self.wait()
        if self._stream is None:
            self._left = start()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            start()()


class Zero2Trainer:
    """A ``Trainer`` with whole parameters, and gradients and optimizer state divided over the world."""

    same_start = True

    def __init__(self, job: Job, *, bucket_numel: int, joins_owners: bool) -> None:
        self._job = job
        self._joins_owners = joins_owners
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        device = device_of(job)
        self._model = meta_model(job)
        total = sum(param.numel() for param in self._model.parameters())
        self._share = -(-total // self._world_size)  # elements of one rank; the last has padding
        own = range(self._rank * self._share, (self._rank + 1) * self._share)
        self._own = own
        # [world * share], every rank's parameters; written by the update and the all-gather
        self._flat = torch.zeros(self._share * self._world_size, dtype=job.param, device=device)
        self._masters = nn.Parameter(torch.zeros(self._share, dtype=torch.float32, device=device))
        # [share], this rank's sum over the world
        self._grads = torch.zeros(self._share, dtype=torch.float32, device=device)
        self._at = self._lay_out(device)
        size = min(bucket_numel, total)
        self._buckets = [_Bucket(torch.empty(size, dtype=job.param, device=device)) for _ in range(2)]
        self._lane = _Lane(device)
        self._optimizer = torch.optim.AdamW(
            [self._masters], lr=job.learning_rate, fused=True if job.device == "cuda" else None
        )
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._take) for param in self._model.parameters()
        ]

    def step(self, batches: Sequence[Batch]) -> Tensor:
        check_batches(self._job, batches)
        losses = []
        for number, (tokens, targets) in enumerate(batches):
            begin("forward", number)
            loss = self._model(tokens, targets) / len(batches)
            begin("backward", number)
            loss.backward()
            self._send()
            self._lane.wait()  # in every micro-step, as DeepSpeed's epilogue does
            losses.append(loss.detach())
        begin("optimizer")
        self._update()
        return torch.stack(losses).sum()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        del self._model, self._optimizer, self._masters, self._flat, self._grads, self._buckets, self._at
        gc.collect()

    def _lay_out(self, device: torch.device) -> dict[nn.Parameter, range]:
        """Give parameters their values, unit by unit, and put them at their places in the flat buffer."""
        places = _positions(self._model)
        found: dict[nn.Parameter, range] = {}
        for unit in (*inner_units(self._model), self._model):
            fresh = set(materialise(unit, device))
            for name, param in self._model.named_parameters():
                if param in fresh:
                    place = found[param] = places[name]
                    common = _common(place, self._own)
                    values = param.detach().reshape(-1)
                    part = values[common.start - place.start : common.stop - place.start]
                    self._masters.data[_inside(common, self._own)] = part
                    view = self._flat[place.start : place.stop].view_as(param)
                    view.copy_(param.detach())
                    param.data = view
        return found

    def _take(self, param: Tensor) -> None:
        """A gradient is complete: into the bucket, which is sent first if it has no room for it."""
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        bucket, place = self._buckets[0], self._at[param]
        if bucket.numel + len(place) > len(bucket.memory):
            self._send()
            bucket = self._buckets[0]
        if len(place) > len(bucket.memory):  # larger than any bucket: alone, from where it is
            self._lane.run(partial(self._reduce, param.grad.reshape(-1), [place]))
            self._lane.wait()
        else:
            bucket.memory[bucket.numel : bucket.numel + len(place)].copy_(param.grad.reshape(-1))
            bucket.numel += len(place)
            bucket.slices.append(place)
        param.grad = None

    def _send(self) -> None:
        """Reduce what is in the bucket, and go on with the other one."""
        bucket = self._buckets[0]
        if bucket.numel:
            self._lane.run(partial(self._reduce, bucket.memory[: bucket.numel], bucket.slices))
            bucket.numel, bucket.slices = 0, []
            self._buckets.reverse()

    def _reduce(self, memory: Tensor, slices: Sequence[range]) -> Callable[[], None]:
        memory.div_(self._world_size)
        wire = memory.to(self._job.reduce)
        owned = self._owned(wire, slices)
        if self._joins_owners:
            works = [dist.all_reduce(wire, async_op=True)]
            mine = owned.get(self._rank, [])
        else:
            joined = {owner: _joined([part for _, part in parts]) for owner, parts in owned.items()}
            works = [dist.reduce(part, dst=owner, async_op=True) for owner, part in joined.items()]
            mine = _divided(joined, owned, self._rank)

        def finish() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            for place, part in mine:
                self._grads[_inside(place, self._own)] += part

        return finish

    def _owned(self, wire: Tensor, slices: Sequence[range]) -> dict[int, list[tuple[range, Tensor]]]:
        """By owner: places in the flat buffer and what a bucket has for them."""
        found: dict[int, list[tuple[range, Tensor]]] = {}
        start = 0
        for place in slices:
            for owner in range(place.start // self._share, (place.stop - 1) // self._share + 1):
                common = _common(place, range(owner * self._share, (owner + 1) * self._share))
                found.setdefault(owner, []).append((common, wire[start : start + len(common)]))
                start += len(common)
        return found

    def _update(self) -> None:
        if self._job.max_norm is not None:
            squares = self._grads.square().sum()
            dist.all_reduce(squares)
            self._grads.mul_((self._job.max_norm / (squares.sqrt() + _EPSILON)).clamp(max=1.0))
        self._masters.grad = self._grads
        self._optimizer.step()
        with torch.no_grad():
            own = self._masters.detach().to(self._job.param)
            all_gather(self._flat, own)
        self._grads.zero_()


def _positions(model: nn.Module) -> dict[str, range]:
    """By name, one after the other in the order of the model."""
    found, start = {}, 0
    for name, param in model.named_parameters():
        found[name] = range(start, start + param.numel())
        start += param.numel()
    return found


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``own`` of every rank into ``whole``."""
    # torch 2.13 has another name for it; looked up here, where whoever counts collectives has put their own.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own, group=group)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _divided(
    joined: dict[int, Tensor], owned: dict[int, list[tuple[range, Tensor]]], owner: int
) -> list[tuple[range, Tensor]]:
    """What was reduced in one piece for an owner, as the places it belongs to."""
    if owner not in owned:
        return []
    places = [place for place, _ in owned[owner]]
    return list(zip(places, joined[owner].split([len(place) for place in places]), strict=True))


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _inside(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
