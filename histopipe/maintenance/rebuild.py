"""Rebuild a store whose file is damaged: copy what can be read into a new file, slide by slide, and replace the old one.

Worker processes read the old file, since LMDB may crash on it. What makes one crash is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.verify import Examination
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
from histopipe.system.progress import Bar, Progress
from histopipe.system.worker_pool import WorkerPool

_CHUNK_BYTES = 32 << 20
"""Of one transaction."""
_BATCH, _SECONDS = 4096, 600.0
"""Items of one task; seconds after which its worker counts as hanging."""

Entry = tuple[bytes, bytes]
"""Database and key."""
Item = tuple[bytes, int | None, int | None]
"""Database, slide and row of what is copied; all entries of the slide without a row, and of the database without a slide."""


def rebuild(
    store: Path,
    found: Examination,
    records: Mapping[int, SlideRecord],
    *,
    next_number: int,
    progress: Progress,
) -> None:
    """Copy what can be read of a store into a new file, under the same numbers, which replaces the old one by one rename.

    Args:
        store: the store's folder, without links. No process may have it open for writing.
        found: what was verified.
        records: of the slides to keep, by number.
        next_number: the number that a new slide gets.
        progress: where to show progress.

    Raises:
        UsageError: the store is open for writing, or was written since it was verified.
        MachineShort: there is not enough free space.
    """
    with (
        progress.bar(f"rebuild {store}", unit="slides", total=len(records)) as bar,
        in_place_of(store) as part,
    ):
        if newest_transaction(store / "data.mdb") != found.transaction:
            raise UsageError(f"{store} was written meanwhile", todo="run the same command again")
        pool = WorkerPool(1, silence)
        try:
            items = _items(records, found.store.databases, bar)
            task = partial(_copy_items, store, part)
            while batch := list(islice(items, _BATCH)):
                # An item that kills the worker cannot be read, and is left out.
                deque(results_of(pool, _SECONDS, task, [batch]), maxlen=0)
        finally:
            pool.shutdown(cancel_futures=True)
        own = [((SLIDES, slide_key(n)), record.to_bytes(n)) for n, record in records.items()]
        _put(part, [*own, ((META, b"next_number"), to_json(next_number))])
        carry_files(store, part)
    try:
        Path.cwd()
    except FileNotFoundError:  # it was the old folder, and worker processes begin in it
        os.chdir(store)


def _items(
    records: Mapping[int, SlideRecord], databases: Iterable[bytes], bar: Bar
) -> Iterator[Item]:
    yield META, None, None
    yield SET_ASIDE, None, None
    others = [name for name in databases if name not in (META, SLIDES, PATCHES, SET_ASIDE)]
    for number, record in records.items():
        yield from ((name, number, None) for name in others)
        if record.state is SlideState.COMPLETE:
            yield from ((PATCHES, number, row) for row in range(record.planned))
        else:
            yield PATCHES, number, None
        bar.advance()


def _copy_items(store: Path, part: Path, items: list[Item]) -> None:
    with RawStore(store) as raw:
        _copy_entries(raw, part, (entry for item in items for entry in _entries(raw, *item)))


def _entries(raw: RawStore, database: bytes, number: int | None, row: int | None) -> list[Entry]:
    """The entries of an item, as far as their keys can be listed."""
    if number is None:
        found = raw.keys(database)
    elif row is None:
        found = raw.slide_keys(database, number)
    else:
        return [(database, patch_key(number, row))]
    keys = [slide_key(number)] if database == INDEX and number is not None else []
    with contextlib.suppress(DamagedStore):
        for key in found:
            keys.append(key)  # one by one, for those before an error
    return [(database, key) for key in dict.fromkeys(keys)]


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
