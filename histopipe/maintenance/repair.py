"""Repair a store: correct what its checksums allow, and ingest its damaged slides again under the same numbers.

docs/design/maintenance.md lists the kinds of damage, and what a repair does about each. The order is:

1. `rebuild`, only if the file itself is damaged: LMDB may crash on it, so that nothing else may open it before.
2. `clean`: while one record is damaged, no ingest can start.
3. `reingest`: the only step that needs files of slides. Each slide is replaced by one transaction.

Each step leaves a store that the next call verifies and continues to repair.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.annotations.annotation_files import find_annotations
from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import DamagedStore, ExitCode, UsageError
from histopipe.ingestion.coords import find_coords
from histopipe.ingestion.ingest_slides import refuse_network
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.maintenance.checks import Examination
from histopipe.maintenance.options import RepairOptions
from histopipe.maintenance.reingest import is_interrupted, reingest
from histopipe.maintenance.remove import carry_files, in_place_of
from histopipe.maintenance.verify import examine
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideNames
from histopipe.store.data_file import RawStore, make_readable, newest_meta
from histopipe.store.environment import delete_entries, no_store, open_environment
from histopipe.store.format import META, PATCHES, patch_key, slide_key
from histopipe.store.record import SlideRecord, SlideState, corrected_record
from histopipe.store.writer import StoreWriter
from histopipe.system.files import run_on_error
from histopipe.system.folders import DATA, FolderKind, folder_kind
from histopipe.system.locks import locked_alone
from histopipe.system.output import Progress, Result, counted, default_progress, some
from histopipe.system.settings import declared_settings, make_settings, split_settings, takes
from histopipe.system.worker_pool import WorkerPool, result_of, results_of, silence
from histopipe.tiling.mask_files import find_masks
from histopipe.tiling.network import SUFFIXES

_BATCH_BYTES, _SECONDS = 32 << 20, 600.0
"""Bytes of values in one transaction, which LMDB keeps in memory, and seconds until its worker counts as hanging."""


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


@takes(declared_settings(RepairOptions, AnnotationRules))
def repair(
    store: str | Path,
    slides: str | Path | Sequence[str | Path],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> RepairResult:
    """Verify a store, ingest the damaged slides again under the same numbers, and verify it again.

    A slide keeps its number, label, patient, site and stain fit. It keeps the measurements of its patches if their
    coordinates are equal. It is changed only if its file is given and contains the same scan, and if the files are given
    from which its patches were chosen. If the file of the store is damaged, the readable entries are first copied into a
    new one. After an interruption, the same call continues.

    Args:
        store: the store's folder.
        slides: files or folders of slides.
        progress: where to show progress.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe repair`.

    Raises:
        NothingToDo, UnknownVersion: there is no store, or a later version wrote it.
        DamagedStore: the entries of `meta` are damaged.
        UsageError, MachineShort: the store cannot be written, another process wrote it during the repair, or `tissue` or
            `coords` are not for such a store.
    """
    of_rules, of_repair = split_settings(settings, AnnotationRules)
    rules, request = (
        make_settings(AnnotationRules, of_rules),
        make_settings(RepairOptions, of_repair),
    )
    progress = progress or default_progress()
    jobs, network = _read_files(slides, request, progress)
    if not request.allow_network:
        refuse_network(Path(store))
    options = IngestOptions(
        workers=request.workers,
        rules=rules,
        tissue_network=network,
        allow_network=True,
        allow_mixed_mpp=True,
    )
    real = Path(store).resolve()
    if folder_kind(real) is not FolderKind.STORE:
        raise no_store(real)
    notes: list[str] = []
    check = partial(examine, real, full=request.full, workers=request.workers, progress=progress)
    lock = partial(
        locked_alone, real, f"another repair of {real} is running", "wait until it has finished"
    )
    with ExitStack() as stack:
        stack.enter_context(lock())
        length = make_readable(real)
        before = examination = check()
        stains = sum(finding.kind == "stain" for finding in before.findings)
        if stains:
            notes.append(f"the stain fits of {stains} slides are damaged: run `histopipe stains`")
        if before.result.is_structural:
            with run_on_error(partial(os.truncate, real / DATA, length)):  # undo `make_readable`
                _refuse_lost_meta(before)
            rebuild(real, before, progress)
            notes.append(f"{real / DATA} was rebuilt from its readable entries")
            stack.enter_context(lock())  # again, since the rebuild has replaced the folder
            examination = check()
        _refuse_lost_meta(examination)
        if clean(real, examination):
            examination = check()
        done, left, ingest_notes = reingest(real, examination, jobs, options, progress=progress)
    left |= _lost_slides(before)
    findings = check().findings if before.findings or done else []
    remaining = [str(f).partition(": ")[2] for f in findings if f.slide not in left]
    return RepairResult(
        str(store), len(before.findings), done, left, notes + ingest_notes, remaining
    )


def _read_files(
    slides: str | Path | Sequence[str | Path],
    options: RepairOptions,
    progress: Progress,
) -> tuple[list[SlideJob], Path | None]:
    """Return the slides with the files about them, and the file of a segmentation network.

    Raises:
        UsageError: a folder or a file cannot be used.
    """
    files = discover(
        [Path(path) for path in ([slides] if isinstance(slides, str | Path) else slides)]
    )
    names = SlideNames(file.id for file in files)
    tissue = None if options.tissue is None else Path(options.tissue)
    has_masks = tissue is not None and tissue.is_dir()
    network = None if has_masks else tissue
    if network is not None and network.suffix.lower() not in SUFFIXES:
        raise UsageError(
            "--tissue",
            found=repr(str(tissue)),
            expected=f"a folder of masks, or a network ({' or '.join(SUFFIXES)})",
        )
    outlines, _ = (
        find_annotations(Path(options.annotations), names) if options.annotations else ({}, [])
    )
    masks = find_masks(tissue, names) if tissue and has_masks else {}
    places = (
        find_coords(Path(options.coords), names, progress, allow_extra=True)
        if options.coords
        else {}
    )
    return [
        SlideJob(
            file,
            coords=places.get(file.id),
            annotations=outlines.get(file.id),
            mask=masks.get(file.id),
        )
        for file in files
    ], network


def _refuse_lost_meta(examination: Examination) -> None:
    """Raise DamagedStore if the settings in `meta` are damaged, since they cannot be restored from slides."""
    lost = [f for f in examination.findings if f.kind == "format"]
    if lost or examination.spec is None:
        raise DamagedStore(
            f"the settings of {examination.result.store} are lost",
            found=some(f.what for f in lost or examination.findings),
            todo="restore the store from a backup, or ingest into a new one",
        )


def _refuse_changed(store: Path, examination: Examination) -> None:
    """Raise UsageError if the store was written after it was verified: what is changed would then be outdated."""
    if newest_meta(store / DATA).transaction != examination.transaction:
        raise UsageError(
            f"{store} was written after it was verified", todo="run the same command again"
        )


def _usable_records(examination: Examination) -> dict[int, SlideRecord]:
    """Return readable and corrected records by number. An uncorrectable record is lost, and so is its slide."""
    corrected = {n: corrected_record(n, data) for n, data in examination.damaged_records.items()}
    records = examination.records | {n: r for n, r in corrected.items() if r is not None}
    return dict(sorted(records.items()))


def rebuild(store: Path, examination: Examination, progress: Progress) -> None:
    """Copy the readable entries of a store, slide by slide, into a new file that replaces the old one by one rename.

    `store` is a path without links. Entries of slides without a record are not copied.

    Raises:
        UsageError: the store is open for writing, or was written after it was verified.
        MachineShort: there is not enough free space.
    """
    records = _usable_records(examination)
    with (
        progress.bar(f"rebuild {store}", unit="slides", total=len(records)) as bar,
        in_place_of(store) as part,
        WorkerPool(1, silence) as pool,
    ):
        _refuse_changed(store, examination)
        copy = partial(_copy_entries, store, part)
        result_of(pool.submit(copy, [(META, b"")]))

        def batches() -> Iterator[list[tuple[bytes, bytes]]]:
            for number, record in records.items():
                key = slide_key(number)
                yield [(name, key) for name in examination.databases - {META, PATCHES}]
                step = max(1, _BATCH_BYTES * record.planned // max(1, record.stored_bytes))
                for first in range(0, record.planned, step):
                    rows = range(first, min(first + step, record.planned))
                    yield [(PATCHES, patch_key(number, row)) for row in rows]
                bar.advance()

        # An item that kills the worker cannot be read, and is skipped.
        deque(results_of(pool, _SECONDS, copy, batches()), maxlen=0)
        carry_files(store, part)
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(store)  # worker processes start in the working directory, which was the old folder


def _copy_entries(store: Path, part: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Copy entries into the new store in one transaction: patches by key, others by the beginning of their keys."""
    with RawStore(store) as raw, open_environment(part, write=True) as environment:

        def work(transaction: Any) -> None:
            for database, start in items:
                # Patches are looked up as readers do: if a page is damaged, a scan would end there.
                keys = [start] if database == PATCHES else _keys(raw, database, start)
                for key in keys:
                    with suppress(DamagedStore):
                        value = raw.get(database, key)
                        if value is not None:
                            transaction.put(
                                key, value, db=environment.database(database, transaction)
                            )

        environment.change(work)


def _keys(raw: RawStore, database: bytes, prefix: bytes) -> list[bytes]:
    """Return the keys that begin with a prefix, as far as they can be listed."""
    keys: list[bytes] = []
    with suppress(DamagedStore):
        keys.extend(raw.keys(database, prefix))  # keeps the keys before an error
    return keys


def clean(store: Path, examination: Examination) -> bool:
    """Correct records, and delete entries that belong to no slide; return whether there were any.

    Slides that an interrupted repair has hidden become complete again, so that the next verification names their damage.
    """
    records, findings = _usable_records(examination), examination.findings
    corrected = {
        **{n: r for n, r in records.items() if n not in examination.records},
        **{
            n: replace(r, state=SlideState.COMPLETE, error=None)
            for n, r in records.items()
            if is_interrupted(r)
        },
    }
    orphans = {
        f.number
        for f in findings
        if f.number is not None
        and (f.number not in records or records[f.number].state is SlideState.FAILED)
    }
    entries = [f.entry for f in findings if f.entry and f.number not in orphans]
    is_numbered = not any(f.kind == "count" and f.number is None for f in findings)
    if not corrected and not orphans and not entries and is_numbered:
        return False
    _refuse_changed(store, examination)
    with StoreWriter(store) as writer:
        for number in orphans - records.keys():
            writer.remove(number)
        for number in orphans & records.keys():
            delete_entries(writer.environment, number)
        for name, key in entries:
            writer.delete(name.encode(), bytes.fromhex(key))
        for number, record in corrected.items():
            writer.update(number, record)
        writer.register([])  # corrects the next number; last, since it reads all records
    return True


def _lost_slides(before: Examination) -> dict[str, str]:
    """Return why slides are not repaired of which there is no record. Their ids are unknown."""
    numbers = before.damaged_records.keys() | {
        f.number
        for f in before.findings
        if f.kind == "orphan" and f.number is not None and f.number < before.next_number
    }
    reason = "its record is lost: add its file with `histopipe ingest`"
    return {
        f"slide number {number}": reason
        for number in sorted(numbers - _usable_records(before).keys())
    }
