"""The result of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Result of a check."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but slowly or not for long."""
    BAD = "bad"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was checked and found, what to do if anything, and details for programs."""

    name: str
    found: str
    state: State = State.GOOD
    todo: str | None = None
    facts: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)
