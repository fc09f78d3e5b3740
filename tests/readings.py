"""Readings of parameters, gradients and lists of them, as users write them: for tests and for a GPU.

Each takes the model's named tensors, sharded or whole, and gives numbers. On a sharded model every one must
be what it is on whole tensors, or a MicsError.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from mics.errors import MicsError

Reading = Callable[[Any], Any]

ONE: dict[str, Reading] = {
    # answered
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 3": lambda t: t.norm(p=3),
    "norm inf": lambda t: t.norm(float("inf")),
    "norm 0": lambda t: t.norm(0),
    "norm dtype": lambda t: t.norm(dtype=torch.float64),
    "torch.norm": lambda t: torch.norm(t),
    "vector_norm": lambda t: torch.linalg.vector_norm(t),
    "vector_norm -inf": lambda t: torch.linalg.vector_norm(t, -float("inf")),
    "linalg.norm": lambda t: torch.linalg.norm(t),
    "frobenius": lambda t: torch.norm(t, "fro"),
    "matrix_norm": lambda t: torch.linalg.matrix_norm(t) if t.dim() == 2 else t.norm(),
    "sum": lambda t: t.sum(),
    "sum float64": lambda t: t.sum(dtype=torch.float64),
    "nansum": lambda t: t.nansum(),
    "mean": lambda t: t.mean(),
    "mean of squares": lambda t: t.pow(2).mean(),
    "sum / numel": lambda t: t.abs().sum() / t.numel(),
    "sum / nelement": lambda t: (t * t).sum() / t.nelement(),
    "numel": lambda t: t.numel(),
    "torch.numel": lambda t: torch.numel(t),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "amin": lambda t: t.amin(),
    "abs max": lambda t: t.abs().max(),
    "std": lambda t: t.std(),
    "std biased": lambda t: t.std(unbiased=False),
    "std correction": lambda t: t.std(correction=0),
    "var": lambda t: t.var(),
    "isfinite all": lambda t: t.isfinite().all(),
    "isnan any": lambda t: torch.isnan(t).any(),
    "isinf any": lambda t: torch.isinf(t).any(),
    "any": lambda t: t.any(),
    "all": lambda t: t.all(),
    "count_nonzero": lambda t: t.count_nonzero(),
    "count positive": lambda t: (t > 0).sum(),
    "fraction": lambda t: (t.abs() < 0.01).float().mean(),
    "item of sum": lambda t: t.sum().item(),
    "float of norm": lambda t: float(t.norm()),
    "f-string of norm": lambda t: f"{t.norm():.4f}",
    "bool of any": lambda t: bool((t > 1e9).any()),
    "python any": lambda t: bool(torch.any(t != t)),
    "detach norm": lambda t: t.detach().norm(),
    "data norm": lambda t: t.data.norm(),
    "clone norm": lambda t: t.clone().norm(),
    "cpu norm": lambda t: t.cpu().norm(),
    "double norm": lambda t: t.double().norm(),
    "flat norm": lambda t: t.view(-1).norm(),
    "reshape sum": lambda t: t.reshape(-1).sum(),
    "flatten max": lambda t: t.flatten().max(),
    "ravel mean": lambda t: t.ravel().mean(),
    "sum of all dims": lambda t: t.sum(dim=tuple(range(t.dim()))),
    "sum keepdim": lambda t: t.sum(dim=tuple(range(t.dim())), keepdim=True).reshape(()),
    "square sum sqrt": lambda t: t.square().sum().sqrt(),
    "dot of itself": lambda t: (t * t).sum(),
    "mul twice": lambda t: (2 * t + 1).sum(),
    "clamp": lambda t: t.clamp(-0.01, 0.01).sum(),
    "clamp sigmoid": lambda t: torch.sigmoid(t).mean(),
    "relu": lambda t: F.relu(t).sum(),
    "gelu": lambda t: F.gelu(t).sum(),
    "where": lambda t: torch.where(t > 0, t, torch.zeros_like(t)).sum(),
    "masked_fill": lambda t: t.masked_fill(t > 0, 0.0).sum(),
    "zeros_like": lambda t: torch.zeros_like(t).sum(),
    "ones_like": lambda t: torch.ones_like(t).sum(),
    "full_like": lambda t: torch.full_like(t, 2.0).sum(),
    "nan_to_num": lambda t: t.nan_to_num().sum(),
    "sign": lambda t: t.sign().sum(),
    "equal to itself": lambda t: torch.equal(t, t),
    "equal to a copy": lambda t: torch.equal(t, t.clone()),
    "not equal": lambda t: torch.equal(t, t + 1),
    "allclose": lambda t: torch.allclose(t, t * (1 + 1e-9)),
    "allclose not": lambda t: torch.allclose(t, t + 1),
    "addcmul": lambda t: torch.addcmul(t, t, t, value=0.5).sum(),
    "lerp": lambda t: t.lerp(torch.zeros_like(t), 0.25).sum(),
    "out": lambda t: torch.mul(t, 2, out=torch.zeros_like(t)).sum(),
    "into a plain one": lambda t: torch.zeros(t.shape, device=t.device).add_(t).sum(),
    "deepcopy": lambda t: copy.deepcopy(t).sum(),
    "is finite norm": lambda t: bool(torch.isfinite(t.norm())),
    "full_tensor": lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t,
    "nanmean": lambda t: t.nanmean(),
    "aten sum": lambda t: torch.ops.aten.sum(t),
    "aten norm": lambda t: torch.ops.aten.linalg_vector_norm.default(t),
    # refused
    "argmax": lambda t: t.argmax(),
    "argmin": lambda t: t.argmin(),
    "median": lambda t: t.median(),
    "mode": lambda t: t.view(-1).mode(),
    "prod": lambda t: t.prod(),
    "quantile": lambda t: t.view(-1).quantile(0.5),
    "logsumexp": lambda t: t.view(-1).logsumexp(0),
    "kthvalue": lambda t: t.view(-1).kthvalue(1),
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().cpu().numpy(),
    "numpy force": lambda t: t.numpy(force=True),
    "np.asarray": lambda t: np.asarray(t.detach().cpu()),
    "np.array": lambda t: np.array(t.detach().cpu()),
    "__dlpack__": lambda t: torch.from_dlpack(t.detach()),
    "data_ptr": lambda t: t.data_ptr(),
    "histc": lambda t: torch.histc(t.float()),
    "histogram": lambda t: torch.histogram(t.detach().cpu(), 4),
    "bincount": lambda t: torch.bincount((t.view(-1) > 0).long()),
    "topk": lambda t: torch.topk(t.view(-1), 1),
    "sort": lambda t: torch.sort(t.view(-1)),
    "argsort": lambda t: torch.argsort(t.view(-1)),
    "msort": lambda t: torch.msort(t),
    "unique": lambda t: torch.unique(t),
    "cosine_similarity": lambda t: F.cosine_similarity(t.view(-1), t.view(-1), dim=0),
    "dot": lambda t: torch.dot(t.view(-1), t.view(-1)),
    "vdot": lambda t: torch.vdot(t.view(-1), t.view(-1)),
    "inner": lambda t: torch.inner(t.view(-1), t.view(-1)),
    "einsum": lambda t: torch.einsum("i,i->", t.view(-1), t.view(-1)),
    "matmul": lambda t: t @ t.T,
    "rmatmul": lambda t: torch.ones(2, t.shape[0]) @ t,
    "mv": lambda t: torch.mv(t, torch.ones(t.shape[-1])),
    "linear": lambda t: F.linear(torch.ones(1, t.shape[-1]), t),
    "T": lambda t: t.T.sum(),
    "transpose": lambda t: t.transpose(0, -1),
    "permute": lambda t: t.permute(*reversed(range(t.dim()))),
    "index": lambda t: t[0],
    "slice": lambda t: t[:1].sum(),
    "mask": lambda t: t[t > 0].sum(),
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "nonzero": lambda t: t.nonzero(),
    "iterate": lambda t: [row.sum() for row in t],
    "unbind": lambda t: t.unbind(),
    "chunk": lambda t: t.chunk(2),
    "split": lambda t: t.split(1),
    "cumsum": lambda t: t.cumsum(0),
    "cumprod": lambda t: t.cumprod(0),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(0),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "normalize": lambda t: F.normalize(t),
    "norm dim": lambda t: t.norm(dim=-1),
    "sum dim": lambda t: t.sum(dim=-1),
    "mean dim": lambda t: t.mean(0),
    "max dim": lambda t: t.max(dim=-1),
    "svd": lambda t: torch.linalg.svdvals(t),
    "spectral norm": lambda t: torch.linalg.norm(t, 2),
    "nuclear": lambda t: torch.linalg.matrix_norm(t, "nuc"),
    "cond": lambda t: torch.linalg.cond(t),
    "matrix_rank": lambda t: torch.linalg.matrix_rank(t),
    "qr": lambda t: torch.linalg.qr(t),
    "det": lambda t: torch.linalg.det(t @ t.T),
    "trace": lambda t: torch.trace(t),
    "diag": lambda t: torch.diag(t),
    "roll": lambda t: t.roll(1),
    "flip": lambda t: t.flip(0),
    "cat with plain": lambda t: torch.cat([t.view(-1), torch.zeros(3, device=t.device)]),
    "stack": lambda t: torch.stack([t, t]),
    "repeat": lambda t: t.repeat(2, 1).sum(),
    "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape).sum(),
    "outer": lambda t: torch.outer(t.view(-1), t.view(-1)),
    "std_mean": lambda t: torch.std_mean(t),
    "var_mean": lambda t: torch.var_mean(t),
    "aminmax": lambda t: torch.aminmax(t),
    "searchsorted": lambda t: torch.searchsorted(t.detach().view(-1), torch.zeros((), device=t.device)),
    "fft": lambda t: torch.fft.fft(t),
    "cdist": lambda t: torch.cdist(t, t),
    "corrcoef": lambda t: torch.corrcoef(t),
    "interpolate": lambda t: F.interpolate(t[None, None], scale_factor=2),
    "randn_like": lambda t: torch.randn_like(t).sum(),
    "dropout": lambda t: F.dropout(t, 0.5).sum(),
    "bernoulli": lambda t: t.clamp(0, 1).bernoulli().sum(),
    "pickle": lambda t: torch.save(t.detach(), io.BytesIO()),
    "safetensors": lambda t: safetensors.torch.save({"t": t.detach()}),
    "bool": lambda t: bool((t > 0).view(-1)),
    "contains": lambda t: 0.0 in t,
    "plain of another shape": lambda t: t + torch.ones(7, 5, 3, device=t.device),
    "into a larger one": lambda t: torch.zeros(10_000, device=t.device)[: t.shape[0]].copy_(t.view(-1)),
}

ANSWERED = list(ONE)[: list(ONE).index("argmax")]
"""Readings that are common enough to be answered on every rank, not refused."""

MANY: dict[str, Callable[[list[Any]], Any]] = {
    "get_total_norm": lambda ts: torch.nn.utils.get_total_norm(ts),
    "get_total_norm inf": lambda ts: torch.nn.utils.get_total_norm(ts, float("inf")),
    "foreach_norm": lambda ts: torch._foreach_norm(ts),
    "foreach_norm 1": lambda ts: torch._foreach_norm(ts, 1),
    "foreach_mul": lambda ts: [t.sum() for t in torch._foreach_mul(ts, 2.0)],
    "foreach_add": lambda ts: [t.sum() for t in torch._foreach_add(ts, ts)],
    "foreach_max": lambda ts: torch._foreach_max(ts),
    "parameters_to_vector norm": lambda ts: torch.nn.utils.parameters_to_vector(ts).norm(),
    "cat norm": lambda ts: torch.cat([t.reshape(-1) for t in ts]).norm(),
    "cat index": lambda ts: torch.cat([t.reshape(-1) for t in ts])[0],
    "cat topk": lambda ts: torch.cat([t.reshape(-1) for t in ts]).topk(1),
    "stack of norms": lambda ts: torch.stack([t.norm() for t in ts]).norm(),
    "sum of squares": lambda ts: sum(t.pow(2).sum() for t in ts),
    "l1": lambda ts: sum(t.abs().sum() for t in ts),
    "max of maxima": lambda ts: max(t.abs().max().item() for t in ts),
    "any nan": lambda ts: any(bool(t.isnan().any()) for t in ts),
    "log of norms": lambda ts: [float(t.norm()) for t in ts],
    "numel": lambda ts: sum(t.numel() for t in ts),
    "mean by numel": lambda ts: sum(t.sum() for t in ts) / sum(t.numel() for t in ts),
    "dot of two": lambda ts: (ts[0] * ts[1]).sum(),
    "stack": lambda ts: torch.stack(ts),
    "allclose of two": lambda ts: torch.allclose(ts[0], ts[1]),
    "vstack": lambda ts: torch.vstack(ts),
    "block_diag": lambda ts: torch.block_diag(*ts),
    "state dict": lambda ts: torch.save({str(i): t.detach() for i, t in enumerate(ts)}, io.BytesIO()),
    "deepcopy": lambda ts: [t.sum() for t in copy.deepcopy([t.detach() for t in ts])],
}


def read(reading: Callable[[Any], Any], value: Any) -> tuple[str, Any]:
    """("ours", text), ("torch", text) or ("answer", numbers)."""
    try:
        return "answer", _numbers(reading(value))
    except MicsError as error:
        return "ours", str(error)
    except Exception as error:
        return "torch", f"{type(error).__name__}: {error}"


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().double().reshape(-1).tolist()
    if isinstance(value, list | tuple):
        return [number for item in value for number in _as_list(_numbers(item))]
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
