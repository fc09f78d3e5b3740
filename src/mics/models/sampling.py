"""Text from a language model: one token after the other, by the whole forward."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def sample_tokens(
    forward: Callable[[Tensor], Tensor],
    tokens: Tensor,
    num_new: int,
    *,
    seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append ``num_new`` sampled tokens to ``tokens`` [batch, token]; temperature 0 takes the likeliest.

    ``forward`` gives the logits [batch, token, vocab] of at most ``seq_len`` tokens. It is called as often on
    every rank, so a sharded model may be behind it.
    """
    for _ in range(num_new):
        logits = forward(tokens[:, -seq_len:])[:, -1].float()
        if top_k is not None and top_k < logits.shape[-1]:
            kth_best = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kth_best, -math.inf)
        if temperature == 0.0:
            chosen = logits.argmax(dim=-1, keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen), dim=1)
    return tokens
