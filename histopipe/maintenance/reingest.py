"""Ingest damaged slides of a store again, under the same numbers.

The data of a slide is set aside during the ingest, so that a kill at any time loses none of it. One transaction copies
the slide's entries, except patches and thumbnails, into the database `set-aside`, and makes the slide pending. When the
slide is complete again, one transaction restores the data that is still valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import DamagedStore, SlideError
from histopipe.geometry import Mpp, Size
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.maintenance.checks import Examination
from histopipe.slides.discovery import with_recorded_ids
from histopipe.slides.readers import open_slide
from histopipe.slides.slide_files import SlideFile
from histopipe.store.claims import Claims
from histopipe.store.environment import Environment, entries_with
from histopipe.store.format import (
    INDEX,
    INDEX_COLUMNS,
    META,
    PATCHES,
    SET_ASIDE,
    SLIDE_KEY_BYTES,
    SLIDES,
    THUMBNAILS,
    Columns,
    decode_index,
    encode_index,
    slide_key,
)
from histopipe.store.reading import read_records
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.writer import open_for_change
from histopipe.system.files import to_storable_text
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool, map_in_pool, result_of
from histopipe.tiling.spec import spec_of_store

_MIN_UNREADABLE = 0.01
_OPENING_SECONDS = 120.0
_NOT_SET_ASIDE = {META, PATCHES, THUMBNAILS, SET_ASIDE}
"""Databases that an ingest writes again, or that belong to no slide."""
_OF_CLASSES = {"label", "covered"}
_MEASURED = {*_OF_CLASSES, "focus", "pen", "dark"}


def reingest(
    store: Path,
    examination: Examination,
    slides: Sequence[SlideFile],
    options: IngestOptions,
    *,
    annotations: Mapping[str, Path],
    progress: Progress,
) -> tuple[list[str], dict[str, str], list[str]]:
    """Ingest the damaged slides whose files are available, and restore the data that was set aside.

    The store's file must be intact. `annotations` are files by slide id.

    Returns the ids of slides that are complete again, the reasons why others were not ingested, by id, and notes for the
    user.

    Raises:
        SpecMismatch: this version cannot tile slides with the settings of the store.
    """
    numbers = {f.number for f in examination.findings if f.entry is None}
    damaged = {
        number: record
        for number, record in examination.records.items()
        if number in numbers and record.state is SlideState.COMPLETE
    }
    left: dict[str, str] = {}
    with open_for_change(store) as environment:
        done, begun, notes = _restore_all(environment)
        records = [*{**damaged, **begun}.values()]
        if not records:
            return list(done.values()), left, notes
        spec = spec_of_store(examination.spec or {})
        ids = {r.resolved_path: r.id for r in examination.records.values()}
        files, left = _matching_files(with_recorded_ids(slides, ids), records, options.worker_count)
        for number, record in damaged.items():
            file = files.get(record.id)
            if file is not None and not _set_aside(environment, number, record, file):
                left[record.id] = "it was changed during the repair"
                del files[record.id]
        if files:
            shares = [r.unreadable / r.planned for r in damaged.values() if r.planned]
            options = replace(
                options,
                rules=replace(options.rules, roi=spec.roi),
                max_unreadable=max([_MIN_UNREADABLE, *shares]),
            )
            mpps = {r.id: Mpp(r.mpp) for r in records if r.mpp}
            jobs = [
                SlideJob(file, mpp=mpps.get(name), annotations=annotations.get(name))
                for name, file in files.items()
            ]
            left |= ingest_slides(jobs, store, spec, options, progress=progress).failed
        now_done, _, more_notes = _restore_all(environment)
    return [*(done | now_done).values()], left, notes + more_notes


def _restore_all(
    environment: Environment,
) -> tuple[dict[int, str], dict[int, SlideRecord], list[str]]:
    """Restore data to complete slides, and delete that of removed ones.

    Returns the ids of the complete slides, the records of slides that are not complete, both by number, and notes.
    """
    with environment.read() as transaction:
        records = read_records(transaction, environment.databases, environment.path)
        kept = environment.databases.get(SET_ASIDE)
        entries = entries_with(transaction, kept, b"") if kept is not None else ()
        numbers = {int.from_bytes(key[1:SLIDE_KEY_BYTES], "big") for key, _ in entries}
    done: dict[int, str] = {}
    begun: dict[int, SlideRecord] = {}
    notes: list[str] = []
    for number in sorted(numbers):
        record = records.get(number)
        if record is not None and record.state is not SlideState.COMPLETE:
            begun[number] = record
            continue
        note = restore(environment, number)
        notes += [note] if note else []
        if record is not None:
            done[number] = record.id
    return done, begun, notes


def _matching_files(
    slides: Sequence[SlideFile], records: Sequence[SlideRecord], workers: int
) -> tuple[dict[str, SlideFile], dict[str, str]]:
    """Return the files of recorded slides that contain the same scan, and why the others have none, by id."""
    by_id = {slide.id: slide for slide in slides}
    scans = {record.id: record for record in records}
    left = {name: "its file is not among the given slides" for name in scans if name not in by_id}
    files = {name: by_id[name] for name in scans if name in by_id}
    with WorkerPool(workers) as pool:
        tasks = [(slide, scans[name]) for name, slide in files.items()]
        for (slide, _), future in map_in_pool(pool, _has_scan, tasks, seconds=_OPENING_SECONDS):
            try:
                if result_of(future):
                    continue
                left[slide.id] = f"{slide.path} is now another scan"
            except (WorkerDied, SlideError) as error:
                left[slide.id] = f"its file cannot be opened: {error}"
            del files[slide.id]
    return files, left


def _set_aside(environment: Environment, number: int, record: SlideRecord, file: SlideFile) -> bool:
    pending = replace(
        record,
        state=SlideState.PENDING,
        path=to_storable_text(str(file.path)),
        resolved_path=file.resolve(),
        annotations=None,  # otherwise, the ingest adds a note that the patch labels are lost
    )
    with Claims(environment.path) as claims:
        return claims.take(number) and set_aside(environment, number, record, pending)


def _has_scan(task: tuple[SlideFile, SlideRecord]) -> bool:
    """Return whether a file has the recorded hashes, if there are any, and the recorded size of level 0."""
    slide, record = task
    with open_slide(slide.path) as opened:
        # A slide of an interrupted repair has neither.
        size = Size(record.width, record.height) if record.width else opened.info.size
        return size == opened.info.size and record.hashes.match_file(slide, opened.info)


def set_aside(
    environment: Environment, number: int, expected: SlideRecord, pending: SlideRecord
) -> bool:
    """Set aside the data of a slide, and replace its record by `pending`, in one transaction.

    Returns False without changes if the current record differs from `expected`.
    """
    slide = slide_key(number)

    def work(transaction: Any) -> bool:
        databases = environment.databases
        if _decoded(number, transaction.get(slide, db=databases[SLIDES])) != expected:
            return False
        kept = environment.database(SET_ASIDE, transaction)
        for name, database in list(databases.items()):
            if database is None or name in _NOT_SET_ASIDE:
                continue
            for key, entry in list(entries_with(transaction, database, slide)):
                transaction.put(_kept_key(number, name) + key[SLIDE_KEY_BYTES:], entry, db=kept)
        transaction.put(slide, pending.to_bytes(number), db=databases[SLIDES])
        return True

    return environment.change(work)


def restore(environment: Environment, number: int) -> str | None:
    """Restore the data of a slide that is complete again, if it is still valid. Delete the data of a removed slide.

    Returns a note for the user about data that could not be restored, if any.
    """

    def work(transaction: Any) -> str | None:
        note = None
        kept = environment.database(SET_ASIDE, transaction)
        entries = dict(entries_with(transaction, kept, _kept_key(number)))
        databases, key = environment.databases, slide_key(number)
        before = _decoded(number, entries.get(_kept_key(number, SLIDES)))
        now = _decoded(number, transaction.get(key, db=databases[SLIDES]))
        if before is not None and now is not None:
            old = _index(number, entries.get(_kept_key(number, INDEX)))
            index = _index(number, transaction.get(key, db=databases[INDEX]))
            classes = bytes(transaction.get(b"classes", db=databases[META]) or b"[]")
            columns = _still_valid(old, index, len(json.loads(classes)))
            if now.annotations is not None:
                columns = {n: c for n, c in columns.items() if n not in _OF_CLASSES}
            record, note = _record(before, now, columns)
            if index:
                transaction.put(key, encode_index(key, {**index, **columns}), db=databases[INDEX])
            transaction.put(key, record.to_bytes(number), db=databases[SLIDES])
        for kept_key, entry in entries.items():
            name, _, rest = kept_key[SLIDE_KEY_BYTES:].partition(b"\0")
            if now is not None and name not in (SLIDES, INDEX):
                transaction.put(key + rest, entry, db=environment.database(name, transaction))
            transaction.delete(kept_key, db=kept)
        return note

    return environment.change(work)


def _kept_key(number: int, database: bytes | None = None) -> bytes:
    """Return the prefix of a slide's keys in `set-aside`, or of those of one database. It is no slide number."""
    prefix = b"\xff" + number.to_bytes(SLIDE_KEY_BYTES - 1, "big")
    return prefix if database is None else prefix + database + b"\0"


def _decoded(number: int, value: bytes | memoryview | None) -> SlideRecord | None:
    with suppress(DamagedStore):
        return SlideRecord.from_bytes(number, value or b"", where=f"slide {number}")
    return None


def _index(number: int, block: bytes | memoryview | None) -> Columns:
    """Return the columns of an index block; empty if it is missing or damaged."""
    with suppress(DamagedStore):
        return decode_index(slide_key(number), bytes(block or b""), where=f"slide {number}")
    return {}


def _still_valid(old: Columns, new: Columns, classes: int) -> Columns:
    """Return the columns that were measured or labelled after the ingest, if the patch coordinates are equal."""
    if not (old and new and all(np.array_equal(old[name], new[name]) for name in ("x_l0", "y_l0"))):
        return {}
    valid = {name: c for name, c in old.items() if name in _MEASURED or name not in INDEX_COLUMNS}
    labels = valid["label"]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:  # class names are lost
        return {name: c for name, c in valid.items() if name not in _OF_CLASSES}
    return valid


def _record(
    before: SlideRecord, now: SlideRecord, columns: Mapping[str, Any]
) -> tuple[SlideRecord, str | None]:
    """Return the record with the fields from users and those of the restored columns, and a note."""
    names = ["patient", "label", "site", "mpp_source", "unknown"]
    if "label" in columns:
        names += ["annotations", "annotation_notes", "patch_labels"]
    if "focus" in columns:
        names += ["quality"]
    record = replace(now, **{name: getattr(before, name) for name in names})
    notes = []
    if before.annotations is not None and now.annotations is None and "label" not in columns:
        notes.append("its patch labels are lost: run `histopipe annotate` again")
        record = replace(record, notes=list(dict.fromkeys([*record.notes, *notes])))
    if record.unreadable > before.unreadable:
        notes.append(f"{record.unreadable} patches are unreadable, {before.unreadable} before")
    return record, f"{now.id}: {'; '.join(notes)}" if notes else None
