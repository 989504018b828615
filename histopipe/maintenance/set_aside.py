"""What a repair keeps of damaged slides while they are ingested again, so that a kill at any moment loses none of it.

One transaction copies a slide's record, index and all else but its patches and thumbnails into the database `set-aside`, and
makes the slide pending. Once it is complete again, one transaction returns what still fits. The keys in `set-aside` begin with
numbers that no slide has: 0xff, and the slide's number in 3 bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.environment import Environment, entries_with
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

_NUMBER = 4
"""Bytes of a slide number at the start of a key."""
_ANEW = {META, PATCHES, THUMBNAILS, SET_ASIDE}
"""Databases that an ingest fills anew, or that are of no slide."""
_PLACES = ("x_l0", "y_l0")
_OF_CLASSES = ("label", "covered")
_MEASURED = (*_OF_CLASSES, "focus", "pen", "dark")

Columns = dict[str, NDArray[Any]]


def set_aside_slides(environment: Environment) -> list[int]:
    """List the slides of which something is set aside, by an earlier repair."""
    kept = environment.databases.get(SET_ASIDE)
    if kept is None:
        return []
    with environment.read() as transaction, transaction.cursor(db=kept) as cursor:
        keys = [bytes(key) for key in cursor.iternext(values=False)]
    return sorted({int.from_bytes(key[1:_NUMBER], "big") for key in keys})


def set_aside(
    environment: Environment, number: int, expected: SlideRecord, pending: SlideRecord
) -> bool:
    """Set aside what is stored of a slide, and give it the record `pending`, in one transaction.

    Returns False, and changes nothing, if the slide no longer has the record `expected`.
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
            for key, entry in list(entries_with(transaction, database, slide_key(number))):
                transaction.put(_kept_key(number, name) + key[_NUMBER:], entry, db=kept)
        transaction.put(slide_key(number), pending.to_bytes(number), db=databases[SLIDES])
        return True

    return environment.change(work)


def restore(environment: Environment, number: int) -> str | None:
    """Return to a slide that is complete again what was set aside, where it still fits. Of a removed slide, forget it.

    Returns a note for the user on what could not be returned, if any.
    """

    def work(transaction: Any) -> str | None:
        note = None
        kept = environment.database(SET_ASIDE, transaction)
        held = dict(entries_with(transaction, kept, _kept_prefix(number)))
        databases, key = environment.databases, slide_key(number)
        value = transaction.get(key, db=databases[SLIDES])
        before = _decoded(number, held.get(_kept_key(number, SLIDES), b""))
        now = None if value is None else _decoded(number, value)
        if before is not None and now is not None:
            old = _index(number, held.get(_kept_key(number, INDEX)))
            index = _index(number, transaction.get(key, db=databases[INDEX]))
            classes = json.loads(bytes(transaction.get(b"classes", db=databases[META]) or b"[]"))
            columns = _still_valid(old, index, len(classes))
            if now.annotations is not None:
                columns = {n: c for n, c in columns.items() if n not in _OF_CLASSES}
            record, note = _record(before, now, columns)
            if index is not None:
                transaction.put(key, encode_index(key, {**index, **columns}), db=databases[INDEX])
            transaction.put(key, record.to_bytes(number), db=databases[SLIDES])
        for kept_key, entry in held.items():
            name, _, rest = kept_key[_NUMBER:].partition(b"\0")
            if value is not None and name not in (SLIDES, INDEX):
                transaction.put(key + rest, entry, db=environment.database(name, transaction))
            transaction.delete(kept_key, db=kept)
        return note

    return environment.change(work)


def _kept_prefix(number: int) -> bytes:
    return b"\xff" + number.to_bytes(_NUMBER - 1, "big")


def _kept_key(number: int, database: bytes) -> bytes:
    return _kept_prefix(number) + database + b"\0"


def _decoded(number: int, value: bytes | memoryview) -> SlideRecord | None:
    try:
        return SlideRecord.from_bytes(number, value, where=f"slide {number}")
    except DamagedStore:
        return None


def _index(number: int, block: bytes | memoryview | None) -> Columns | None:
    """Columns of an index block; None if it is missing or damaged."""
    try:
        return decode_index(slide_key(number), bytes(block or b""), where=f"slide {number}")
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
    record = dataclasses.replace(now, **{name: getattr(before, name) for name in names})
    notes = []
    if before.annotations is not None and now.annotations is None and "label" not in columns:
        notes.append("the classes of its patches are gone: `histopipe annotate` makes them again")
        record = dataclasses.replace(record, notes=list(dict.fromkeys([*record.notes, *notes])))
    if record.unreadable > before.unreadable:
        notes.append(f"{record.unreadable} patches cannot be read, {before.unreadable} before")
    return record, f"{now.id}: {'; '.join(notes)}" if notes else None
