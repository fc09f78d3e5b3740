"""Another GPU's clock: how many times as fast this device computes a model as the GPU that it plays.

An emulated cluster has the network of its own GPUs and the computation of this one. If this one is F times
as fast, every collective is given 1/F of its time, and everything that is measured is multiplied by F. The
ratio of computing to communicating is then that of the GPU named, and so are the times.

F is of one micro-step of the model. Its matrices, its attention and the rest, which moves memory, are timed
here at their own shapes, and each is compared with what ``mics.cost.gpus`` says of the GPU named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mics.bench.job import DType, Job
from mics.bench.systems.start import device_of
from mics.cost.gpus import GPUS, Gpu
from mics.errors import SettingsError
from mics.models import GPTConfig
from mics.models.gpt import Block

_SECONDS: Final = {"cuda": 0.1, "cpu": 0.02}  # of each timing: a GPU's clock falls under load
_COPIED_NBYTES: Final = {"cuda": 2**29, "cpu": 2**24}


@dataclass(frozen=True, kw_only=True)
class Term:
    """One kind of work of a micro-step: seconds on this device and on the GPU named."""

    name: str
    here: float
    there: float

    @property
    def factor(self) -> float:
        return self.there / self.here if self.here > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class GpuClock:
    """The GPU whose time is shown, and how it compares with this device."""

    gpu: str
    terms: tuple[Term, ...]

    @property
    def factor(self) -> float:
        """Seconds of the GPU named in one of this device."""
        return sum(term.there for term in self.terms) / sum(term.here for term in self.terms)

    @property
    def peak_tflops(self) -> float:
        return GPUS[self.gpu].peak_tflops

    def lines(self) -> list[str]:
        """The factor, term by term, and what it cannot change."""
        gpu = self.title
        parts = "; ".join(
            f"{term.name} {1e3 * term.here:.3g} ms here, {1e3 * term.there:.3g} ms there "
            f"({term.factor:.3g} x)"
            for term in self.terms
        )
        by, factor = max(self.factor, 1 / self.factor), f"{self.factor:.3g}"
        links, delays = ("faster", "longer") if self.factor >= 1 else ("slower", "shorter")
        return [
            f"Times are those of {gpu}: one second of this device is {factor} of its seconds, and links are "
            f"{by:.3g} times {links} on the clock of this machine. A micro-step's work: {parts}.",
            f"Not dilated: the host, whose delays count {by:.3g} times {delays}, and copies between device "
            f"and host, whose bandwidth counts as 1/{factor} of this machine's ({gpu} has about "
            f"{GPUS[self.gpu].host_gbs:.0f} GB/s each way).",
        ]

    @property
    def title(self) -> str:
        """``an A100``."""
        name = self.gpu.upper().replace("GB", " GB").replace("-", " ")
        return f"{'an' if name[0] in 'AH' else 'a'} {name}"

    @classmethod
    def of(cls, found: dict[str, Any]) -> GpuClock:
        """From what ``dataclasses.asdict`` made of it."""
        return cls(gpu=found["gpu"], terms=tuple(Term(**term) for term in found["terms"]))


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A micro-step of a whole model, and the GPU to compare it with: all that a clock depends on."""

    model: GPTConfig
    micro_batch: int
    checkpoint: bool
    dtype: DType
    gpu: str

    @classmethod
    def of(cls, job: Job, gpu: str) -> StepWork:
        layers = job.whole_layers or job.model.num_layers
        return cls(
            model=replace(job.model, num_layers=layers),
            micro_batch=job.micro_batch,
            checkpoint=job.checkpoint,
            dtype=job.param_dtype,
            gpu=gpu,
        )


_known: dict[StepWork, GpuClock] = {}  # by this process


def measure_clock(work: StepWork, job: Job) -> GpuClock:
    """Time the kinds of work of a micro-step here, and ask the table for the same on the GPU named."""
    device, gpu, model = device_of(job), GPUS[work.gpu], work.model
    shapes = _Shapes(work, device, job.param)
    matrices = model.num_layers * shapes.block_matrices() + shapes.head_matrices()
    attention = model.num_layers * shapes.attention()
    everything = model.num_layers * shapes.block() + shapes.head()
    rest = max(0.0, everything - matrices - attention)
    return GpuClock(
        gpu=work.gpu,
        terms=(
            Term(name="matrices", here=matrices, there=_matrix_seconds(work, gpu)),
            Term(name="attention", here=attention, there=_attention_seconds(work, gpu)),
            Term(name="the rest", here=rest, there=rest * shapes.bandwidth() / gpu.memory_bandwidth),
        ),
    )


def _matrix_seconds(work: StepWork, gpu: Gpu) -> float:
    """On the GPU named. A backward is two products for each of the forward."""
    model, tokens = work.model, work.micro_batch * work.model.seq_len
    passes = 4 if work.checkpoint else 3
    block = 24.0 * model.hidden_size**2 * tokens * passes
    head = 2.0 * model.hidden_size * model.vocab_size * tokens * 3
    return (model.num_layers * block + head) / gpu.matrix_flops(model.hidden_size)


def _attention_seconds(work: StepWork, gpu: Gpu) -> float:
    """On the GPU named. A backward is 2.5 forwards: it multiplies queries with keys again."""
    model = work.model
    forward = 4.0 * work.micro_batch * model.seq_len**2 * model.hidden_size / (2 if model.causal else 1)
    flops = forward * (4.5 if work.checkpoint else 3.5) * model.num_layers
    return flops / gpu.attention_flops(model.seq_len, causal=model.causal)


class _Shapes:
    """The pieces of a micro-step on this device. Seconds count a recomputed forward twice."""

    def __init__(self, work: StepWork, device: torch.device, dtype: torch.dtype) -> None:
        self._work = work
        self._model = model = work.model
        self._device, self._dtype = device, dtype
        self._forwards = 2 if work.checkpoint else 1
        self._tokens = work.micro_batch * model.seq_len
        self._rows = self._random(work.micro_batch, model.seq_len, model.hidden_size)

    def block_matrices(self) -> float:
        h = self._model.hidden_size
        return sum(
            self._products(k, n, self._forwards) for k, n in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
        )

    def head_matrices(self) -> float:
        return self._products(self._model.hidden_size, self._model.vocab_size, 1)

    def attention(self) -> float:
        model = self._model
        shape = (self._work.micro_batch, model.num_heads, model.seq_len, model.hidden_size // model.num_heads)
        query, key, value = (self._random(*shape).requires_grad_() for _ in range(3))

        def mix() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=model.causal)

        return self._pair(mix, [query, key, value], self._forwards)

    def block(self) -> float:
        with self._device:
            block = Block(self._model).to(self._dtype)
        rows = self._rows.clone().requires_grad_()
        return self._pair(lambda: block(rows, None), [*block.parameters(), rows], self._forwards)

    def head(self) -> float:
        """The last norm, the logits and the loss."""
        with self._device:
            norm = nn.LayerNorm(self._model.hidden_size).to(self._dtype)
        rows = self._rows.clone().requires_grad_()
        weight = self._random(self._model.vocab_size, self._model.hidden_size).requires_grad_()
        targets = torch.zeros(self._tokens, dtype=torch.int64, device=self._device)

        def loss() -> Tensor:
            return F.cross_entropy(F.linear(norm(rows), weight).flatten(0, 1).float(), targets)

        return self._pair(loss, [weight, rows, *norm.parameters()], 1)

    def bandwidth(self) -> float:
        """Bytes a second that an addition reads and writes."""
        numel = _COPIED_NBYTES[self._device.type] // self._dtype.itemsize
        first, second, out = (torch.empty(numel, dtype=self._dtype, device=self._device) for _ in range(3))
        first.zero_(), second.zero_()
        return 3 * out.nbytes / self._time(lambda: torch.add(first, second, out=out))

    def _products(self, k: int, n: int, forwards: int) -> float:
        """A linear layer's forward and the two products of its backward."""
        rows, weight, grad = (
            self._random(self._tokens, k),
            self._random(n, k),
            self._random(self._tokens, n),
        )
        forward = self._time(lambda: rows @ weight.T)
        return forwards * forward + self._time(lambda: grad @ weight) + self._time(lambda: grad.T @ rows)

    def _pair(self, forward: Callable[[], Tensor], inputs: list[Tensor], forwards: int) -> float:
        """Of a forward and its backward, the forward as often as asked."""
        grad = torch.ones_like(forward().detach())

        def both() -> None:
            forward().backward(grad)
            for tensor in inputs:
                tensor.grad = None

        def alone() -> None:
            with torch.no_grad():
                forward()

        return self._time(both) + (forwards - 1) * self._time(alone)

    def _random(self, *shape: int) -> Tensor:
        # As wide as values of a model: a GPU multiplies zeros faster.
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _time(self, work: Callable[[], object]) -> float:
        """Seconds of one call, in the mean of as many as a while takes, after as many that are not timed."""
        wanted = _SECONDS[self._device.type]
        count = max(1, round(wanted / max(1e-9, self._run(work, 1 + (self._device.type == "cuda")))))
        self._run(work, count)
        return self._run(work, count)

    def _run(self, work: Callable[[], object], count: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        self._wait()
        return (time.perf_counter() - began) / count

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure_clocks(jobs: Sequence[tuple[Job, str]]) -> list[GpuClock]:
    """Of every job and GPU; equal ones once, so that every system has the same clock."""
    works = [StepWork.of(job, gpu) for job, gpu in jobs]
    new = {work: job for work, (job, _) in zip(works, jobs, strict=True) if work not in _known}
    if new:
        _known.update(_measured_apart(new))
    return [_known[work] for work in works]


def _measured_apart(different: Mapping[StepWork, Job]) -> dict[StepWork, GpuClock]:
    """In a process of its own, whose memory goes with it."""
    with tempfile.TemporaryDirectory(prefix="mics-clock-") as scratch:
        asked, answered = Path(scratch) / "jobs.json", Path(scratch) / "clocks.json"
        asked.write_text(
            json.dumps([{"job": asdict(job), "gpu": work.gpu} for work, job in different.items()])
        )
        command = [sys.executable, "-m", "mics.bench.clock", str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip() or "nothing").splitlines()[-1]
            raise SettingsError(
                f"--as-gpu: expected to time a micro-step of the model here, found: {said}; choose a smaller "
                "--micro-batch"
            )
        found = [GpuClock.of(each) for each in json.loads(answered.read_text())]
    return dict(zip(different, found, strict=True))


def main(jobs: Path, clocks: Path) -> None:
    """``python -m mics.bench.clock JOBS CLOCKS``."""
    from mics.bench.plan import job_from  # it imports this module

    found = []
    for each in json.loads(jobs.read_text()):
        job = job_from(each["job"])
        found.append(asdict(measure_clock(StepWork.of(job, each["gpu"]), job)))
    clocks.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
