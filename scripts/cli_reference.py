"""The page of the site that lists every command of mics, from the parsers that read the command line.

`make docs` makes it anew (scripts/site_hooks.py). `python scripts/cli_reference.py` prints it.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import tyro

from mics.cli import COMMANDS
from mics.utils.deprecation import OLD_SETTINGS, REMOVED_IN

INTRODUCTION = """# Command line

Made from the parsers themselves. `mics COMMAND --help` prints the same in a terminal.

A flag may be written with dashes or underscores, and as `--flag value` or `--flag=value`. Settings are
checked before anything starts. A wrong one ends with exit code 2 and an error that says what was expected.
"""
_DEFAULT = re.compile(r"\s*\((default: |required|optional|sets? |repeatable)(.*)\)$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A row of a table."""

    names: str
    default: str
    meaning: str


class _Read(Exception):  # noqa: N818 - not an error: it carries the parsers out of the command
    def __init__(self, parsers: list[argparse.ArgumentParser]) -> None:
        self.parsers = parsers


def page() -> str:
    """The whole page as Markdown."""
    rows = [f"| [`mics {name}`](#mics-{name}) | {command.summary} |" for name, command in COMMANDS.items()]
    parts = [INTRODUCTION, "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"]
    for name in COMMANDS:
        parts.append(_section(name))
    return "\n".join(parts)


def parsers_of(command: str, *, gpu: bool) -> list[argparse.ArgumentParser]:
    """What a command parses its arguments with; several if it has commands of its own."""
    # Called as `mics COMMAND` calls it, up to the moment at which tyro would read the arguments.
    with (
        mock.patch.object(tyro, "cli", _read_settings),
        mock.patch.object(tyro.extras, "subcommand_cli_from_dict", _read_functions),
        mock.patch.object(torch.cuda, "is_available", return_value=gpu),
    ):
        try:
            COMMANDS[command].run([])
        except _Read as found:
            return found.parsers
    raise AssertionError(f"mics {command}: expected a command that parses by tyro")


def _parser(settings: Callable[..., Any], **options: Any) -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to the parser yet
        return tyro.extras.get_parser(settings, **options)


def _read_settings(settings: Callable[..., Any], *, args: object, **options: Any) -> None:
    raise _Read([_parser(settings, **options)])


def _read_functions(functions: dict[str, Callable[..., Any]], *, prog: str, **options: Any) -> None:
    raise _Read([_parser(function, prog=f"{prog} {name}") for name, function in functions.items()])


def _section(command: str) -> str:
    parsers = parsers_of(command, gpu=False)
    with_gpu = parsers_of(command, gpu=True)
    lines = [f"## mics {command}", ""]
    several = len(parsers) > 1
    if several:
        lines += [_sentence(COMMANDS[command].summary), ""]
    for parser, other in zip(parsers, with_gpu, strict=True):
        if several:
            lines += [f"### {parser.prog}", ""]
        for paragraph in (parser.description or "").split("\n\n"):
            lines += [_text(paragraph), ""]
        lines += [f"```text\n{_usage(parser)}\n```", ""]
        for title, about, flags in _groups(parser, other):
            if title:
                lines += [f"### mics {command}: {title}", "", about, ""]
            lines += [*_table(flags), ""]
    old = OLD_SETTINGS.get(command, {})
    if old:
        names = ", ".join(f"`{_flag(was)}` (now `{_flag(now)}`)" for was, now in old.items())
        lines += [f"Old flags, until mics {REMOVED_IN}: {names}.", ""]
    return "\n".join(lines)


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _usage(parser: argparse.ArgumentParser) -> str:
    positionals = [str(action.metavar) for action in _actions(parser) if not action.option_strings]
    required = [
        f"{action.option_strings[0]} {action.metavar}"
        for action in _actions(parser)
        if action.option_strings and action.required
    ]
    return " ".join([parser.prog, *positionals, *required, "[flags]"])


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]


def _groups(
    parser: argparse.ArgumentParser, with_gpu: argparse.ArgumentParser
) -> Iterator[tuple[str, str, list[Flag]]]:
    """Title, description and flags of every group, first those of the command itself."""
    on_gpu = {action.dest: _row(action) for action in _actions(with_gpu)}
    own: list[Flag] = []
    others = []
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.dest != "help"]
        flags = [_merged(_row(action), on_gpu[action.dest]) for action in actions]
        title = (group.title or "").removesuffix(" options").removesuffix("options").strip()
        if title in ("", "positional arguments"):
            own += flags
        elif flags:
            others.append((title, _text(group.description or ""), flags))
    if own:
        yield "", "", own
    yield from others


def _row(action: argparse.Action) -> Flag:
    text = action.help or ""
    found = _DEFAULT.search(text)
    default = found[2] if found and found[1] == "default: " else ""
    kind = str(action.metavar or "").replace("{None}|", "")
    values = re.fullmatch(r"\{(.+)\}", kind)
    meaning = _text(_DEFAULT.sub("", text))
    is_switch = len(action.option_strings) > 1  # --flag and --no-flag
    if values:
        kind = ""
        listed = ", ".join(f"`{value}`" for value in values[1].split(","))
        meaning = f"One of {listed}. {meaning}"
    if several := re.fullmatch(r"\[(\w+) \[\1 \.\.\.\]\]", kind):
        kind = f"{several[1]} ..."
    names = [f"`{name}`" for name in action.option_strings]
    if names and kind and not is_switch:
        names[-1] = f"{names[-1][:-1]} {kind}`"
    if action.required or not action.option_strings:
        default = "required"
    elif default in ("unset", "None"):
        default = "unset"
    elif is_switch:
        default = "on" if action.default else "off"
    elif default and "--" not in default:
        default = f"`{default}`"
    return Flag(names="<br>".join(names) or f"`{kind}`", default=_text(default), meaning=meaning)


def _merged(flag: Flag, on_gpu: Flag) -> Flag:
    """Where a default depends on the machine, both."""
    if flag.default == on_gpu.default:
        return flag
    return Flag(
        names=flag.names, default=f"{flag.default}; with a GPU {on_gpu.default}", meaning=flag.meaning
    )


def _text(text: str) -> str:
    """Help as Markdown on one line: flags, and words in angle brackets, as code."""
    line = " ".join(text.split())
    line = re.sub(r"([\w/.-]*<[\w-]+>[\w/<>-]*)", r"`\1`", line)
    return re.sub(r"(?<![\w`-])(--[a-z][\w.-]*\w)", r"`\1`", line)


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with a name, and a full stop."""
    begins_with_value = re.match(r"[\w.-]*[:_0-9-]", text)
    capital = text if begins_with_value else text[:1].upper() + text[1:]
    return capital if capital.endswith(".") else f"{capital}."


def _table(flags: list[Flag]) -> list[str]:
    rows = [f"| {flag.names} | {flag.default} | {_sentence(flag.meaning)} |" for flag in flags]
    return ["| flag | default | meaning |", "|---|---|---|", *rows]


if __name__ == "__main__":
    print(page())
