"""A byte-level BPE tokenizer from one's own text, for causal and for masked language models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from mics.data.documents import DocumentFormat, find_files, read_documents
from mics.data.index import TOKENIZER_FILE
from mics.data.preparing import published
from mics.data.tokenizer import fast_config, frame_texts
from mics.errors import SettingsError
from mics.utils.extras import require
from mics.utils.progress import long_work

# In RoBERTa's order: its models take id 1 for padding.
_SPECIAL: Final = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_NUM_BYTES: Final = 256
_MOST: Final = 10_000_000  # the library reserves memory for all of them


def train_tokenizer(
    files: tuple[Path, ...],
    out: Path,
    *,
    vocab_size: int,
    reading: DocumentFormat,
    objective: Literal["causal", "masked"],
) -> int:
    """Write tokenizer.json and its config into a new folder. Returns the size of the vocabulary."""
    require("data", "mics data tokenizer")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = _NUM_BYTES + len(_SPECIAL)
    if not least <= vocab_size <= _MOST:
        raise SettingsError(
            f"--vocab-size: expected {least} ({_NUM_BYTES} bytes and {len(_SPECIAL)} special tokens) to "
            f"{_MOST:,}, found {vocab_size:,}"
        )
    found = find_files(files)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with published(out) as folder:
        with long_work("read", sum(file.stat().st_size for file in found)) as work:

            def texts() -> Iterator[str]:
                for file in found:
                    yield from read_documents(file, reading, advance=work.advance)

            library.train_from_iterator(texts(), trainer=trainer)
        if objective == "masked":
            frame_texts(library, begin=_SPECIAL["bos_token"], end=_SPECIAL["eos_token"])
        # Not its own save: what that raises on a full disk is no OSError.
        (folder / TOKENIZER_FILE).write_text(library.to_str(pretty=True), encoding="utf-8")
        config = {**fast_config(_SPECIAL), "cls_token": "<s>", "sep_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return int(library.get_vocab_size(with_added_tokens=True))
