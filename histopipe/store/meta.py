"""Read the databases `meta` and `slides` of a store."""

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
    slide_key,
    slide_number,
)
from histopipe.store.record import SlideRecord
from histopipe.system.files import shown
from histopipe.tiling.spec import MAX_PATCH_SIZE

T = TypeVar("T")
Stored = Callable[[bytes], bytes | memoryview | None]


def _is_number(value: object, *kinds: type) -> bool:
    return type(value) in kinds and 0 <= value <= MAX_PATCH_SIZE  # type: ignore[operator]


_READ_SETTINGS: Mapping[str, Callable[[object], bool]] = {
    "patch_size": lambda value: _is_number(value, int) and value != 0,
    "overlap": lambda value: _is_number(value, int),
    "mpp": lambda value: value is None or (_is_number(value, int, float) and value != 0),
    "level": lambda value: value is None or _is_number(value, int),
    "tissue": lambda value: isinstance(value, str),
    "tissue_threshold": lambda value: _is_number(value, int, float),
    "codec": lambda value: isinstance(value, str),
}
"""Settings of a spec that readers use, and the check of each value."""


def meta_entries(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> Stored:
    """Check the format, and return a function that maps a key of `meta` to its value.

    Raises:
        NothingToDo: the LMDB environment is empty, or belongs to another program.
        UnknownVersion, DamagedStore: as `check_format`.
    """
    if databases.get(META) is None:
        raise NothingToDo(f"{path} is an LMDB environment, but not a histopipe store")
    if transaction.stat(databases[META])["entries"] == 0:
        raise NothingToDo(
            f"{path} is empty: an ingest has just started, or was stopped at its start"
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
    """Check the format, and return one entry of `meta`; raises as `meta_entries` and `entry`."""
    return entry(meta_entries(transaction, databases, path), name, kind, path)


def read_records(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> dict[int, SlideRecord]:
    """Return every slide record by number, in order."""
    records = {}
    with transaction.cursor(db=databases[SLIDES]) as cursor:
        for key, value in cursor:
            if len(key) != 4:
                raise DamagedStore(f"{path}: a key of `slides`", found=bytes(key))
            number = slide_number(bytes(key))
            records[number] = SlideRecord.from_bytes(number, value, where=f"{path}, slide {number}")
    return records


def read_record(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], slide: int, path: Path
) -> SlideRecord:
    """Return a slide's record; DamagedStore if it is missing or damaged."""
    where = f"{path}, slide {slide}"
    value = transaction.get(slide_key(slide), db=databases[SLIDES])
    if value is None:
        raise DamagedStore(f"{where} has no record")
    return SlideRecord.from_bytes(slide, value, where=where)


def check_format(stored: Stored, path: Path) -> None:
    """Check that this version can read a store.

    Raises:
        UnknownVersion: a later version wrote the store, or it needs an unknown feature.
        DamagedStore: the entries of the format are missing or wrong.
    """
    format_entry = entry(stored, "format", dict, path)
    if format_entry.get("name") != FORMAT_NAME:
        raise DamagedStore(
            f"{path}: format", found=repr(format_entry.get("name"))[:80], expected=FORMAT_NAME
        )
    if format_entry.get("version") != VERSION:
        raise UnknownVersion(
            f"{path}: store format version",
            found=repr(format_entry.get("version"))[:80],
            expected=VERSION,
            todo="use the histopipe version that wrote it, or a later one",
        )
    features = entry(stored, "required_features", list, path)
    unknown = sorted({str(feature) for feature in features} - KNOWN_FEATURES)
    if unknown:
        raise UnknownVersion(
            f"{path} needs a feature that this version does not have",
            found=", ".join(unknown)[:200],
            todo="use a later histopipe",
        )


def entry(stored: Stored, name: str, kind: type[T], path: Path) -> T:
    """Return one entry of `meta`; DamagedStore if it is missing, not JSON, or of another type."""
    where = f"{path}, meta {name!r}"
    data = stored(name.encode())
    if data is None:
        raise DamagedStore(f"{where} is missing")
    value = from_json(data, where=where)
    if type(value) is not kind or not _can_be_shown(value):
        raise DamagedStore(where, found=repr(value)[:80], expected=f"a JSON {kind.__name__}")
    return value


def _can_be_shown(value: object) -> bool:
    """Check that no text contains terminal control characters. Without recursion, since values may be nested deeply."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            todo += [*part, *part.values()]
        elif isinstance(part, list):
            todo += part
        elif isinstance(part, str) and shown(part) != part:
            return False
    return True


def read_spec(stored: Stored, path: Path) -> dict[str, Any]:
    """Return the spec of a store; DamagedStore if a setting that readers need is missing or out of range."""
    spec = entry(stored, "spec", dict, path)
    if _READ_SETTINGS.keys() - spec.keys():
        expected = "settings " + ", ".join(sorted(_READ_SETTINGS))
        raise DamagedStore(f"{path}, meta 'spec'", found=repr(spec)[:120], expected=expected)
    for name, is_right in _READ_SETTINGS.items():
        if not is_right(spec[name]):
            raise DamagedStore(f"{path}, meta 'spec': {name}", found=repr(spec[name])[:80])
    return spec


def read_classes(stored: Stored, path: Path) -> list[str]:
    """Return the names of the patch classes; DamagedStore if they are not texts, or not unique."""
    classes = entry(stored, "classes", list, path)
    if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
        raise DamagedStore(
            f"{path}, meta 'classes'", found=repr(classes)[:80], expected="unique names"
        )
    return classes
