"""Durations on the command line: `2h`, `90m`, `45s`, or seconds."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)\s*([smhd]?)")


class Duration(click.ParamType[float]):
    """Seconds, 0 for no limit."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds of a text such as `2h`."""
        match = _PATTERN.fullmatch(str(value))
        if match is None or not math.isfinite(seconds := float(match[1]) * _UNITS[match[2] or "s"]):
            self.fail(f"{value!r}: write 2h, 90m, 45s or a number of seconds", param, ctx)
        return seconds
