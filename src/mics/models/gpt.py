"""A small GPT: pre-norm blocks in an ``nn.ModuleList``, rotary or learned positions, one fused attention.

It may be built on the ``meta`` device: every module that holds parameters has ``reset_parameters``, and
there are no buffers (the rotary angles are computed in the forward), so nothing is left uninitialised.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mics.models.loss import cross_entropy
from mics.models.sampling import sample_tokens


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. Everything about its cost follows from these numbers alone."""

    num_layers: int
    num_heads: int
    hidden_size: int
    vocab_size: int
    seq_len: int
    dropout: float = 0.0
    tie_weights: bool = False
    """Use one matrix for the token embedding and the output head."""
    causal: bool = True
    """Each token sees those before it; False: all of them, as in BERT."""
    rotary: bool = True
    """Positions turn queries and keys; False: a learned vector a position is added to the tokens."""
    loss_in_pieces: bool = False
    """Work through the logits a piece at a time (see ``mics.models.cross_entropy``)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "hidden_size", "vocab_size", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: expected a number in [0, 1), found {self.dropout}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size: expected a multiple of 2 * num_heads = {2 * self.num_heads} (rotary positions "
                f"turn pairs inside each head), found {self.hidden_size}; change one of the two"
            )

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters a token is multiplied with: 12 h^2 a layer, and the head. An embedding is looked up."""
        return 12 * self.num_layers * self.hidden_size**2 + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; equal to the sum over the module's own."""
        embedding = 0 if self.tie_weights else self.vocab_size * self.hidden_size
        positions = 0 if self.rotary else self.seq_len * self.hidden_size
        norms = (2 * self.num_layers + 1) * 2 * self.hidden_size  # each a weight and a bias
        return self.num_matmul_parameters + embedding + positions + norms

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of one forward and backward per token, recomputation not counted.

        Every multiplied parameter costs 2 FLOPs forward and 4 backward. Attention costs 4 s h a layer forward
        (queries times keys, weights times values), and twice that again backward; a causal token sees half
        the keys on average.
        """
        return 6 * self.num_matmul_parameters + self._attention_flops_per_token

    @property
    def six_n_flops_per_token(self) -> int:
        """The same if every parameter counts as multiplied, looked-up ones too, as in many publications."""
        return 6 * self.num_parameters + self._attention_flops_per_token

    @property
    def _attention_flops_per_token(self) -> int:
        return (6 if self.causal else 12) * self.num_layers * self.seq_len * self.hidden_size


class Linear(nn.Linear):
    """A linear layer without bias that starts from a normal distribution of given width."""

    def __init__(self, in_features: int, out_features: int, *, std: float = 0.02) -> None:
        self.std = std  # before the base constructor, which already calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token embedding that starts as small as the linear layers, so that a tied head starts small too."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def rotary_angles(
    num_tokens: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_tokens, head_size / 2] of the angle by which each position turns each pair.

    The angles themselves are fp32: bf16 cannot tell position 2047 from 2048.
    """
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    positions = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of x [..., num_tokens, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.causal = config.causal
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = Linear(config.hidden_size, config.hidden_size, std=_residual_std(config))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        batch_size, num_tokens, hidden_size = x.shape
        heads = self.qkv(x).view(batch_size, num_tokens, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, token, head_size]
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch_size, num_tokens, hidden_size))
        return output


class Block(nn.Module):
    """One transformer block: attention and a GELU MLP, each on a normalised copy and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.up = Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = Linear(4 * config.hidden_size, config.hidden_size, std=_residual_std(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), angles))
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        output: Tensor = x + self.dropout(self.down(hidden))
        return output


class GPT(nn.Module):
    """Tokens in; logits out, or the mean cross-entropy when the targets are given too."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.positions = None if config.rotary else Embedding(config.seq_len, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets [batch, token] int64 -> logits [batch, token, vocab], or a scalar fp32 loss."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.seq_len:
            raise ValueError(
                f"tokens: expected at most seq_len={self.config.seq_len} a row, found {num_tokens}"
            )
        head_size = self.config.hidden_size // self.config.num_heads
        x = self.embedding(tokens)
        angles = None
        if self.positions is None:
            angles = rotary_angles(num_tokens, head_size, dtype=x.dtype, device=x.device)
        else:
            x = x + self.positions(torch.arange(num_tokens, dtype=torch.int64, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        if self.config.loss_in_pieces:
            return cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def generate(
        self,
        tokens: Tensor,
        num_new: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append ``num_new`` sampled tokens to ``tokens`` [batch, token]; temperature 0 takes the likeliest.

        It calls the module itself, so hooks run, and the same number of forwards on every rank.
        """
        return sample_tokens(
            self,
            tokens,
            num_new,
            seq_len=self.config.seq_len,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
        )


def _residual_std(config: GPTConfig) -> float:
    """The 2 * num_layers additions to the stream start smaller, so that their sum starts at width 0.02."""
    return 0.02 / math.sqrt(2 * config.num_layers)
