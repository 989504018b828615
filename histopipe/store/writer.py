"""Write a store. A slide becomes visible by one transaction, at the end."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import DamagedStore, MachineShort, NothingToDo, UsageError
from histopipe.store.environment import Environment, delete_entries, delete_slide, open_environment
from histopipe.store.format import (
    FORMAT_NAME,
    INDEX,
    MAX_SLIDE_NUMBER,
    META,
    PATCHES,
    SLIDES,
    STAINS,
    THUMBNAILS,
    VERSION,
    decode_index,
    encode_index,
    patch_key,
    seal,
    slide_key,
    thumbnail_key,
    to_json,
    value_crc,
)
from histopipe.store.reading import read_meta, read_record, read_records
from histopipe.store.record import SlideRecord, SlideState, StainFit
from histopipe.system.files import Closing
from histopipe.tiling.spec import TilingSpec, differences

_BEGUN_FILES = ("data.mdb", "lock.mdb", "ingest.lock")
_OWN_FILES = {*_BEGUN_FILES, "ingest.log", "ingest.csv"}


def open_for_change(path: Path) -> Environment:
    """Open an existing store for writing. Call it before a `Store` of it is opened in the same process.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion, UsageError, MachineShort: it cannot be written.
    """
    open_environment(path).close()  # do not create a store at a wrong path
    environment = open_environment(path, write=True)
    try:
        with environment.read() as transaction:
            read_meta(transaction, environment.databases, "format", dict, path)
    except BaseException:
        environment.close()
        raise
    return environment


def open_or_make(path: Path, spec: Mapping[str, Any]) -> Environment:
    """Open or create a store of a spec for writing; raises as `StoreWriter`."""
    is_new = _make_folder(path)
    try:
        environment = open_environment(path, write=True)
    except MachineShort:
        if is_new:
            for name in _BEGUN_FILES:
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        raise

    def work(transaction: lmdb.Transaction) -> None:
        databases = environment.databases
        if transaction.stat(databases[META])["entries"]:
            check_spec(read_meta(transaction, databases, "spec", dict, path), spec, path)
            return
        for name, value in _new_meta(spec).items():
            transaction.put(name.encode(), to_json(value), db=databases[META])

    try:
        environment.change(work)
    except BaseException:
        environment.close()
        raise
    return environment


def check_spec(stored: Mapping[str, Any], requested: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError if the spec of a store differs from the requested one."""
    if stored != requested:
        raise UsageError(
            f"{path} was created with other settings",
            found="; ".join(differences(stored, requested)),
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


def _make_folder(path: Path) -> bool:
    """Create the folder of a store; return False if it exists. Nothing is written into a folder with other contents."""
    if path.is_dir():
        contents = [p.name for p in path.iterdir() if p.name not in _OWN_FILES]
        if contents and not (path / "data.mdb").exists():
            raise UsageError(
                f"{path} is not a store, and not empty",
                found=", ".join(sorted(contents)[:3]),
                expected="a store, an empty folder, or a new path",
                todo="choose another --out",
            )
    elif path.exists():
        raise UsageError(f"{path} is a file", expected="a folder", todo="choose another --out")
    try:
        environment = open_environment(path)  # for reading
    except NothingToDo:
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be created", found=str(error)) from error
        return is_new
    with environment, environment.read() as transaction:
        if environment.databases[META] is not None:
            if transaction.stat(environment.databases[META])["entries"]:
                read_meta(transaction, environment.databases, "format", dict, path)
        elif transaction.stat()["entries"]:
            raise UsageError(
                f"{path} is an LMDB environment of another program", todo="choose another --out"
            )
    return False


class StoreWriter(Closing):
    """A store open for writing, also by several processes. Open it before a `Store` of it in the same process.

    Args:
        path: the store's folder.
        spec: tiling settings, as a spec or as in `meta`; a missing store is created. None opens any existing store.
        alone: no other process writes to the store at the same time. Its records are then read only once.

    Raises:
        NothingToDo: there is no store, and `spec` is None.
        UsageError: the store has another spec.
        UnknownVersion, DamagedStore, MachineShort: the store cannot be used.
        UsageError: the path is not a store.
    """

    def __init__(
        self, path: Path, spec: TilingSpec | Mapping[str, Any] | None = None, *, alone: bool = False
    ) -> None:
        self.path = path
        self._cached: dict[int, SlideRecord] | None = None
        if spec is None:
            self._environment = open_for_change(path)
        else:
            spec_json = spec.to_json() if isinstance(spec, TilingSpec) else spec
            self._environment = open_or_make(path, spec_json)
        if alone:
            try:
                self._cached = self.records()
            except BaseException:
                self.close()
                raise

    def records(self) -> dict[int, SlideRecord]:
        """Return the records of all slides by number."""
        with self._environment.read() as transaction:
            return self._records(transaction)

    def record(self, slide: int) -> SlideRecord:
        """Return the record of a slide."""
        with self._environment.read() as transaction:
            return read_record(transaction, self._db, slide, self.path)

    def register(self, records: Sequence[SlideRecord]) -> dict[str, int]:
        """Store the records of new slides under numbers never used before; return the numbers of all slides by id."""
        cached = None if self._cached is None else dict(self._cached)

        def work(transaction: lmdb.Transaction) -> dict[str, int]:  # runs again if the map is full
            existing = cached if cached is not None else self._records(transaction)
            numbers = {r.id: n for n, r in existing.items()}
            next_number = read_meta(transaction, self._db, "next_number", int, self.path)
            number = max([next_number, *(n + 1 for n in existing)])  # never overwrite a record
            for record in records:
                if record.id in numbers:
                    continue
                if number > MAX_SLIDE_NUMBER:
                    raise UsageError(f"{self.path} has no slide number left", found=number)
                numbers[record.id] = number
                self._put_record(transaction, number, record)
                number += 1
            transaction.put(b"next_number", to_json(number), db=self._db[META])
            return numbers

        return self._environment.change(work)

    def class_numbers(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each patch class. New classes are added after the known ones."""
        if not names:
            return {}

        def work(transaction: lmdb.Transaction) -> dict[str, int]:
            classes = read_meta(transaction, self._db, "classes", list, self.path)
            new = [name for name in names if name not in classes]
            if new:
                classes = [*classes, *new]
                transaction.put(b"classes", to_json(classes), db=self._db[META])
            return {name: classes.index(name) for name in names}

        return self._environment.change(work)

    def put_patches(
        self, slide: int, rows: Sequence[int], values: Sequence[bytes | None]
    ) -> NDArray[np.uint32]:
        """Store the files of patches, best in ascending order. None is an unreadable patch, stored as an empty value.

        Returns their CRCs with the keys, (N,) uint32, 0 for unreadable patches.
        """
        # An empty value marks an unreadable patch; a missing patch has no value.
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
        """Make a slide visible: write record, index and all else in one transaction, after its last patch.

        `columns` are (N,) each. `further` are values by database and key, also of databases unknown to this version.
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

    def put_columns(
        self,
        slide: int,
        columns: Mapping[str, NDArray[Any]],
        *,
        crc: NDArray[np.integer],
        **facts: Any,
    ) -> None:
        """Add or replace columns of a slide's index, (N,) each, and fields of its record, in one transaction.

        Raises:
            DamagedStore: the checksums of the stored patches differ from `crc`, (N,).
        """
        key, where = slide_key(slide), f"{self.path}, slide {slide}"

        def work(transaction: lmdb.Transaction) -> None:
            block = transaction.get(key, db=self._db[INDEX])
            old = decode_index(key, bytes(block), where=where) if block is not None else {}
            if not np.array_equal(old.get("crc", ()), crc):
                raise DamagedStore(
                    f"{where} was ingested again at the same time",
                    todo="run the same command again",
                )
            record = read_record(transaction, self._db, slide, self.path)
            transaction.put(key, encode_index(key, {**old, **columns}), db=self._db[INDEX])
            self._put_record(transaction, slide, dataclasses.replace(record, **facts))

        self._environment.change(work)

    def put_stain(self, slide: int, fit: StainFit) -> None:
        """Add or replace the stain fit of a slide."""
        key = slide_key(slide)
        value = seal(key, fit.to_json())
        self._environment.change(lambda t: t.put(key, value, db=self._db[STAINS]))

    def fail(self, slide: int, record: SlideRecord) -> None:
        """Delete the entries of a slide, then write the record of its failure."""
        delete_entries(self._environment, slide)
        self.update(slide, record)

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Hide a slide and delete its entries, so that it can be ingested from the start."""
        pending = dataclasses.replace(
            record, state=SlideState.PENDING, error=None, error_kind=None, error_option=None
        )
        self.update(slide, pending)
        delete_entries(self._environment, slide)

    def remove(self, slide: int) -> None:
        """Delete a slide and all its entries in one transaction. Its number is not used again."""

        def work(transaction: lmdb.Transaction) -> None:
            for database in [*self._environment.slide_databases(), self._db[SLIDES]]:
                delete_slide(transaction, database, slide)

        self._environment.change(work)
        if self._cached is not None:
            self._cached.pop(slide, None)

    def add_meta(self, entries: Mapping[bytes, bytes]) -> None:
        """Add entries to `meta`. Existing ones are not replaced."""

        def work(transaction: lmdb.Transaction) -> None:
            for name, value in entries.items():
                transaction.put(name, value, db=self._db[META], overwrite=False)

        self._environment.change(work)

    def update(self, slide: int, record: SlideRecord) -> None:
        """Replace the record of a slide."""
        self._environment.change(lambda transaction: self._put_record(transaction, slide, record))

    def change(self, slide: int, **facts: Any) -> None:
        """Change some fields of a record, and keep the current values of the others."""

        def work(transaction: lmdb.Transaction) -> None:
            record = read_record(transaction, self._db, slide, self.path)
            self._put_record(transaction, slide, dataclasses.replace(record, **facts))

        self._environment.change(work)

    def reusable_bytes(self) -> int:
        """Return the bytes inside the file that are free after deletions."""
        length = (self.path / "data.mdb").stat().st_size
        return max(0, length - self._environment.used_bytes())

    def close(self) -> None:
        """Close the store."""
        self._environment.close()

    @property
    def _db(self) -> Mapping[bytes, Any]:
        return self._environment.databases

    def _records(self, transaction: lmdb.Transaction) -> dict[int, SlideRecord]:
        if self._cached is not None:
            return dict(self._cached)
        return read_records(transaction, self._db, self.path)

    def _put_record(self, transaction: lmdb.Transaction, number: int, record: SlideRecord) -> None:
        transaction.put(slide_key(number), record.to_bytes(number), db=self._db[SLIDES])
        if self._cached is not None:  # if the transaction fails, this writer is closed
            self._cached[number] = record
