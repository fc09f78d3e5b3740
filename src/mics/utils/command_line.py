"""Settings classes as command lines: what may be left out shows its type, and counts are read as written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from mics.errors import SettingsError
from mics.utils.numbers import TokenCount, parse_count

_Spec = PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None
_Settings = TypeVar("_Settings")
_UNSET = ("None", "unset")


def parse(
    settings: type[_Settings], args: Sequence[str], *, prog: str, default: _Settings | None = None
) -> _Settings:
    """The settings of one call. Prints help or a usage error and exits as command lines do."""
    with _our_types():
        if default is None:
            return tyro.cli(settings, prog=prog, args=list(args))
        return tyro.cli(settings, prog=prog, args=list(args), default=default)


def parse_commands(
    commands: Mapping[str, Callable[..., int]], args: Sequence[str], *, prog: str, description: str
) -> int:
    """Call the function whose name comes first, with what follows. Returns its exit code."""
    with _our_types():
        found = tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog=prog, description=description, args=list(args)
        )
    return int(found)


def _our_types() -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.primitive_rule(_optional)
    registry.primitive_rule(_several)
    registry.primitive_rule(_token_count)
    return registry


def _optional(info: PrimitiveTypeInfo) -> _Spec:
    """``INT`` instead of ``{None}|INT``, with the default shown as unset. None can still be given."""
    options = get_args(info.type)
    if info.type_origin not in (Union, UnionType) or NoneType not in options or len(options) != 2:
        return None
    (inner,) = (option for option in options if option is not NoneType)
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner, info.markers))
    if not isinstance(found, PrimitiveConstructorSpec) or found.nargs != 1:
        return None
    spec: PrimitiveConstructorSpec[Any] = found

    def read(words: list[str]) -> Any:
        if words[0] in _UNSET:
            return None
        if spec.choices is not None and words[0] not in spec.choices:
            raise ValueError(f"expected one of {', '.join(spec.choices)}, found {words[0]!r}")
        return spec.instance_from_str(words)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=spec.metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["unset"] if value is None else spec.str_from_instance(value),
    )


def _several(info: PrimitiveTypeInfo) -> _Spec:
    """A flag of any number of values has one at least: with none, as ``--data.shards $NOTHING`` in a script,
    its default would be taken."""
    if info.type_origin is not tuple or get_args(info.type)[1:] != (Ellipsis,):
        return None
    inner = ConstructorRegistry.get_primitive_spec(
        PrimitiveTypeInfo.make(get_args(info.type)[0], info.markers)
    )
    if not isinstance(inner, PrimitiveConstructorSpec) or inner.nargs != 1:
        return None
    spec: PrimitiveConstructorSpec[Any] = inner

    def read(words: list[str]) -> tuple[Any, ...]:
        if not words:
            raise ValueError("expected at least one value, found none")
        return tuple(spec.instance_from_str([word]) for word in words)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{spec.metavar} [{spec.metavar} ...]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple) and all(map(spec.is_instance, value)),
        str_from_instance=lambda value: [word for each in value for word in spec.str_from_instance(each)],
        choices=spec.choices,
    )


def _token_count(info: PrimitiveTypeInfo) -> _Spec:
    if info.type is not TokenCount:
        return None

    def read(words: list[str]) -> TokenCount:
        try:
            return TokenCount(parse_count(words[0], setting="tokens"))
        except SettingsError as error:
            raise ValueError(str(error).removeprefix("tokens: ")) from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(int(value))],
    )
