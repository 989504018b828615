"""What to do with each slide asked for, given what the store already holds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import Fingerprint
from histopipe.slides.scale import MppSource
from histopipe.store.record import FailureKind, SlideRecord, SlideState


class Action(StrEnum):
    """What becomes of a slide in this run."""

    INGEST = "ingest"
    KEEP = "keep"
    """Complete already."""
    REFUSE = "refuse"
    """Complete, but no longer what was ingested."""
    STILL_FAILED = "still failed"
    """Failed before, and nothing changed since."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action with its reason, which is empty for what needs none."""

    action: Action
    reason: str = ""


def decide(
    slide: SlideFile,
    now: Fingerprint,
    record: SlideRecord | None,
    *,
    from_csv: Mpp | None = None,
    default: Mpp | None = None,
    force: bool = False,
    retry_failed: bool = False,
    options: Collection[str] = (),
) -> Decision:
    """What to do with a slide.

    Args:
        slide: the slide as it was found.
        now: its files' size and time.
        record: what the store holds of it.
        from_csv, default: scales the user gives now.
        force: ingest again what was replaced.
        retry_failed: try again files that were bad.
        options: in force now, of those that a failure may be due to.
    """
    if record is None or record.state is SlideState.PENDING:
        return Decision(Action.INGEST)
    changed = _changed(now, record)
    if record.state is SlideState.FAILED:
        due = record.error_option is not None and record.error_option not in options
        if retry_failed or changed or due or record.error_kind is FailureKind.OPTION:
            return Decision(Action.INGEST)
        return Decision(Action.STILL_FAILED, record.error or "unknown reason")
    why = changed or _rescaled(record, from_csv, default)
    if why is None:
        return Decision(Action.KEEP)
    if force:
        return Decision(Action.INGEST)
    return Decision(
        Action.REFUSE,
        f"{slide.path} {why} since it was ingested; pass --force to ingest it again",
    )


def with_recorded_ids(
    slides: Sequence[SlideFile], records: Mapping[int, SlideRecord], resolve: Callable[[Path], str]
) -> list[SlideFile]:
    """Slides under the ids that the store knows them by: one file reached by another way is the same slide.

    Args:
        slides: as they were found.
        records: what the store holds.
        resolve: a path as records hold it, without links.

    Raises:
        UsageError: a slide of another file has that id already.
    """
    by_path = {record.resolved_path: record.id for record in records.values()}
    named = [replace(s, id=by_path.get(resolve(s.path), s.id)) for s in slides]
    paths: dict[str, Path] = {}
    for slide in named:
        other = paths.setdefault(slide.id, slide.path)
        if other != slide.path:
            raise UsageError(
                f"two slides would both be called {slide.id!r}",
                found=f"{other}, so called in the store, and {slide.path}",
                todo="rename one, or use another --out",
            )
    return sorted(named, key=lambda slide: slide.id)


def _changed(now: Fingerprint, record: SlideRecord) -> str | None:
    if now.size_bytes != record.size_bytes:
        return f"changed ({now.size_bytes:,} bytes, {record.size_bytes:,} before)"
    if now.mtime_ns != record.mtime_ns:
        return "was written to (its modification time is another)"
    return None


def _rescaled(record: SlideRecord, from_csv: Mpp | None, default: Mpp | None) -> str | None:
    used = None
    if (
        record.mpp_source != MppSource.PROPERTIES
    ):  # what a header says comes before what a user says
        used = from_csv or (default if record.mpp_source == MppSource.DEFAULT else None)
    if used is not None and used != record.mpp:
        return f"was given another mpp ({used:g}, {record.mpp:g} before)"
    return None
