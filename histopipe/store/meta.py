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
from histopipe.system.files import shown
from histopipe.tiling.spec import MAX_PATCH_SIZE

T = TypeVar("T")
Stored = Callable[[bytes], bytes | memoryview | None]


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_PATCH_SIZE


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_PATCH_SIZE  # type: ignore[operator]


_READ_SETTINGS: Mapping[str, Callable[[object], bool]] = {
    "patch_size": lambda value: _is_whole(value, 1),
    "overlap": lambda value: _is_whole(value, 0),
    "mpp": lambda value: value is None or (_is_number(value) and value != 0),
    "level": lambda value: value is None or _is_whole(value, 0),
    "tissue": lambda value: isinstance(value, str),
    "tissue_threshold": _is_number,
    "codec": lambda value: isinstance(value, str),
}
"""What readers use of a spec, and how it must be; what later versions add is not among it."""


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
    if type(value) is not kind or not _can_be_shown(value):
        raise DamagedStore(where, found=repr(value)[:80], expected=f"a JSON {kind.__name__}")
    return value


def _can_be_shown(value: object) -> bool:
    """Whether texts hold no characters that a terminal would obey."""
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
    """How a store's patches were made, with all that reading needs.

    Raises:
        DamagedStore: something of that is missing or out of range.
    """
    spec = entry(stored, "spec", dict, path)
    missing = _READ_SETTINGS.keys() - spec.keys()
    if missing:
        raise DamagedStore(
            f"{path}, meta 'spec'", found=repr(spec)[:120],
            expected="settings " + ", ".join(sorted(_READ_SETTINGS)),
        )  # fmt: skip
    for name, is_right in _READ_SETTINGS.items():
        if not is_right(spec[name]):
            raise DamagedStore(f"{path}, meta 'spec': {name}", found=repr(spec[name])[:80])
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
