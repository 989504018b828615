"""Reading a store's `meta` and `slides` databases, for reader and writer alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.store.format import (
    FORMAT_NAME,
    KNOWN_FEATURES,
    META,
    SLIDES,
    VERSION,
    from_json,
    slide_number,
)
from histopipe.store.record import SlideRecord

T = TypeVar("T")


def read_meta(
    transaction: lmdb.Transaction,
    databases: Mapping[bytes, Any],
    name: str,
    kind: type[T],
    path: Path,
) -> T:
    """One entry of `meta`, once the format's name, version and features are known ones.

    Raises:
        NothingToDo: an LMDB environment, but none of histopipe's.
        UnknownVersion: of a later version, or with a feature not known here.
        DamagedStore: the entry is missing, no JSON, or of another type.
    """
    if databases.get(META) is None:
        raise NothingToDo(f"{path} is an LMDB environment, but no histopipe store")
    if transaction.stat(databases[META])["entries"] == 0:
        raise NothingToDo(
            f"{path} is empty: an ingest has only just begun it, or was stopped there"
        )
    _check_format(transaction, databases[META], path)
    return _entry(transaction, databases[META], name, kind, path)


def read_records(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> dict[int, SlideRecord]:
    """Every slide record by number, in order."""
    records = {}
    with transaction.cursor(db=databases[SLIDES]) as cursor:
        for key, value in cursor:
            if len(key) != 4:
                raise DamagedStore(f"{path}: a key of `slides`", found=bytes(key))
            number = slide_number(bytes(key))
            where = f"{path}, slide {number}"
            records[number] = SlideRecord.from_json(from_json(value, where=where), where=where)
    return records


def _check_format(transaction: lmdb.Transaction, database: Any, path: Path) -> None:
    found = _entry(transaction, database, "format", dict, path)
    if found.get("name") != FORMAT_NAME:
        raise DamagedStore(f"{path}: format", found=repr(found.get("name")), expected=FORMAT_NAME)
    if found.get("version") != VERSION:
        raise UnknownVersion(
            f"{path}: store format version",
            found=found.get("version"),
            expected=VERSION,
            todo="use the histopipe version that wrote it, or a later one",
        )
    features = _entry(transaction, database, "required_features", list, path)
    unknown = sorted({str(feature) for feature in features} - KNOWN_FEATURES)
    if unknown:
        raise UnknownVersion(
            f"{path} needs a feature not known to this version",
            found=", ".join(unknown),
            todo="use a later histopipe",
        )


def _entry(transaction: lmdb.Transaction, database: Any, name: str, kind: type[T], path: Path) -> T:
    where = f"{path}, meta {name!r}"
    stored = transaction.get(name.encode(), db=database)
    if stored is None:
        raise DamagedStore(f"{where} is missing")
    value = from_json(stored, where=where)
    if not isinstance(value, kind):
        raise DamagedStore(where, found=repr(value)[:80], expected=f"a JSON {kind.__name__}")
    return value
