"""Command lines of Markdown pages: each goes through the parser of the program that it calls."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Final

import pytest

from tests.doc_blocks import ROOT, Block

_SHELL: Final = ("bash", "console", "sh", "indented")
_UNCHECKED: Final = ("cd", "export", "git", "kill", "sbatch", "ls", "cat", "sudo", "unset", "ssh")


def command_lines(block: Block) -> Iterator[list[str]]:
    """The commands of a block as lists of words; of an indented block or a session, those that we know."""
    if block.language not in _SHELL or "skip" in block.options:
        return
    for line in re.sub(r"\\\n", " ", block.code).splitlines():
        prompt = line.startswith("$ ")
        if block.language == "console" and not prompt:
            continue
        if block.language == "indented" and not _is_known(line.removeprefix("$ ")):
            continue
        yield from _commands(line.removeprefix("$ "))


def _is_known(line: str) -> bool:
    first = re.sub(r"^(?:[A-Z_]+=\S* )*", "", line).partition(" ")[0]
    return first in _CHECKS


def _commands(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    while words:
        end = next((n for n, word in enumerate(words) if word in ("&&", "||", "|", ";", "&")), len(words))
        command, words = words[:end], words[end + 1 :]
        while command and re.match(r"[A-Z_]+=", command[0]):
            command = command[1:]
        if command:
            yield command


def check_command(words: list[str]) -> None:
    """Raise unless a program that is called so would begin to work."""
    assert words[0] in (*_CHECKS, *_UNCHECKED), f"expected a known command, found {shlex.join(words)}"
    if words[0] in _CHECKS:
        _CHECKS[words[0]](words[1:])


def _check_mics(args: list[str]) -> None:
    from mics.cli import _parser
    from mics.utils.deprecation import new_flags

    if args in (["--help"], ["--version"]):
        return
    found = _parser().parse_args(args)
    assert new_flags(found.command, found.args) == found.args, "an old flag"
    if found.args in (["--help"], ["-h"]):
        return
    _PARSERS[found.command](found.args)


def _check_train(args: list[str]) -> None:
    from mics.train.settings_file import parse_train_config

    for flag, value in itertools.pairwise(args):
        if flag == "--data.text" and not Path(value).is_absolute():
            Path(value).touch()  # the reader's own
    for folder in _values(args, "--data.shards"):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "index.json").touch()
    parse_train_config(args)


def _values(args: list[str], flag: str) -> list[str]:
    """What follows a flag that takes several values."""
    after = args[args.index(flag) + 1 :] if flag in args else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), after))


def _check_plan(args: list[str]) -> None:
    from mics.cost.modules import find_model
    from mics.planner.command import PlanConfig
    from mics.planner.hardware import planned_cluster
    from mics.utils.command_line import parse

    config = parse(PlanConfig, args, prog="mics plan")
    config.check()
    planned_cluster(config.cluster if not config.nodes else f"{config.cluster}:{config.nodes[0]}")
    if ":" not in config.model and not config.model.endswith(".json"):
        find_model(config.model, seq_len=config.seq)


def _check_calibrate(args: list[str]) -> None:
    from mics.calibrate.command import CalibrateConfig
    from mics.utils.command_line import parse

    parse(CalibrateConfig, args, prog="mics calibrate").check()


def _check_bench(args: list[str]) -> None:
    from mics.bench.command import rows_of
    from mics.bench.config import BenchConfig
    from mics.utils.command_line import parse

    config = parse(BenchConfig, args, prog="mics bench")
    config.check()
    rows_of(config)


def _check_emulate(args: list[str]) -> None:
    from mics.bench.config import EmulateConfig
    from mics.cost.clusters import find_cluster
    from mics.utils.command_line import parse

    config = parse(EmulateConfig, args, prog="mics emulate")
    config.check()
    config.training.job(config.partition_size, find_cluster(config.cluster).world_size)


def _check_doctor(args: list[str]) -> None:
    from mics.doctor.command import DoctorConfig
    from mics.utils.command_line import parse

    parse(DoctorConfig, args, prog="mics doctor").check()


def _check_checkpoint(args: list[str]) -> None:
    from mics.checkpoint import command

    with pytest.MonkeyPatch.context() as patch:
        for name in ("show", "verify", "export", "import_"):
            patch.setattr(command, name, _parsed_only(getattr(command, name)))
        assert command.checkpoint(args) == 0


def _check_data(args: list[str]) -> None:
    from mics.data import command

    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare", "show", "tokenizer", "verify"):
            patch.setattr(command, name, _parsed_only(getattr(command, name)))
        assert command.data(args) == 0


def _parsed_only(run: Callable[..., int]) -> Callable[..., int]:
    @wraps(run)
    def stub(*args: object, **kwargs: object) -> int:
        return 0

    return stub


def _check_torchrun(args: list[str]) -> None:
    from torch.distributed.run import parse_args

    found = parse_args(args)
    if found.module:
        _check_module([found.training_script, *found.training_script_args])
    elif "/" in found.training_script:
        assert Path(found.training_script).exists(), f"no script {found.training_script}"


def _check_python(args: list[str]) -> None:
    if args[0] == "-m":
        _check_module(args[1:])
    elif args[0] != "-c":
        assert Path(args[0]).exists(), f"no script {args[0]}"


def _check_module(args: list[str]) -> None:
    if args[0] == "mics.cli":
        _check_mics(args[1:])
    elif args[0] == "torch.distributed.run":
        _check_torchrun(args[1:])
    else:
        assert importlib.util.find_spec(args[0]) is not None, f"no module {args[0]}"


def _check_pip(args: list[str]) -> None:
    assert args[0] == "install", args
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in (each for each in args[1:] if not each.startswith("-")):
        name, _, extras = requirement.rstrip("]").partition("[")
        if name in (".", project["name"]) and extras:
            unknown = set(extras.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"no extra {unknown}"


def _check_make(args: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in (each for each in args if "=" not in each):
        assert re.search(rf"^{re.escape(target)}:", text, re.MULTILINE), f"no target {target}"


_PARSERS: Final = {
    "bench": _check_bench,
    "calibrate": _check_calibrate,
    "checkpoint": _check_checkpoint,
    "data": _check_data,
    "doctor": _check_doctor,
    "emulate": _check_emulate,
    "plan": _check_plan,
    "train": _check_train,
}
_CHECKS: Final = {
    "make": _check_make,
    "mics": _check_mics,
    "pip": _check_pip,
    "python": _check_python,
    "python3": _check_python,
    "torchrun": _check_torchrun,
}
