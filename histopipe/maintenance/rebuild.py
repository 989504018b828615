"""Rebuild a store whose file is damaged: copy the readable entries into a new file that replaces the old one.

Worker processes read the old file, since LMDB may crash on it. Entries that crash a worker are skipped.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.maintenance.compact import carry_files, in_place_of
from histopipe.maintenance.store_check import Examination
from histopipe.store.data_file import RawStore, newest_transaction
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
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.progress import Bar, Progress
from histopipe.system.worker_pool import WorkerPool, results_of, silence

_CHUNK_BYTES = 32 << 20
"""Bytes of values in one transaction."""
_BATCH, _SECONDS = 4096, 600.0
"""Items of one task, and seconds until its worker counts as hanging."""

RebuiltEntry = tuple[bytes, bytes, bool]
"""Database, key, and whether the key is a prefix: all entries whose keys begin with it are copied."""


def rebuild(
    store: Path,
    examination: Examination,
    records: Mapping[int, SlideRecord],
    *,
    next_number: int,
    progress: Progress,
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
        if newest_transaction(store / "data.mdb") != examination.transaction:
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
        _put(part, entries | {(META, b"next_number"): to_json(next_number)})
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
    keys = []
    with suppress(DamagedStore):
        for key in raw.keys(database, prefix):
            keys.append(key)  # not list(), to keep the keys before an error
    return keys


def _put(part: Path, entries: Mapping[tuple[bytes, bytes], bytes]) -> None:
    """Write values by database and key into the new store, in one transaction."""

    def work(transaction: Any) -> None:
        for (database, key), value in entries.items():
            transaction.put(key, value, db=environment.database(database, transaction))

    with open_environment(part, write=True) as environment:
        environment.change(work)
