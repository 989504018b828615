"""Ingest damaged slides of a store again, in their places.

What is known of a slide is set aside meanwhile, so that a kill at any moment loses none of it. One transaction copies the
slide's record, index and all else but its patches and thumbnails into the database `set-aside`, and makes the slide pending.
Once the slide is complete again, one transaction returns what still fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, SlideError
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.records import resolved, with_recorded_ids
from histopipe.maintenance.store_check import Examination
from histopipe.slides.discovery import SlideFile, tile_hash
from histopipe.slides.slide import Slide
from histopipe.store.claims import Claims
from histopipe.store.environment import Environment, entries_with
from histopipe.store.folder import open_for_change
from histopipe.store.format import (
    INDEX,
    INDEX_COLUMNS,
    META,
    PATCHES,
    SET_ASIDE,
    SLIDES,
    THUMBNAILS,
    decode_index,
    encode_index,
    slide_key,
)
from histopipe.store.meta import read_records
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.files import storable
from histopipe.system.progress import Progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool, results_of
from histopipe.tiling.spec import spec_of_store

_LEAST_UNREADABLE = 0.01
_OPENING_SECONDS = 120.0
_NUMBER = 4
"""Bytes of a slide number at the start of a key."""
_ANEW = {META, PATCHES, THUMBNAILS, SET_ASIDE}
"""Databases that an ingest fills anew, or that are of no slide."""
_OF_CLASSES = {"label", "covered"}
_MEASURED = {*_OF_CLASSES, "focus", "pen", "dark"}

Columns = dict[str, NDArray[Any]]


@dataclass(slots=True)
class Reingestion:
    """Ingests the damaged slides of a store again, by an ordinary ingest. The store's file must be sound.

    Attributes:
        annotations: files of outlines by slide id.
        done: ids of slides that are complete again, by number.
        left: reasons by id, of slides that are not.
        notes: what the user should know.
    """

    store: Path
    found: Examination
    given: Sequence[SlideFile]
    options: IngestOptions
    annotations: Mapping[str, Path]
    progress: Progress
    done: dict[int, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ingest what can be ingested, and return to the slides what was set aside of them.

        Raises:
            SpecMismatch: this version cannot make the patches of the store.
        """
        hit = {f.number for f in self.found.findings if f.entry is None}
        records = self.found.records.items()
        damaged = {n: r for n, r in records if n in hit and r.state is SlideState.COMPLETE}
        with open_for_change(self.store) as environment:
            begun = self._restore(environment)
            if damaged or begun:
                self._ingest(environment, damaged, [*{**damaged, **begun}.values()])
                self._restore(environment)

    def _restore(self, environment: Environment) -> dict[int, SlideRecord]:
        """Return to complete slides what was set aside, forget what was of removed ones, and return all others."""
        with environment.read() as transaction:
            records = read_records(transaction, environment.databases, self.store)
            kept = environment.databases.get(SET_ASIDE)
            keys = (
                [key for key, _ in entries_with(transaction, kept, b"")] if kept is not None else []
            )
        begun = {}
        for number in sorted({int.from_bytes(key[1:_NUMBER], "big") for key in keys}):
            record = records.get(number)
            if record is not None and record.state is not SlideState.COMPLETE:
                begun[number] = record
                continue
            note = restore(environment, number)
            self.notes += [note] if note else []
            if record is not None:
                self.done[number] = record.id
        return begun

    def _ingest(
        self,
        environment: Environment,
        damaged: Mapping[int, SlideRecord],
        wanted: Sequence[SlideRecord],
    ) -> None:
        """Ingest the wanted slides: damaged ones, and those that an interrupted repair has set aside."""
        spec = spec_of_store(self.found.spec or {})
        files = self._files(wanted)
        for number, record in damaged.items():
            file = files.get(record.id)
            if file is not None and not self._set_aside(environment, number, record, file):
                self.left[record.id] = "it was changed meanwhile"
                del files[record.id]
        if not files:
            return
        shares = [r.unreadable / r.planned for r in damaged.values() if r.planned]
        options = replace(
            self.options,
            rules=replace(self.options.rules, roi=spec.roi),
            max_unreadable=max([_LEAST_UNREADABLE, *shares]),
        )
        mpps = {r.id: Mpp(r.mpp) for r in wanted if r.mpp}
        slides = [
            SlideInput(file, mpp=mpps.get(name), annotations=self.annotations.get(name))
            for name, file in files.items()
        ]
        report = ingest_slides(slides, self.store, spec, options, progress=self.progress)
        self.left |= report.failed

    def _files(self, wanted: Sequence[SlideRecord]) -> dict[str, SlideFile]:
        """The files of slides by id, where they are given and of the same scan."""
        given = {slide.id: slide for slide in with_recorded_ids(self.given, self.found.records)}
        scans = {record.id: record.content for record in wanted}
        self.left |= {
            name: "its file is not among those given" for name in scans if name not in given
        }
        files = {name: given[name] for name in scans if name in given}
        with WorkerPool(self.options.worker_count) as pool:
            tasks = [[slide] for slide in files.values()]
            for (slide,), content in results_of(pool, _OPENING_SECONDS, _content, tasks):
                if isinstance(content, WorkerDied | SlideError):
                    self.left[slide.id] = f"its file cannot be opened: {content}"
                elif scans[slide.id] not in (None, content):
                    self.left[slide.id] = f"{slide.path} is another scan by now"
                else:
                    continue
                del files[slide.id]
        return files

    def _set_aside(
        self, environment: Environment, number: int, record: SlideRecord, file: SlideFile
    ) -> bool:
        pending = replace(
            record,
            state=SlideState.PENDING,
            path=storable(str(file.path)),
            resolved_path=resolved(file.path),
            annotations=None,  # else the ingest would note that its classes are gone
        )
        with Claims(self.store) as claims:
            return claims.take(number) and set_aside(environment, number, record, pending)


def _content(slides: list[SlideFile]) -> str | SlideError | None:
    """What copies of one scan have in common, of a slide; None where there is nothing of that kind."""
    (slide,) = slides
    try:
        with Slide(slide.path) as opened:
            return opened.info.quickhash or tile_hash(slide.path)
    except SlideError as error:
        return error


def set_aside(
    environment: Environment, number: int, expected: SlideRecord, pending: SlideRecord
) -> bool:
    """Set aside what is stored of a slide, and give it the record `pending`, in one transaction.

    Returns False, and changes nothing, if the slide no longer has the record `expected`.
    """
    own = slide_key(number)

    def work(transaction: Any) -> bool:
        databases = environment.databases
        if _decoded(number, transaction.get(own, db=databases[SLIDES])) != expected:
            return False
        kept = environment.database(SET_ASIDE, transaction)
        for name, database in list(databases.items()):
            if database is None or name in _ANEW:
                continue
            for key, entry in list(entries_with(transaction, database, own)):
                transaction.put(_kept_key(number, name) + key[_NUMBER:], entry, db=kept)
        transaction.put(own, pending.to_bytes(number), db=databases[SLIDES])
        return True

    return environment.change(work)


def restore(environment: Environment, number: int) -> str | None:
    """Return to a slide that is complete again what was set aside, where it still fits. Of a removed slide, forget it.

    Returns a note for the user on what could not be returned, if any.
    """

    def work(transaction: Any) -> str | None:
        note = None
        kept = environment.database(SET_ASIDE, transaction)
        held = dict(entries_with(transaction, kept, _kept_key(number)))
        databases, key = environment.databases, slide_key(number)
        before = _decoded(number, held.get(_kept_key(number, SLIDES)))
        now = _decoded(number, transaction.get(key, db=databases[SLIDES]))
        if before is not None and now is not None:
            old = _index(number, held.get(_kept_key(number, INDEX)))
            index = _index(number, transaction.get(key, db=databases[INDEX]))
            classes = json.loads(bytes(transaction.get(b"classes", db=databases[META]) or b"[]"))
            columns = _still_valid(old, index, len(classes))
            if now.annotations is not None:
                columns = {n: c for n, c in columns.items() if n not in _OF_CLASSES}
            record, note = _record(before, now, columns)
            if index:
                transaction.put(key, encode_index(key, {**index, **columns}), db=databases[INDEX])
            transaction.put(key, record.to_bytes(number), db=databases[SLIDES])
        for kept_key, entry in held.items():
            name, _, rest = kept_key[_NUMBER:].partition(b"\0")
            if now is not None and name not in (SLIDES, INDEX):
                transaction.put(key + rest, entry, db=environment.database(name, transaction))
            transaction.delete(kept_key, db=kept)
        return note

    return environment.change(work)


def _kept_key(number: int, database: bytes | None = None) -> bytes:
    """Begin of a slide's keys in `set-aside`, or of those of one database. No slide has these numbers."""
    prefix = b"\xff" + number.to_bytes(_NUMBER - 1, "big")
    return prefix if database is None else prefix + database + b"\0"


def _decoded(number: int, value: bytes | memoryview | None) -> SlideRecord | None:
    with suppress(DamagedStore):
        return SlideRecord.from_bytes(number, value or b"", where=f"slide {number}")
    return None


def _index(number: int, block: bytes | memoryview | None) -> Columns:
    """Columns of an index block; none if it is missing or damaged."""
    with suppress(DamagedStore):
        return decode_index(slide_key(number), bytes(block or b""), where=f"slide {number}")
    return {}


def _still_valid(old: Columns, new: Columns, classes: int) -> Columns:
    """Columns that were measured or decided after the ingest, if the patches are at the same places."""
    if not (old and new and all(np.array_equal(old[name], new[name]) for name in ("x_l0", "y_l0"))):
        return {}
    keep = {name: c for name, c in old.items() if name in _MEASURED or name not in INDEX_COLUMNS}
    labels = keep["label"]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:  # their names are lost
        return {name: c for name, c in keep.items() if name not in _OF_CLASSES}
    return keep


def _record(
    before: SlideRecord, now: SlideRecord, columns: Mapping[str, Any]
) -> tuple[SlideRecord, str | None]:
    """The record with the fields that users gave, and those that belong to the columns that are kept; a note."""
    names = ["patient", "label", "site", "mpp_source", "unknown"]
    if "label" in columns:
        names += ["annotations", "annotation_notes", "patch_labels"]
    if "focus" in columns:
        names += ["quality"]
    record = replace(now, **{name: getattr(before, name) for name in names})
    notes = []
    if before.annotations is not None and now.annotations is None and "label" not in columns:
        notes.append("the classes of its patches are gone: `histopipe annotate` makes them again")
        record = replace(record, notes=list(dict.fromkeys([*record.notes, *notes])))
    if record.unreadable > before.unreadable:
        notes.append(f"{record.unreadable} patches cannot be read, {before.unreadable} before")
    return record, f"{now.id}: {'; '.join(notes)}" if notes else None
