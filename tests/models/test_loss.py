"""A loss in pieces is torch's own, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mics.models import GPT, GPTConfig, cross_entropy

_ROWS, _CLASSES = 37, 101


def _data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(_ROWS, _CLASSES, generator=generator)).to(dtype)
    targets = torch.randint(0, _CLASSES, (_ROWS,), generator=generator)
    targets[3::7] = -100
    return logits, targets


@pytest.mark.parametrize("num_rows", [1, 5, _ROWS, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_and_gradient_are_torchs(dtype: torch.dtype, num_rows: int) -> None:
    """Rows that do not count, pieces that do not divide the rows, a loss that is scaled afterwards."""
    logits, targets = _data(dtype)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = cross_entropy(ours, targets, piece_numel=num_rows * _CLASSES)
    expected = F.cross_entropy(theirs.float(), targets)
    (loss / 3).backward()
    (expected / 3).backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert ours.grad is not None and ours.grad.dtype is dtype
    tolerance = 8e-3 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=1e-7)


def test_pieces_change_no_bit() -> None:
    logits, targets = _data(torch.bfloat16)
    found = []
    for num_rows in (3, 1000):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, targets, piece_numel=num_rows * _CLASSES)
        loss.backward()
        found.append((loss, leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]


class _Largest(TorchDispatchMode):
    """The most float32 elements of any result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32:
            self.numel = max(self.numel, result.numel())
        return result


def test_float32_exists_for_one_piece_at_a_time() -> None:
    logits, targets = _data(torch.bfloat16)
    with _Largest() as largest:
        cross_entropy(logits.requires_grad_(), targets, piece_numel=4 * _CLASSES).backward()
    assert largest.numel == 4 * _CLASSES


def test_a_gpt_that_works_in_pieces() -> None:
    shape = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "vocab_size": 32, "seq_len": 8}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape))  # type: ignore[arg-type]
    pieces = GPT(GPTConfig(**shape, loss_in_pieces=True))  # type: ignore[arg-type]
    pieces.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 32, (2, 9))
    losses = []
    for each in (model, pieces):
        losses.append(each(tokens[:, :-1], tokens[:, 1:]))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    for one, other in zip(model.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
