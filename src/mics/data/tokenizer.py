"""Tokenizers: files of Hugging Face's tokenizers library, or the bytes of the text."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mics.data.index import BYTES, TOKENIZER_FILE, SpecialTokens, digest_of
from mics.data.token_data import TokenData
from mics.errors import SettingsError
from mics.utils.extras import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library

_CONFIG_FILE: Final = "tokenizer_config.json"
_COPIED: Final = (
    TOKENIZER_FILE,
    _CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
# Where no file says it: the names that well-known tokenizers have for these.
_END_NAMES: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
_BEGIN_NAMES: Final = ("<s>", "[CLS]")
_MASK_NAMES: Final = ("<mask>", "[MASK]")
_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "cls_token", "sep_token")
_PAD_NAMES: Final = ("<pad>", "[PAD]")
_UNKNOWN_NAMES: Final = ("<unk>", "[UNK]")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def digest(self) -> str:
        """Equal for tokenizers that give the same tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def special(self) -> SpecialTokens: ...

    @property
    def unknown(self) -> int | None:
        """The token for text that it does not know, if it has one."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype[np.unsignedinteger]
    ) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of each text, with the end-of-text token behind. Threads may call it."""
        ...

    def num_unknown(self, text: str, tokens: NDArray[np.unsignedinteger]) -> int:
        """How often a text, whose tokens these are, has something that the tokenizer does not know."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def copy_files(self, folder: Path) -> None:
        """Put what another program needs to load it into a new folder; nothing where there is nothing."""
        ...


class BytesTokenizer:
    """A token is a byte of UTF-8. Two that no text has are special: 0 ends a document, 4 is the mask."""

    digest = BYTES
    vocab_size = 256
    unknown = None
    special = SpecialTokens(end_of_text=0, mask=4, all_ids=(0, 4))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype[np.unsignedinteger]
    ) -> list[NDArray[np.unsignedinteger]]:
        for text in texts:
            place = max(text.find(chr(number)) for number in self.special.all_ids)
            if place >= 0:
                raise SettingsError(
                    "expected text without the bytes 0 and 4, which are special to --tokenizer bytes, found "
                    f"{ord(text[place])} in {text[max(0, place - 20) : place + 20]!r}; use another "
                    "tokenizer, or leave that file out"
                )
        return [np.frombuffer(text.encode() + b"\0", dtype=np.uint8).astype(dtype) for text in texts]

    def num_unknown(self, text: str, tokens: NDArray[np.unsignedinteger]) -> int:
        return 0

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def copy_files(self, folder: Path) -> None:
        """There are none."""


class FileTokenizer:
    """A tokenizer.json, with the files that stand beside it."""

    def __init__(self, file: Path, *, end_of_text: str | None = None) -> None:
        self._file = file
        self._library = _read(file)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True  # a text that spells <s> has no <s>
        self._names = _names_beside(file)
        self._end_given = end_of_text is not None
        if end_of_text is not None:
            self._names["eos_token"] = end_of_text
        self.special = self._special(end_of_text)
        self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        self.unknown, self._knows_bytes = self._unknown()
        self._covered: dict[str, bool] = {}
        self.digest = digest_of(file)

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype[np.unsignedinteger]
    ) -> list[NDArray[np.unsignedinteger]]:
        try:
            found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # it raises Exception itself
            raise SettingsError(
                f"expected text that the tokenizer {self._file} can encode, found: {error}; use another"
            ) from None
        end = self.special.end_of_text
        return [np.array([*each.ids, end], dtype=dtype) for each in found]

    def num_unknown(self, text: str, tokens: NDArray[np.unsignedinteger]) -> int:
        if self.unknown is not None:
            return int(np.count_nonzero(tokens[:-1] == self.unknown))
        if self._knows_bytes:
            return 0
        return sum(number for each, number in Counter(text).items() if not self._covers(each))

    def _covers(self, character: str) -> bool:
        if character not in self._covered:
            normalizer = self._library.normalizer
            normal = character if normalizer is None else normalizer.normalize_str(character)
            self._covered[character] = not normal.strip() or bool(self.encode(character))
        return self._covered[character]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._library.decode([token for token in tokens if token < self.vocab_size]))

    def copy_files(self, folder: Path) -> None:
        folder.mkdir()
        for name in _COPIED:
            if (self._file.parent / name).is_file() and name != TOKENIZER_FILE:
                shutil.copyfile(self._file.parent / name, folder / name)
        shutil.copyfile(self._file, folder / TOKENIZER_FILE)
        config = folder / _CONFIG_FILE
        if not config.is_file():
            config.write_text(json.dumps(fast_config(self._names), indent=1) + "\n")
        elif self._end_given:  # the files beside it do not say so, and whoever loads the copy must know it
            content = {**json.loads(config.read_bytes()), "eos_token": self._names["eos_token"]}
            config.write_text(json.dumps(content, indent=1) + "\n")

    def _special(self, end_of_text: str | None) -> SpecialTokens:
        end = self._id("eos_token", _END_NAMES)
        if end is None:
            missing = self._names.get("eos_token")
            found = f"no {missing!r} in it" if missing is not None else f"none of {', '.join(_END_NAMES)}"
            raise SettingsError(
                f"{self._file}: expected a token that ends a document, found {found}; name it with "
                "--end-of-text"
            )
        if end_of_text is not None and end in self.encode(end_of_text):
            raise SettingsError(
                f"--end-of-text: expected a token that no text has, found {end_of_text!r}, which would end a "
                "document wherever it is spelled; name a special token"
            )
        begin = self._id("bos_token", _BEGIN_NAMES)
        begin = begin if begin is not None and begin != end else self._id("cls_token", _BEGIN_NAMES)
        mask = self._id("mask_token", _MASK_NAMES)
        others = [self._id("pad_token", _PAD_NAMES), self._id("unk_token", _UNKNOWN_NAMES)]
        added = self._library.get_added_tokens_decoder()
        ids = {number for number, token in added.items() if token.special}
        ids |= {number for number in (end, begin, mask, *others) if number is not None}
        return SpecialTokens(
            end_of_text=end, begin=None if begin == end else begin, mask=mask, all_ids=tuple(sorted(ids))
        )

    def _unknown(self) -> tuple[int | None, bool]:
        """The token that the library puts where it knows none; and, where it has no such token and leaves the
        text out, whether it knows all bytes."""
        from tokenizers import pre_tokenizers

        written = self._library.to_str()
        model = json.loads(written)["model"]
        name = model.get("unk_token")
        token = model.get("unk_id") if name is None else self._library.token_to_id(name)
        vocabulary = self._library.get_vocab().keys()
        return token, '"ByteLevel"' in written and vocabulary >= set(pre_tokenizers.ByteLevel.alphabet())

    def _id(self, role: str, usual: Sequence[str]) -> int | None:
        """The id of a role's token: the one that the tokenizer's files name, else one with a usual name."""
        named = self._names.get(role)
        for name in [named] if named is not None else usual:
            found = self._library.token_to_id(name)
            if found is not None:
                self._names[role] = name
                return int(found)
        return None


def different_token(file: Path, other: Path) -> str | None:
    """The first token that two tokenizer.json have different numbers for; None: there is none."""
    ours, theirs = (_read(each).get_vocab(with_added_tokens=True) for each in (file, other))
    different = (token for token, number in ours.items() if theirs.get(token, number) != number)
    return min(different, key=ours.__getitem__, default=None)


def _read(file: Path) -> _Library:
    require("data", f"the tokenizer {file}")
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_file(str(file))
    except Exception as error:  # it raises Exception itself
        raise SettingsError(
            f"{file}: expected a tokenizer.json of the tokenizers library, found: {error}"
        ) from None


def load_tokenizer(name: str, *, end_of_text: str | None = None) -> Tokenizer:
    """``bytes``, a tokenizer.json, or a folder that has one."""
    if name == BYTES:
        if end_of_text is not None:
            raise SettingsError(
                f"--end-of-text: expected none with --tokenizer {BYTES}, whose byte 0 ends a document, found "
                f"{end_of_text!r}; leave it out"
            )
        return BytesTokenizer()
    path = Path(name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise SettingsError(
            f"--tokenizer: expected {BYTES}, a {TOKENIZER_FILE} or a folder with one, found {name!r}; type: "
            "mics data tokenizer, which makes one from your text"
        )
    return FileTokenizer(file, end_of_text=end_of_text)


def frame_texts(library: _Library, *, begin: str, end: str) -> None:
    """Have the library put each text between two tokens, as masked language models are trained."""
    from tokenizers import processors

    pairs = [(name, library.token_to_id(name)) for name in (begin, end)]
    library.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} {end} $B {end}", special_tokens=pairs
    )


def frame_file(file: Path, special: SpecialTokens) -> None:
    """The same in a tokenizer.json that does nothing of its own with a text."""
    library = _read(file)
    if library.post_processor is not None or special.begin is None:
        return
    begin, end = (str(library.id_to_token(number)) for number in (special.begin, special.end_of_text))
    frame_texts(library, begin=begin, end=end)
    file.write_text(library.to_str(pretty=True), encoding="utf-8")


def tokenizer_of(data: TokenData) -> Tokenizer:
    """The one that a folder of shards was prepared with."""
    folder = data.tokenizer_folder
    return BytesTokenizer() if folder is None else FileTokenizer(folder / TOKENIZER_FILE)


def fast_config(names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json with which transformers loads a tokenizer.json that has none."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}


def _names_beside(file: Path) -> dict[str, str]:
    """Special tokens by role, as the files beside a tokenizer.json name them."""
    names: dict[str, str] = {}
    for beside in ("special_tokens_map.json", _CONFIG_FILE):
        path = file.parent / beside
        try:
            content = json.loads(path.read_bytes()) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{path}: expected JSON, found: {error}") from None
        if not isinstance(content, dict):
            raise SettingsError(
                f"{path}: expected special tokens by role, as {{...}}, found {type(content).__name__}; mend "
                "it, or remove it"
            )
        for role in _ROLES:
            token = content.get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[role] = token
    return names
