"""Whether a value is one that a setting may have, and how that is said."""

from __future__ import annotations

import dataclasses
from typing import Any

from histopipe.errors import UsageError


def like(field: dataclasses.Field[Any]) -> str:
    """What a value of a setting looks like."""
    return f"such as {field.default!r}" if field.default is not None else "a text"


def fits(value: object, default: object) -> bool:
    """Whether a value is of a setting's type, which its default shows."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(fits(v, default[0]) for v in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default) if default is not None else isinstance(value, str)


def flag(name: str) -> str:
    """A setting as the command line has it."""
    return f"--{name.replace('_', '-')}"


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """A UsageError unless it is."""
    if value not in allowed:
        raise UsageError(name, found=repr(value), expected=" or ".join(allowed))
