"""Dataclasses from the tables of TOML files, with checked names and types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from histopipe.errors import UsageError


def from_table(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Create a dataclass from the values of a TOML table, with checked names and types."""
    declared = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - declared.keys())
    missing = sorted(
        name
        for name, field in declared.items()
        if field.default is dataclasses.MISSING and name not in values
    )
    if unknown or missing:
        states = (("unknown", unknown), ("missing", missing))
        raise UsageError(
            f"{where}: fields", found="; ".join(f"{state}: {', '.join(names)}" for state, names in states if names),
            expected=", ".join(declared),
        )  # fmt: skip
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: checked_value(hints[name], value, f"{where}: {name}")
            for name, value in values.items()
        }
    )


def checked_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value with the type of a field."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or dataclasses.is_dataclass(hint):
        return value  # a table, already checked
    if origin is Literal:
        if value in choices:
            return value
    elif origin is tuple:
        kind, count = choices[0], None if choices[-1] is ... else len(choices)
        numbers = (int, float) if kind is float else (kind,)
        if (
            isinstance(value, list)
            and count in (None, len(value))
            and all(type(element) in numbers for element in value)
        ):
            return tuple(kind(element) for element in value)
    elif hint is int and type(value) is int and 0 <= value < 1 << 40:
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (str, bool) and type(value) is hint:
        return value
    expected = " or ".join(map(str, choices)) if origin is Literal else _described(hint)
    raise UsageError(where, found=repr(value), expected=expected)


def _described(hint: Any) -> str:
    choices = typing.get_args(hint)
    if not choices:
        return f"a value of type {hint.__name__}"
    count = "" if choices[-1] is ... else f"{len(choices)} "
    return f"a list of {count}values of type {choices[0].__name__}"
