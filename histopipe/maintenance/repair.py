"""Repair a store: ingest its damaged slides again, under the same numbers. Intact slides are not changed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from histopipe.annotations.annotation_files import find_annotations
from histopipe.annotations.rules import AnnotationRules, Origin
from histopipe.errors import DamagedStore, ExitCode, UsageError
from histopipe.ingestion.ingest_slides import refuse_network
from histopipe.ingestion.options import IngestOptions
from histopipe.maintenance.checks import Examination, FindingKind
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.reingest import reingest
from histopipe.maintenance.verify import examine
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import SlideNames
from histopipe.store.catalog import no_store
from histopipe.store.claims import Claims
from histopipe.store.data_file import RawStore, make_readable, newest_transaction
from histopipe.store.environment import Environment, delete_entries, open_environment
from histopipe.store.format import (
    INDEX,
    META,
    PATCHES,
    SET_ASIDE,
    SLIDES,
    patch_key,
    slide_key,
    to_json,
)
from histopipe.store.reading import read_record, read_records
from histopipe.store.record import SlideRecord, SlideState, corrected_record
from histopipe.store.writer import open_for_change
from histopipe.system.files import locked_alone
from histopipe.system.folders import DATA, FolderKind, folder_kind
from histopipe.system.output import Bar, Progress, Result, counted, default_progress, some
from histopipe.system.worker_pool import WorkerPool, results_of, silence

_CHUNK_BYTES = 32 << 20
"""Bytes of values in one transaction."""
_BATCH, _SECONDS = 4096, 600.0
"""Items of one task, and seconds until its worker counts as hanging."""

RebuiltEntry = tuple[bytes, bytes, bool]
"""Database, key, and whether the key is a prefix: all entries whose keys begin with it are copied."""


def rebuild(
    store: Path, examination: Examination, records: Mapping[int, SlideRecord], progress: Progress
) -> None:
    """Copy the readable entries of a store into a new file that replaces the old one by one rename.

    `store` is a path without links. Only the slides of `records` are copied, under the same numbers.

    Raises:
        UsageError: the store is open for writing, or was written after it was verified.
        MachineShort: there is not enough free space.
    """
    with (
        progress.bar(f"rebuild {store}", unit="slides", total=len(records)) as bar,
        in_place_of(store) as part,
    ):
        if newest_transaction(store / DATA) != examination.transaction:
            raise UsageError(
                f"{store} was written after it was verified", todo="run the same command again"
            )
        with WorkerPool(1, silence) as pool:
            items = _items(records, examination.databases, bar)
            task = partial(_copy_items, store, part)
            while batch := list(islice(items, _BATCH)):
                # An item that kills the worker cannot be read, and is skipped.
                deque(results_of(pool, _SECONDS, task, [batch]), maxlen=0)
        entries = {(SLIDES, slide_key(n)): record.to_bytes(n) for n, record in records.items()}
        entries[META, b"next_number"] = to_json(_next_number(examination, records))
        _put(part, entries)
        carry_files(store, part)
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(store)  # worker processes start in the working directory, which was the old folder


def _items(
    records: Mapping[int, SlideRecord], databases: set[bytes], bar: Bar
) -> Iterator[RebuiltEntry]:
    yield META, b"", True
    yield SET_ASIDE, b"", True
    other_databases = databases - {META, SLIDES, PATCHES, INDEX, SET_ASIDE}
    for number, record in records.items():
        key = slide_key(number)
        yield from ((name, key, True) for name in other_databases)
        yield INDEX, key, False
        if record.state is SlideState.COMPLETE:
            yield from ((PATCHES, patch_key(number, row), False) for row in range(record.planned))
        else:
            yield PATCHES, key, True
        bar.advance()


def _copy_items(store: Path, part: Path, items: list[RebuiltEntry]) -> None:
    entries: dict[tuple[bytes, bytes], bytes] = {}
    size = 0
    with RawStore(store) as raw:
        for database, start, is_prefix in items:
            for key in _keys(raw, database, start) if is_prefix else [start]:
                with suppress(DamagedStore):
                    value = raw.get(database, key)
                    if value is not None:
                        entries[database, key] = bytes(value)
                        size += len(value)
                if size > _CHUNK_BYTES:
                    _put(part, entries)
                    entries, size = {}, 0
    _put(part, entries)


def _keys(raw: RawStore, database: bytes, prefix: bytes) -> list[bytes]:
    """Return the keys that begin with a prefix, as far as they can be listed."""
    keys: list[bytes] = []
    with suppress(DamagedStore):
        keys.extend(raw.keys(database, prefix))  # keeps the keys before an error
    return keys


def _put(part: Path, entries: Mapping[tuple[bytes, bytes], bytes]) -> None:
    """Write values by database and key into the new store, in one transaction."""

    def work(transaction: Any) -> None:
        for (database, key), value in entries.items():
            transaction.put(key, value, db=environment.database(database, transaction))

    with open_environment(part, write=True) as environment:
        environment.change(work)


@dataclass(frozen=True, slots=True, repr=False)
class RepairResult(Result):
    """Result of `repair`.

    Attributes:
        store: path of the store.
        findings: number of findings before the repair.
        slides: ids of slides that were ingested again.
        left: reasons why damaged slides were not ingested again, by id.
        notes: notes for the user.
        remaining: findings after the repair, except for the slides in `left`.
    """

    store: str
    findings: int = 0
    slides: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remaining: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        if self.remaining:
            return ExitCode.DAMAGED
        return ExitCode.PARTLY if self.left else ExitCode.DONE

    def __str__(self) -> str:
        if not self.findings and not self.slides and not self.left:
            return f"{self.store} is intact: nothing to repair"
        names = f": {', '.join(self.slides)}" if self.slides else ""
        return f"{self.store}: {counted(self.findings, 'finding')}, {counted(len(self.slides), 'slide')} ingested again{names}"


def repair(
    store: str | Path,
    slides: str | Path | Sequence[str | Path],
    *,
    annotations: str | Path | None = None,
    annotation_threshold: float = 0.5,
    unclassified: str | None = None,
    class_property: str | None = None,
    annotation_origin: Origin = "auto",
    full: bool = False,
    workers: int | None = None,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Verify a store, ingest the damaged slides again under the same numbers, and verify it again.

    A slide keeps its number, label, patient, site and stain fit. It keeps the measurements of its patches if their
    coordinates are equal. It is changed only if its file is given and contains the same scan. If the file of the store
    is damaged, the readable entries are first copied into a new one. After an interruption, the same call continues.

    Args:
        store: the store's folder.
        slides: files or folders of slides.
        annotations: file or folder of annotations. Without them, patches keep their labels where these are intact.
        annotation_threshold, unclassified, class_property, annotation_origin: as for `annotate`.
        full: also decode every patch, and ingest slides again whose patches cannot be decoded.
        workers: number of processes; one per core if not given.
        allow_network: allow the store to be on a network filesystem.
        progress: where to show progress.

    Raises:
        NothingToDo, UnknownVersion: there is no store, or a later version wrote it.
        DamagedStore: the entries of `meta` are damaged.
        UsageError, MachineShort: the store cannot be written, or another process wrote it during the repair.
    """
    slide_files = discover(
        [Path(path) for path in ([slides] if isinstance(slides, str | Path) else slides)]
    )
    rules = AnnotationRules(
        annotation_threshold=annotation_threshold,
        unclassified=unclassified,
        class_property=class_property,
        annotation_origin=annotation_origin,
    )
    outlines: Mapping[str, Path] = {}
    if annotations is not None:
        names = SlideNames(slide.id for slide in slide_files)
        outlines, _ = find_annotations(Path(annotations), names)
    if not allow_network:
        refuse_network(Path(store))
    options = IngestOptions(
        workers=workers, rules=rules, retry_failed=True, allow_network=True, allow_mixed_mpp=True
    )
    real = Path(store).resolve()
    progress = progress or default_progress()
    notes: list[str] = []
    check = partial(examine, real, full=full, workers=workers, progress=progress)
    if folder_kind(real) is not FolderKind.STORE:
        raise no_store(real)
    lock = partial(
        locked_alone, real, f"another repair of {real} is running", "wait until it has finished"
    )
    with lock():
        length = make_readable(real)
        before = examination = check()
        count = len(examination.findings)
        stains = sum(finding.kind is FindingKind.STAIN for finding in examination.findings)
        if stains:
            notes.append(f"the stain fits of {stains} slides are damaged: run `histopipe stains`")
        records = _known_records(examination)
        if examination.result.is_structural:
            try:
                _refuse_lost_meta(examination)
            except DamagedStore:
                os.truncate(real / DATA, length)  # as before `make_readable`
                raise
            rebuild(real, examination, records, progress)
            notes.append(f"{real / DATA} was rebuilt from its readable entries")
    with lock():  # again, since the rebuild has replaced the folder
        if before.result.is_structural:
            examination = check()
        else:
            _refuse_lost_meta(examination)
            _delete_orphans(real, examination, records)
            if examination.damaged_records or examination.without_record:
                examination = check()
        done, left, ingest_notes = reingest(
            real, examination, slide_files, options, annotations=outlines, progress=progress
        )
    left |= _lost(before, records, slide_files, examination)
    findings = check().findings if count or done else []
    remaining = [str(f).partition(": ")[2] for f in findings if f.slide not in left]
    return RepairResult(str(store), count, done, left, notes + ingest_notes, remaining)


def _refuse_lost_meta(examination: Examination) -> None:
    """Raise DamagedStore if the settings in `meta` are damaged, since they cannot be restored from slides."""
    lost = [f for f in examination.findings if f.kind is FindingKind.FORMAT]
    if lost or examination.spec is None:
        raise DamagedStore(
            f"the settings of {examination.result.store} are lost",
            found=some(f.what for f in lost or examination.findings),
            todo="restore the store from a backup, or ingest into a new one",
        )


def _next_number(examination: Examination, numbers: Iterable[int]) -> int:
    return max([examination.next_number, *(number + 1 for number in numbers)])


def _known_records(examination: Examination) -> dict[int, SlideRecord]:
    """Return readable and corrected records by number, and placeholders that hide the entries of other slides."""
    records = dict(examination.records)
    lost = [n for n in examination.without_record if n < _next_number(examination, records)]
    for number in [*examination.damaged_records, *lost]:
        records[number] = corrected_record(
            number, examination.damaged_records.get(number, b"")
        ) or SlideRecord(id=f"lost-slide-{number}", path="", resolved_path="(lost)")
    return dict(sorted(records.items()))


def _delete_orphans(
    store: Path, examination: Examination, records: Mapping[int, SlideRecord]
) -> None:
    """Delete entries that belong to no slide, write corrected records, and hide slides without a record."""
    if not examination.findings:
        return
    hidden = records.keys() - examination.records
    entries = [f.entry for f in examination.findings if f.entry and f.number not in hidden]
    damaged = {f.number for f in examination.findings if f.number is not None and f.entry is None}
    orphans = {n for n in damaged if n not in records or records[n].state is SlideState.FAILED}
    changed = {n: record for n, record in records.items() if examination.records.get(n) != record}
    with open_for_change(store) as environment, Claims(store) as claims:
        for number in sorted(orphans):
            if claims.take(number) and not _is_in_use(environment, number):
                delete_entries(environment, number)

        def work(transaction: Any) -> None:
            for name, key in entries:
                transaction.delete(
                    bytes.fromhex(key), db=environment.database(name.encode(), transaction)
                )
            slides, meta = (environment.database(name, transaction) for name in (SLIDES, META))
            for number, record in changed.items():
                transaction.put(slide_key(number), record.to_bytes(number), db=slides)
            # An ingest may have registered slides after the store was verified.
            numbers = [*records, *read_records(transaction, environment.databases, store)]
            transaction.put(b"next_number", to_json(_next_number(examination, numbers)), db=meta)

        environment.change(work)


def _is_in_use(environment: Environment, number: int) -> bool:
    """Return whether a number now has a slide that has not failed."""
    with suppress(DamagedStore), environment.read() as transaction:
        record = read_record(transaction, environment.databases, number, environment.path)
        return record.state is not SlideState.FAILED
    return False


def _lost(
    before: Examination,
    records: Mapping[int, SlideRecord],
    slide_files: Sequence[SlideFile],
    examination: Examination,
) -> dict[str, str]:
    """Return reasons, by id, for slides whose records are lost and for files without a slide in the store."""
    lost = {
        record.id: "its record is lost: add its file with `histopipe ingest`, delete the rest with `histopipe remove`"
        for number, record in records.items()
        if number not in before.records and not record.path and record.state is SlideState.PENDING
    }
    pages = [f.what for f in before.findings if f.kind is FindingKind.STRUCTURE]
    if lost or any("slides" in what or "main DB" in what for what in pages):
        stored = {record.resolved_path for record in examination.records.values()}
        missing = "it is not in the store, or its record is lost: add it with `histopipe ingest`"
        lost |= {s.id: missing for s in slide_files if s.resolve() not in stored}
    return lost
