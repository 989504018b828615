"""All errors that histopipe raises on purpose, with their exit codes. Most are also subclasses of a builtin exception.

A message contains what failed, what was found, what was expected and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from operator import attrgetter
from typing import Any, ClassVar, Literal

OnError = Literal["raise", "skip"]
"""What to do with damaged data: end the command, or leave them out."""


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
    """Base class of all errors. An error of exactly this class is a bug.

    Args:
        what: the object (a path, a slide id, a key) and what is wrong with it.
        found: what was found.
        expected: what was expected.
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
        pairs = (("found", self.found), ("expected", self.expected))
        values = ", ".join(f"{name} {value}" for name, value in pairs if value is not None)
        return self.what + (values and f": {values}") + (f"; {self.todo}" if self.todo else "")

    def __reduce__(self) -> tuple[object, ...]:
        """Send texts to another process: what was found may be an error of a library that cannot be read there."""
        plain = (str, int, float, type(None))
        texts = (
            each if isinstance(each, plain) else str(each) for each in (self.found, self.expected)
        )
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return _received, (type(self), self.what, *texts, self.todo), notes


def _received(
    kind: type[HistopipeError], what: str, found: object, expected: object, todo: str | None
) -> HistopipeError:
    return kind(what, found=found, expected=expected, todo=todo)


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can read: itself, or if its class cannot be, one with its name and text."""
    import pickle  # late: most processes send none

    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - the methods of a library
        text = HistopipeError(f"{type(error).__name__}: {error}")
        text.__notes__ = getattr(error, "__notes__", [])
        return text
    return error


class UsageError(HistopipeError, ValueError):
    """The command line, a configuration or a CSV file is invalid."""

    exit_code = ExitCode.USAGE


class SlideError(HistopipeError):
    """One slide cannot be used. The failure is recorded, and the run continues."""

    exit_code = ExitCode.PARTLY


class SlideUnreadable(SlideError, OSError):
    """The file is not a slide, is damaged, or changed while it was read."""


class OptionUnfit(SlideError, ValueError):
    """A slide does not fit an option, such as the requested route, or has no annotations although they are required."""


class ScaleError(OptionUnfit):
    """The scale of a slide is unknown, implausible, or does not fit the options."""


class MaskUnfit(OptionUnfit):
    """The tissue mask of a slide is missing, or is not a mask of this slide."""


class NothingToDo(HistopipeError, LookupError):
    """There is no slide, no store, or no training data."""

    exit_code = ExitCode.NOTHING


class DamagedStore(HistopipeError, ValueError):
    """A store or a run folder is damaged."""

    exit_code = ExitCode.DAMAGED


class UnknownVersion(DamagedStore):
    """A store or run was written by an unknown version, or with an unknown feature."""


class MachineShort(HistopipeError, OSError):
    """Disk, memory or GPU memory ran out."""

    exit_code = ExitCode.SHORT


class OutOfMemory(MachineShort):
    """Memory ran out and the process cannot continue. A new process with smaller micro-batches may succeed."""


class OutOfTime(MachineShort, TimeoutError):
    """A training reached its time limit. The saved state is kept."""


class WorkerLost(HistopipeError, ConnectionError):
    """Another worker of a cluster died, hangs, or never started."""

    exit_code = ExitCode.SHORT


class RemoteError(HistopipeError, ConnectionError):
    """A file in object storage or on a web server cannot be read or written now. Another try may succeed."""

    exit_code = ExitCode.SHORT


class RemoteRefused(RemoteError):
    """A file in object storage or on a web server does not exist, or the access is denied."""

    exit_code = ExitCode.USAGE


class RemoteMissing(RemoteRefused):
    """There is no file behind a URL."""


class Interrupted(HistopipeError):
    """Ctrl-C or SIGTERM ended the command. Completed work is kept."""

    exit_code = ExitCode.INTERRUPTED


strerror = attrgetter("strerror")
"""The reason that the operating system gives for an OSError, without its number and its file."""


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text: those of large libraries have many lines."""
    return str(error).split("\n")[0][:200]


@contextmanager
def reported_as(
    kind: type[HistopipeError],
    what: str,
    causes: type[Exception] | tuple[type[Exception], ...],
    *,
    reason: Callable[[Any], object] = str,
    expected: str | None = None,
    todo: str | None = None,
) -> Iterator[None]:
    """Raise errors of some classes from the block as one of histopipe.

    Args:
        kind: the class to raise.
        what, expected, todo: its arguments; see `HistopipeError`.
        causes: classes of errors of the block, as after `except`.
        reason: returns what was found, from an error of the block.
    """
    try:
        yield
    except causes as error:
        raise kind(what, found=reason(error), expected=expected, todo=todo) from error


def needs_extra(
    extra: str, problem: str, otherwise: str = ""
) -> AbstractContextManager[None, bool | None]:
    """Report that a library of an extra, which the block imports, is not installed.

    Raises:
        MachineShort: with the `problem`, and as its cure the extra, followed by `otherwise`.
    """
    todo = f"pip install 'histopipe[{extra}]'{otherwise}"
    return reported_as(MachineShort, problem, ImportError, todo=todo)
