"""What a model must be to be sharded. Looked at before anything is touched: a refused model is as it was."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import SettingsError
from mics.sharding.float8 import check_weights, is_float8_weight, plain_of


def check_model(model: nn.Module) -> None:
    """Raise unless ``model`` has ordinary parameters, each with memory of its own."""
    if torch.is_inference_mode_enabled():
        raise SettingsError(
            "mics.shard: expected to run outside torch.inference_mode(), found it on, where tensors keep no "
            "track of edits; shard the model first"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SettingsError(
                f"mics.shard: expected modules in Python, found {name or 'the model'!r} as a ScriptModule, "
                "whose parameters cannot be replaced; shard the model that it was made from"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise SettingsError(
                f"mics.shard: expected dense gradients, found sparse=True on the embedding {name!r}; "
                "build it with sparse=False"
            )
    for name, param in model.named_parameters():
        _check_param(name, param)
    check_weights(model)
    _check_memory(model)


def _check_param(name: str, param: nn.Parameter) -> None:
    found = _what_is_odd(param)
    if found is not None:
        kind, remedy = found
        raise SettingsError(
            f"mics.shard: expected ordinary real parameters, found {name!r} as {kind}; {remedy}"
        )
    if param.grad is not None:
        raise SettingsError(
            f"mics.shard: expected parameters without gradients, found one on {name!r}, which would be lost; "
            "call model.zero_grad() first, or step before sharding"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise SettingsError(
            f"mics.shard: expected parameters without hooks, found one on {name!r}, which would never run on "
            "a sharded model; change gradients between backward and optimizer.step() instead"
        )


def _what_is_odd(param: nn.Parameter) -> tuple[str, str] | None:
    """What kind of parameter it is, and what to do about it."""
    if isinstance(param, nn.parameter.UninitializedParameter):
        return (
            "one without a shape",
            "run a forward, which gives lazy modules their shapes, before mics.shard()",
        )
    if is_float8_weight(param):
        return None
    if hasattr(param, "device_mesh"):  # importing the class would cost every start a second
        return "a DTensor", "shard the plain model"
    # Shards are plain numbers: what a subclass makes of its memory, or does when it is used, would be lost.
    if type(param.data) is not Tensor:
        return f"a {type(param.data).__name__}", "shard a model of plain tensors, without this conversion"
    if type(param).__torch_function__ is not nn.Parameter.__torch_function__:
        return f"a {type(param).__name__}", "shard a model of plain nn.Parameter, without this conversion"
    if param.dtype.is_complex or param.is_quantized:
        return f"format {param.dtype}", "shard the plain model"
    if param.layout is not torch.strided or param.is_nested:
        return f"a tensor of layout {param.layout}", "build it dense"
    if param.is_inference():
        return "an inference tensor", "build the model outside torch.inference_mode()"
    return None


def _check_memory(model: nn.Module) -> None:
    """Raise if two parameters, or one and a buffer, share memory: each would get values of its own."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    params = {id(param) for param in model.parameters()}
    for name, given in (*model.named_parameters(), *model.named_buffers()):
        tensor = plain_of(given)
        params |= {id(tensor)} if id(given) in params else set()
        if (
            type(tensor.data) is Tensor
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and tensor.numel()
        ):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_storage.values():
        for (first, one), (second, other) in _overlapping(sharing):
            if id(one) in params or id(other) in params:
                raise SettingsError(
                    f"mics.shard: expected parameters with memory of their own, found {first!r} and "
                    f"{second!r} in the same memory, which would be two different tensors afterwards; tie "
                    "them by one nn.Parameter that both modules hold, or clone() one"
                )


def _overlapping(
    sharing: list[tuple[str, Tensor]],
) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Those in one storage that have elements in common."""
    before: list[tuple[str, Tensor]] = []  # that reach to where we are
    for entry in sorted(sharing, key=lambda entry: _extent(entry[1]).start):
        before = [each for each in before if _extent(each[1]).stop > _extent(entry[1]).start]
        yield from ((each, entry) for each in before if _share_elements(each[1], entry[1]))
        before.append(entry)


def _extent(tensor: Tensor) -> range:
    """The bytes from the first element to the last."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, start + (sum(steps) + 1) * tensor.element_size())


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether an element is part of both: columns of a matrix lie between each other and share none."""
    if one.element_size() != other.element_size():
        return True
    return bool(torch.isin(_places(one), _places(other)).any())


def _places(tensor: Tensor) -> Tensor:
    """Where in its storage each element is."""
    found = torch.tensor([tensor.storage_offset()], dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        found = (found.unsqueeze(-1) + steps).flatten()
    return found
