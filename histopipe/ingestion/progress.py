"""Progress of an ingest: a bar for the run, a bar for each slide in flight, and a line for each slide that ends."""

from __future__ import annotations

from histopipe.ingestion.report import SlideOutcome, Status
from histopipe.system.files import Closing
from histopipe.system.progress import Bar, Progress, SilentProgress


class IngestProgress(Closing):
    """Shows an ingest by a `Progress`, and writes its events to a log.

    Args:
        shown: where bars and lines are shown.
        log: where every event is written as a line.
    """

    def __init__(self, shown: Progress, log: Progress | None = None) -> None:
        self._shown, self._log = shown, log or SilentProgress()
        self._run = Bar()
        self._slides: dict[str, tuple[Bar, int, int]] = {}
        self._ended = self._count = self._planned = self._stored = 0

    def begin(self, slides: int) -> None:
        """Start the bar of the run.

        Args:
            slides: number of slides, including those that need no ingest.
        """
        self._log.message(f"begins: {slides} slides")
        self._count = slides
        self._run = self._shown.bar(self._title(), unit="patches", total=0)

    def planned(self, slide: str, patches: int) -> None:
        """Show that a slide will have so many patches."""
        self._log.message(f"planned {slide}: {patches} patches")
        if patches:
            bar = self._shown.bar(slide, unit="patches", total=patches, detail=True)
            self._slides[slide] = bar, patches, 0
        self._update(planned=patches)

    def advanced(self, slide: str, patches: int) -> None:
        """Show that so many more patches of a slide are stored."""
        if slide in self._slides:
            bar, planned, stored = self._slides[slide]
            bar.advance(patches)
            self._slides[slide] = bar, planned, stored + patches
        self._update(stored=patches)

    def finished(self, outcome: SlideOutcome) -> None:
        """Show the outcome of a slide."""
        if outcome.id in self._slides:
            bar, planned, stored = self._slides.pop(outcome.id)
            bar.close()
            self._update(planned=stored - planned)  # negative if the slide failed half-way
        self._ended += 1
        self._run.retitle(self._title())
        self._log.message(str(outcome))
        self._run.item(
            f"[{self._ended}/{self._count}] {outcome}", problem=outcome.status is Status.FAILED
        )

    def message(self, text: str) -> None:
        """Show a line, and write it to the log."""
        self._log.message(text)
        self._shown.message(text)

    def close(self) -> None:
        """Remove all bars."""
        for bar, _, _ in self._slides.values():
            bar.close()
        self._run.close()

    def _update(self, *, planned: int = 0, stored: int = 0) -> None:
        self._planned += planned
        self._stored += stored
        self._run.update(self._stored, self._planned)

    def _title(self) -> str:
        return f"slides {self._ended}/{self._count}"
