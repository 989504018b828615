"""Verify a store: its file, its records, its indices and every value.

The main process never opens the file with LMDB, which a damaged tree can crash or hang. Worker processes do, and one that dies
costs only the slide that it was reading.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from zlib import crc32

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.findings import Finding, FindingKind, VerifyResult, some
from histopipe.maintenance.slide_check import SlideCheck, WrongValue, check_slides
from histopipe.maintenance.store_check import Examination, check_store, find_orphans
from histopipe.store.catalog import no_store
from histopipe.store.data_file import check_length, newest_transaction, page_faults
from histopipe.store.format import patch_key
from histopipe.store.record import SlideState
from histopipe.system.progress import Bar, Progress, default_progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool, result_of, results_of, silence

_SMALL_BYTES = 32 << 20
"""A file that one worker reads sooner than a second one has started."""
_BATCH_BYTES, _BATCH_SLIDES = 64 << 20, 500
"""Of the slides that one task checks."""
_LEAST_SECONDS, _SLOWEST = 60.0, 2e6
"""What a task may take: so long, and the time to read the file with so many bytes per second."""
_MOST_COMPARED = 200
"""Wrong values that are compared with each other, to find swapped ones."""


def verify(
    store: str | Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Verify the integrity of a store. Nothing is written.

    Args:
        store: the store's folder.
        full: decode every patch and picture, too.
        untrusted: do not let LMDB open the file before its pages are verified; refuse links in the folder.
        workers: number of processes; one per core if not given.
        progress: where to show progress.

    Returns:
        What is wrong. Slides that an ingest has not finished are no finding.

    Raises:
        NothingToDo: there is no store, or it is empty.
        UnknownVersion: a later version wrote the store.
        MachineShort: memory ran out.

    Example:
        >>> verify("patches.lmdb").findings  # doctest: +SKIP
        []
    """
    return examine(
        Path(store), full=full, untrusted=untrusted, workers=workers, progress=progress
    ).result


def check_untrusted(store: Path, *, progress: Progress | None = None) -> None:
    """Refuse a store that is damaged, before LMDB opens it in this process.

    What the store says may still be wrong, as in any file of an unknown source. But it cannot make a reader follow a path,
    leave a folder, or use more memory than its size and its patch size account for.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: something is wrong with it.
    """
    findings = [f.what for f in verify(store, untrusted=True, progress=progress).findings]
    if findings:
        raise DamagedStore(
            f"the store {store} is not to be trusted",
            found=f"{len(findings)} findings: {some(findings)}"[:500],
            todo="see `histopipe verify --untrusted`",
        )


def examine(
    store: Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Verify a store, as `verify`, and return all that was found out."""
    started = time.monotonic()
    data = store / "data.mdb"
    if not data.is_file() or data.stat().st_size == 0:
        raise no_store(store)
    size, transaction = data.stat().st_size, 0
    try:
        check_length(data)
        transaction = newest_transaction(data)
    except DamagedStore as error:
        found = Examination(findings=[_broken(error)])
    else:
        progress = progress or default_progress()
        count = 1 if size < _SMALL_BYTES else workers or len(os.sched_getaffinity(0))
        with (
            WorkerPool(count, silence) as pool,
            progress.bar(f"verify {store}", unit="bytes", total=size) as bar,
        ):
            found = _examine(
                store, pool, size, full=full, untrusted=untrusted, pages_first=count > 1, bar=bar
            )
    found.transaction = transaction
    complete = [r for r in found.records.values() if r.state is SlideState.COMPLETE]
    found.result = VerifyResult(
        str(store), full, len(found.records), sum(record.planned for record in complete),
        size, round(time.monotonic() - started, 3), found.findings,
    )  # fmt: skip
    return found


def _examine(
    store: Path,
    pool: WorkerPool,
    size: int,
    *,
    full: bool,
    untrusted: bool,
    pages_first: bool,
    bar: Bar,
) -> Examination:
    """Verify a store of sound length.

    LMDB's verifier reads one page of each value, which is slow while the file is not in memory. Without `pages_first`, it
    runs after all values were read.
    """
    seconds = _LEAST_SECONDS + size / _SLOWEST

    @cache
    def pages() -> Future[list[str]]:
        return pool.submit_within(seconds, page_faults, store, not untrusted)

    if pages_first:
        pages()
    if untrusted:
        findings = _links(store) + _page_findings(pages())
        if findings:
            return Examination(findings=findings)
    try:
        found = result_of(pool.submit_within(seconds, check_store, store))
    except NothingToDo:
        findings = _page_findings(pages())
        if not findings:
            raise
        return Examination(findings=findings)
    except UnknownVersion:
        raise
    except (WorkerDied, DamagedStore) as error:
        failure = _broken(f"LMDB cannot read `meta` and `slides`: {error}")
        return Examination(findings=[*_page_findings(pages()), failure])
    average = max(1, size // max(1, len(found.slides)))
    batch_size = min(_BATCH_SLIDES, max(1, _BATCH_BYTES // average))
    batches = [found.slides[i : i + batch_size] for i in range(0, len(found.slides), batch_size)]
    side = (found.spec or {}).get("patch_size", 0) if full else None
    checks = _check_slides(pool, partial(check_slides, store, side=side), batches, seconds, bar)
    found.records = {c.number: c.record for c in checks if c.record is not None}
    found.damaged_records = {c.number: c.damaged_record for c in checks if c.record is None}
    complete = {n for n, r in found.records.items() if r.state is SlideState.COMPLETE}
    try:
        task = pool.submit_within(seconds, find_orphans, store, complete)
        orphans, found.without_record = result_of(task)
    except (WorkerDied, DamagedStore) as error:
        orphans = [_broken(f"LMDB cannot list the keys: {error}")]
    found.findings = [
        *_page_findings(pages()),
        *found.findings,
        *(finding for check in checks for finding in check.findings),
        *_duplicate_ids(found),
        *_wrong_values(found, [value for check in checks for value in check.wrong]),
        *orphans,
    ]
    return found


def _broken(what: object) -> Finding:
    return Finding(FindingKind.STRUCTURE, str(what))


def _page_findings(pages: Future[list[str]]) -> list[Finding]:
    """Findings of LMDB's verifier."""
    try:
        return [_broken(fault) for fault in result_of(pages)]
    except WorkerDied as error:
        return [_broken(f"LMDB's verifier crashes or hangs: {error}")]
    except DamagedStore as error:
        return [_broken(error)]


def _links(store: Path) -> list[Finding]:
    """Files of the folder that would have another file read or written."""
    return [
        _broken(f"{path.name} is a link or a device, not a regular file")
        for path in sorted(store.iterdir())
        if path.is_symlink() or not (path.is_file() or path.is_dir())
    ]


def _check_slides(
    pool: WorkerPool,
    task: Callable[..., list[SlideCheck]],
    batches: Iterable[list[int]],
    seconds: float,
    bar: Bar,
) -> list[SlideCheck]:
    """Check slides by number. A slide that ends its worker is checked by its record only."""
    checks: list[SlideCheck] = []
    died: dict[int, WorkerDied] = {}
    for batch, result in results_of(pool, seconds, task, batches):
        if isinstance(result, WorkerDied):
            died[batch[0]] = result
            continue
        checks += result
        bar.advance(sum(check.value_bytes for check in result))
    task = partial(task, records_only=True)
    for (number,), result in results_of(pool, seconds, task, [[number] for number in died]):
        check = SlideCheck(number) if isinstance(result, WorkerDied) or not result else result[0]
        why = f"LMDB crashes or hangs reading this slide: {died[number]}"
        check.add(FindingKind.STRUCTURE, why)
        checks.append(check)
    return sorted(checks, key=lambda check: check.number)


def _duplicate_ids(found: Examination) -> list[Finding]:
    names = Counter(record.id for record in found.records.values())
    return [
        Finding(FindingKind.RECORD, f"{count} slides are called {name!r}")
        for name, count in names.items()
        if count > 1
    ]


def _wrong_values(found: Examination, wrong: list[WrongValue]) -> list[Finding]:
    """Findings of wrong values by slide. If there are few, values under each other's keys are found, too."""
    findings: list[Finding] = []
    changed: dict[int, list[int]] = defaultdict(list)
    others = wrong if len(wrong) <= _MOST_COMPARED else []
    for value in wrong:
        owner = next((other for other in others if _is_value_of(value, other)), None)
        if owner is None:
            changed[value.slide].append(value.row)
            continue
        place = "" if owner.slide == value.slide else f" of {found.records[owner.slide].id}"
        what = f"patch {value.row} holds the value of patch {owner.row}{place}"
        name = found.records[value.slide].id
        findings.append(Finding(FindingKind.SWAPPED, what, name, value.slide))
    for slide, rows in changed.items():
        count = f"{len(rows)} patches are" if len(rows) > 1 else "a patch is"
        what = f"{count} not what was written: {some(rows)}"
        findings.append(Finding(FindingKind.VALUE, what, found.records[slide].id, slide))
    return findings


def _is_value_of(wrong: WrongValue, other: WrongValue) -> bool:
    """Whether the value under one key is the one that belongs under another key.

    CRC-32 is linear: the checksums of one value under two keys differ as those of zeros of the same length do.
    """
    if wrong is other or wrong.length != other.expected_length:
        return False
    zeros = bytes(wrong.length)
    here, there = (crc32(zeros, crc32(patch_key(w.slide, w.row))) for w in (wrong, other))
    return wrong.crc ^ here ^ there == other.expected_crc
