"""Results of commands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import asdict, dataclass
from typing import Any

from histopipe.errors import (
    DamagedStore,
    ExitCode,
    HistopipeError,
    NothingToDo,
    SlideError,
)
from histopipe.system.filesystems import is_full_disk


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
    return f"{noun}es" if noun.endswith(("s", "ch")) and noun != "epoch" else f"{noun}s"


def some(items: Iterable[object], most: int = 8) -> str:
    """List the first items, and the number of the others, for a message."""
    items = list(items)
    text = ", ".join(map(str, items[:most]))
    return text + (f" and {len(items) - most} more" if len(items) > most else "")


def listed(names: Sequence[object], most: int = 12, *, last: str = "and") -> str:
    """Return names as `a, b and c`; the number of those after the first `most`."""
    texts = [str(name) for name in names]
    if len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    return (
        f" {last} ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
    )


def exit_code_of(failed: int, succeeded: int) -> ExitCode:
    """Return the exit code of a command from the number of failed slides and of slides with results."""
    if not failed:
        return ExitCode.DONE
    return ExitCode.PARTLY if succeeded else ExitCode.NOTHING


def slide_failure(error: Exception) -> str:
    """Return why a slide failed, for the result of a command that continues with the other slides.

    An error of the store, the disk or the machine, or of the use of the command, is raised again: it concerns all slides.
    """
    if isinstance(error, SlideError | DamagedStore | NothingToDo):
        return str(error)
    if isinstance(error, HistopipeError) or is_full_disk(error):
        raise error
    if isinstance(error, BrokenExecutor):
        return f"the worker process died ({error}); memory ran out, or the file crashes its reader"
    if isinstance(error, MemoryError):
        return "memory ran out; use fewer --workers"
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        return f"{error.strerror}: {path}" if path else str(error)
    return f"{type(error).__name__}: {error}; this is a bug in histopipe: please report it"
