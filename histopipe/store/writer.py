"""Writing a store. Whatever becomes visible does so by one transaction, last."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import MachineShort, SpecMismatch, UsageError
from histopipe.store.columns import add_classes
from histopipe.store.environment import Environment, open_environment
from histopipe.store.folder import make_folder, remove_begun
from histopipe.store.format import (
    FORMAT_NAME,
    INDEX,
    MAX_SLIDE_NUMBER,
    META,
    PATCHES,
    SLIDES,
    THUMBNAILS,
    VERSION,
    encode_index,
    patch_key,
    slide_key,
    thumbnail_key,
    to_json,
    value_crc,
)
from histopipe.store.meta import read_meta, read_record, read_records
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.system.files import Closing
from histopipe.tiling.spec import TilingSpec, differences

_DELETE_AT_ONCE = 20_000


class StoreWriter(Closing):
    """A store open for writing; any number of processes may have one.

    Args:
        path: the store's folder, made if missing.
        spec: how its patches are made, as a spec or as `meta` holds it.
        alone: no other process writes to the store meanwhile, so that its records are read only once.

    Raises:
        SpecMismatch: the store has another spec.
        UnknownVersion, DamagedStore: the store cannot be used.
        UsageError: the path is something else than a store.
    """

    def __init__(
        self, path: Path, spec: TilingSpec | Mapping[str, Any], *, alone: bool = False
    ) -> None:
        self.path = path
        self._held: dict[int, SlideRecord] | None = None
        wanted = spec.to_json() if isinstance(spec, TilingSpec) else spec
        made = make_folder(path)
        try:
            self._environment = open_environment(path, write=True)
        except MachineShort:
            if made:
                remove_begun(path)
            raise
        try:
            self._environment.change(lambda transaction: self._check_or_create(transaction, wanted))
            if alone:
                self._held = self.records()
        except BaseException:
            self.close()
            raise

    def records(self) -> dict[int, SlideRecord]:
        """Return every slide's record by number."""
        with self._environment.read() as transaction:
            return self._records(transaction)

    def record(self, slide: int) -> SlideRecord:
        """Read a slide's record."""
        with self._environment.read() as transaction:
            return read_record(transaction, self._db, slide, self.path)

    def register(self, records: Sequence[SlideRecord]) -> dict[str, int]:
        """Store the records of new slides under numbers never used before; return the numbers of all slides by id."""
        held = None if self._held is None else dict(self._held)

        def work(transaction: lmdb.Transaction) -> dict[str, int]:  # again, where the map was full
            there = held if held is not None else self._records(transaction)
            known = {r.id: n for n, r in there.items()}
            told = read_meta(transaction, self._db, "next_number", int, self.path)
            number = max([told, *(n + 1 for n in there)])  # never over a record, whatever it says
            for record in records:
                if record.id in known:
                    continue
                if number > MAX_SLIDE_NUMBER:
                    raise UsageError(f"{self.path} has no slide number left", found=number)
                known[record.id] = number
                self._put_record(transaction, number, record)
                number += 1
            transaction.put(b"next_number", to_json(number), db=self._db[META])
            return known

        return self._environment.change(work)

    def class_numbers(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each class of patches. New classes are added after the known ones."""
        if not names:
            return {}
        return self._environment.change(
            lambda transaction: add_classes(transaction, self._db, names, path=self.path)
        )

    def put_patches(
        self, slide: int, rows: Sequence[int], values: Sequence[bytes | None]
    ) -> NDArray[np.uint32]:
        """Store the files of patches, best in rising order; None is an unreadable patch, stored as an empty value.

        Returns their CRCs with the keys, (N,) uint32, 0 where unreadable.
        """
        # An empty value tells an unreadable patch from one that is missing.
        items = [(patch_key(slide, r), v or b"") for r, v in zip(rows, values, strict=True)]

        def work(transaction: lmdb.Transaction) -> None:
            with transaction.cursor(db=self._db[PATCHES]) as cursor:
                cursor.putmulti(items)

        self._environment.change(work)
        return np.array([value_crc(k, v) if v else 0 for k, v in items], np.uint32)

    def complete(
        self,
        slide: int,
        record: SlideRecord,
        columns: Mapping[str, NDArray[Any]],
        thumbnails: Mapping[str, bytes],
        further: Mapping[tuple[bytes, bytes], bytes] = MappingProxyType({}),
    ) -> None:
        """Make a slide visible: record, index and all else in one transaction, after its last patch.

        Args:
            slide: its number.
            record: what is known of it.
            columns: (N,) each, of its index.
            thumbnails: pictures by name.
            further: values by database and key, of databases that this version may not know.
        """
        index = encode_index(slide_key(slide), columns)
        pictures = {thumbnail_key(slide, kind): picture for kind, picture in thumbnails.items()}
        checksums = map(value_crc, pictures, pictures.values())
        record = dataclasses.replace(
            record,
            state=SlideState.COMPLETE,
            thumbnail_crc=dict(zip(thumbnails, checksums, strict=True)),
        )

        def work(transaction: lmdb.Transaction) -> None:
            transaction.put(slide_key(slide), index, db=self._db[INDEX])
            for picture_key, picture in pictures.items():
                transaction.put(picture_key, picture, db=self._db[THUMBNAILS])
            for (database, key), value in further.items():
                transaction.put(key, value, db=self._environment.database(database, transaction))
            self._put_record(transaction, slide, record)

        self._environment.change(work)

    def fail(self, slide: int, record: SlideRecord, error: str, kind: FailureKind) -> None:
        """Delete what was stored of a slide, then record why it failed."""
        failed = dataclasses.replace(
            record, state=SlideState.FAILED, error=error, error_kind=kind,
            planned=0, stored=0, unreadable=0, stored_bytes=0,
        )  # fmt: skip
        delete_entries(self._environment, slide)
        self.update(slide, failed)

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Hide a slide and delete what is stored of it, so that it can be ingested from the start."""
        pending = dataclasses.replace(
            record, state=SlideState.PENDING, error=None, error_kind=None, error_option=None
        )
        self.update(slide, pending)
        delete_entries(self._environment, slide)

    def remove(self, slide: int) -> None:
        """Delete a slide and all that is stored of it, in one transaction. Its number is not used again."""

        def work(transaction: lmdb.Transaction) -> None:
            for name in [*_databases_of_slides(self._environment), SLIDES]:
                _delete(transaction, self._db[name], slide)

        self._environment.change(work)
        if self._held is not None:
            self._held.pop(slide, None)

    def add_meta(self, entries: Mapping[bytes, bytes]) -> None:
        """Add entries to `meta`, except those whose names it has."""

        def work(transaction: lmdb.Transaction) -> None:
            for name, value in entries.items():
                transaction.put(name, value, db=self._db[META], overwrite=False)

        self._environment.change(work)

    def update(self, slide: int, record: SlideRecord) -> None:
        """Replace a record."""
        self._environment.change(lambda transaction: self._put_record(transaction, slide, record))

    def change(self, slide: int, **facts: Any) -> None:
        """Change some fields of a record, and leave the others as they are now."""

        def work(transaction: lmdb.Transaction) -> None:
            record = read_record(transaction, self._db, slide, self.path)
            self._put_record(transaction, slide, dataclasses.replace(record, **facts))

        self._environment.change(work)

    def reusable_bytes(self) -> int:
        """Return the bytes inside the file that deleted values have left free."""
        length = (self.path / "data.mdb").stat().st_size
        return max(0, length - self._environment.used_bytes())

    def close(self) -> None:
        """Close the store."""
        self._environment.close()

    @property
    def _db(self) -> Mapping[bytes, Any]:
        return self._environment.databases

    def _records(self, transaction: lmdb.Transaction) -> dict[int, SlideRecord]:
        if self._held is not None:
            return dict(self._held)
        return read_records(transaction, self._db, self.path)

    def _put_record(self, transaction: lmdb.Transaction, number: int, record: SlideRecord) -> None:
        transaction.put(slide_key(number), record.to_bytes(number), db=self._db[SLIDES])
        if self._held is not None:  # should the transaction fail, this writer is closed
            self._held[number] = record

    def _check_or_create(self, transaction: lmdb.Transaction, spec: Mapping[str, Any]) -> None:
        if transaction.stat(self._db[META])["entries"] == 0:
            for name, value in _new_meta(spec).items():
                transaction.put(name.encode(), to_json(value), db=self._db[META])
            return
        check_spec(read_meta(transaction, self._db, "spec", dict, self.path), spec, self.path)


def check_spec(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to put patches of one spec into a store of another, with SpecMismatch."""
    if found != wanted:
        raise SpecMismatch(
            f"{path} was made with other settings",
            found="; ".join(differences(found, wanted)),
            todo="use the store's settings, or another --out",
        )


def _new_meta(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": {"name": FORMAT_NAME, "version": VERSION},
        "required_features": [],
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "histopipe_version": __version__,
        "spec": dict(spec),
        "classes": [],
        "next_number": 0,
    }


def delete_entries(environment: Environment, slide: int) -> None:
    """Delete all that is stored of a slide but its record, in bounded transactions, since nothing of it is visible."""
    for name in _databases_of_slides(environment):
        database = environment.databases[name]
        delete = partial(_delete, database=database, slide=slide, most=_DELETE_AT_ONCE)
        while _holds(environment, database, slide):  # mostly not, and looking costs no commit
            environment.change(delete)


def _databases_of_slides(environment: Environment) -> list[bytes]:
    """The databases with entries of slides beside their records. A later version's keys begin with slide numbers, too."""
    held = environment.databases.items()
    return [n for n, database in held if database is not None and n not in (META, SLIDES)]


def _holds(environment: Environment, database: Any, slide: int) -> bool:
    with environment.read() as transaction, transaction.cursor(db=database) as cursor:
        return bool(cursor.set_range(slide_key(slide))) and _is_of(cursor, slide)


def _is_of(cursor: lmdb.Cursor, slide: int) -> bool:
    return bytes(cursor.key()).startswith(slide_key(slide))


def _delete(
    transaction: lmdb.Transaction, database: Any, slide: int, most: int | None = None
) -> None:
    """Delete a slide's entries, or at most so many of them."""
    with transaction.cursor(db=database) as cursor:
        found = cursor.set_range(slide_key(slide))
        while found and _is_of(cursor, slide) and most != 0:
            found = cursor.delete() and bool(cursor.key())
            most = most and most - 1
