"""Which DeepSpeed to import: its MiCS works in one version only, its ZeRO-3 in all, and a process holds one.

Versions that live beside each other, each in a folder of its own (``pip install --target``), are named in
the variable ``MICS_DEEPSPEED_PATH``, separated as in ``PATH``. Without it, the installed one is all there is.
"""

import logging
import os
import sys
from importlib import import_module
from importlib.metadata import distributions
from typing import Any, Final

from mics.bench.job import Job
from mics.bench.systems.protocol import SystemUnavailable

VARIABLE: Final = "MICS_DEEPSPEED_PATH"


def find_deepspeed(system: str, job: Job, *, only: str | None = None, reason: str = "") -> Any:
    """The module ``deepspeed``: of version ``only``, for ``reason``, or the newest there is.

    Raises ``SystemUnavailable`` with the command that installs what is missing.
    """
    found = _versions()
    version = only or max(found, key=_numbers, default=None)
    install = (
        f"DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed{f'=={only}' if only else ''}, or into a "
        f"folder of its own (with --no-deps --target) that {VARIABLE} names"
    )
    if version is None or version not in found:
        raise SystemUnavailable(
            f"{system}: expected deepspeed{f' {only}' if only else ''}{f' ({reason})' if reason else ''}, "
            f"found {' and '.join(found) or 'none'}; {install}"
        )
    folder = found[version]
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    # It takes a GPU that is there even if nobody asked for it. This is read once, when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise SystemUnavailable(
            f"{system}: expected deepspeed {version} to import, found {error}; install what it misses, or "
            f"anew: {install}"
        ) from error
    imported = _release(deepspeed.__version__)
    if imported != version:
        raise SystemUnavailable(
            f"{system}: expected deepspeed {version} in this process, found {imported} imported already; "
            "run each version in a process of its own"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _versions() -> dict[str, str | None]:
    """Version -> folder that holds it (None: it is installed)."""
    folders = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    found: dict[str, str | None] = {}
    for folder in (*folders, None):
        for distribution in distributions(name="deepspeed", path=sys.path if folder is None else [folder]):
            found.setdefault(_release(distribution.version), folder)
    return found


def _release(version: str) -> str:
    """Without what a build from source adds: 0.19.2+1a2b3c is 0.19.2."""
    return version.partition("+")[0]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
