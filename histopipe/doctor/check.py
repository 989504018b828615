"""One thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from histopipe.errors import ExitCode


class State(StrEnum):
    """How it is."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but not as it could, or not for long."""
    BAD = "bad"
    """Something that was asked for will not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what, in a word or two.
        found: what it is like.
        todo: what to do; None where nothing has to be done.
        facts: the same for a program, where there is more to say.
    """

    name: str
    found: str
    state: State = State.GOOD
    todo: str | None = None
    facts: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self)


def exit_code(checks: Iterable[Check]) -> ExitCode:
    """Of the command."""
    bad = any(check.state is State.BAD for check in checks)
    return ExitCode.SHORT if bad else ExitCode.DONE
