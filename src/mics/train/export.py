"""What makes a folder of weights one that ``transformers`` load: config, generation settings, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from mics.checkpoint.exporting import files_beside
from mics.checkpoint.model_folder import export_model
from mics.data.index import TOKENIZER_FILE, SpecialTokens
from mics.data.tokenizer import frame_file
from mics.integrations.weights import GENERATION, write_config
from mics.models.huggingface import CONFIG


def export_folder(
    model: nn.Module,
    out: Path,
    *,
    sources: Sequence[Path | None],
    framed: SpecialTokens | None = None,
    ended: SpecialTokens | None = None,
) -> None:
    """Write a folder that ``AutoModel.from_pretrained`` loads. All ranks must call it.

    ``sources``: folders to copy a tokenizer and generation settings from; a later one's replace an earlier's.
    ``framed``: the special tokens that the sequences of a masked language model stood between. The tokenizer
    puts texts between them too, where it does not say otherwise.
    ``ended``: those of the documents that a causal one was trained on. Generation ends with theirs.
    """
    export_model(model, out, beside=partial(_write_beside, model, sources, framed, ended))


def _write_beside(
    model: nn.Module,
    sources: Sequence[Path | None],
    framed: SpecialTokens | None,
    ended: SpecialTokens | None,
    folder: Path,
) -> None:
    for source in filter(None, sources):
        for file in files_beside(source):
            shutil.copyfile(file, folder / file.name)
    if framed is not None:
        frame_file(folder / TOKENIZER_FILE, framed)
    write_config(model, folder)
    if ended is not None:
        for name in (CONFIG, GENERATION):
            _name_end(folder / name, ended)


def _name_end(file: Path, special: SpecialTokens) -> None:
    """Have generation end where documents do, if ``file`` names no end or a token of the text.

    What a config has by default is a token of another tokenizer.
    """
    if not file.is_file():
        return
    described = json.loads(file.read_text())
    named = described.get("eos_token_id")
    ids = set(named) if isinstance(named, list) else {named}
    if not ids <= set(special.all_ids):
        described["eos_token_id"] = special.end_of_text
        file.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
