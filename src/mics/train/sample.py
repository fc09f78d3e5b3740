"""The text that a trained model writes at the end of a run."""

from __future__ import annotations

from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.sequences import Sequences


def prompt_tokens(config: TrainConfig, sequences: Sequences) -> list[int]:
    """What the sample begins with, at least one token; none of a run that samples nothing."""
    report = config.report
    if report.sample_tokens == 0 or config.model.build().objective == "masked":
        return []
    try:
        found = sequences.encode(report.prompt)
    except UnicodeError:  # bytes of a command line that are no text
        found = []
    if not found:
        raise SettingsError(
            f"report.prompt: expected text that the tokenizer of the data makes tokens of, found "
            f"{report.prompt!r}; give another, or set report.sample_tokens to 0"
        )
    return found
