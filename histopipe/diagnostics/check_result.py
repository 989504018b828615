"""The result of one check of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["good", "warning", "bad"]
"""Result of a check. warning: it works, but slowly or not for long. bad: something does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: its name, what was found, what to do (if anything), and details for programs."""

    name: str
    found: str
    state: State = "good"
    todo: str | None = None
    facts: dict[str, Any] | None = None
