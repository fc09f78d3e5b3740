"""Packages that not every user needs. Each belongs to an extra, and errors say which line to type."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from mics.errors import MissingExtraError

PACKAGES: Final = {
    "cli": ("rich", "tyro", "yaml"),
    "data": ("tokenizers", "pyarrow"),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "trl": ("trl", "peft"),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan",),
    "ray": ("ray",),
    "torchao": ("torchao",),
    "bitsandbytes": ("bitsandbytes",),
    "wandb": ("wandb",),
    "s3": ("fsspec", "s3fs"),
    "gcs": ("fsspec", "gcsfs"),
}
"""What is imported of each extra. pyproject.toml has the versions."""


Extra = Literal[
    "cli",
    "data",
    "plot",
    "tensorboard",
    "transformers",
    "accelerate",
    "trl",
    "lightning",
    "torchtitan",
    "ray",
    "torchao",
    "bitsandbytes",
    "wandb",
    "s3",
    "gcs",
]


def require(extra: Extra, what: str) -> None:
    """Raise if a package of the extra is not installed. ``what`` needs it."""
    missing = [package for package in PACKAGES[extra] if find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {', '.join(missing)}, found none; type: pip install 'mics-torch[{extra}]'"
        )
