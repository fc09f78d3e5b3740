"""``mics doctor``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from mics.errors import SettingsError
from mics.utils.command_line import parse
from mics.utils.progress import long_work

if TYPE_CHECKING:
    from mics.doctor.examination import Examination

_STAGES: Final = ("introduce", "compare_clocks", "visit", "try_folder", "compute", "send")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Find what would make a run fail or crawl, in under a minute: one line each, with the way out.

    Start it as you will start the training, on all hosts: torchrun ... -m mics.cli doctor --config run.yaml.
    Without a launcher it starts launch.ranks_per_node ranks on this machine: unset is one for each GPU, or
    two on the CPU. The exit code is 0 for go (there may be warnings), 1 for no-go and 2 for wrong settings.
    """

    config: Path | None = None
    """YAML file with the settings of the run, as for mics train."""
    checkpoint_dir: str | None = None
    """Folder or URL to try for checkpoints; unset takes the one of the settings."""
    timeout: float = 30.0
    """Seconds to wait for ranks that have not come."""
    json: bool = False
    """Print everything as JSON instead, with the facts of all ranks."""

    def check(self) -> None:
        """Raise if a number makes no sense."""
        if not 1 <= self.timeout <= 3600:
            raise SettingsError(
                f"--timeout: expected seconds from 1 to 3,600, found {self.timeout:g}; check its unit"
            )


def doctor(args: Sequence[str]) -> int:
    """Parse, then examine as a rank, or start ranks that do."""
    config = parse(DoctorConfig, args, prog="mics doctor")
    config.check()
    if "RANK" in os.environ:
        return _examine(config)
    from mics.doctor.settings import read_settings
    from mics.utils.own_ranks import num_own_ranks, start_ranks

    settings = read_settings(config.config, config.checkpoint_dir)
    if settings.train is None:
        raise SettingsError(settings.error)
    launch = settings.train.launch
    num_ranks = num_own_ranks(launch.device, launch.ranks_per_node)
    return start_ranks("doctor", args, num_ranks=num_ranks, explained=(1, 2))


def _examine(config: DoctorConfig) -> int:
    """As the rank that the launcher made of this process."""
    from mics.doctor.examination import Examination, is_anything_stuck
    from mics.doctor.meeting import NotJoinedError, join
    from mics.doctor.settings import read_settings
    from mics.train.ranks import die_with_launcher

    began = time.monotonic()
    die_with_launcher(os.environ)
    settings = read_settings(config.config, config.checkpoint_dir)
    try:
        meeting = join(os.environ, config.timeout)
        examination = Examination(meeting, settings, timeout=config.timeout)
        _go_through(examination, shown=meeting.rank == 0)
        if meeting.rank == 0:
            code = _judge(examination, config, took=time.monotonic() - began)
            meeting.announce("verdict", str(code))
        code = int(meeting.hear("verdict", config.timeout))
        examination.finish()
        meeting.leave()
    except NotJoinedError as error:
        print(f"mics doctor: {error}", file=sys.stderr, flush=True)
        code = 1
    if is_anything_stuck():
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs would keep the interpreter
    return code


def _go_through(examination: Examination, *, shown: bool) -> None:
    if not shown:
        for stage in _STAGES:
            getattr(examination, stage)()
        return
    with long_work("doctor", len(_STAGES), unit="stages") as work:
        for stage in _STAGES:
            getattr(examination, stage)()
            work.advance()


def _judge(examination: Examination, config: DoctorConfig, *, took: float) -> int:
    """Print what was found. All ranks could not read the settings: that is an error of settings."""
    from mics.doctor.checks import judge
    from mics.doctor.findings import is_go
    from mics.doctor.report import as_json, show

    survey = examination.survey
    errors = {facts.settings_error for facts in survey.ranks.values()}
    findings = judge(survey)
    if config.json:
        print(as_json(survey, findings, took=took), flush=True)
    elif len(errors) == 1 and "" not in errors:
        print(f"mics doctor: error: {errors.pop()}", file=sys.stderr, flush=True)
        return 2
    else:
        show(findings, took=took, console=Console(highlight=False))
    return 0 if is_go(findings) else 1
