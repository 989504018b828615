"""Verify a store: its file, its records, its indexes and every value.

Only worker processes open the file with LMDB, since a damaged tree can crash or hang it. If a worker dies, only the
slide that it was reading counts as damaged.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from zlib import crc32

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.checks import (
    Examination,
    Finding,
    VerifyResult,
    WrongValue,
    check_pages,
    check_slides,
    check_store,
    find_orphans,
)
from histopipe.store.data_file import check_length, newest_meta
from histopipe.store.environment import no_store
from histopipe.store.format import patch_key
from histopipe.store.record import SlideState
from histopipe.system.folders import DATA
from histopipe.system.output import Bar, Progress, default_progress, some
from histopipe.system.worker_pool import (
    WorkerDied,
    WorkerPool,
    count_usable_cores,
    result_of,
    results_of,
    silence,
)

_SMALL_BYTES = 32 << 20
"""File size up to which one worker is faster than starting a second one."""
_BATCH_BYTES, _BATCH_SLIDES = 64 << 20, 500
"""Maximum bytes and slides of one task."""
_BASE_SECONDS, _MIN_BYTES_PER_SECOND = 60.0, 2e6
"""Time limit of a task: these seconds, plus the time to read the file at this rate."""
_MAX_COMPARED = 200
"""Maximum number of wrong values that are compared with each other, to find swapped ones."""


def verify(
    store: str | Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Verify the integrity of a store. The store is not written.

    Args:
        store: the store's folder.
        full: also decode every patch and picture.
        untrusted: verify the pages of the file before LMDB opens it, and refuse links in the folder.
        workers: number of processes; one per core if not given.
        progress: where to show progress.

    Returns:
        The findings. Slides that an ingest has not finished are not reported.

    Raises:
        NothingToDo: there is no store, or it is empty.
        UnknownVersion: a later version wrote the store.
        MachineShort: out of memory.

    Example:
        >>> verify("patches.lmdb").findings  # doctest: +SKIP
        []
    """
    return examine(
        Path(store), full=full, untrusted=untrusted, workers=workers, progress=progress
    ).result


def check_untrusted(store: Path, *, progress: Progress | None = None) -> None:
    """Check that an untrusted store is intact, before LMDB opens it in this process.

    Its contents may still be wrong, as in any file from an unknown source. But they cannot make a reader follow a path,
    leave a folder, or use more memory than the file size and the patch size explain.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: verification has findings.
    """
    findings = [f.what for f in verify(store, untrusted=True, progress=progress).findings]
    if findings:
        raise DamagedStore(
            f"the untrusted store {store} failed verification",
            found=f"{len(findings)} findings: {some(findings)}"[:500],
            todo="run `histopipe verify --untrusted` for details",
        )


def examine(
    store: Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Verify a store as `verify` does, and return the findings with the readable entries."""
    started = time.monotonic()
    data = store / DATA
    if not data.is_file() or data.stat().st_size == 0:
        raise no_store(store)
    size, transaction = data.stat().st_size, 0
    try:
        check_length(data)
        transaction = newest_meta(data).transaction
    except DamagedStore as error:
        examination = Examination(findings=[Finding("structure", str(error))])
    else:
        progress = progress or default_progress()
        count = 1 if size < _SMALL_BYTES else workers or count_usable_cores()
        with (
            WorkerPool(count, silence) as pool,
            progress.bar(f"verify {store}", unit="bytes", total=size) as bar,
        ):
            examination = _examine(store, pool, size, full=full, untrusted=untrusted, bar=bar)
    examination.transaction = transaction
    records = examination.records.values()
    examination.result = VerifyResult(
        str(store),
        full,
        len(records),
        sum(record.planned for record in records if record.state is SlideState.COMPLETE),
        size,
        round(time.monotonic() - started, 3),
        examination.findings,
    )
    return examination


def _examine(
    store: Path, pool: WorkerPool, size: int, *, full: bool, untrusted: bool, bar: Bar
) -> Examination:
    """Verify a store whose file has the right length.

    LMDB's verifier of pages starts first: it takes longest, and LMDB must not open an untrusted file before it has ended.
    Orphans are searched last, since they are the entries of slides that were not read.
    """
    seconds = _BASE_SECONDS + size / _MIN_BYTES_PER_SECOND
    submit = partial(pool.submit_within, seconds)
    pages = submit(check_pages, store, not untrusted)
    crash_of_verifier = "LMDB's verifier crashes or hangs"
    if untrusted:
        # Through links and devices, other files would be read or written.
        findings = [
            Finding("structure", f"{path.name} is a link or a device, not a regular file")
            for path in sorted(store.iterdir())
            if path.is_symlink() or not (path.is_file() or path.is_dir())
        ] + _result_or_finding(pages, crash_of_verifier).findings
        if findings:
            return Examination(findings=findings)
    try:
        examination = _result_or_finding(
            submit(check_store, store), "LMDB cannot read `meta` and `slides`"
        )
    except NothingToDo:
        examination = _result_or_finding(pages, crash_of_verifier)
        if examination.findings:
            return examination
        raise
    numbers = examination.slides
    average = max(1, size // max(1, len(numbers)))
    step = min(_BATCH_SLIDES, max(1, _BATCH_BYTES // average))
    batches = [numbers[i : i + step] for i in range(0, len(numbers), step)]
    side = (examination.spec or {}).get("patch_size", 0) if full else None
    task = partial(check_slides, store, side=side)
    _check_slides(examination, pool, task, batches, seconds=seconds, bar=bar)
    examination.records = dict(sorted(examination.records.items()))
    complete = {n for n, r in examination.records.items() if r.state is SlideState.COMPLETE}
    orphans = _result_or_finding(submit(find_orphans, store, complete), "LMDB cannot list the keys")
    examination.findings = [
        *_result_or_finding(pages, crash_of_verifier).findings,
        # Those of the whole store first.
        *sorted(examination.findings, key=lambda f: -1 if f.number is None else f.number),
    ]
    for name, count in Counter(record.id for record in examination.records.values()).items():
        if count > 1:
            examination.add("record", f"{count} slides have the id {name!r}")
    _add_wrong_values(examination)
    examination.findings += orphans.findings
    return examination


def _result_or_finding(task: Future[Examination], what: str) -> Examination:
    """Return the result of a task; a finding if the file crashes, hangs or stops it."""
    try:
        return result_of(task)
    except UnknownVersion:
        raise
    except (WorkerDied, DamagedStore) as error:
        return Examination(findings=[Finding("structure", f"{what}: {error}")])


def _check_slides(
    examination: Examination,
    pool: WorkerPool,
    task: Callable[..., Examination],
    batches: Iterable[list[int]],
    *,
    seconds: float,
    bar: Bar,
) -> None:
    """Check slides by number, and add the results. For a slide that kills its worker, check only the record."""
    died: dict[int, WorkerDied] = {}
    for batch, result in results_of(pool, seconds, task, batches):
        if isinstance(result, WorkerDied):
            died |= dict.fromkeys(batch, result)
        else:
            examination.add_slides(result)
            bar.advance(result.value_bytes)
    task = partial(task, records_only=True)
    for (number,), result in results_of(pool, seconds, task, [[number] for number in died]):
        check = (
            Examination(damaged_records={number: b""}) if isinstance(result, WorkerDied) else result
        )
        check.add(
            "structure",
            f"LMDB crashes or hangs reading this slide: {died[number]}",
            number,
        )
        examination.add_slides(check)


def _add_wrong_values(examination: Examination) -> None:
    """Add findings of wrong values by slide. If there are few, also find values that were swapped."""
    wrong = sorted(examination.wrong)
    changed: dict[int, list[int]] = defaultdict(list)
    candidates = wrong if len(wrong) <= _MAX_COMPARED else []
    for value in wrong:
        owner = next((other for other in candidates if _is_value_of(value, other)), None)
        if owner is None:
            changed[value.slide].append(value.row)
        else:
            is_same = owner.slide == value.slide
            place = "" if is_same else f" of {examination.records[owner.slide].id}"
            what = f"patch {value.row} has the value of patch {owner.row}{place}"
            examination.add("swapped", what, value.slide)
    for slide, rows in changed.items():
        text = (
            "1 patch does not match its checksum"
            if len(rows) == 1
            else f"{len(rows)} patches do not match their checksums"
        )
        examination.add("value", f"{text}: {some(rows)}", slide)


def _is_value_of(wrong: WrongValue, other: WrongValue) -> bool:
    """Return whether the value under one key belongs under another key.

    CRC-32 is linear: checksums of a value under two keys differ by the same XOR as those of zeros of equal length.
    """
    if wrong is other or wrong.length != other.expected_length:
        return False
    zeros = bytes(wrong.length)
    one, two = (crc32(zeros, crc32(patch_key(w.slide, w.row))) for w in (wrong, other))
    return wrong.crc ^ one ^ two == other.expected_crc
