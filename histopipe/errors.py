"""Every error histopipe raises on purpose, with the exit code of each.

    HistopipeError                      1   a bug when nothing below fits
    ├── UsageError (ValueError)         2   the command line, a config or a CSV is wrong
    │   └── SpecMismatch                2   a store was made with other settings
    ├── SlideError                      3   one slide cannot be used; the run goes on
    │   ├── SlideUnreadable (OSError)   3   the file is not a slide, broken, or changed
    │   ├── ScaleError (ValueError)     3   its scale is unknown or does not fit the options
    │   ├── RouteUnfit (ValueError)     3   it cannot go by the route that was asked for
    │   └── AnnotationsUnfit (ValueError) 3 what is drawn on it cannot be used
    ├── NothingToDo (LookupError)       4   no slides, no store, nothing to train on
    ├── DamagedStore (ValueError)       5   a store or run is damaged
    │   └── UnknownVersion              5   a store or run of a version or feature not known here
    ├── MachineShort (OSError)          6   disk, memory or GPU memory
    │   ├── OutOfMemory                 6   memory ran out; a fresh process may go on with smaller pieces
    │   └── OutOfTime (TimeoutError)    6   it took longer than it was given; what was saved stays
    ├── WorkerLost (ConnectionError)    6   a worker of a cluster died, hangs or never came
    └── Interrupted                   130   Ctrl-C or SIGTERM

A message says what it is about, what was found, what was expected and what to do next.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    BUG = 1
    USAGE = 2
    PARTLY = 3
    NOTHING = 4
    DAMAGED = 5
    SHORT = 6
    INTERRUPTED = 130


class HistopipeError(Exception):
    """Base of all errors.

    Args:
        what: the thing (a path, a slide id, a key) and what is wrong with it.
        found: what was found there.
        expected: what should have been there.
        todo: what the user can do next.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(
        self,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        todo: str | None = None,
    ) -> None:
        self.what, self.found, self.expected, self.todo = what, found, expected, todo
        super().__init__(str(self))

    def __str__(self) -> str:
        facts = [
            f"{name} {value}"
            for name, value in (("found", self.found), ("expected", self.expected))
            if value is not None
        ]
        text = self.what + (": " + ", ".join(facts) if facts else "")
        return text + (f"; {self.todo}" if self.todo else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments are lost by the default pickling, and workers raise across processes.
        return (_rebuild, (type(self), self.what, self.found, self.expected, self.todo))


def _rebuild(
    kind: type[HistopipeError], what: str, found: object, expected: object, todo: str | None
) -> HistopipeError:
    return kind(what, found=found, expected=expected, todo=todo)


class UsageError(HistopipeError, ValueError):
    """The command line, a configuration or a CSV file is wrong."""

    exit_code = ExitCode.USAGE


class SpecMismatch(UsageError):
    """A store exists that was made with other tiling or encoding settings."""


class SlideError(HistopipeError):
    """One slide cannot be used. It is recorded, and the run goes on."""

    exit_code = ExitCode.PARTLY


class SlideUnreadable(SlideError, OSError):
    """The file is no slide, is broken, or changed while it was read."""


class ScaleError(SlideError, ValueError):
    """A slide's scale is unknown, implausible, or does not fit the options given."""


class RouteUnfit(SlideError, ValueError):
    """A slide's patches cannot be made by the route that was asked for."""


class AnnotationsUnfit(SlideError, ValueError):
    """A slide's annotations cannot be read, or are missing where they are needed."""


class NothingToDo(HistopipeError, LookupError):
    """No slide, no store, or nothing to train on."""

    exit_code = ExitCode.NOTHING


class DamagedStore(HistopipeError, ValueError):
    """A store or a run folder is damaged."""

    exit_code = ExitCode.DAMAGED


class UnknownVersion(DamagedStore):
    """A store or run was written by a version, or with a feature, that is not known here."""


class MachineShort(HistopipeError, OSError):
    """Disk, memory or GPU memory ran out."""

    exit_code = ExitCode.SHORT


class OutOfMemory(MachineShort):
    """Memory ran out where a process cannot go on. A fresh one may, with smaller micro-batches."""


class OutOfTime(MachineShort, TimeoutError):
    """A training took longer than it was given. What was saved stays."""


class WorkerLost(HistopipeError, ConnectionError):
    """Another worker of a cluster died, hangs, or never came."""

    exit_code = ExitCode.SHORT


class Interrupted(HistopipeError):
    """The user or the system asked to stop; what was complete stays."""

    exit_code = ExitCode.INTERRUPTED
