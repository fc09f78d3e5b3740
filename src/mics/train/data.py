"""Bytes of a text as tokens: a split for training and validation, and batches anybody can reproduce."""

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.utils.global_batch import AskedBatch


@dataclass(frozen=True, kw_only=True)
class ByteText:
    """A text as bytes; the end of it is kept for validation."""

    train: Tensor  # [num_train_tokens] uint8, CPU, never written
    validation: Tensor  # [num_validation_tokens] uint8, CPU, never written


def load_text(file: Path | None, *, validation_share: float, seq_len: int) -> ByteText:
    """Read and split a text; without a file, the fables that ship with mics."""
    if file is None:
        raw = resources.files("mics.train").joinpath("fables.txt").read_bytes()
    else:
        raw = file.read_bytes()
    tokens = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    num_train = len(raw) - int(len(raw) * validation_share)
    text = ByteText(train=tokens[:num_train], validation=tokens[num_train:])
    for name, part in (("training", text.train), ("validation", text.validation)):
        if len(part) <= seq_len:
            raise SettingsError(
                f"data.text: expected more than seq_len={seq_len} bytes for {name}, found {len(part)} of "
                f"{len(raw)}; use a longer text or a shorter model.seq_len"
            )
    return text


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How a step's sequences are divided: over micro-steps, ranks and batches."""

    batch_size: int
    micro_steps: int
    num_ranks: int

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, on all ranks together."""
        return self.batch_size * self.micro_steps * self.num_ranks

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def asked(cls, config: TrainConfig, *, num_ranks: int, before: "Dealing | None") -> "Dealing":
        """What the settings ask for on so many ranks; ``before``: what the run resumes from."""
        size, batch = config.batch_size, config.batch
        if not batch.given:
            dealing = cls(batch_size=size, micro_steps=config.micro_steps or 2, num_ranks=num_ranks)
            return dealing if before is None else dealing.going_on_from(before)
        seq_len = config.model.build().seq_len
        if before is not None and before.rounds(batch, seq_len):
            return before.over(num_ranks, most=size)
        found = batch.fit(
            seq_len=seq_len, multiple=size * num_ranks, because=f"batch_size {size} on {num_ranks} ranks"
        )
        dealing = cls(
            batch_size=size, micro_steps=found.num_sequences // (size * num_ranks), num_ranks=num_ranks
        )
        return dealing if before is None else dealing.going_on_from(before)

    def rounds(self, batch: AskedBatch, seq_len: int) -> bool:
        """Whether this is what a batch in tokens came to, on other ranks maybe."""
        unit = self.batch_size * self.num_ranks * seq_len
        return batch.tokens is not None and 2 * abs(self.num_sequences * seq_len - batch.tokens) <= unit

    def over(self, num_ranks: int, *, most: int) -> "Dealing":
        """The same sequences on so many ranks, in batches of at most so many."""
        if self.num_sequences % num_ranks:
            raise SettingsError(
                f"expected a number of ranks that divides the {self.num_sequences} sequences per step "
                f"({self.batch_size} x {self.micro_steps} on {self.num_ranks} ranks, in the checkpoint), "
                f"found {num_ranks} ranks; start another number of them"
            )
        each = self.num_sequences // num_ranks
        batch_size = max(size for size in range(1, most + 1) if each % size == 0)
        return Dealing(batch_size=batch_size, micro_steps=each // batch_size, num_ranks=num_ranks)

    def going_on_from(self, before: "Dealing") -> "Dealing":
        """The same global batch as ``before``, on the ranks there are now.

        Batches get no larger than this asks for, since they fit: fewer ranks take more accumulation steps.
        """
        if self.num_sequences == before.num_sequences:
            return self
        settings = {"batch_size": self.batch_size, "micro_steps": self.micro_steps}
        if settings != {"batch_size": before.batch_size, "micro_steps": before.micro_steps}:
            raise SettingsError(
                f"batch_size, micro_steps: expected {before.num_sequences} sequences per step as in the "
                f"checkpoint, found {self.batch_size} x {self.micro_steps} on {self.num_ranks} ranks = "
                f"{self.num_sequences}; set batch_size and micro_steps so that they are as many"
            )
        return before.over(self.num_ranks, most=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of one rank.

    A step's sequences are drawn once for all ranks and then dealt out, so the same seed and the same number
    of sequences a step give the same training whatever the number of ranks::

        sequence   0 1 2 3 | 4 5 6 7        2 micro-steps, 2 ranks, batch size 2
        rank       0 0 1 1 | 0 0 1 1
        micro-step 0       | 1
    """

    text: ByteText
    seq_len: int
    batch_size: int
    micro_steps: int
    rank: int
    num_ranks: int
    seed: int
    device: torch.device

    def train(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The (tokens, targets) of every micro-step of a step, each [batch_size, seq_len] int64."""
        per_micro_step = self.batch_size * self.num_ranks
        generator = np.random.default_rng([self.seed, step])
        highest = len(self.text.train) - self.seq_len
        starts = generator.integers(0, highest, size=(self.micro_steps, per_micro_step))
        mine = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        return [self._windows(self.text.train, row[mine]) for row in starts]

    def validation(self, num_batches: int) -> list[tuple[Tensor, Tensor]]:
        """Windows spread evenly over the validation text, the same at every call, dealt out to the ranks."""
        highest = len(self.text.validation) - self.seq_len - 1
        starts = np.linspace(0, highest, num_batches * self.num_ranks * self.batch_size).astype(np.int64)
        mine = starts.reshape(num_batches, self.num_ranks, self.batch_size)[:, self.rank]
        return [self._windows(self.text.validation, row) for row in mine]

    def _windows(self, tokens: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows of seq_len tokens and of the tokens that follow them."""
        index = torch.from_numpy(starts)[:, None] + torch.arange(
            self.seq_len + 1, dtype=torch.int64, device="cpu"
        )
        rows = tokens[index].to(torch.int64)
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)  # else the copy waits for the GPU
        return rows[:, :-1], rows[:, 1:]


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """The text of tokens; what is no UTF-8 (a model may say anything) becomes a replacement character."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
