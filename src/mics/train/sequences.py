"""Where a run's sequences come from: the bytes of a text, or token shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from mics.comm import join_world
from mics.data import Mixture, Source, TokenData
from mics.data.hashing import Words, draw
from mics.data.index import BYTES, TOKENIZER_FILE, Split, changed_shards, digest_of, read_index
from mics.data.packing import MaskedPacking, Objective, PackedSequences, make_packing
from mics.data.tokenizer import BytesTokenizer, Tokenizer, different_token, tokenizer_of
from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.ranks import Rank
from mics.utils.numbers import plural
from mics.utils.progress import long_work

Places = NDArray[np.int64]
NO_VALIDATION: Final = "no validation: the shards hold nothing out (mics data prepare --validation-share)"
TensorPair = tuple[Tensor, Tensor]
"""Tokens and targets, each [sequence, seq_len] int64."""


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


class Sequences(Protocol):
    """Where sequences come from. Which ones a step has depends on the step alone, not on who reads them."""

    def digest(self) -> str:
        """Of all that decides which sequence is where: a run that goes on compares it."""
        ...

    @property
    def tokenizer(self) -> str:
        """``bytes``, or the digest of the tokenizer's file: what the numbers of the tokens mean."""
        ...

    def train(self, step: int, places: Places, *, of: int) -> TensorPair:
        """Those at ``places`` among the ``of`` sequences of a step."""
        ...

    def validation(self, places: Places, *, of: int) -> TensorPair:
        """Those at ``places`` among ``of`` sequences, the same at every call."""
        ...

    @property
    def has_validation(self) -> bool:
        """Whether any data is held out; a run without trains all the same."""
        ...

    def check_validation(self, num_sequences: int) -> None:
        """Raise if what is held out has fewer sequences than one batch of all ranks."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TextSequences:
    """Windows of a text whose tokens are its bytes."""

    text: ByteText
    seq_len: int
    seed: int
    masking: MaskedPacking | None = None
    """Of a masked language model; others predict the next token."""

    def digest(self) -> str:
        return _digest(xxh3_128_hexdigest(self.text.train.numpy().data), self.seq_len, self.seed)

    @property
    def tokenizer(self) -> str:
        return BYTES

    def train(self, step: int, places: Places, *, of: int) -> TensorPair:
        """Windows that begin anywhere."""
        highest = len(self.text.train) - self.seq_len
        starts = np.random.default_rng([self.seed, step]).integers(0, highest, size=of)
        return self._windows(self.text.train, starts[places], draw(self.seed, step, places))

    def validation(self, places: Places, *, of: int) -> TensorPair:
        """Windows spread evenly over the validation text."""
        highest = len(self.text.validation) - self.seq_len - 1
        starts = np.linspace(0, highest, of).astype(np.int64)
        return self._windows(self.text.validation, starts[places], draw(self.seed, 0, places))

    @property
    def has_validation(self) -> bool:
        return True

    def check_validation(self, num_sequences: int) -> None:
        """Windows overlap where the text is short."""

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def decode(self, tokens: list[int]) -> str:
        return decode(tokens)

    def _windows(self, tokens: Tensor, starts: Places, keys: Words) -> TensorPair:
        """Rows of seq_len tokens, and of the tokens that follow them or are masked."""
        index = torch.from_numpy(starts)[:, None] + torch.arange(
            self.seq_len + 1, dtype=torch.int64, device="cpu"
        )
        rows = tokens[index].to(torch.int64)
        if self.masking is not None:
            return _as_tensors(self.masking.pack(rows[:, :-1].numpy(), keys))
        return rows[:, :-1], rows[:, 1:]


class ShardSequences:
    """Sequences of token shards; several folders are mixed by weight.

    A step's are the next ones of the run, so all that a run must know to go on is how many it has had.
    """

    def __init__(
        self,
        folders: Sequence[TokenData],
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        weights: Sequence[float] = (),
        objective: Objective = "causal",
        way_out: str = "take a model with that or more",
    ) -> None:
        _check_vocabularies(folders, vocab_size=vocab_size, way_out=way_out)
        packing = make_packing(
            objective, folders[0].index, seq_len=seq_len, name=f"data.shards {folders[0].folder}"
        )
        self._train = Mixture(_sources(folders, "train"), packing, weights=weights, seed=seed)
        held_out = [
            number
            for number, each in enumerate(folders)
            if packing.num_sequences(each.index.num_tokens("validation"))
        ]
        sources = _sources([folders[number] for number in held_out], "validation")
        chosen = [weights[number] for number in held_out] if weights else ()
        self._validation = Mixture(sources, packing, weights=chosen, seed=seed) if sources else None
        self._has_validation = any(each.index.num_tokens("validation") for each in folders)
        self._folder = folders[0]
        self._tokenizer: Tokenizer | None = None
        shards = [shard.digest for each in folders for shard in each.index.of_split("train")]
        self._digest = _digest(shards, seq_len, list(weights), seed)

    def digest(self) -> str:
        return self._digest

    @property
    def tokenizer(self) -> str:
        return self._folder.index.tokenizer

    def train(self, step: int, places: Places, *, of: int) -> TensorPair:
        return _as_tensors(self._train.batch((step - 1) * of + places))

    def validation(self, places: Places, *, of: int) -> TensorPair:
        assert self._validation is not None
        return _as_tensors(self._validation.batch(places))

    @property
    def has_validation(self) -> bool:
        return self._has_validation

    def check_validation(self, num_sequences: int) -> None:
        if not self.has_validation:
            return
        found = 0 if self._validation is None else self._validation.num_sequences
        if found < num_sequences:
            raise SettingsError(
                f"data.shards: expected {plural(num_sequences, 'sequence')} or more for a validation batch "
                f"of all ranks, found {found:,}; prepare the data with a larger --validation-share (0: train "
                "without validation), or use a smaller batch_size or seq_len"
            )

    def encode(self, text: str) -> list[int]:
        return self._text_tokenizer().encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._text_tokenizer().decode(tokens)

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:  # training alone does without it
            self._tokenizer = tokenizer_of(self._folder)
        return self._tokenizer


def _sources(folders: Sequence[TokenData], split: Split) -> list[Source]:
    named = [(f"data.shards {each.folder} ({split})", each) for each in folders]
    return [Source(name=name, stream=each.stream(split)) for name, each in named]


def _digest(*parts: object) -> str:
    return xxh3_128_hexdigest(repr(parts).encode())


def _as_tensors(packed: PackedSequences) -> TensorPair:
    return torch.from_numpy(packed.tokens), torch.from_numpy(packed.targets)


def _check_vocabularies(folders: Sequence[TokenData], *, vocab_size: int, way_out: str) -> None:
    first = folders[0]
    for each in folders:
        if 0 < vocab_size < each.index.vocab_size:  # 0: a model that does not say
            raise SettingsError(
                f"data.shards {each.folder}: expected a vocabulary of at most the model's {vocab_size:,} "
                f"tokens, found {each.index.vocab_size:,}; {way_out}"
            )
        if each.index.tokenizer != first.index.tokenizer:
            raise SettingsError(
                f"data.shards {each.folder}: expected the tokenizer of {first.folder} "
                f"({first.index.tokenizer}), found another ({each.index.tokenizer}); prepare both with one"
            )
        if each.index.special != first.index.special:
            raise SettingsError(
                f"data.shards {each.folder}: expected the special tokens of {first.folder} "
                f"({first.index.special}), found others ({each.index.special}); prepare both with the same "
                "--end-of-text"
            )


def _check_tokens_of_weights(weights: Path, data: TokenData) -> None:
    """Raise if the tokenizer beside a model's weights has other numbers for the tokens of the data."""
    file, prepared = weights / TOKENIZER_FILE, data.tokenizer_folder
    if prepared is None or not file.is_file() or digest_of(file) == data.index.tokenizer:
        return
    other = different_token(prepared / TOKENIZER_FILE, file)
    if other is not None:
        raise SettingsError(
            f"data.shards {data.folder}: expected tokens of {file}, with which the weights were trained, "
            f"found another number for {other!r}; prepare the data with --tokenizer {weights}, or begin with "
            "fresh weights: --model.from-scratch"
        )


def _check_padding(data: TokenData, *, pad_token: int | None, objective: Objective) -> None:
    """Raise if the model would take a token of its sequences for padding.

    It would not learn that token, and RoBERTa would count no position where it stands. Causal models often
    have the end of text for padding: it counts as a target like any other.
    """
    index = data.index
    if pad_token is None or data.tokenizer_folder is None or not 0 <= pad_token < index.vocab_size:
        return
    special = index.special
    standing = [special.begin, special.end_of_text, special.mask] if objective == "masked" else []
    if index.num_unknown:
        standing.append(tokenizer_of(data).unknown)
    free = [each for each in special.all_ids if each not in standing]
    if pad_token not in free:
        choices = ", ".join(map(str, ("null", *free)))
        found = "a special token that is in them" if pad_token in special.all_ids else "an ordinary token"
        raise SettingsError(
            f"data.shards {data.folder}: expected the model's pad_token_id, {pad_token}, to be no token of "
            f"sequences, found {found}; set it in config.json to one of {choices}"
        )


def open_sequences(config: TrainConfig, *, check: bool = True) -> Sequences:
    """What the settings name. ``check``: whether to compare the sizes of all shards with the index."""
    shape, data = config.model.build(), config.data
    objective = shape.objective
    assert objective is not None, "settings refuse such a model"
    if data.shards:
        folders = [TokenData.open(folder, check=check) for folder in data.shards]
        if check and config.model.weights is not None:
            _check_tokens_of_weights(config.model.weights, folders[0])
        elif check:
            for each in folders:
                _check_padding(each, pad_token=shape.pad_token, objective=objective)
        return ShardSequences(
            folders,
            seq_len=shape.seq_len,
            vocab_size=shape.vocab_size,
            seed=config.seed,
            weights=data.weights,
            objective=objective,
            way_out=shape.way_to_more_tokens,
        )
    text = load_text(data.text, validation_share=data.validation_share, seq_len=shape.seq_len)
    masking = None
    if objective == "masked":
        masking = MaskedPacking(
            seq_len=shape.seq_len,
            vocab_size=BytesTokenizer.vocab_size,
            special=BytesTokenizer.special,
            name="data.text",
        )
    return TextSequences(text=text, seq_len=shape.seq_len, seed=config.seed, masking=masking)


def open_together(config: TrainConfig, me: Rank) -> Sequences:
    """The same on all ranks; what one of them finds wrong is an error of all.

    On each node one rank compares sizes. With ``data.verify`` its ranks divide the reading of all shards.
    """
    found: Sequences | SettingsError
    try:
        found = open_sequences(config, check=me.local_rank == 0)
        if config.data.verify:
            _verify(config.data.shards, me)
    except SettingsError as error:
        found = error
    error_here = found if isinstance(found, SettingsError) else None
    for failed in join_world().gather_objects(error_here):
        if failed is not None:
            raise failed
    assert not isinstance(found, SettingsError)
    return found


def _verify(folders: Sequence[Path], me: Rank) -> None:
    """Read this rank's part of all shards; rank 0 says how far its part is."""
    mine = {folder: read_index(folder).shards[me.local_rank :: me.ranks_per_node] for folder in folders}
    nbytes = sum(shard.nbytes for shards in mine.values() for shard in shards)
    say = partial(print, flush=True) if me.rank == 0 else (lambda line: None)
    with long_work("verify shards", nbytes, tell=say) as work:
        for folder, shards in mine.items():
            for problem in changed_shards(folder, shards, progress=work.advance):
                raise SettingsError(f"data.shards {problem}")


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """The text of tokens; what is no UTF-8 (a model may say anything) becomes a replacement character."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
