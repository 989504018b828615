"""Write a store. A slide becomes visible by one transaction, at the end."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import DamagedStore, MachineShort, NothingToDo, UsageError, reported_as
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
    Columns,
    decode_index,
    encode_index,
    patch_key,
    seal,
    slide_key,
    thumbnail_key,
    to_json,
    value_crc,
)
from histopipe.store.reading import meta_entries, read_meta, read_record, read_records
from histopipe.store.record import SlideRecord, SlideState, StainFit
from histopipe.system.files import Closing, run_on_error
from histopipe.system.folders import DATA
from histopipe.tiling.spec import TilingSpec, differences

_NEVER = datetime.min.replace(tzinfo=UTC)
_OWN_FILES = {DATA, "lock.mdb", "ingest.lock", "ingest.log", "ingest.csv"}


def _open_for_writing(path: Path, spec: Mapping[str, Any] | None, after: datetime) -> Environment:
    """Open a store for writing, or create one of a spec; raises as `StoreWriter`."""
    is_new = not path.exists()
    if spec is None:
        open_environment(path).close()  # do not create a store at a wrong path
    else:
        _check_folder(path)
        with reported_as(UsageError, f"{path} cannot be created", OSError):
            path.mkdir(parents=True, exist_ok=True)
    try:
        environment = open_environment(path, write=True)
    except MachineShort:
        if is_new:
            shutil.rmtree(path)
        raise

    def work(transaction: lmdb.Transaction) -> None:
        databases = environment.databases
        if spec is None:
            meta_entries(transaction, databases, path)
        elif transaction.stat(databases[META])["entries"]:
            check_spec(read_meta(transaction, databases, "spec", dict, path), spec, path)
        else:
            _put_meta(transaction, databases[META], spec, after)

    with run_on_error(environment.close):
        environment.change(work)
    return environment


def _put_meta(
    transaction: lmdb.Transaction, database: Any, spec: Mapping[str, Any], after: datetime
) -> None:
    """Write the entries of `meta` of a new store."""
    created = max(datetime.now(UTC), after + timedelta(milliseconds=1))
    for name, value in {
        "format": {"name": FORMAT_NAME, "version": VERSION},
        "required_features": [],
        "uuid": str(uuid.uuid4()),
        "created": created.isoformat(timespec="milliseconds"),
        "histopipe_version": __version__,
        "spec": dict(spec),
        "classes": [],
        "next_number": 0,
    }.items():
        transaction.put(name.encode(), to_json(value), db=database)


def check_spec(stored: Mapping[str, Any], requested: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError if the spec of a store differs from the requested one."""
    if stored != requested:
        raise UsageError(
            f"{path} was created with other settings",
            found="; ".join(differences(stored, requested)),
            todo="use the store's settings, or another --out",
        )


def _check_folder(path: Path) -> None:
    """Check that a store may be created or continued in a folder. A folder with other contents is refused."""
    if path.is_dir():
        contents = [p.name for p in path.iterdir() if p.name not in _OWN_FILES]
        if contents and not (path / DATA).exists():
            raise UsageError(
                f"{path} is not a store, and not empty",
                found=", ".join(sorted(contents)[:3]),
                expected="a store, an empty folder, or a new path",
                todo="choose another --out",
            )
    elif path.exists():
        raise UsageError(f"{path} is a file", expected="a folder", todo="choose another --out")
    # For reading, since opening it for writing would create databases in the environment of another program.
    with (
        suppress(NothingToDo),
        open_environment(path) as environment,
        environment.read() as transaction,
    ):
        meta = environment.databases[META]
        if meta is not None and transaction.stat(meta)["entries"]:
            meta_entries(transaction, environment.databases, path)
        elif meta is None and transaction.stat()["entries"]:
            raise UsageError(
                f"{path} is an LMDB environment of another program", todo="choose another --out"
            )


P = ParamSpec("P")
T = TypeVar("T")


def _in_transaction(
    method: Callable[Concatenate[StoreWriter, lmdb.Transaction, P], T],
) -> Callable[Concatenate[StoreWriter, P], T]:
    """Decorate a method: run it in one write transaction, its first argument, and again if the map is full."""

    @functools.wraps(method)
    def run(writer: StoreWriter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return writer.environment.change(
            lambda transaction: method(writer, transaction, *args, **kwargs)
        )

    return run


class StoreWriter(Closing):
    """A store open for writing, also by several processes. Open it before a `Store` of it in the same process.

    Args:
        path: the store's folder.
        after: latest time of stores with the same slides. A new store gets a later one, also by a clock that is behind.
        spec: tiling settings, as a spec or as in `meta`; a missing store is created. None opens any existing store.

    Raises:
        NothingToDo: there is no store, and `spec` is None.
        UsageError: the store has another spec.
        UnknownVersion, DamagedStore, MachineShort: the store cannot be used.
        UsageError: the path is not a store.

    Attributes:
        environment: the store's environment.
    """

    def __init__(
        self,
        path: Path,
        spec: TilingSpec | Mapping[str, Any] | None = None,
        *,
        after: datetime = _NEVER,
    ) -> None:
        self.path = path
        self.environment = _open_for_writing(
            path, spec.to_json() if isinstance(spec, TilingSpec) else spec, after
        )

    def records(self) -> dict[int, SlideRecord]:
        """Return the records of all slides by number."""
        with self.environment.read() as transaction:
            return read_records(transaction, self._db, self.path)

    def record(self, slide: int) -> SlideRecord:
        """Return the record of a slide."""
        with self.environment.read() as transaction:
            return read_record(transaction, self._db, slide, self.path)

    @_in_transaction
    def register(
        self, transaction: lmdb.Transaction, records: Sequence[SlideRecord]
    ) -> dict[str, int]:
        """Store the records of new slides under numbers never used before; return the numbers of all slides by id."""
        existing = read_records(transaction, self._db, self.path)
        numbers = {r.id: n for n, r in existing.items()}
        new = {record.id: record for record in records if record.id not in numbers}
        first = max(  # never overwrite a record
            [
                read_meta(transaction, self._db, "next_number", int, self.path),
                *(n + 1 for n in existing),
            ]
        )
        for number, record in enumerate(new.values(), first):
            if number > MAX_SLIDE_NUMBER:
                raise UsageError(f"{self.path} has no slide number left", found=number)
            numbers[record.id] = number
            self._put_record(transaction, number, record)
        transaction.put(b"next_number", to_json(first + len(new)), db=self._db[META])
        return numbers

    @_in_transaction
    def class_numbers(self, transaction: lmdb.Transaction, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each patch class. New classes are added after the known ones."""
        classes = read_meta(transaction, self._db, "classes", list, self.path)
        new = [name for name in names if name not in classes]
        if new:
            classes = [*classes, *new]
            transaction.put(b"classes", to_json(classes), db=self._db[META])
        return {name: classes.index(name) for name in names}

    @_in_transaction
    def put_patches(
        self,
        transaction: lmdb.Transaction,
        slide: int,
        rows: Sequence[int],
        values: Sequence[bytes | None],
    ) -> NDArray[np.uint32]:
        """Store the files of patches, best in ascending order. None is an unreadable patch, stored as an empty value.

        Returns their CRCs with the keys, (N,) uint32, 0 for unreadable patches.
        """
        # An empty value marks an unreadable patch; a missing patch has no value.
        items = [(patch_key(slide, r), v or b"") for r, v in zip(rows, values, strict=True)]
        with transaction.cursor(db=self._db[PATCHES]) as cursor:
            cursor.putmulti(items)
        return np.array([value_crc(k, v) if v else 0 for k, v in items], np.uint32)

    @_in_transaction
    def complete(
        self,
        transaction: lmdb.Transaction,
        slide: int,
        record: SlideRecord,
        columns: Columns,
        thumbnails: Mapping[str, bytes],
        *,
        further: Mapping[tuple[bytes, bytes], bytes] = MappingProxyType({}),
    ) -> None:
        """Make a slide visible: write record, index and all else in one transaction, after its last patch.

        `columns` are (N,) each. `further` are values by database and key, also of databases unknown to this version.
        """
        checksums = {}
        for kind, picture in thumbnails.items():
            key = thumbnail_key(slide, kind)
            checksums[kind] = value_crc(key, picture)
            transaction.put(key, picture, db=self._db[THUMBNAILS])
        key = slide_key(slide)
        transaction.put(key, encode_index(key, columns), db=self._db[INDEX])
        for (database, key), value in further.items():
            transaction.put(key, value, db=self.environment.database(database, transaction))
        record = dataclasses.replace(record, state=SlideState.COMPLETE, thumbnail_crc=checksums)
        self._put_record(transaction, slide, record)

    @_in_transaction
    def put_columns(
        self,
        transaction: lmdb.Transaction,
        /,
        slide: int,
        columns: Columns,
        *,
        crc: NDArray[np.integer],
        **record_fields: Any,
    ) -> None:
        """Add or replace columns of a slide's index, (N,) each, and fields of its record, in one transaction.

        Raises:
            DamagedStore: the checksums of the stored patches differ from `crc`, (N,).
        """
        key, where = slide_key(slide), f"{self.path}, slide {slide}"
        block = transaction.get(key, db=self._db[INDEX])
        old = decode_index(key, bytes(block), where=where) if block is not None else {}
        if not np.array_equal(old.get("crc", ()), crc):
            raise DamagedStore(
                f"{where} was ingested again at the same time",
                todo="run the same command again",
            )
        transaction.put(key, encode_index(key, {**old, **columns}), db=self._db[INDEX])
        record = read_record(transaction, self._db, slide, self.path)
        self._put_record(transaction, slide, dataclasses.replace(record, **record_fields))

    @_in_transaction
    def put_stain(self, transaction: lmdb.Transaction, slide: int, fit: StainFit) -> None:
        """Add or replace the stain fit of a slide."""
        key = slide_key(slide)
        transaction.put(key, seal(key, fit.to_json()), db=self._db[STAINS])

    def fail(self, slide: int, record: SlideRecord) -> None:
        """Delete the entries of a slide, then write the record of its failure."""
        delete_entries(self.environment, slide)
        self.update(slide, record)

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Hide a slide and delete its entries, so that it can be ingested from the start."""
        self.update(
            slide,
            dataclasses.replace(
                record, state=SlideState.PENDING, error=None, error_kind=None, error_option=None
            ),
        )
        delete_entries(self.environment, slide)

    @_in_transaction
    def remove(self, transaction: lmdb.Transaction, slide: int) -> None:
        """Delete a slide and all its entries in one transaction. Its number is not used again."""
        for database in [*self.environment.slide_databases(), self._db[SLIDES]]:
            delete_slide(transaction, database, slide)

    @_in_transaction
    def delete(self, transaction: lmdb.Transaction, database: bytes, key: bytes) -> None:
        """Delete one entry of any database."""
        transaction.delete(key, db=self.environment.database(database, transaction))

    @_in_transaction
    def add_meta(self, transaction: lmdb.Transaction, entries: Mapping[bytes, bytes]) -> None:
        """Add entries to `meta`. Existing ones are not replaced."""
        for name, value in entries.items():
            transaction.put(name, value, db=self._db[META], overwrite=False)

    @_in_transaction
    def update(self, transaction: lmdb.Transaction, slide: int, record: SlideRecord) -> None:
        """Replace the record of a slide."""
        self._put_record(transaction, slide, record)

    @_in_transaction
    def change(self, transaction: lmdb.Transaction, /, slide: int, **record_fields: Any) -> None:
        """Change some fields of a record, and keep the current values of the others."""
        record = read_record(transaction, self._db, slide, self.path)
        self._put_record(transaction, slide, dataclasses.replace(record, **record_fields))

    def reusable_bytes(self) -> int:
        """Return the bytes inside the file that are free after deletions."""
        return max(0, (self.path / DATA).stat().st_size - self.environment.used_bytes())

    def close(self) -> None:
        """Close the store."""
        self.environment.close()

    @property
    def _db(self) -> Mapping[bytes, Any]:
        return self.environment.databases

    def _put_record(self, transaction: lmdb.Transaction, number: int, record: SlideRecord) -> None:
        transaction.put(slide_key(number), record.to_bytes(number), db=self._db[SLIDES])
