"""What became of every slide, and what that makes of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from histopipe.errors import ExitCode
from histopipe.store.record import SlideRecord


class Status(StrEnum):
    """A slide after a run."""

    COMPLETE = "complete"
    SKIPPED = "skipped"
    """Complete since an earlier run."""
    FAILED = "failed"
    PLANNED = "planned"
    """Would be ingested: of a run that only plans."""


@dataclass(frozen=True, slots=True)
class SlideOutcome:
    """One slide asked for.

    Attributes:
        patches, unreadable: stored, and lost to damage.
        route, route_reason: how its patches were made, and why so; None where none were.
        seconds: that it was in work; 0 if it was not.
        reason: why it failed; empty otherwise.
        notes: what a person should know although it did not fail.
    """

    id: str
    path: str
    status: Status
    patches: int = 0
    unreadable: int = 0
    stored_bytes: int = 0
    route: str | None = None
    route_reason: str | None = None
    seconds: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IngestReport:
    """A whole run, slides in the order of their ids."""

    store: str
    seconds: float
    slides: list[SlideOutcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of(self, status: Status) -> list[SlideOutcome]:
        """The slides of one status."""
        return [slide for slide in self.slides if slide.status is status]

    @property
    def exit_code(self) -> ExitCode:
        """0 if every slide asked for is complete, 3 if some are, 4 if none is."""
        return exit_code(len(self.of(Status.FAILED)), len(self.slides))


def exit_code(failed: int, slides: int) -> ExitCode:
    """0 if no slide asked for failed, 3 if some did, 4 if all did."""
    if not failed:
        return ExitCode.DONE
    return ExitCode.PARTLY if failed < slides else ExitCode.NOTHING


def outcome_of(record: SlideRecord, status: Status) -> SlideOutcome:
    """The outcome that a complete slide's record tells."""
    return SlideOutcome(
        id=record.id, path=record.path, status=status, patches=record.stored,
        unreadable=record.unreadable, stored_bytes=record.stored_bytes, route=record.route,
        route_reason=record.route_reason, notes=(*record.notes, *record.annotation_notes),
    )  # fmt: skip


def failed_outcome(record: SlideRecord, reason: str) -> SlideOutcome:
    """The outcome of a slide that failed."""
    return SlideOutcome(record.id, record.path, Status.FAILED, reason=reason)
