"""What a repair keeps of damaged slides while they are ingested again, so that a kill at any moment loses none of it.

One transaction copies a slide's record, index and all else but its patches and thumbnails into the database `set-aside`, and
makes the slide pending. Once it is complete again, one transaction returns what still fits. The keys in `set-aside` begin with
numbers that no slide has: 0xff, and the slide's number in 3 bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.environment import Environment
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
from histopipe.store.record import SlideRecord

_MARK = (0xFF).to_bytes(1, "big")
_NUMBER = 4
_ANEW = {META, PATCHES, THUMBNAILS, SET_ASIDE}
"""Databases that an ingest fills anew, or that are of no slide."""
_PLACES = ("x_l0", "y_l0")
_OF_CLASSES = ("label", "covered")
_MEASURED = (*_OF_CLASSES, "focus", "pen", "dark")

Columns = dict[str, NDArray[Any]]


def set_aside_slides(environment: Environment) -> list[int]:
    """List the slides of which something is set aside, by an earlier repair."""
    if environment.databases.get(SET_ASIDE) is None:
        return []
    with (
        environment.read() as transaction,
        transaction.cursor(db=environment.databases[SET_ASIDE]) as cursor,
    ):
        keys = [bytes(key[:_NUMBER]) for key in cursor.iternext(values=False)]
    return sorted({int.from_bytes(key[1:], "big") for key in keys})


def set_aside(
    environment: Environment, number: int, expected: SlideRecord, pending: SlideRecord
) -> bool:
    """Set aside what is stored of a slide, and make it pending, in one transaction.

    Args:
        environment: open for writing.
        number: of the slide.
        expected: the record that was verified.
        pending: the record that it gets.

    Returns:
        Whether it was done; False if the slide has another record by now.
    """

    def work(transaction: Any) -> bool:
        databases = environment.databases
        value = transaction.get(slide_key(number), db=databases[SLIDES])
        if value is None or _decoded(number, value) != expected:
            return False
        kept = environment.database(SET_ASIDE, transaction)
        for name, database in list(databases.items()):
            if database is None or name in _ANEW:
                continue
            for key, entry in list(_entries(transaction, database, slide_key(number))):
                transaction.put(_kept_key(number, name) + key[_NUMBER:], entry, db=kept)
        transaction.put(slide_key(number), pending.to_bytes(number), db=databases[SLIDES])
        return True

    return environment.change(work)


def restore(environment: Environment, number: int) -> str | None:
    """Return to a slide that is complete again what was set aside, where it still fits, and forget it.

    Args:
        environment: open for writing.
        number: of the slide.

    Returns:
        A note for the user on what could not be returned, if any.
    """
    note: str | None = None

    def work(transaction: Any) -> None:
        nonlocal note
        databases = environment.databases
        kept = environment.database(SET_ASIDE, transaction)
        held = dict(_entries(transaction, kept, _kept_prefix(number)))
        before = _decoded(number, held.get(_kept_key(number, SLIDES), b""))
        now = _decoded(number, transaction.get(slide_key(number), db=databases[SLIDES]) or b"")
        if before is not None and now is not None:
            index = _index(number, transaction.get(slide_key(number), db=databases[INDEX]))
            old = _index(number, held.get(_kept_key(number, INDEX)))
            classes = transaction.get(b"classes", db=databases[META]) or b"[]"
            columns = _still_valid(old, index, len(json.loads(bytes(classes))))
            if now.annotations is not None:
                columns = {n: c for n, c in columns.items() if n not in _OF_CLASSES}
            now, note = _record(before, now, columns)
            if index is not None:
                block = encode_index(slide_key(number), {**index, **columns})
                transaction.put(slide_key(number), block, db=databases[INDEX])
            transaction.put(slide_key(number), now.to_bytes(number), db=databases[SLIDES])
        for key, value in held.items():
            name, _, rest = key[_NUMBER:].partition(b"\0")
            if name not in (SLIDES, INDEX):
                database = environment.database(name, transaction)
                transaction.put(slide_key(number) + rest, value, db=database)
            transaction.delete(key, db=kept)

    environment.change(work)
    return note


def forget(environment: Environment, number: int) -> None:
    """Forget what is set aside of a slide that is in the store no more."""

    def work(transaction: Any) -> None:
        kept = environment.database(SET_ASIDE, transaction)
        for key, _ in list(_entries(transaction, kept, _kept_prefix(number))):
            transaction.delete(key, db=kept)

    environment.change(work)


def _kept_prefix(number: int) -> bytes:
    return _MARK + number.to_bytes(_NUMBER - 1, "big")


def _kept_key(number: int, database: bytes) -> bytes:
    return _kept_prefix(number) + database + b"\0"


def _entries(transaction: Any, database: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=database) as cursor:
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()).startswith(prefix):
            yield bytes(cursor.key()), bytes(cursor.value())
            found = cursor.next()


def _decoded(number: int, value: bytes | memoryview) -> SlideRecord | None:
    try:
        return SlideRecord.from_bytes(number, value, where=f"slide {number}")
    except DamagedStore:
        return None


def _index(number: int, block: bytes | memoryview | None) -> Columns | None:
    """Columns of an index block; None if it is missing or damaged."""
    if block is None:
        return None
    try:
        return decode_index(slide_key(number), bytes(block), where=f"slide {number}")
    except DamagedStore:
        return None


def _still_valid(old: Columns | None, new: Columns | None, classes: int) -> Columns:
    """Columns that were measured or decided after the ingest, if the patches are at the same places."""
    if old is None or new is None:
        return {}
    if not all(np.array_equal(old[name], new[name]) for name in _PLACES):
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
    record, note = dataclasses.replace(now, **{name: getattr(before, name) for name in names}), None
    if before.annotations is not None and now.annotations is None and "label" not in columns:
        note = "the classes of its patches are gone: `histopipe annotate` makes them again"
        if note not in record.notes:
            record = dataclasses.replace(record, notes=[*record.notes, note])
        note = f"{now.id}: {note}"
    if record.unreadable > before.unreadable:
        more = f"{record.unreadable} patches cannot be read, {before.unreadable} before"
        note = f"{note}; {more}" if note else f"{now.id}: {more}"
    return record, note
