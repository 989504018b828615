"""A run in a table, for people and as CSV."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from histopipe.ingest.outcome import IngestReport, SlideOutcome, Status
from histopipe.ingest.progress import Progress
from histopipe.system.files import appearing

LOG, SUMMARY = "ingest.log", "ingest.csv"
"""What an ingest leaves in the store's folder beside the store itself; LMDB takes no notice."""

_REASONS = 10

_COLUMNS = [field.name for field in dataclasses.fields(SlideOutcome)]


def summary_lines(report: IngestReport) -> list[str]:
    """Slides, patches, speed, bytes and routes of a run, a line for each kind of outcome.

    Patches a second are the whole run's share: those of a route over all of the run's seconds.
    """
    done = report.of(Status.COMPLETE)
    routes = sorted({slide.route or "none" for slide in done})
    rows = [("ingested", done)]
    rows += [(f"  {route}", [s for s in done if (s.route or "none") == route]) for route in routes]
    rows += [(str(status), report.of(status)) for status in (Status.SKIPPED, Status.FAILED)]
    header = f"{'':<12}{'slides':>8}{'patches':>13}{'unreadable':>12}{'MB':>11}{'patches/s':>11}"
    lines = [header, *(_line(name, slides, report.seconds) for name, slides in rows)]
    # Why a slide took no shorter route: a lab that sees one reason often may want to know.
    reasons = Counter(f"{s.route}: {s.route_reason}" for s in done if s.route != "copy")
    return [*lines, *(f"{count} × {reason}" for reason, count in reasons.most_common(_REASONS))]


def write_csv(report: IngestReport, path: Path) -> None:
    """A row a slide, with the fields of `SlideOutcome`; it replaces an earlier run's whole or not at all."""
    with appearing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for slide in report.slides:
            values = dataclasses.asdict(slide) | {"notes": "; ".join(slide.notes)}
            table.writerow([values[name] for name in _COLUMNS])


def _line(name: str, slides: Sequence[SlideOutcome], seconds: float) -> str:
    patches = sum(slide.patches for slide in slides)
    if name == Status.FAILED:
        return f"{name:<12}{len(slides):>8,}"
    sums = (
        f"{name:<12}{len(slides):>8,}{patches:>13,}{sum(s.unreadable for s in slides):>12,}"
        f"{sum(s.stored_bytes for s in slides) / 1e6:>11,.1f}"
    )
    return sums if name == Status.SKIPPED else f"{sums}{patches / seconds:>11,.0f}"


def leave_csv(report: IngestReport, path: Path, progress: Progress) -> None:
    """`write_csv`, or say why not: the slides are in, and a missing table is no reason to fail."""
    try:
        write_csv(report, path)
    except OSError as error:
        progress.said(f"{path} cannot be written: {error.strerror}")
