"""How an ingest shows what it is doing: bars on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

from histopipe.ingest.outcome import SlideOutcome, Status

_SECONDS_BETWEEN_LINES = 30.0


class Progress(Protocol):
    """What an ingest tells while it runs."""

    def begin(self, slides: int) -> None:
        """So many slides are asked for."""

    def planned(self, slide: str, patches: int) -> None:
        """A slide will have so many patches."""

    def advanced(self, slide: str, patches: int) -> None:
        """So many more patches of it are stored."""

    def finished(self, outcome: SlideOutcome) -> None:
        """A slide is done, however it ended."""

    def said(self, text: str) -> None:
        """Something a person may want to know of."""

    def close(self) -> None:
        """The run is over."""


def choose_progress(stream: TextIO | None = None) -> Progress:
    """Bars if the stream (standard error) is a terminal, else lines."""
    stream = stream or sys.stderr
    return Bars(stream) if stream.isatty() else Lines(stream)


class Bars:
    """One bar for the run, one a slide in work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._slides: dict[str, tuple[tqdm[NoReturn], int]] = {}
        self._all: tqdm[NoReturn] | None = None
        self._done = self._count = self._planned = 0

    def begin(self, slides: int) -> None:
        self._count = slides
        self._all = tqdm(total=0, unit=" patches", file=self._stream, desc=self._title())

    def planned(self, slide: str, patches: int) -> None:
        self._expect(patches)
        if patches:
            bar = tqdm(
                total=patches,
                unit=" patches",
                file=self._stream,
                desc=f"  {slide[-40:]}",
                leave=False,
            )
            self._slides[slide] = bar, patches

    def advanced(self, slide: str, patches: int) -> None:
        if self._all is not None:
            self._all.update(patches)
        if slide in self._slides:
            self._slides[slide][0].update(patches)

    def finished(self, outcome: SlideOutcome) -> None:
        if outcome.id in self._slides:
            bar, patches = self._slides.pop(outcome.id)
            self._expect(int(bar.n) - patches)  # less than none if it ended half-way
            bar.close()
        if outcome.status is Status.FAILED:
            tqdm.write(line(outcome), file=self._stream)
        self._done += 1
        if self._all is not None:
            self._all.set_description(self._title())

    def said(self, text: str) -> None:
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        for bar, _ in self._slides.values():
            bar.close()
        if self._all is not None:
            self._all.close()

    def _expect(self, patches: int) -> None:
        self._planned += patches
        if self._all is not None:
            self._all.total = self._planned
            self._all.refresh()

    def _title(self) -> str:
        return f"slides {self._done}/{self._count}"


class Lines:
    """A line a slide that ends, and one now and then while none does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = self._last = time.monotonic()
        self._slides = self._done = self._planned = self._stored = 0

    def begin(self, slides: int) -> None:
        self._slides = slides
        self._start = self._last = time.monotonic()

    def planned(self, slide: str, patches: int) -> None:
        self._planned += patches

    def advanced(self, slide: str, patches: int) -> None:
        self._stored += patches
        now = time.monotonic()
        if now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            rate = self._stored / (now - self._start)
            left = (self._planned - self._stored) / rate
            self._say(
                f"{self._stored}/{self._planned} patches, {rate:.0f}/s, "
                f"about {left:.0f} s for the slides begun"
            )

    def finished(self, outcome: SlideOutcome) -> None:
        self._done += 1
        self._say(f"[{self._done}/{self._slides}] {line(outcome)}")

    def said(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _QuietFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


class Log:
    """Every slide's end and every message, with the time, appended to a file. A disk that takes no log stops nothing."""

    def __init__(self, path: Path) -> None:
        self._handler = _QuietFile(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger = logging.Logger("histopipe.ingest")  # of no tree: nobody else's handlers
        self._logger.addHandler(self._handler)

    def begin(self, slides: int) -> None:
        self.said(f"begins: {slides} slides asked for")

    def planned(self, slide: str, patches: int) -> None:
        self.said(f"planned {slide}: {patches} patches")

    def advanced(self, slide: str, patches: int) -> None:
        pass

    def finished(self, outcome: SlideOutcome) -> None:
        self.said(line(outcome))

    def said(self, text: str) -> None:
        self._logger.info("%s", text)

    def close(self) -> None:
        self._handler.close()


@contextmanager
def logged(path: Path) -> Iterator[Log]:
    """A run's log, which says why it ended if that was not the end."""
    log = Log(path)
    try:
        yield log
    except BaseException as error:
        log.said(f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        log.close()


class Both:
    """Tells two what happens."""

    def __init__(self, *told: Progress) -> None:
        self._told = told

    def begin(self, slides: int) -> None:
        for progress in self._told:
            progress.begin(slides)

    def planned(self, slide: str, patches: int) -> None:
        for progress in self._told:
            progress.planned(slide, patches)

    def advanced(self, slide: str, patches: int) -> None:
        for progress in self._told:
            progress.advanced(slide, patches)

    def finished(self, outcome: SlideOutcome) -> None:
        for progress in self._told:
            progress.finished(outcome)

    def said(self, text: str) -> None:
        for progress in self._told:
            progress.said(text)

    def close(self) -> None:
        for progress in self._told:
            progress.close()


def line(outcome: SlideOutcome) -> str:
    """An outcome in one line."""
    if outcome.status is Status.FAILED:
        return f"failed {outcome.id}: {outcome.reason}"
    lost = f", {outcome.unreadable} unreadable" if outcome.unreadable else ""
    route = f", {outcome.route}" if outcome.route and outcome.patches else ""
    notes = "".join(f" ({note})" for note in outcome.notes)
    return f"{outcome.status} {outcome.id}: {outcome.patches} patches{route}{lost}{notes}"
