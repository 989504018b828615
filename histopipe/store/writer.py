"""Writing a store. Whatever becomes visible does so by one transaction, last."""

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
from histopipe.errors import (
    DamagedStore,
    MachineShort,
    SpecMismatch,
    UsageError,
)
from histopipe.store.columns import add_classes
from histopipe.store.deletion import delete_entries, delete_slide
from histopipe.store.environment import open_environment
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
from histopipe.store.meta import read_meta, read_records
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.system.files import Closing
from histopipe.tiling.spec import TilingSpec, differences


class StoreWriter(Closing):
    """A store open for writing; any number of processes may have one.

    Args:
        path: the store's folder, made if missing.
        spec: how its patches are made; as another store's `meta` holds it, or for a new one.
        alone: no other process writes to it while this one has it open, so its records are read once.

    Raises:
        SpecMismatch: the store was made by another spec.
        UnknownVersion, DamagedStore: the store cannot be used.
        UsageError: the path is something else than a store.

    Example:
        >>> with StoreWriter(Path("patches.lmdb"), TilingSpec(mpp=0.5)) as writer:  # doctest: +SKIP
        ...     numbers = writer.register([SlideRecord(id="a", path="a.svs", resolved_path="/a.svs")])
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
        """Every slide's record by number."""
        with self._environment.read() as transaction:
            return self._records(transaction)

    def record(self, slide: int) -> SlideRecord:
        """One slide's record as it is now."""
        where = f"{self.path}, slide {slide}"
        with self._environment.read() as transaction:
            value = transaction.get(slide_key(slide), db=self._db[SLIDES])
            if value is None:
                raise DamagedStore(f"{where} has no record")
            return SlideRecord.from_bytes(slide, value, where=where)

    def register(self, records: Sequence[SlideRecord]) -> dict[str, int]:
        """Give each slide not known yet a number, in the order given, never used before; all as `pending`.

        Returns:
            The number of every slide of the store by id.
        """
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
        """The number of each class of patches; new ones are added behind those that are there, which keep theirs."""
        if not names:
            return {}
        return self._environment.change(
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
        record = dataclasses.replace(
            record, state=SlideState.COMPLETE,
            thumbnail_crc={kind: value_crc(thumbnail_key(slide, kind), picture) for kind, picture in thumbnails.items()},
        )  # fmt: skip

        def work(transaction: lmdb.Transaction) -> None:
            transaction.put(slide_key(slide), index, db=self._db[INDEX])
            for picture_key, picture in pictures.items():
                transaction.put(picture_key, picture, db=self._db[THUMBNAILS])
            for (database, key), value in further.items():
                transaction.put(key, value, db=self._environment.database(database, transaction))
            self._put_record(transaction, slide, record)

        self._environment.change(work)

    def fail(self, slide: int, record: SlideRecord, error: str, kind: FailureKind) -> None:
        """Remove what was stored of a slide, then record why it failed: killed in between, it is done anew."""
        failed = dataclasses.replace(
            record, state=SlideState.FAILED, error=error, error_kind=kind,
            planned=0, stored=0, unreadable=0, stored_bytes=0,
        )  # fmt: skip
        delete_entries(self._environment, slide)
        self.update(slide, failed)

    def restart(self, slide: int, record: SlideRecord) -> None:
        """Hide a slide and remove what is stored of it, so that it can be ingested from the start."""
        self.update(
            slide,
            dataclasses.replace(
                record, state=SlideState.PENDING, error=None, error_kind=None, error_option=None
            ),
        )
        delete_entries(self._environment, slide)

    def remove(self, slide: int) -> None:
        """Take a slide out, in one transaction; its number is not given again."""
        delete_slide(self._environment, slide)
        if self._held is not None:
            self._held.pop(slide, None)

    def add_meta(self, entries: Mapping[bytes, bytes]) -> None:
        """Keep entries of `meta` that this version does not know, unless there are others of their names."""

        def work(transaction: lmdb.Transaction) -> None:
            for name, value in entries.items():
                transaction.put(name, value, db=self._db[META], overwrite=False)

        self._environment.change(work)

    def update(self, slide: int, record: SlideRecord) -> None:
        """Replace a record."""
        self._environment.change(lambda transaction: self._put_record(transaction, slide, record))

    def change(self, slide: int, **facts: Any) -> None:
        """Change some fields of a record, whatever others have put into its other ones."""
        where = f"{self.path}, slide {slide}"

        def work(transaction: lmdb.Transaction) -> None:
            value = transaction.get(slide_key(slide), db=self._db[SLIDES])
            record = SlideRecord.from_bytes(slide, value or b"", where=where)
            self._put_record(transaction, slide, dataclasses.replace(record, **facts))

        self._environment.change(work)

    def reusable_bytes(self) -> int:
        """What deleted values have left free inside the file, which grows only when that is used up."""
        length = (self.path / "data.mdb").stat().st_size
        return max(0, length - self._environment.used_bytes())

    def close(self) -> None:
        """Give the environment back."""
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
    """Refuse to put patches of one spec into a store of another.

    Raises:
        SpecMismatch: with what differs.
    """
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
