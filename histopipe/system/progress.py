"""Progress of long work: bars on a terminal or in a notebook, lines elsewhere, a log file, or nothing.

Functions that take long have a parameter `progress`. None stands for `default_progress()`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from histopipe.system.files import Closing

_SECONDS_BETWEEN_LINES = 30.0


class Bar(Closing):
    """Counts what is done of one piece of work. This one shows nothing.

    Example:
        >>> with SilentProgress().bar("verify", unit="slides", total=3) as bar:
        ...     bar.advance()
    """

    def __init__(self, done: int = 0) -> None:
        self._done = done

    def advance(self, count: int = 1) -> None:
        """Add to what is done."""
        self.update(self._done + count)

    def update(self, done: int, total: int | None = None) -> None:
        """Set what is done and, if given, the total."""
        self._done = done

    def retitle(self, title: str) -> None:
        """Change the title."""

    def item(self, text: str, *, problem: bool = False) -> None:
        """Show a line about a finished item. Where there are bars, only problems are shown."""

    def close(self) -> None:
        """Remove the bar."""


class Progress(Protocol):
    """Shows what a function is doing."""

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
            title: what is being done.
            unit: what is counted, in the plural.
            total: how many there are; None if unknown.
            done: how many of them are done already.
            detail: part of a larger piece of work. It is not shown where there are only lines.
        """

    def message(self, text: str) -> None:
        """Show a line of text."""


class SilentProgress:
    """Shows nothing."""

    def bar(self, title: str, **_: Any) -> Bar:
        """Return a bar that shows nothing."""
        return Bar()

    def message(self, text: str) -> None:
        """Show nothing."""


class BarProgress:
    """Bars by tqdm on a terminal or, if it has the widgets, in a notebook, with messages above them."""

    def __init__(self, stream: TextIO, *, notebook: bool = False) -> None:
        # Late: `--help` must answer at once.
        from tqdm import tqdm

        self._stream, self._write = stream, tqdm.write
        self._tqdm: Any = tqdm
        if notebook and importlib.util.find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm_notebook

            self._tqdm = tqdm_notebook

    def bar(self, title: str, *, unit: str, detail: bool = False, **options: Any) -> Bar:
        """Start a bar."""
        bar = self._tqdm(
            desc=f"  {title[-40:]}" if detail else title, unit=f" {unit}", total=options.get("total"),
            initial=options.get("done", 0), file=self._stream, leave=False, unit_scale=unit == "bytes",
        )  # fmt: skip
        return _TqdmBar(bar, self.message)

    def message(self, text: str) -> None:
        """Write a line above the bars."""
        self._write(text, file=self._stream)


class _TqdmBar(Bar):
    def __init__(self, bar: Any, message: Callable[[str], None]) -> None:
        super().__init__(bar.n)
        self._bar, self._message = bar, message

    def update(self, done: int, total: int | None = None) -> None:
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


class LineProgress:
    """Plain lines: every message, and for each bar that is not a detail a line every 30 seconds."""

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

    def update(self, done: int, total: int | None = None) -> None:
        self._done, self._total = done, self._total if total is None else total
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._progress.message(f"{self._title}: {self._state(now - self._start)}")

    def retitle(self, title: str) -> None:
        self._title = title

    def item(self, text: str, *, problem: bool = False) -> None:
        self._progress.message(text)

    def _state(self, seconds: float) -> str:
        rate = (self._done - self._first) / seconds
        if self._total is None or rate <= 0:
            return f"{self._done:,} {self._unit}, {rate:,.0f}/s"
        left = max(0, self._total - self._done) / rate
        return (
            f"{self._done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s, about {left:,.0f} s left"
        )


class _QuietFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Go on without a log where the disk is full."""


class LogProgress(SilentProgress, Closing):
    """Appends every message, with the time, to a file. A full disk does not stop the work."""

    def __init__(self, path: Path) -> None:
        self._handler = _QuietFile(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger = logging.Logger("histopipe")  # not in the tree of loggers: no other handlers
        self._logger.addHandler(self._handler)

    def message(self, text: str) -> None:
        """Append a line."""
        self._logger.info("%s", text)

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    def __exit__(self, *error: object) -> None:
        if error[1] is not None:
            self.message(f"ended by {type(error[1]).__name__}: {error[1]}")
        self.close()


_used: Progress | None = None


@contextmanager
def use_progress(progress: Progress) -> Iterator[None]:
    """Make `default_progress()` return a given progress, in all threads of this process."""
    global _used  # noqa: PLW0603 - as standard error, it belongs to the process
    before, _used = _used, progress
    try:
        yield
    finally:
        _used = before


def default_progress() -> Progress:
    """Return what `use_progress` has set; else bars in a notebook or on a terminal, and lines elsewhere."""
    if _used is not None:
        return _used
    notebook = _in_notebook()
    if notebook or sys.stderr.isatty():
        return BarProgress(sys.stderr, notebook=notebook)
    return LineProgress(sys.stderr)


def message(text: str) -> None:
    """Show a line of text by the default progress."""
    default_progress().message(text)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
