"""Small models, one trait each, and the batches to train them on.

Sizes are odd on purpose: nothing divides by a number of ranks, nothing is aligned by luck.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import Recipe

VOCAB = 11
DIM = 7
HIDDEN = 13


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on all of `numbers`."""
    seed = 0
    for number in numbers:
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed)


def floats(step: int, micro: int, rank: int, *, dim: int = DIM, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets `(batch, dim)`."""
    generator = seeded(step, micro, rank)
    return (
        torch.randn(batch, dim, generator=generator),
        torch.randn(batch, dim, generator=generator),
    )


def tokens(step: int, micro: int, rank: int, *, batch: int = 2, length: int = 3) -> tuple[Tensor, Tensor]:
    """Token ids and next-token ids `(batch, length)`."""
    generator = seeded(step, micro, rank)
    ids = torch.randint(VOCAB, (batch, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------
# The grid's model: many traits at once
# ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual feed-forward block with a norm, biases and a lone one-element gain."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Embedding, blocks, a head tied to the embedding, a frozen parameter and one used at times."""

    def __init__(
        self, *, vocab: int = VOCAB, dim: int = DIM, hidden: int = HIDDEN, num_blocks: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.randn(1, 3, dim) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(num_blocks))
        self.spare = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position, std=0.1)

    def forward(self, ids: Tensor, targets: Tensor, use_spare: bool = False) -> Tensor:
        x = self.embedding(ids) + self.position[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        if use_spare:
            x = x + self.spare(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def language_batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, bool]:
    """Tokens, and the spare layer on in every step but the first."""
    return (*tokens(step, micro, rank), step > 0)


def language_recipe(*, shape: tuple[tuple[str, int], ...] = (), **options: Any) -> Recipe:
    """The grid's recipe; `shape` are keywords of `Language`."""
    build = partial(Language, **dict(shape)) if shape else Language
    return Recipe(build=build, batch=language_batch, **options)


# ---------------------------------------------------------------------------------------------
# One trait each. Models take (x, target) and return a loss, unless said otherwise.
# ---------------------------------------------------------------------------------------------


def mse(x: Tensor, target: Tensor) -> Tensor:
    """In float32 at least. Both in one format: torch 2.11 cannot go back through two."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.mse_loss(x.to(wide), target.to(wide))


class Chain(nn.Module):
    """Nothing but equal blocks: what travels is easy to count."""

    def __init__(self, num_blocks: int = 3, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(num_blocks))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class TiedBlocks(nn.Module):
    """Two blocks that share one matrix, and one block that stands in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks.append(self.blocks[2])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRA(nn.Module):
    """Blocks of which only the low-rank parts are trained, after a wholly frozen stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(LowRank() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return mse(x, target)


class FrozenMiddle(nn.Module):
    """A trained stem, frozen blocks, a trained head: gradients pass through what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return mse(self.head(x), target)


class Branches(nn.Module):
    """A block with two alternative layers; `which` chooses, so the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Alternatives() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor, which: int) -> Tensor:
        for block in self.blocks:
            x = block(x, which)
        return mse(x, target)


class Alternatives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(DIM, DIM)
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh(self.common(x)) + (self.first, self.second)[which](x)


def which_by_step(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    """All ranks use the same alternative, another one in every second step."""
    return (*floats(step, micro, rank), step % 2)


def which_by_rank(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    """Ranks use different alternatives; in the second step all use the first."""
    return (*floats(step, micro, rank), 0 if step == 1 else (rank + micro) % 2)


class SkippedBlock(nn.Module):
    """A chain in which block `skip` is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor, skip: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = block(x)
        return mse(x, target)


def skip_by_step(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    return (*floats(step, micro, rank), (0, 2, 3, -1)[step % 4])


def skip_by_micro(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    """Every block is used in some micro-step."""
    return (*floats(step, micro, rank), micro)


def skip_by_rank(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    """Odd ranks leave block 1 out: ranks do not call the same modules."""
    return (*floats(step, micro, rank), 1 if rank % 2 else -1)


class Convolutional(nn.Module):
    """Convolutions and batch norms, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return mse(x, target)


def images(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = seeded(step, micro, rank)
    return (
        torch.randn(4, 3, 5, generator=generator),
        torch.randn(4, 3, 5, generator=generator),
    )


class CalledTwice(nn.Module):
    """Every block runs twice in one forward, in a row and in turn; so does the layer outside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first, second = self.blocks
        x = second(first(first(self.mix(x))))
        x = second(first(self.mix(x)))
        return mse(x, target)


def two_forwards(model: nn.Module, batch: Any) -> Tensor:
    """Two forwards before one backward."""
    x, target = batch
    return model(x, target) + 0.5 * model(target, x)


def two_backwards(model: nn.Module, batch: Any) -> Tensor:
    """Two losses of one forward, each with a backward of its own."""
    x, target = batch
    hidden = model(x)
    (0.3 * hidden.abs().mean()).backward(retain_graph=True)
    return mse(hidden, target)


def three_losses(model: nn.Module, batch: Any) -> Tensor:
    """One backward per loss, each of a forward of its own, before the trainer's."""
    x, target = batch
    model(x, target).backward()
    model(target, x).backward()
    return model(x + target, x - target)


class Plain(nn.Module):
    """A chain that returns its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointAround(nn.Module):
    """Each block as a whole runs under `torch.utils.checkpoint`."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return mse(x, target)


class CheckpointedBlock(Block):
    """A block that checkpoints what is inside it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointInside(nn.Module):
    """The blocks checkpoint themselves, after a layer that makes their input need a gradient."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(CheckpointedBlock(reentrant=reentrant) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class CheckpointSpan(nn.Module):
    """One checkpoint over several blocks at once."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.stem(x)
        x = checkpoint(self.blocks[:2], x, use_reentrant=self.reentrant)
        x = checkpoint(self.blocks[2:], x, use_reentrant=self.reentrant)
        return mse(x, target)


class Stage(nn.Module):
    """A unit that contains units, with parameters of its own before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.after = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before
        for block in self.blocks:
            x = block(x)
        return self.after(x) * self.before


class Nested(nn.Module):
    """Stages of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return mse(x, target)


class MixedDtypes(nn.Module):
    """fp32, bf16 and fp64 layers in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(DIM, DIM)
        self.narrow = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        self.wide = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(x))
        x = x + self.narrow(x.bfloat16()).float()
        return self.wide(x.double()).float()


class NoParameters(nn.Module):
    """Blocks in between which have no parameters at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Identity(), Block(), nn.GELU()])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class Tiny(nn.Module):
    """Two numbers: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return mse(self.line(x[:, :1]), target[:, :1])


class Recurrent(nn.Module):
    """Recurrent layers keep a second list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRUCell(10, DIM)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        sequence = torch.stack([x, target, x * target], dim=1)
        hidden, _ = self.lstm(sequence)
        return mse(self.gru(hidden[:, -1], x), target)


class Functional(nn.Module):
    """Weights used without calling the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.extra = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = F.linear(x, self.extra.weight) + self.extra.bias
        x = x + F.linear(x, self.blocks[0].down.weight @ self.blocks[0].up.weight)
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ReadAhead(Chain):
    """Weights that are read before the call of the module that holds them, and used again after it."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first, held, *_ = self.blocks
        up, down = held.up.weight, held.down.weight
        x = first(x + F.linear(F.linear(x, up), down))
        x = held(x + F.linear(F.linear(x, up), down))
        return mse(x + F.linear(F.linear(x, up), down), target)


class Attention(nn.Module):
    """torch's own encoder layers, which hand their weights to a fused function in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return mse(self.encoder(x.unflatten(1, (3, 8))).flatten(1), target)


def sequences(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return floats(step, micro, rank, dim=24)


class Parametrized(nn.Module):
    """Weights computed from parameters by `torch.nn.utils.parametrizations`."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.utils.parametrizations import weight_norm

        self.blocks = nn.ModuleList(weight_norm(nn.Linear(DIM, DIM)) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return mse(x, target)


@dataclasses.dataclass
class Hidden:
    """What a block may return."""

    state: Tensor
    note: str = "ok"
    nothing: None = None


class ReturnsObject(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.line = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.line(x))
        kinds = {
            "dataclass": Hidden(y),
            "dict": {"state": y, "more": [None, (x, y * 2)]},
            "tuple": (None, y, [x]),
            "namespace": SimpleNamespace(state=y),
        }
        return kinds[self.kind]


class ReturnsNothing(nn.Module):
    """Writes its result into a container it was given, and returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, results: list[Tensor]) -> None:
        results.append(torch.tanh(self.line(x)))


class Objects(nn.Module):
    """Blocks that return a dataclass, a dict, a tuple and a namespace."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("dataclass", "dict", "tuple", "namespace")
        self.blocks = nn.ModuleList(ReturnsObject(kind) for kind in kinds)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.blocks[0](x).state
        out = self.blocks[1](x)
        x = x + out["more"][1][1] + out["state"]
        x = x + self.blocks[2](x)[1]
        return mse(x + self.blocks[3](x).state, target)


class Nothing(nn.Module):
    """Blocks that return None beside blocks that return tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsNothing() for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        results: list[Tensor] = []
        for block in self.blocks:
            assert block(x, results) is None
        return mse(self.head(results[0] + results[1]), target)


class Expert(nn.Module):
    """A block that leaves an auxiliary loss on an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, 3)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        self.aux_loss = (probabilities.mean(0) ** 2).sum()
        return x + torch.tanh(self.line(x))


class Experts(nn.Module):
    """The auxiliary losses are picked up after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def with_aux_losses(model: nn.Module, batch: Any) -> Tensor:
    x, target = batch
    loss = mse(model(x), target)
    for module in model.modules():
        if isinstance(module, Expert):
            assert module.aux_loss is not None
            loss = loss + 0.1 * module.aux_loss
    return loss


class SkipConnections(nn.Module):
    """An encoder whose every output is used again by the decoder, in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        memory = []
        for block in self.encoder:
            x = block(x)
            memory.append(x)
        for block in self.decoder:
            x = block(x, context=memory.pop())
        return mse(x, target)


class CrossBlock(nn.Module):
    """Takes one of its inputs as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, context: Tensor) -> Tensor:
        return x + self.query(x) * torch.sigmoid(self.key(context))


class InPlace(nn.Module):
    """Blocks that change their input in place and return it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return mse(x, target)


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.line(x.clone())))


class ParameterViews(nn.Module):
    """Hands out its parameters as they are: itself, as a view, in an object, in a list, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.table = nn.Parameter(torch.randn(5, DIM) * 0.1)
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, DIM))
        self.lift = nn.Parameter(torch.linspace(0.3, 0.1, DIM))
        self.tilt = nn.Parameter(torch.linspace(0.2, 0.4, DIM))
        self.kept: Tensor | None = None

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.normal_(self.table, std=0.1)
        for parameter in (self.shift, self.lift, self.tilt):
            nn.init.zeros_(parameter)

    def forward(self, length: int, left_here: list[Tensor]) -> Any:
        left_here.append(self.lift[None])
        self.kept = self.tilt[None]
        return self.gain, {"table": self.table[:length]}, Hidden(self.shift.expand(length, -1))


class ReturnsParameters(nn.Module):
    """Computes with what a module returned of its own parameters, long after that module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(DIM, DIM)
        self.views = ParameterViews()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor, *, use_gain: bool = True) -> Tensor:
        lifts: list[Tensor] = []
        gain, tables, shift = self.views(x.shape[0], lifts)
        x = self.inward(x) + tables["table"]
        for block in self.blocks:
            x = block(x)
        return mse((x * gain if use_gain else x) + shift.state + lifts[0] * self.views.kept, target)


def use_gain_late(model: nn.Module, batch: Any, *, first: int) -> Tensor:
    """The loss of `ReturnsParameters`, whose gain counts from some step on only."""
    x, target, step = batch
    loss: Tensor = model(x, target, use_gain=step >= first)
    return loss


def numbered(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    return (*floats(step, micro, rank), step)


class InputUntouched(nn.Module):
    """A parameter is the whole input of the model; data enters late and needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bare = nn.ParameterList([nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.ones(()))])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.start
        for block in self.blocks:
            hidden = block(hidden)
        return mse(hidden * self.bare[0] * self.bare[1] + x, target)
