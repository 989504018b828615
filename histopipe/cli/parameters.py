"""Values on the command line that are more than a text or a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)\s*([smhd]?)")


F = TypeVar("F", bound=Callable[..., Any])


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine options into one decorator; `--help` lists them in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class Duration(click.ParamType[float]):
    """A duration: `2h`, `90m`, `45s`, or seconds; 0 means no limit."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds."""
        match = _PATTERN.fullmatch(str(value))
        if match is None or not math.isfinite(seconds := float(match[1]) * _UNITS[match[2] or "s"]):
            self.fail(f"{value!r}: write 2h, 90m, 45s or a number of seconds", param, ctx)
        return seconds


class Names(click.ParamType[tuple[str, ...]]):
    """Names separated by commas: `flips,colour`."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the names."""
        if isinstance(value, list | tuple):
            return tuple(value)
        return tuple(part.strip() for part in str(value).split(","))


class Fractions(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas: `0.7,0.15,0.15`."""

    name = "fractions"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the numbers."""
        if isinstance(value, list | tuple):
            return tuple(value)
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: write 0.7,0.15,0.15", param, ctx)


class Share(click.ParamType[float]):
    """A share: `1%` or `0.01`."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the share, 0 to 1."""
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"{text!r} is no share: write 1% or 0.01", param, ctx)
        return share
