"""Writing a store. Whatever becomes visible does so by one transaction, last."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import (
    DamagedStore,
    MachineShort,
    SpecMismatch,
    UsageError,
)
from histopipe.files import Closing
from histopipe.store.columns import add_classes
from histopipe.store.environment import open_environment
from histopipe.store.folder import make_folder, remove_begun
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
    encode_index,
    from_json,
    patch_key,
    slide_key,
    thumbnail_key,
    to_json,
    value_crc,
)
from histopipe.store.meta import read_meta, read_records
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.tiling.spec import TilingSpec, differences

_DELETE_AT_ONCE = 20_000

T = TypeVar("T")


class StoreWriter(Closing):
    """A store open for writing; any number of processes may have one.

    Args:
        path: the store's folder, made if missing.
        spec: how its patches are made.

    Raises:
        SpecMismatch: the store was made by another spec.
        UnknownVersion, DamagedStore: the store cannot be used.
        UsageError: the path is something else than a store.

    Example:
        >>> with StoreWriter(Path("patches.lmdb"), TilingSpec(mpp=0.5)) as writer:  # doctest: +SKIP
        ...     numbers = writer.register([SlideRecord(id="a", path="a.svs", resolved_path="/a.svs")])
    """

    def __init__(self, path: Path, spec: TilingSpec) -> None:
        self.path = path
        made = make_folder(path)
        try:
            self._environment = open_environment(path, write=True)
        except MachineShort:
            if made:
                remove_begun(path)
            raise
        try:
            self._write(lambda transaction: self._check_or_create(transaction, spec))
        except BaseException:
            self.close()
            raise

    def records(self) -> dict[int, SlideRecord]:
        """Every slide's record by number."""
        with self._environment.read() as transaction:
            return read_records(transaction, self._db, self.path)

    def record(self, slide: int) -> SlideRecord:
        """One slide's record as it is now."""
        where = f"{self.path}, slide {slide}"
        with self._environment.read() as transaction:
            value = transaction.get(slide_key(slide), db=self._db[SLIDES])
            if value is None:
                raise DamagedStore(f"{where} has no record")
            return SlideRecord.from_json(from_json(value, where=where), where=where)

    def register(self, records: Sequence[SlideRecord]) -> dict[str, int]:
        """Give each slide not known yet a number, in the order given, never used before; all as `pending`.

        Returns:
            The number of every slide of the store by id.
        """

        def work(transaction: lmdb.Transaction) -> dict[str, int]:
            known = {r.id: n for n, r in read_records(transaction, self._db, self.path).items()}
            number = read_meta(transaction, self._db, "next_number", int, self.path)
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

        return self._write(work)

    def class_numbers(self, names: Sequence[str]) -> dict[str, int]:
        """The number of each class of patches; new ones are added behind those that are there, which keep theirs."""
        if not names:
            return {}
        return self._write(
            lambda transaction: add_classes(transaction, self._db, names, path=self.path)
        )

    def put_patches(
        self, slide: int, rows: Sequence[int], values: Sequence[bytes | None]
    ) -> NDArray[np.uint32]:
        """Store patches of a slide; None is an unreadable one, stored as an empty value.

        Args:
            slide: its number.
            rows: the patches' numbers, best in rising order.
            values: their files.

        Returns:
            (N,) uint32 CRCs bound to the keys, 0 where unreadable.
        """
        keys = [patch_key(slide, row) for row in rows]
        # An empty value keeps the number taken, and tells a lost patch from one that never was.
        items = [(key, value or b"") for key, value in zip(keys, values, strict=True)]

        def work(transaction: lmdb.Transaction) -> None:
            with transaction.cursor(db=self._db[PATCHES]) as cursor:
                cursor.putmulti(items)

        self._write(work)
        return np.array([value_crc(k, v) if v else 0 for k, v in items], np.uint32)

    def complete(
        self,
        slide: int,
        record: SlideRecord,
        columns: Mapping[str, NDArray[Any]],
        thumbnails: Mapping[str, bytes],
    ) -> None:
        """Make a slide visible: record, index and thumbnails in one transaction, after its last patch."""
        index = encode_index(columns)

        def work(transaction: lmdb.Transaction) -> None:
            transaction.put(slide_key(slide), index, db=self._db[INDEX])
            for kind, picture in thumbnails.items():
                transaction.put(thumbnail_key(slide, kind), picture, db=self._db[THUMBNAILS])
            self._put_record(
                transaction, slide, dataclasses.replace(record, state=SlideState.COMPLETE)
            )

        self._write(work)

    def fail(self, slide: int, record: SlideRecord, error: str, kind: FailureKind) -> None:
        """Remove what was stored of a slide, then record why it failed: killed in between, it is done anew."""
        failed = dataclasses.replace(
            record, state=SlideState.FAILED, error=error, error_kind=kind,
            planned=0, stored=0, unreadable=0, stored_bytes=0,
        )  # fmt: skip
        self._remove_pixels(slide)
        self.update(slide, failed)

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Hide a slide and remove what is stored of it, so that it can be ingested from the start."""
        self.update(
            slide,
            dataclasses.replace(
                record, state=SlideState.PENDING, error=None, error_kind=None, error_option=None
            ),
        )
        self._remove_pixels(slide)

    def update(self, slide: int, record: SlideRecord) -> None:
        """Replace a record."""
        self._write(lambda transaction: self._put_record(transaction, slide, record))

    def change(self, slide: int, **facts: Any) -> None:
        """Change some fields of a record, whatever others have put into its other ones."""
        where = f"{self.path}, slide {slide}"

        def work(transaction: lmdb.Transaction) -> None:
            value = transaction.get(slide_key(slide), db=self._db[SLIDES])
            record = SlideRecord.from_json(from_json(value or b"", where=where), where=where)
            self._put_record(transaction, slide, dataclasses.replace(record, **facts))

        self._write(work)

    def reusable_bytes(self) -> int:
        """What deleted values have left free inside the file, which grows only when that is used up."""
        with self._environment.read() as transaction:
            stats = [transaction.stat(), *(transaction.stat(db) for db in self._db.values())]
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        pages: int = self._environment.handle.info()["last_pgno"] + 1
        return max(0, pages - used) * int(stats[0]["psize"])

    def close(self) -> None:
        """Give the environment back."""
        self._environment.close()

    @property
    def _db(self) -> Mapping[bytes, Any]:
        return self._environment.databases

    def _write(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """One transaction; where address space is limited and the map is full, in a larger map."""
        while True:
            try:
                with self._environment.write() as transaction:
                    return work(transaction)
            except MachineShort as error:
                if not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
                self._environment.grow()

    def _put_record(self, transaction: lmdb.Transaction, number: int, record: SlideRecord) -> None:
        transaction.put(slide_key(number), to_json(record.to_json()), db=self._db[SLIDES])

    def _check_or_create(self, transaction: lmdb.Transaction, spec: TilingSpec) -> None:
        if transaction.stat(self._db[META])["entries"] == 0:
            for name, value in _new_meta(spec).items():
                transaction.put(name.encode(), to_json(value), db=self._db[META])
            return
        check_spec(read_meta(transaction, self._db, "spec", dict, self.path), spec, self.path)

    def _remove_pixels(self, slide: int) -> None:
        """Delete patches and all that describes them; in bounded transactions, since nothing of it is visible."""
        ranges = (
            (PATCHES, patch_key(slide, 0), patch_key(slide + 1, 0)),
            (INDEX, slide_key(slide), slide_key(slide + 1)),
            (THUMBNAILS, slide_key(slide), slide_key(slide + 1)),
            (STAINS, slide_key(slide), slide_key(slide + 1)),
        )
        for database, first, last in ranges:
            # Mostly there is nothing, and looking costs no commit.
            while self._holds(database, first, last):
                self._write(functools.partial(self._delete_some, database, first, last))

    def _holds(self, database: bytes, first: bytes, last: bytes) -> bool:
        """Whether there is a key from `first` up to `last`."""
        with (
            self._environment.read() as transaction,
            transaction.cursor(db=self._db[database]) as c,
        ):
            return c.set_range(first) and bytes(c.key()) < last

    def _delete_some(
        self, database: bytes, first: bytes, last: bytes, transaction: lmdb.Transaction
    ) -> None:
        """Delete keys from `first` up to `last`, or as many as one transaction should."""
        with transaction.cursor(db=self._db[database]) as cursor:
            found = cursor.set_range(first)
            for _ in range(_DELETE_AT_ONCE):
                if not found or bytes(cursor.key()) >= last:
                    return
                found = cursor.delete() and bool(cursor.key())


def check_spec(found: Mapping[str, Any], spec: TilingSpec, path: Path) -> None:
    """Refuse to put patches of one spec into a store of another.

    Raises:
        SpecMismatch: with what differs.
    """
    wanted = spec.to_json()
    if found != wanted:
        raise SpecMismatch(
            f"{path} was made with other settings",
            found="; ".join(differences(found, wanted)),
            todo="use the store's settings, or another --out",
        )


def _new_meta(spec: TilingSpec) -> dict[str, Any]:
    return {
        "format": {"name": FORMAT_NAME, "version": VERSION},
        "required_features": [],
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "histopipe_version": __version__,
        "spec": spec.to_json(),
        "classes": [],
        "next_number": 0,
    }
