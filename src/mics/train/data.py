"""How a step's sequences are dealt out to ranks and micro-steps, and the batches that come of it."""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from mics.data.prefetching import Prefetcher
from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.sequences import Places, Sequences, TensorPair
from mics.utils.global_batch import AskedBatch


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
        if before is not None and before.is_asked(batch, seq_len):
            return before.over(num_ranks, most=size)
        found = batch.fit(
            seq_len=seq_len, multiple=size * num_ranks, because=f"batch_size {size} on {num_ranks} ranks"
        )
        dealing = cls(
            batch_size=size, micro_steps=found.num_sequences // (size * num_ranks), num_ranks=num_ranks
        )
        return dealing if before is None else dealing.going_on_from(before)

    def is_asked(self, batch: AskedBatch, seq_len: int) -> bool:
        """Whether this is the batch that is asked for, or what one in tokens came to, on any ranks."""
        if batch.tokens is None:
            return batch.sequences == self.num_sequences
        unit = self.batch_size * self.num_ranks * seq_len
        return 2 * abs(self.num_sequences * seq_len - batch.tokens) <= unit

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

    sequences: Sequences
    batch_size: int
    micro_steps: int
    rank: int
    num_ranks: int
    device: torch.device

    def __post_init__(self) -> None:
        self.sequences.check_validation(self.batch_size * self.num_ranks)

    def train(self, step: int) -> list[TensorPair]:
        """The (tokens, targets) of every micro-step of a step, each [batch_size, seq_len] int64."""
        return self.on_device(self.load(step))

    def load(self, step: int) -> list[TensorPair]:
        """The same in host memory, pinned where a GPU copies it."""
        of = self.batch_size * self.num_ranks * self.micro_steps
        found = [self.sequences.train(step, mine, of=of) for mine in self._mine(self.micro_steps)]
        return [self._pinned(batch) for batch in found]

    def on_device(self, batches: list[TensorPair]) -> list[TensorPair]:
        """Move loaded batches. The copies do not wait for the GPU."""
        if self.device.type != "cuda":
            return batches
        return [(self._moved(tokens), self._moved(targets)) for tokens, targets in batches]

    def prefetch(self, *, first: int, last: int) -> Prefetcher[list[TensorPair]]:
        """Loads the batches of these steps in a thread, ahead of their use."""
        return Prefetcher(self.load, first=first, last=last)

    def validation(self, num_batches: int) -> list[TensorPair]:
        """Sequences spread over the validation data, the same at every call, dealt out to the ranks."""
        of = num_batches * self.num_ranks * self.batch_size
        found = [self.sequences.validation(mine, of=of) for mine in self._mine(num_batches)]
        return self.on_device([self._pinned(batch) for batch in found])

    def _mine(self, num_batches: int) -> list[Places]:
        """The places of this rank's sequences among those of all, for each batch."""
        all_places = np.arange(num_batches * self.num_ranks * self.batch_size, dtype=np.int64)
        return list(all_places.reshape(num_batches, self.num_ranks, self.batch_size)[:, self.rank])

    def _pinned(self, batch: TensorPair) -> TensorPair:
        if self.device.type != "cuda":
            return batch
        with torch.cuda.device(self.device):  # a thread begins on the first GPU
            return batch[0].pin_memory(), batch[1].pin_memory()

    def _moved(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.device, non_blocking=True)
