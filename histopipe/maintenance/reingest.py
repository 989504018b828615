"""Ingest damaged slides of a store again, under the same numbers.

A slide is pending in the meantime. Its record, index, stain fit and patches stay in the store, hidden from readers, until
one transaction completes it with what is still valid of them. So a kill, or an ingest that fails, loses none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.rules import Frame
from histopipe.errors import DamagedStore, SlideError, UsageError
from histopipe.geometry import Mpp, Size
from histopipe.ingestion.coords import CoordsFile, read_corners, spec_of
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.maintenance.checks import Examination
from histopipe.slides.discovery import with_recorded_ids
from histopipe.slides.slide_files import SlideFile, open_slide
from histopipe.store.claims import Claims
from histopipe.store.environment import delete_slide
from histopipe.store.format import (
    INDEX,
    INDEX_COLUMNS,
    PATCHES,
    Columns,
    decode_index,
    patch_key,
    slide_key,
)
from histopipe.store.reading import read_meta, read_record
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress, to_storable_text
from histopipe.system.worker_pool import WorkerDied, WorkerPool, map_in_pool, result_of
from histopipe.tiling.mask_files import identify_mask_file
from histopipe.tiling.network import identify_network
from histopipe.tiling.spec import MaskRules, TilingSpec, spec_of_store

_INTERRUPTED = "its repair was interrupted: run `histopipe repair` again"
"""Error of a pending slide that is ingested again by a repair."""
_MIN_UNREADABLE = 0.01
"""Share of unreadable patches that is always accepted: as few as the default of an ingest allows."""
_OPENING_SECONDS = 120.0
_OF_CLASSES = {"label", "covered"}
_MEASURED = {*_OF_CLASSES, "focus", "pen", "dark"}


def is_interrupted(record: SlideRecord) -> bool:
    """Return whether a repair has hidden a slide, and has not completed it."""
    return record.state is SlideState.PENDING and record.error == _INTERRUPTED


def reingest(
    store: Path,
    examination: Examination,
    jobs: Sequence[SlideJob],
    options: IngestOptions,
    *,
    progress: Progress,
) -> tuple[list[str], dict[str, str], list[str]]:
    """Ingest the damaged slides again for which there is a job with all the files that their first ingest used.

    The store's file must be intact.

    Returns the ids of slides that are complete again, the reasons why others were not ingested, by id, and notes for the
    user.

    Raises:
        UsageError: this version cannot tile slides with the settings of the store, or the jobs do not fit these.
    """
    numbers = {f.number for f in examination.findings if f.entry is None}
    damaged = {
        number: record
        for number, record in examination.records.items()
        if number in numbers and record.state is SlideState.COMPLETE
    }
    if not damaged:
        return [], {}, []
    spec = spec_of_store(examination.spec or {})
    _check_options(jobs, spec, options)
    ids = {r.resolved_path: r.id for r in examination.records.values() if not r.scan}
    job_of_path = {job.file.path: job for job in jobs}
    for file in with_recorded_ids([job.file for job in jobs], ids):
        job_of_path[file.path].file = file
    job_of = {job.id: job for job in jobs}
    left = _find_obstacles(list(damaged.values()), job_of, spec, options)
    ready: list[SlideJob] = []
    with RepairWriter(store) as writer:
        for number, record in damaged.items():
            if record.id in left:
                continue
            job = job_of[record.id]
            job.mpp = Mpp(record.mpp) if record.mpp else None
            job.mask = job.mask if record.mask else None  # its tissue was found by the fallback
            job.frame = options.rules.frame
            if (
                job.frame == "auto"
            ):  # earlier versions, which recorded none, read files in the turned frame
                job.frame = cast(Frame, record.frame or "turned")
            obstacle = writer.hide(number, record, job)
            if obstacle is None:
                ready.append(job)
            else:
                left[record.id] = obstacle
        if ready:
            shares = [r.unreadable / r.planned for r in damaged.values() if r.planned]
            options = replace(
                options,
                rules=replace(options.rules, roi=spec.roi),
                # Its mask was used before, and is not judged again.
                masks=MaskRules(tissue_values=spec.tissue_values, tissue_check="warn"),
                max_unreadable=max([_MIN_UNREADABLE, *shares]),
            )
            report = ingest_slides(ready, store, spec, options, progress=progress, writer=writer)
            left |= report.failed
    return [job.id for job in ready if job.id not in left], left, writer.notes


class RepairWriter(StoreWriter):
    """A writer for slides that are ingested again: what they have is replaced only when they are complete.

    Attributes:
        notes: notes for the user, about what could not be kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes: list[str] = []

    def hide(self, number: int, record: SlideRecord, job: SlideJob) -> str | None:
        """Make a slide pending, to be read from the file of its job; otherwise return why it cannot be ingested.

        Raises:
            SlideUnreadable: the coordinate file of the job cannot be read.
        """
        with Claims(self.path) as claims:
            if not claims.take(number) or self.record(number) != record:
                return "it was changed during the repair"
            if job.coords is not None:
                old = self._index(number, record.id)
                if not old:
                    self.notes.append(
                        f"{record.id}: its index was lost: if its coordinates were not imported from "
                        f"{job.coords.path}, compute its features again"
                    )
                elif not _have_corners(old, *read_corners(job.coords.path).T):
                    return f"{job.coords.path} has other coordinates than were imported"
            self.change(
                number,
                state=SlideState.PENDING,
                error=_INTERRUPTED,
                path=to_storable_text(str(job.file.path)),
                resolved_path=job.file.resolve(),
            )
        return None

    def _index(self, slide: int, where: str) -> Columns:
        """Return the columns of the slide's index; none if it is damaged."""
        key = slide_key(slide)
        with self.environment.read() as transaction, suppress(DamagedStore):
            block = transaction.get(key, db=self.environment.databases[INDEX])
            return decode_index(key, bytes(block or b""), where=where)
        return {}

    def records(self) -> dict[int, SlideRecord]:
        """Return the records as of new slides: an ingest skips a hidden slide, and notes that patch labels are lost."""
        records = super().records().items()
        return {n: replace(record, annotations=None, error=None) for n, record in records}

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Do nothing: the slide is hidden, and its patches will be replaced one by one."""

    def fail(self, slide: int, record: SlideRecord) -> None:
        """Make the slide visible again, with the patches that can still be read."""
        self.change(slide, state=SlideState.COMPLETE, error=None)

    def complete(
        self,
        slide: int,
        record: SlideRecord,
        columns: Columns,
        thumbnails: Mapping[str, bytes],
        **_: Any,
    ) -> None:
        """Make the slide visible, with what users gave and with the columns that are still valid."""
        databases = self.environment.databases
        with self.environment.read() as transaction:
            before = read_record(transaction, databases, slide, self.path)
            classes = read_meta(transaction, databases, "classes", list, self.path)
        old = self._index(slide, record.id)
        has_moved = bool(old) and not _have_corners(old, columns["x_l0"], columns["y_l0"])
        kept = {} if has_moved else _measured_columns(old, len(classes))
        if record.annotations is not None:
            kept = {name: column for name, column in kept.items() if name not in _OF_CLASSES}
        record, notes = _merged_record(before, record, kept)
        if has_moved:
            notes.append("its patches have other coordinates: compute its features again")
        self.notes += [f"{record.id}: {'; '.join(notes)}"] * bool(notes)
        beyond = patch_key(slide, record.planned)
        self.environment.change(
            partial(delete_slide, database=databases[PATCHES], slide=slide, first=beyond)
        )
        super().complete(slide, record, {**columns, **kept}, thumbnails)


def _have_corners(index: Columns, x_l0: NDArray[Any], y_l0: NDArray[Any]) -> bool:
    return np.array_equal(index["x_l0"], x_l0) and np.array_equal(index["y_l0"], y_l0)


def _measured_columns(index: Columns, classes: int) -> Columns:
    """Return the columns that were measured or labelled after an ingest; no labels if names of classes are lost."""
    columns = {n: c for n, c in index.items() if n in _MEASURED or n not in INDEX_COLUMNS}
    labels = index.get("label", np.empty(0))
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
        return {name: column for name, column in columns.items() if name not in _OF_CLASSES}
    return columns


def _merged_record(
    before: SlideRecord, now: SlideRecord, kept: Mapping[str, Any]
) -> tuple[SlideRecord, list[str]]:
    """Return the new record with the fields from users and those of the kept columns, and notes."""
    names = ["patient", "label", "site", "mpp_source", "unknown"]
    if "label" in kept:
        names += ["annotations", "annotation_notes", "patch_labels"]
    if "focus" in kept:
        names += ["quality"]
    record = replace(now, **{name: getattr(before, name) for name in names})
    notes = []
    if before.annotations is not None and now.annotations is None and "label" not in kept:
        notes.append("its patch labels are lost: run `histopipe annotate` again")
        record = replace(record, notes=list(dict.fromkeys([*record.notes, *notes])))
    if record.unreadable > before.unreadable:
        notes.append(f"{record.unreadable} patches are unreadable, {before.unreadable} before")
    return record, notes


def _check_options(jobs: Sequence[SlideJob], spec: TilingSpec, options: IngestOptions) -> None:
    """Raise UsageError if masks, a network or coordinates are given that the store does not use."""
    has_tissue = options.tissue_network is not None or any(job.mask for job in jobs)
    for flag, is_given, is_used, what in (
        ("--tissue", has_tissue, spec.tissue in ("masks", "model"), f"tissue {spec.tissue}"),
        ("--coords", any(job.coords for job in jobs), spec.grid == "imported", "a regular grid"),
    ):
        if is_given and not is_used:
            raise UsageError(f"{flag} does not fit the store", found=what, expected=f"no {flag}")


def _find_obstacles(
    records: Sequence[SlideRecord],
    jobs: Mapping[str, SlideJob],
    spec: TilingSpec,
    options: IngestOptions,
) -> dict[str, str]:
    """Return why slides cannot be ingested as before, by id. Workers open the files, since a damaged one may crash."""
    obstacles = {
        record.id: "its file is not among the given slides"
        for record in records
        if record.id not in jobs
    }
    network = identify_network(options.tissue_network) if options.tissue_network else None
    tasks = [(jobs[record.id], record) for record in records if record.id in jobs]
    task = partial(_find_obstacle, spec=spec, network=network)
    with WorkerPool(options.worker_count) as pool:
        for (job, _), future in map_in_pool(pool, task, tasks, seconds=_OPENING_SECONDS):
            try:
                obstacle = result_of(future)
            except (WorkerDied, SlideError) as error:
                obstacle = f"its file cannot be opened: {error}"
            if obstacle is not None:
                obstacles[job.id] = obstacle
    return obstacles


def _find_obstacle(
    task: tuple[SlideJob, SlideRecord], spec: TilingSpec, network: str | None
) -> str | None:
    job, record = task
    if not _has_scan(job.file, record):
        return f"{job.file.path} is now another scan"
    try:
        return _find_missing_file(job, record, spec, network)
    except SlideError as error:
        return str(error)


def _has_scan(slide: SlideFile, record: SlideRecord) -> bool:
    """Return whether a file has the recorded hashes, if there are any, and the recorded size of level 0."""
    with open_slide(slide.path) as opened:
        size = Size(record.width, record.height)
        return size == opened.info.size and record.hashes.match_file(slide, opened.info)


def _find_missing_file(
    job: SlideJob, record: SlideRecord, spec: TilingSpec, network: str | None
) -> str | None:
    """Return which file is missing, or differs from that of the ingest, so that other patches would be chosen."""
    mask, annotations = (
        None if path is None else identify_mask_file(path) for path in (job.mask, job.annotations)
    )
    # The rules follow the file. `annotate` may have used others than the ingest.
    annotated = (record.annotations or "").partition(", threshold ")[0] or None
    for what, flag, is_used, before, now in (
        ("mask", "--tissue", spec.tissue == "masks" and record.mask is not None, record.mask, mask),
        ("network", "--tissue", spec.tissue == "model", spec.tissue_model, network),
        ("annotation file", "--annotations", bool(spec.exclude), annotated, annotations),
    ):
        if is_used and now != before:
            passed = f"but {now} was passed" if now else "which was not passed"
            return f"its {what} was {before or 'none'}, {passed} with {flag}"
    if spec.roi is not None and job.annotations is None:
        return f"its region {spec.roi!r} is in annotations that were not passed with --annotations"
    if spec.grid == "imported" and job.coords is None:
        return "its coordinates were imported, and not passed with --coords"
    if job.coords is not None and not _has_coordinates(job.coords, record, spec):
        return f"{job.coords.path} has other coordinates than were imported"
    return None


def _has_coordinates(file: CoordsFile, record: SlideRecord, spec: TilingSpec) -> bool:
    fields = attrgetter("patch_size", "overlap", "level", "mpp")
    is_same = fields(spec_of([file])) == fields(spec)
    return is_same and len(read_corners(file.path)) == record.planned
