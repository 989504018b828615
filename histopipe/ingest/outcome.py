"""What became of every slide, and what that makes of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from histopipe.errors import ExitCode


class Status(StrEnum):
    """A slide after a run."""

    COMPLETE = "complete"
    SKIPPED = "skipped"
    """Complete since an earlier run."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SlideOutcome:
    """One slide asked for.

    Attributes:
        patches, unreadable: stored, and lost to damage.
        reason: why it failed; empty otherwise.
        notes: what a person should know although it did not fail.
    """

    id: str
    path: str
    status: Status
    patches: int = 0
    unreadable: int = 0
    stored_bytes: int = 0
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
        failed = len(self.of(Status.FAILED))
        if not failed:
            return ExitCode.DONE
        return ExitCode.PARTLY if failed < len(self.slides) else ExitCode.NOTHING
