"""What commands show: progress of long tasks, and results."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from histopipe.errors import (
    DamagedStore,
    ExitCode,
    HistopipeError,
    NothingToDo,
    SlideError,
)
from histopipe.system.files import Closing, is_full_disk
from histopipe.system.forecast import spelled


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


def to_storable_text(text: str) -> str:
    """Return a text that UTF-8 can encode: undecodable bytes of a file name are written as \\xNN."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shown(text: str) -> str:
    """Return a text that is safe to print on a terminal: control characters are written as \\xNN."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural: `1 patch`, `2,000 patches`."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun: `patches`, `slides`."""
    return f"{noun}es" if noun.endswith(("s", "ch")) and noun != "epoch" else f"{noun}s"


def some(items: Iterable[object], most: int = 8) -> str:
    """List the first items, and the number of the others, for a message."""
    items = list(items)
    return listed(items, most) if len(items) > most else ", ".join(map(str, items))


def listed(names: Sequence[object], most: int = 12, *, last: str = "and") -> str:
    """Return names as `a, b and c`; the number of those after the first `most`."""
    texts = [str(name) for name in names]
    if len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    return (
        f" {last} ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in rows
    ]


def exit_code_of(failed: int, succeeded: int) -> ExitCode:
    """Return the exit code of a command from the number of failed slides and of slides with results."""
    return ExitCode.DONE if not failed else ExitCode.PARTLY if succeeded else ExitCode.NOTHING


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


_SECONDS_BETWEEN_LINES = 30.0
"""Logs of long runs stay short, and a run that hangs is noticed soon."""
_SECONDS_BETWEEN_MESSAGES = 0.1
"""Interval of the messages of a `ReportedProgress`: the steps of a bar may take a millisecond."""


class Bar(Closing):
    """Counts the finished items of a task. This base class shows nothing.

    Example:
        >>> with Progress().bar("verify", unit="slides", total=3) as bar:
        ...     bar.advance()
    """

    def __init__(self, done: int = 0) -> None:
        self._done = done

    def advance(self, count: int = 1) -> None:
        """Add to the number of finished items."""
        self.update(self._done + count)

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        """Set the number of finished items and, if given, the total and the seconds that are left."""
        self._done = done

    def retitle(self, title: str) -> None:
        """Change the title."""

    def item(self, text: str, *, problem: bool = False) -> None:
        """Show a line about a finished item. If bars are shown, only problems are printed."""

    def close(self) -> None:
        """Remove the bar."""


class Progress:
    """Shows the progress of a function. This base class shows nothing."""

    def bar(
        self,
        title: str,
        *,
        unit: str,
        total: int | None = None,
        done: int = 0,
        detail: bool = False,
    ) -> Bar:
        """Start a bar.

        Args:
            title: name of the task.
            unit: unit of the count, in the plural.
            total: number of all items; None if unknown.
            done: number of items that are already finished.
            detail: the bar is part of a larger task. `LineProgress` does not show it.
        """
        return Bar()

    def message(self, text: str) -> None:
        """Show a line of text."""


class BarProgress(Progress):
    """Bars by tqdm on a terminal, or in a notebook if ipywidgets is installed, with messages above the bars."""

    def __init__(self, stream: TextIO, *, notebook: bool = False) -> None:
        # Late: `--help` must be fast.
        from tqdm import tqdm

        self._stream, self._write = stream, tqdm.write
        self._tqdm: Any = tqdm
        if notebook and importlib.util.find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm_notebook

            self._tqdm = tqdm_notebook

    def bar(self, title: str, *, unit: str, detail: bool = False, **options: Any) -> Bar:
        """Start a bar."""
        bar = self._tqdm(
            desc=f"  {title[-40:]}" if detail else title,
            unit=f" {unit}",
            total=options.get("total"),
            initial=options.get("done", 0),
            file=self._stream,
            leave=False,
            unit_scale=unit == "bytes",
            smoothing=0.0,  # slides differ: the mean rate predicts the end better than the last rate
        )
        return _TqdmBar(bar, self.message)

    def message(self, text: str) -> None:
        """Write a line above the bars."""
        self._write(text, file=self._stream)


_WITHOUT_REMAINING = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class _TqdmBar(Bar):
    def __init__(self, bar: Any, message: Callable[[str], None]) -> None:
        super().__init__(bar.n)
        self._bar, self._message, self._waiting = bar, message, True

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        if left is not None:
            self._bar.bar_format = _WITHOUT_REMAINING
            self._bar.set_postfix_str(f"about {spelled(left)} left", refresh=False)
        if self._waiting and done != self._done:
            # The first item also takes the time of starting up: it is no part of the rate.
            self._waiting, self._bar.initial, self._bar.start_t = False, done, time.time()
        self._done = done
        if total is not None and total != self._bar.total:
            self._bar.total = total
            self._bar.refresh()
        self._bar.update(done - self._bar.n)

    def retitle(self, title: str) -> None:
        self._bar.set_description_str(title)

    def item(self, text: str, *, problem: bool = False) -> None:
        if problem:
            self._message(text)

    def close(self) -> None:
        self._bar.close()


class LineProgress(Progress):
    """Plain lines: every message, and a line every 30 seconds for each bar that is not a detail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def bar(self, title: str, *, detail: bool = False, **options: Any) -> Bar:
        """Start counting."""
        return Bar() if detail else _LineBar(self, title, **options)

    def message(self, text: str) -> None:
        """Write a line."""
        print(text, file=self._stream, flush=True)


class _LineBar(Bar):
    def __init__(self, progress: LineProgress, title: str, *, unit: str, **options: Any) -> None:
        super().__init__(options.get("done", 0))
        self._progress, self._title, self._unit = progress, title, unit
        self._first, self._total = self._done, options.get("total")
        self._start = self._last = time.monotonic()
        self._left: float | None = None
        self._waiting = True

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        now, self._left = time.monotonic(), left
        if self._waiting and done != self._first:
            # The first item also takes the time of starting up: it is no part of the rate.
            self._waiting, self._first, self._start = False, done, now
        self._done, self._total = done, self._total if total is None else total
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._progress.message(f"{self._title}: {self._state(now - self._start)}")

    def retitle(self, title: str) -> None:
        self._title = title

    def item(self, text: str, *, problem: bool = False) -> None:
        self._progress.message(text)

    def _state(self, seconds: float) -> str:
        rate = (self._done - self._first) / (seconds or 1.0)
        if self._total is None or rate <= 0:
            return f"{self._done:,} {self._unit}, {rate:,.0f}/s"
        left = max(0, self._total - self._done) / rate if self._left is None else self._left
        return f"{self._done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s, about {spelled(left)} left"


class LogProgress(Progress, Closing):
    """Progress that appends every message, with the time, to a file. A full disk does not stop the work."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def message(self, text: str) -> None:
        """Append a line."""
        now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        with suppress(OSError):
            self._file.write(f"{now} {text}\n")

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()

    def __exit__(self, *error: object) -> None:
        if error[1] is not None:
            self.message(f"ended by {type(error[1]).__name__}: {error[1]}")
        self.close()


class ReportedProgress(Progress):
    """Progress that sends each call to a function, as a message "progress" for `show_progress` in another process."""

    def __init__(self, report: Callable[[str, Any], None]) -> None:
        self._report, self._numbers = report, itertools.count()

    def bar(self, title: str, **options: Any) -> Bar:
        """Start a bar."""
        bar = _ReportedBar(self._report, next(self._numbers), options.get("done", 0))
        bar.send("bar", title=title, **options)
        return bar

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._report("progress", ("message", 0, {"text": text}))


class _ReportedBar(Bar):
    def __init__(self, report: Callable[[str, Any], None], number: int, done: int) -> None:
        super().__init__(done)
        self._report, self._number, self._sent = report, number, 0.0

    def send(self, method: str, **options: Any) -> None:
        self._report("progress", (method, self._number, options))

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        self._done, now = done, time.monotonic()
        if total is not None or now - self._sent >= _SECONDS_BETWEEN_MESSAGES:
            self._sent = now
            self.send("update", done=done, total=total, left=left)

    def retitle(self, title: str) -> None:
        self.send("retitle", title=title)

    def close(self) -> None:
        self.send("close")


def show_progress(
    progress: Progress, bars: dict[int, Bar], event: tuple[str, int, dict[str, Any]]
) -> None:
    """Show the value of a "progress" message. `bars` are the open bars of its process, by number."""
    method, number, options = event
    if method == "message":
        progress.message(**options)
    elif method == "bar":
        bars[number] = progress.bar(**options)
    elif number in bars:
        bar = bars.pop(number) if method == "close" else bars[number]
        getattr(bar, method)(**options)


_used: Progress | None = None


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Make `default_progress()` return a given progress, in all threads of this process."""
    global _used  # noqa: PLW0603 - one per process, like standard error
    before, _used = _used, progress
    try:
        yield
    finally:
        _used = before


def default_progress() -> Progress:
    """Return the progress set by `use_progress`; else bars in a notebook or on a terminal, and lines elsewhere."""
    if _used is not None:
        return _used
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    notebook = type(shell).__name__ == "ZMQInteractiveShell"
    has_bars = notebook or sys.stderr.isatty()
    return BarProgress(sys.stderr, notebook=notebook) if has_bars else LineProgress(sys.stderr)


def message(text: str) -> None:
    """Show a line of text with the default progress."""
    default_progress().message(text)
