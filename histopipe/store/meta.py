"""Reading a store's `meta` and `slides` databases, for reader and writer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from histopipe.tiling.spec import MAX_PATCH_SIZE

T = TypeVar("T")
Stored = Callable[[bytes], bytes | memoryview | None]

_READ_SETTINGS = {"patch_size", "overlap", "mpp", "level", "tissue", "tissue_threshold", "codec"}
"""What readers use of a spec; what later versions add is not among it."""


def meta_entries(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> Stored:
    """What gives the values of `meta` by their keys, once the format's name, version and features are known ones.

    Raises:
        NothingToDo: an LMDB environment, but none of histopipe's.
        UnknownVersion, DamagedStore: as `check_format`.
    """
    if databases.get(META) is None:
        raise NothingToDo(f"{path} is an LMDB environment, but no histopipe store")
    if transaction.stat(databases[META])["entries"] == 0:
        raise NothingToDo(
            f"{path} is empty: an ingest has only just begun it, or was stopped there"
        )

    def stored(key: bytes) -> bytes | memoryview | None:
        return transaction.get(key, db=databases[META])

    check_format(stored, path)
    return stored


def read_meta(
    transaction: lmdb.Transaction,
    databases: Mapping[bytes, Any],
    name: str,
    kind: type[T],
    path: Path,
) -> T:
    """One entry of `meta`.

    Raises:
        NothingToDo, UnknownVersion, DamagedStore: as `meta_entries` and `entry`.
    """
    return entry(meta_entries(transaction, databases, path), name, kind, path)


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
            records[number] = SlideRecord.from_bytes(number, value, where=f"{path}, slide {number}")
    return records


def check_format(stored: Stored, path: Path) -> None:
    """Refuse what this version cannot read.

    Args:
        stored: gives the values of `meta` by their keys.

    Raises:
        UnknownVersion: of a later version, or with a feature not known here.
        DamagedStore: it does not say, or is something else.
    """
    found = entry(stored, "format", dict, path)
    if found.get("name") != FORMAT_NAME:
        raise DamagedStore(
            f"{path}: format", found=repr(found.get("name"))[:80], expected=FORMAT_NAME
        )
    if found.get("version") != VERSION:
        raise UnknownVersion(
            f"{path}: store format version",
            found=repr(found.get("version"))[:80],
            expected=VERSION,
            todo="use the histopipe version that wrote it, or a later one",
        )
    features = entry(stored, "required_features", list, path)
    unknown = sorted({str(feature) for feature in features} - KNOWN_FEATURES)
    if unknown:
        raise UnknownVersion(
            f"{path} needs a feature not known to this version",
            found=", ".join(unknown)[:200],
            todo="use a later histopipe",
        )


def entry(stored: Stored, name: str, kind: type[T], path: Path) -> T:
    """One entry of `meta`.

    Raises:
        DamagedStore: it is missing, no JSON, or of another type.
    """
    where = f"{path}, meta {name!r}"
    held = stored(name.encode())
    if held is None:
        raise DamagedStore(f"{where} is missing")
    value = from_json(held, where=where)
    if not isinstance(value, kind):
        raise DamagedStore(where, found=repr(value)[:80], expected=f"a JSON {kind.__name__}")
    return value


def read_spec(stored: Stored, path: Path) -> dict[str, Any]:
    """How a store's patches were made, with all that reading needs.

    Raises:
        DamagedStore: something of that is missing or out of range.
    """
    spec = entry(stored, "spec", dict, path)
    size = spec.get("patch_size")
    if not set(spec) >= _READ_SETTINGS or type(size) is not int or not 0 < size <= MAX_PATCH_SIZE:
        raise DamagedStore(
            f"{path}, meta 'spec'",
            found=repr(spec)[:120],
            expected="settings " + ", ".join(sorted(_READ_SETTINGS)),
        )
    return spec


def read_classes(stored: Stored, path: Path) -> list[str]:
    """Names of the classes of patches.

    Raises:
        DamagedStore: they are no names, or one is there twice.
    """
    classes = entry(stored, "classes", list, path)
    if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
        raise DamagedStore(f"{path}, meta 'classes'", found=repr(classes)[:80], expected="names")
    return classes
