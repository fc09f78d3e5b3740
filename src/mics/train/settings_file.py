"""Settings from a YAML file and from flags: the file replaces defaults, the flags replace the file."""

import difflib
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.utils.command_line import parse
from mics.utils.deprecation import new_setting
from mics.utils.numbers import TokenCount, parse_count

Settings = TypeVar("Settings")


def parse_train_config(args: Sequence[str], *, prog: str = "mics train") -> TrainConfig:
    """The settings of one run. Prints help or a usage error and exits as command lines do."""
    file = _config_flag(args)
    defaults = TrainConfig() if file is None else load_settings(TrainConfig, file)
    config = parse(TrainConfig, args, prog=prog, default=defaults)
    config.data.check_prepared()
    return config


def load_settings(cls: type[Settings], file: Path) -> Settings:
    """Read a YAML file into a settings class."""
    try:
        content = yaml.load(file.read_text(), _EachOnce)
        return settings_from_mapping(cls, {} if content is None else content)
    except OSError as error:
        raise SettingsError(f"--config {file}: cannot be read: {error.strerror}") from None
    except SettingsError as error:
        raise SettingsError(f"--config {file}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a number or a nesting without end
        raise SettingsError(f"--config {file}: not valid YAML: {' '.join(str(error).split())}") from None


class _EachOnce(yaml.SafeLoader):
    """Plain values, and an error for a key that stands twice in a mapping: YAML itself takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                where = f"{name} (line {key.start_mark.line + 1})"
                raise SettingsError(f"{where}: expected once, found twice; keep one of them")
            seen.add(name)
        return super().construct_mapping(node, deep)


def settings_from_mapping(cls: type[Settings], mapping: object, *, prefix: str = "") -> Settings:
    """Build a settings class from nested plain values; any key or value that does not fit is an error."""
    if not isinstance(mapping, dict):
        raise SettingsError(
            f"{prefix.rstrip('.') or 'the file'}: expected names with values, found {mapping!r}"
        )
    assert is_dataclass(cls)
    known = [item.name for item in fields(cls) if item.name != "config"]  # a file does not name another file
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for raw_key, value in mapping.items():
        key = new_setting("train", prefix + str(raw_key).replace("-", "_")).removeprefix(prefix)
        if key in values:
            raise SettingsError(f"{prefix}{key}: expected once, found twice; keep one of them")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {prefix}{near[0]}?)" if near else ""
            raise SettingsError(
                f"{prefix}{raw_key}: unknown setting{hint}; expected one of {', '.join(known)}"
            )
        values[key] = _convert(hints[key], value, prefix + key)
    return replace(cls(), **values)


def _convert(expected: Any, value: object, key: str) -> object:
    """Turn a YAML value into the annotated type, or say what was expected."""
    if is_dataclass(expected) and isinstance(expected, type):
        return settings_from_mapping(expected, value, prefix=f"{key}.")
    if get_origin(expected) in (Union, types.UnionType):
        if value is None:
            return None
        (expected,) = (option for option in get_args(expected) if option is not type(None))
    if get_origin(expected) is Literal:
        if value in get_args(expected):
            return value
        raise SettingsError(
            f"{key}: expected one of {', '.join(map(str, get_args(expected)))}, found {value!r}"
        )
    if get_origin(expected) is tuple:
        (inner, _) = get_args(expected)
        if not isinstance(value, list):
            raise SettingsError(f"{key}: expected a list, found {value!r}")
        return tuple(_convert(inner, each, key) for each in value)
    if expected is Path and isinstance(value, str):
        return Path(value)
    if expected is TokenCount:
        return TokenCount(parse_count(str(value), setting=key))
    if expected is float:
        try:
            # A string too: YAML reads 3e-4 as text, since it wants 3.0e-4 for a number.
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                return float(value)
        except ValueError:
            pass
    elif type(value) is expected:  # not isinstance: True is no count
        return value
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    raise SettingsError(f"{key}: expected {words[expected]}, found {value!r}")


def _config_flag(args: Sequence[str]) -> Path | None:
    """The last ``--config`` among the flags: its file gives the defaults the other flags are read against."""
    found = None
    for position, arg in enumerate(args):
        if arg.startswith("--config="):
            found = arg.removeprefix("--config=")
        elif arg == "--config" and position + 1 < len(args):
            found = args[position + 1]
    return None if found in (None, "None", "unset") else Path(found)
