"""Results of an ingest: the outcome of each slide, the progress display, the summary of the run, `ingest.csv`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from histopipe.errors import ExitCode
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.files import Closing
from histopipe.system.forecast import Outlook, Stages, bottleneck
from histopipe.system.grouping import grouped
from histopipe.system.output import (
    Bar,
    Progress,
    Result,
    counted,
    exit_code_of,
    some,
)
from histopipe.system.table_files import write_table

LOG, SUMMARY = "ingest.log", "ingest.csv"
"""Files that an ingest writes into the store's folder; LMDB ignores them."""
_NAMES = 3
"""Number of slides that a line names: lines stay short."""
_REMEDIES = {
    "no tissue found": "check it with `histopipe tissue`, or use --tissue none to take all patches",
    "no patch fits": "use a smaller --patch-size",
    "no patch has": "use a lower --annotation-threshold, or correct the outlines",
}
"""What to do about slides without patches, by the start of their note."""


class SlideStatus(StrEnum):
    """State of a slide after a run."""

    COMPLETE = "complete"
    SKIPPED = "skipped"
    """Complete since an earlier run."""
    FAILED = "failed"
    PLANNED = "planned"
    """Would be ingested: result of `plan`."""


@dataclass(frozen=True, slots=True)
class SlideOutcome:
    """Result of one slide.

    Attributes:
        patches, unreadable: number of stored patches, and of unreadable patches.
        stored_bytes: bytes of the stored patches.
        route, route_reason: route of the patches, and the reason for it; None if the slide failed.
        seconds: wall time from the start of planning; 0 if it was not planned.
        reason: failure message; empty if the slide did not fail.
        notes: remarks for the user about a slide that did not fail.
    """

    id: str
    path: str
    status: SlideStatus
    patches: int = 0
    unreadable: int = 0
    stored_bytes: int = 0
    route: str | None = None
    route_reason: str | None = None
    seconds: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        record: SlideRecord,
        status: SlideStatus = SlideStatus.COMPLETE,
        *,
        seconds: float = 0.0,
    ) -> SlideOutcome:
        """Return the outcome of a slide with a complete or failed record; `status` is that of a complete one."""
        if record.state is SlideState.FAILED:
            return cls(
                record.id,
                record.path,
                SlideStatus.FAILED,
                seconds=seconds,
                reason=record.error or "unknown reason",
            )
        return cls(
            id=record.id,
            path=record.path,
            status=status,
            patches=record.stored,
            unreadable=record.unreadable,
            stored_bytes=record.stored_bytes,
            route=record.route,
            route_reason=record.route_reason,
            seconds=seconds,
            notes=(*record.notes, *record.annotation_notes),
        )

    def __str__(self) -> str:
        """Return the outcome in one line."""
        if self.status is SlideStatus.FAILED:
            return f"failed {self.id}: {self.reason}"
        return (
            f"{self.status} {self.id}: {counted(self.patches, 'patch')}"
            + f", {self.route}" * bool(self.route and self.patches)
            + f", {self.unreadable} unreadable" * bool(self.unreadable)
            + "".join(f" ({note})" for note in self.notes)
        )


def reason_without_patches(notes: Sequence[str]) -> str:
    """Return the reason why a slide has no patches, from its notes."""
    return next((note for note in notes if note.startswith(tuple(_REMEDIES))), "no patch is stored")


def lines_of_slides(reasons: Mapping[str, str], line: Callable[[str], str]) -> list[str]:
    """Return the line of each slide, but only one line with what to do for three slides and more with a common reason.

    `reasons` has the reasons why slides have no patches, by id; an empty text for slides with patches.
    """
    groups = grouped(reasons, lambda name: _cause(name, reasons[name]) if reasons[name] else name)
    return [
        text
        for names in groups.values()
        for text in ([_common_line(names, reasons[names[0]])] if names[2:] else map(line, names))
    ]


def _cause(name: str, reason: str) -> str:
    """Return a reason without the id of the slide and numbers, which differ between slides."""
    return re.sub(r"\d[\d.,]*", "#", reason.replace(name, ""))


def _common_line(names: list[str], reason: str) -> str:
    todo = next((f"; {todo}" for start, todo in _REMEDIES.items() if reason.startswith(start)), "")
    return (
        f"{counted(len(names), 'slide')}: {names[0]}: {reason}{todo}. "
        f"Also {some(names[1:], _NAMES)}"
    )


@dataclass(frozen=True, slots=True, repr=False)
class IngestReport(Result):
    """Result of an ingest.

    Attributes:
        store: path of the store, or of the folder of parts.
        seconds: wall time of the run.
        slides: the outcome of each slide, sorted by id.
        warnings: warnings about several slides, such as copies.
        shares: share of each stage in the time of the workers, the largest first; see `Stages`.
    """

    store: str
    seconds: float
    slides: list[SlideOutcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shares: Mapping[str, float] = field(default_factory=dict)

    def of(self, status: SlideStatus) -> list[SlideOutcome]:
        """Return the outcomes with a status."""
        return [slide for slide in self.slides if slide.status is status]

    @property
    def failed(self) -> dict[str, str]:
        """Reasons of the slides that failed, by id."""
        return {slide.id: slide.reason for slide in self.of(SlideStatus.FAILED)}

    @property
    def exit_code(self) -> ExitCode:
        """0 if every slide is complete, 3 if some failed, 4 if all did."""
        return exit_code_of(len(self.failed), len(self.slides) - len(self.failed))

    def summary_lines(self) -> list[str]:
        """Return a table of slides, patches, bytes and speed, with one line per status and route.

        The speed of a route is its number of patches divided by the wall time of the whole run.
        """
        done = self.of(SlideStatus.COMPLETE)
        by_route = grouped(done, lambda slide: f"  {slide.route or 'none'}")
        rows = [
            ("ingested", done),
            *sorted(by_route.items()),
            *((str(s), self.of(s)) for s in (SlideStatus.SKIPPED, SlideStatus.FAILED)),
        ]
        # The user may want to change an option that slows down many slides.
        reasons = Counter(f"{s.route}: {s.route_reason}" for s in done if s.route != "copy")
        # How many slides have patches, and why the others have none.
        empty = [s for s in self.slides if not s.patches and s.status is not SlideStatus.FAILED]
        by_reason = grouped(
            empty, lambda slide: re.split("[:;]", reason_without_patches(slide.notes))[0]
        )
        causes = "; ".join(
            f"{reason}: {some([slide.id for slide in slides], _NAMES)}"
            for reason, slides in by_reason.items()
        )
        without, failed = len(empty), len(self.failed)
        return [
            f"{'':<12}{'slides':>8}{'patches':>13}{'unreadable':>12}{'MB':>11}{'patches/s':>11}",
            *(_row(name, slides, self.seconds) for name, slides in rows),
            *(f"{count} × {reason}" for reason, count in reasons.most_common(10)),
            f"{counted(len(self.slides), 'slide')}: {len(self.slides) - without - failed:,} with patches"
            + f", {without:,} without ({causes})" * bool(without)
            + f", {failed:,} failed" * bool(failed),
            *([f"the workers were {bottleneck(self.shares)}"] if self.shares else []),
        ]

    def failed_lines(self) -> list[str]:
        """Return the failed slides with their reasons, and a common reason only once."""
        failed = self.failed
        return lines_of_slides(failed, lambda name: f"{name}: {failed[name]}")

    def write_csv(self, path: Path, progress: Progress) -> None:
        """Write one row per slide with the fields of `SlideOutcome`, replacing the file of an earlier run.

        A failure is only shown, since the slides are stored.
        """
        try:
            write_table(
                path,
                [column.name for column in fields(SlideOutcome)],
                [
                    list((asdict(slide) | {"notes": "; ".join(slide.notes)}).values())
                    for slide in self.slides
                ],
            )
        except OSError as error:
            progress.message(f"{path} cannot be written: {error.strerror}")

    def __str__(self) -> str:
        """Return the store, the summary and the failed slides as text."""
        return "\n".join(
            [self.store, *self.summary_lines(), *(f"failed {line}" for line in self.failed_lines())]
        )


def _row(name: str, slides: Sequence[SlideOutcome], seconds: float) -> str:
    patches = sum(slide.patches for slide in slides)
    if name == SlideStatus.FAILED:
        return f"{name:<12}{len(slides):>8,}"
    sums = (
        f"{name:<12}{len(slides):>8,}{patches:>13,}{sum(s.unreadable for s in slides):>12,}"
        f"{sum(s.stored_bytes for s in slides) / 1e6:>11,.1f}"
    )
    return sums if name == SlideStatus.SKIPPED else f"{sums}{patches / seconds:>11,.0f}"


class IngestProgress(Closing):
    """Shows a bar for the run, a bar for each slide in flight and a line for each finished slide; logs every event.

    `sizes` are those of the slides in bytes, for the time left.

    Attributes:
        stages: seconds of the workers by stage.
        outcomes: outcome of each finished slide, by id.
    """

    def __init__(
        self,
        sizes: Mapping[str, float],
        progress: Progress,
        log: Progress | None = None,
    ) -> None:
        self._count, self._progress = len(sizes), progress
        self._outlook, self.stages, self._began = Outlook(sizes), Stages(), 0.0
        self._log = log or Progress()
        self.outcomes: dict[str, SlideOutcome] = {}
        # Bar and number of patches to come of each slide in flight.
        self._slides: dict[str, tuple[Bar, int]] = {}
        self._causes: dict[str, str] = {}
        self._log.message(f"start: {counted(self._count, 'slide')}")
        self._run = progress.bar(f"slides 0/{self._count}", unit="patches", total=0)

    def planned(self, slide: str, patches: int) -> None:
        """Show the number of patches of a planned slide."""
        self._log.message(f"planned {slide}: {counted(patches, 'patch')}")
        if patches:
            bar = self._progress.bar(slide, unit="patches", total=patches, detail=True)
            self._slides[slide] = bar, patches
        self._outlook.planned(slide, patches)
        self._update()

    def advanced(self, slide: str, patches: int) -> None:
        """Advance the bars by a number of stored patches of a slide."""
        if slide in self._slides:
            bar, left = self._slides[slide]
            patches = min(patches, left)
            bar.advance(patches)
            self._slides[slide] = bar, left - patches
            self._update(patches)

    def spent(self, seconds: Mapping[str, float], patches: int, slides: int | None = None) -> None:
        """Add the seconds that a worker has spent, by stage, on patches of a slide, or on its plan."""
        total = sum(seconds.values())
        self._began = self._began or time.monotonic() - total
        self.stages.add(**seconds)
        self._outlook.spent(total, patches, slides)

    def finished(self, outcome: SlideOutcome) -> None:
        """Keep and show the outcome of a slide."""
        text, failed = str(outcome), outcome.status is SlideStatus.FAILED
        self.outcomes[outcome.id] = outcome
        if outcome.id in self._slides:
            bar, left = self._slides.pop(outcome.id)
            bar.close()
            self._outlook.lost(left)  # if the slide failed before its end
        self._outlook.left_out(outcome.id)
        self._update()
        self._run.retitle(f"slides {len(self.outcomes)}/{self._count}")
        self._log.message(text)
        first = self._causes.setdefault(_cause(outcome.id, outcome.reason), outcome.id)
        if failed and first != outcome.id:
            text = f"failed {outcome.id}: the same as {first}"
        self._run.item(f"[{len(self.outcomes)}/{self._count}] {text}", problem=failed)

    def message(self, text: str) -> None:
        """Show a line, and write it to the log."""
        self._log.message(text)
        self._progress.message(text)

    def close(self) -> None:
        """Remove all bars."""
        for bar in (*(bar for bar, _ in self._slides.values()), self._run):
            bar.close()

    def _update(self, stored: int = 0) -> None:
        outlook = self._outlook
        outlook.done += stored
        left, busy = outlook.seconds_left(), self.stages.seconds.total()
        if left is not None:  # of all workers, as many as have been busy so far
            left *= (time.monotonic() - self._began) / busy
        self._run.update(outlook.done, outlook.total, left)
