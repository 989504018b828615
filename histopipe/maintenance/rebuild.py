"""Rebuild a store whose file is damaged: copy what can be read into a new file, slide by slide, and replace the old one.

Worker processes read the old file, since LMDB may crash on it. What makes one crash is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from histopipe.errors import DamagedStore, UsageError
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.worker_tasks import results_of, silence
from histopipe.store.data_file import newest_transaction
from histopipe.store.environment import open_environment
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
from histopipe.store.raw_store import RawStore
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.progress import Bar
from histopipe.system.worker_pool import WorkerPool

T = TypeVar("T")

_CHUNK_BYTES = 32 << 20
"""Of one transaction."""
_BATCH = 4096
"""Items of one task."""
_SECONDS = 600.0
"""For one task, before its worker counts as hanging."""

Entry = tuple[bytes, bytes]
"""Database and key."""


def rebuild(
    store: Path,
    records: Mapping[int, SlideRecord],
    databases: Iterable[bytes],
    *,
    next_number: int,
    transaction: int,
    bar: Bar,
) -> None:
    """Copy what can be read of a store into a new file, under the same numbers, which replaces the old one by one rename.

    Args:
        store: the store's folder, without links. No process may have it open for writing.
        records: of the slides to keep, by number.
        databases: that the store has.
        next_number: the number that a new slide gets.
        transaction: that made the state which was verified.
        bar: advanced by slides.

    Raises:
        UsageError: the store is open for writing, or was written since it was verified.
        MachineShort: there is not enough free space.
    """
    with in_place_of(store) as part:
        if newest_transaction(store / "data.mdb") != transaction:
            raise UsageError(f"{store} was written meanwhile", todo="run the same command again")
        pool = WorkerPool(1, silence)
        try:
            _copy(pool, _copy_ranges, store, part, _ranges(records, databases))
            _copy(pool, _copy_rows, store, part, _rows(records, bar))
        finally:
            pool.shutdown(cancel_futures=True)
        own = [((SLIDES, slide_key(n)), record.to_bytes(n)) for n, record in records.items()]
        _put(part, [*own, ((META, b"next_number"), to_json(next_number))])
        carry_files(store, part)
    try:
        Path.cwd()
    except FileNotFoundError:  # it was the old folder, and worker processes begin in it
        os.chdir(store)


def _ranges(
    records: Mapping[int, SlideRecord], databases: Iterable[bytes]
) -> Iterator[tuple[bytes, int | None]]:
    """Databases with the slides whose entries are copied; None for all entries."""
    others = [name for name in databases if name not in (META, SLIDES, PATCHES, SET_ASIDE)]
    yield META, None
    yield SET_ASIDE, None
    for number, record in records.items():
        yield from ((name, number) for name in others)
        if record.state is not SlideState.COMPLETE:
            yield PATCHES, number


def _rows(records: Mapping[int, SlideRecord], bar: Bar) -> Iterator[tuple[int, int]]:
    """Slide numbers and rows of the patches of complete slides."""
    for number, record in records.items():
        if record.state is SlideState.COMPLETE:
            yield from ((number, row) for row in range(record.planned))
        bar.advance()


def _copy(
    pool: WorkerPool,
    task: Callable[[Path, Path, list[T]], None],
    store: Path,
    part: Path,
    items: Iterator[T],
) -> None:
    """Run a task on all items, in batches. An item that kills the worker cannot be read, and is left out."""
    while batch := list(islice(items, _BATCH)):
        for _ in results_of(pool, _SECONDS, partial(task, store, part), [batch]):
            pass


def _copy_ranges(store: Path, part: Path, ranges: list[tuple[bytes, int | None]]) -> None:
    """Copy entries, as far as their keys can be listed."""
    with RawStore(store) as raw:
        _copy_entries(raw, part, (entry for found in ranges for entry in _entries(raw, *found)))


def _entries(raw: RawStore, database: bytes, number: int | None) -> list[Entry]:
    low, high = (b"", None) if number is None else (slide_key(number), slide_key(number + 1))
    keys = [low] if database == INDEX else []
    with contextlib.suppress(DamagedStore):
        for key in raw.keys(database, low, high):
            keys.append(key)  # one by one, for those before an error
    return [(database, key) for key in dict.fromkeys(keys)]


def _copy_rows(store: Path, part: Path, rows: list[tuple[int, int]]) -> None:
    with RawStore(store) as raw:
        _copy_entries(raw, part, ((PATCHES, patch_key(*row)) for row in rows))


def _copy_entries(raw: RawStore, part: Path, entries: Iterable[Entry]) -> None:
    chunk: list[tuple[Entry, bytes]] = []
    size = 0
    for entry in entries:
        try:
            value = raw.get(*entry)
        except DamagedStore:
            continue
        if value is None:
            continue
        chunk.append((entry, bytes(value)))
        size += len(value)
        if size > _CHUNK_BYTES:
            _put(part, chunk)
            chunk, size = [], 0
    _put(part, chunk)


def _put(part: Path, entries: Sequence[tuple[Entry, bytes]]) -> None:
    """Write entries into the new store, in one transaction."""
    if not entries:
        return
    with open_environment(part, write=True) as environment:

        def work(transaction: Any) -> None:
            for (database, key), value in entries:
                transaction.put(key, value, db=environment.database(database, transaction))

        environment.change(work)
