"""Results of commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from histopipe.errors import ExitCode


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """Result of a command; `print` shows it as text. Subclasses are dataclasses without a generated `repr`."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the exit code, if any, as a dict that JSON can represent; paths become text."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        code = getattr(self, "exit_code", None)
        return values if code is None else {**values, "exit_code": int(code)}

    def __repr__(self) -> str:
        return str(self)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural: `1 patch`, `2,000 patches`."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun: `patches`, `slides`."""
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


def exit_code_of(failed: int, others: int) -> ExitCode:
    """Return the exit code of a command from the number of failed slides and of slides with results."""
    if not failed:
        return ExitCode.DONE
    return ExitCode.PARTLY if others else ExitCode.NOTHING
