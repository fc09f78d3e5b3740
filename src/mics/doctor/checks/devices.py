"""GPUs, NCCL and the driver; what devices compute, and how fast."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Final

from mics.doctor.facts import ComputeFacts
from mics.doctor.findings import Finding, fail, ok, warn
from mics.doctor.survey import Survey
from mics.utils.numbers import memory, percent, plural, tflops

SLOW: Final = 0.85
"""Below this share of the median a node is named."""
VERY_SLOW: Final = 0.5
"""Below this share it is better left out: all others would wait for it."""
_OWN_NBYTES: Final = 1 << 30
"""What one process takes of a GPU without any tensor."""
_BAD_NCCL: Final = {"2.29.2": "it can hang, which 2.29.3 mends"}
_NONBLOCKING_NCCL: Final = "2.26."
"""Hangs at random with TORCH_NCCL_USE_COMM_NONBLOCKING=1."""


def gpus(survey: Survey) -> list[Finding]:
    """One kind of GPU, usable, and one for each rank."""
    found = []
    for rank, facts in sorted(survey.ranks.items()):
        if facts.gpu_error:
            way_out = "run nvidia-smi there; look at dmesg for Xid errors; reset the GPU or replace the node"
            found.append(fail("GPUs", facts.gpu_error, where=survey.where([rank]), way_out=way_out))
    if not survey.on_gpu:
        return found
    usual, others = survey.outliers(lambda facts: "none" if facts.gpu is None else facts.gpu.name)
    for name, ranks in others.items():
        if not all(survey.ranks[rank].gpu_error for rank in ranks):
            found.append(
                fail(
                    "GPUs",
                    f"expected {usual} as on the others, found {name}",
                    where=survey.where(ranks),
                    way_out="train on GPUs of one kind: the slowest sets the pace, the smallest the memory",
                )
            )
    shared = [rank for rank, facts in survey.ranks.items() if facts.gpu and facts.gpu.ranks_per_gpu > 1]
    if shared:
        way_out = "give torchrun one rank for each GPU (--nproc-per-node=gpu)"
        found.append(warn("GPUs", "ranks share a GPU", where=survey.where(shared), way_out=way_out))
    for node, facts in survey.leaders.items():
        idle = facts.gpu.num_gpus - len(survey.nodes[node]) if facts.gpu else 0
        if idle > 0:
            found.append(
                warn(
                    "GPUs",
                    f"{plural(idle, 'GPU')} of {facts.gpu.num_gpus if facts.gpu else 0} without a rank",
                    where=survey.on_nodes([node]),
                    way_out="start one rank for each GPU (--nproc-per-node=gpu)",
                )
            )
    return found or [ok("GPUs", f"{survey.num_ranks} x {usual}")]


def gpu_memory(survey: Survey) -> list[Finding]:
    """Memory that somebody else holds."""
    held = {
        rank: facts.gpu.total_nbytes - facts.gpu.free_nbytes - facts.gpu.ranks_per_gpu * _OWN_NBYTES
        for rank, facts in survey.ranks.items()
        if facts.gpu is not None
    }
    found = [
        warn(
            "GPU memory",
            f"another process holds about {memory(nbytes)} of the GPU",
            where=survey.where([rank]),
            way_out="find it with nvidia-smi and end it",
        )
        for rank, nbytes in sorted(held.items())
        if nbytes > _OWN_NBYTES
    ]
    if found or not held:
        return found
    least = min(facts.gpu.free_nbytes for facts in survey.ranks.values() if facts.gpu is not None)
    return [ok("GPU memory", f"{memory(least)} or more free on each GPU")]


def nccl_and_driver(survey: Survey) -> list[Finding]:
    """A driver as new as CUDA, and an NCCL without known hangs."""
    found = []
    for node, facts in survey.leaders.items():
        where = survey.on_nodes([node])
        gpu, nccl = facts.gpu, facts.versions.get("NCCL", "")
        if gpu is not None and gpu.driver_cuda and gpu.driver_cuda < gpu.runtime_cuda:
            make = fail if gpu.driver_cuda // 1000 < gpu.runtime_cuda // 1000 else warn
            built = f"CUDA {_cuda(gpu.runtime_cuda)}, which torch was built with"
            what = f"expected a driver for {built}, found one for {_cuda(gpu.driver_cuda)}"
            found.append(
                make("driver", what, where=where, way_out="update the NVIDIA driver, or take an older torch")
            )
        if nccl in _BAD_NCCL:
            what = f"NCCL {nccl}: {_BAD_NCCL[nccl]}"
            found.append(warn("driver", what, where=where, way_out="install another nvidia-nccl package"))
        nonblocking = facts.network.variables.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1"
        if nccl.startswith(_NONBLOCKING_NCCL) and nonblocking:
            what = f"NCCL {nccl} with TORCH_NCCL_USE_COMM_NONBLOCKING=1 can hang"
            found.append(warn("driver", what, where=where, way_out="unset the variable"))
    return found


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def compute_results(survey: Survey) -> list[Finding]:
    """Right numbers, and the same bits on devices of one kind."""
    found = []
    for rank, facts in sorted(survey.computed.items()):
        wrong = _wrong(facts)
        if wrong:
            way_out = "do not train on it: run dcgmi diag -r 3 there, and replace the GPU or the node"
            found.append(fail("results", wrong, where=survey.where([rank]), way_out=way_out))
    kinds: dict[str, list[int]] = defaultdict(list)
    for rank, facts in sorted(survey.computed.items()):
        if not _wrong(facts):
            kinds[facts.kind].append(rank)
    for kind, ranks in kinds.items():
        found += _odd_digests(survey, kind, ranks)
    if found or not survey.computed:
        return found
    return [
        ok("results", f"{plural(len(survey.computed), 'device')} computed a known product without an error")
    ]


def _wrong(facts: ComputeFacts) -> str:
    if facts.nonfinite:
        return (
            f"expected whole numbers from a product, found {plural(facts.nonfinite, 'value')} NaN or infinite"
        )
    if facts.wrong_rows:
        return f"expected a known product, found {plural(facts.wrong_rows, 'wrong row')}"
    if facts.unstable:
        return "expected the same bits from the same computation, found different ones"
    return ""


def _odd_digests(survey: Survey, kind: str, ranks: list[int]) -> list[Finding]:
    counted = Counter(survey.computed[rank].digest for rank in ranks)
    usual = counted.most_common(1)[0][0]
    odd = [rank for rank in ranks if survey.computed[rank].digest != usual]
    if not odd:
        return []
    return [
        fail(
            "results",
            f"expected the bits of the other devices of this kind ({kind}), found different ones",
            where=survey.where(odd),
            way_out="run it again; if it stays, replace the device",
        )
    ]


def compute_speed(survey: Survey) -> list[Finding]:
    """The speed of a matrix product, against the median of all devices."""
    rates = {rank: facts.rate for rank, facts in survey.computed.items() if facts.rate > 0}
    if not rates:
        return []
    usual = statistics.median(rates.values())
    found = []
    for node, ranks in survey.nodes.items():
        slow = [rank for rank in ranks if rates.get(rank, usual) < SLOW * usual]
        if not slow:
            continue
        worst = min(rates[rank] for rank in slow)
        make = fail if survey.on_gpu and worst < VERY_SLOW * usual else warn
        found.append(
            make(
                "matmul speed",
                f"{tflops(worst / 1e12)} TFLOP/s, {percent(worst / usual)} of the median "
                f"{tflops(usual / 1e12)}",
                where=survey.where(slow),
                way_out=_way_out(survey.on_gpu, survey.host_of(node)),
            )
        )
    return found or [
        ok("matmul speed", f"{tflops(min(rates.values()) / 1e12)} TFLOP/s or more on each device")
    ]


def _way_out(on_gpu: bool, host: str) -> str:
    if on_gpu:
        return (
            f"look at nvidia-smi -q -d PERFORMANCE,CLOCK,POWER on {host}: heat, a power cap or locked clocks"
        )
    return f"see what else runs on {host} (top), and whether ranks share cores"
