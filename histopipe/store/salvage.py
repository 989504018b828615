"""What can still be read of a store's file, written into a new one, without letting LMDB look at the old."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import lmdb

from histopipe.store.environment import open_environment
from histopipe.store.format import META, PATCHES, SLIDES, slide_key, slide_number, to_json
from histopipe.store.record import SlideRecord
from histopipe.store.structure import Structure

_CHUNK_BYTES = 32 << 20
_NUMBER = 4
_PATCH_KEY = 8

Entry = tuple[bytes, bytes, bytes]
"""Database, key, value."""


def salvage(
    structure: Structure,
    folder: Path,
    records: Mapping[int, SlideRecord],
    sound: Collection[int],
    next_number: int,
) -> None:
    """Write a store anew, from what is sound of an old one, under the same numbers.

    Args:
        structure: of the old file; its databases are known.
        folder: for the new store; empty.
        records: of the slides that the new store will know.
        sound: numbers of those whose entries are taken over; of the others there is only the record.
        next_number: what the new store gives next.
    """
    environment = open_environment(folder, write=True)

    def put(entries: list[Entry]) -> None:
        def work(transaction: lmdb.Transaction) -> None:
            for database, key, value in entries:
                transaction.put(key, value, db=environment.database(database, transaction))

        environment.change(work)

    try:
        chunk: list[Entry] = []
        size = 0
        for entry in _entries(structure, sound):
            chunk.append(entry)
            size += len(entry[2])
            if size > _CHUNK_BYTES:
                put(chunk)
                chunk, size = [], 0
        put(chunk)
        own = [(SLIDES, slide_key(n), record.to_bytes(n)) for n, record in records.items()]
        put([*own, (META, b"next_number", to_json(next_number))])
    finally:
        environment.close()


def _entries(structure: Structure, sound: Collection[int]) -> Iterator[Entry]:
    """All entries of sound slides, and what is no slide's."""
    for name, tree in structure.trees.items():
        database = name.encode("ascii", "backslashreplace")
        if database == SLIDES:
            continue
        for key, value, _ in structure.small(name, tree):
            if database == META or _is_of(database, key, sound):
                yield database, key, value


def _is_of(database: bytes, key: bytes, sound: Collection[int]) -> bool:
    usual = len(key) == _PATCH_KEY if database == PATCHES else len(key) >= _NUMBER
    return usual and slide_number(key[:_NUMBER]) in sound
