"""Read a store, or a folder of parts by its catalog: slide records, index columns, and patches by slide and row."""

from __future__ import annotations

import functools
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion, UsageError
from histopipe.store.environment import PART_SUFFIX, Environment, no_store, open_environment
from histopipe.store.format import (
    META,
    META_NAMES,
    STAINS,
    THUMBNAILS,
    Columns,
    patch_key,
    slide_key,
    thumbnail_key,
    value_crc,
)
from histopipe.store.reading import (
    ColumnCache,
    Reading,
    decode_picture,
    entry,
    meta_entries,
    read_classes,
    read_records,
    read_spec,
)
from histopipe.store.record import NumberedSlides, SlideRecord, StainFit, read_fits
from histopipe.system.files import atomic_write, flush_to_disk, read_json, run_on_error
from histopipe.system.folders import CATALOG, FolderKind, find_catalog, folder_kind
from histopipe.system.settings import check_type


class Store(NumberedSlides):
    """A store open for reading. Patches are available for complete slides only.

    Args:
        path: the store's folder.
        hidden: include slides that the catalog of a part assigns to another part.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: it cannot be read.

    Attributes:
        records: the slide records by number, for all states; of a part, those that its catalog assigns to it.
        spec: tiling settings of the patches, as in `meta`.
        uuid: unique identifier of the store.

    Example:
        >>> with Store(Path("patches.lmdb")) as store:  # doctest: +SKIP
        ...     store.read("CMU-1", 7).shape
        (256, 256, 3)
    """

    def __init__(self, path: str | Path, *, hidden: bool = False) -> None:
        self.path = path = Path(path)
        self._opened: Environment = open_environment(path)
        self._columns: ColumnCache = {}
        with run_on_error(self.close), self._environment.read() as transaction:
            databases = self._environment.databases
            stored = meta_entries(transaction, databases, path)
            self.uuid = entry(stored, "uuid", str, path)
            self.spec: Mapping[str, Any] = read_spec(stored, path)
            self.classes = read_classes(stored, path)
            self.created = entry(stored, "created", str, path)
            records = read_records(transaction, databases, path)
            self.records = records if hidden else seen_in(path, records)

    @property
    def patch_size(self) -> int:
        """Side of every patch, pixels."""
        return int(self.spec["patch_size"])

    def index(self, slide: int) -> Columns:
        """Return the index columns of a slide, (N,) each, one row per patch.

        Raises:
            DamagedStore: the block is missing or damaged, or its length differs from the record's.
        """
        with self.reading() as reading:
            return reading.index(slide)

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Begin a read transaction on the patches. Its views are not valid after the block."""
        environment = self._environment
        with environment.read() as transaction:
            yield Reading(environment, transaction, self.records, self._columns)

    def advise(self, keys: Sequence[tuple[int, int]]) -> int:
        """Prefetch patches from disk, without waiting for them.

        Args:
            keys: slide and row of each patch.

        Returns:
            Number of requested bytes.
        """
        with self.reading() as reading:
            extents = reading.extents(keys).tolist()
        for offset, length in extents:
            os.posix_fadvise(self._environment.descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        return sum(length for _, length in extents)

    def value(self, slide: int, row: int) -> bytes:
        """Return the file of a patch, JPEG or PNG; empty if the ingest could not read it from the slide."""
        with self.reading() as reading:
            return bytes(reading.value(slide, row))

    def read(self, slide_id: str, row: int) -> NDArray[np.uint8]:
        """Return the pixels of a patch, after a check of its CRC.

        Args:
            slide_id: id of a complete slide.
            row: number of the patch, 0 to `planned` - 1.

        Returns:
            (H, W, 3) uint8 RGB.

        Raises:
            UsageError: there is no such slide or row, or the ingest could not read the patch.
            DamagedStore: the value does not match its checksum.
        """
        check_type("row", row, int)
        slide = self.number(slide_id)
        where = f"{self.path}, slide {slide_id}: patch {row}"
        if not 0 <= row < self.records[slide].planned:
            raise UsageError(
                f"{where} does not exist", expected=f"0 to {self.records[slide].planned - 1}"
            )
        with self.reading() as reading:
            value, crc = bytes(reading.value(slide, row)), reading.column(slide, "crc")[row]
        if not value:
            raise UsageError(f"{where} could not be read from the slide at ingest")
        if value_crc(patch_key(slide, row), value) != crc:
            raise DamagedStore(
                f"{where} does not match its checksum", todo="ingest the slide again"
            )
        return decode_picture(value, where, side=self.patch_size)

    def thumbnail(self, slide: int, kind: str = "thumb") -> bytes | None:
        """Return the `thumb` (JPEG) or `mask` (PNG) file of a slide; None if there is none."""
        with self._environment.read() as transaction:
            value = transaction.get(
                thumbnail_key(slide, kind), db=self._environment.databases[THUMBNAILS]
            )
            return None if value is None else bytes(value)

    @property
    def databases(self) -> set[bytes]:
        """Names of the existing databases, also of those of a later version."""
        return {name for name, db in self._environment.databases.items() if db is not None}

    def entries(self, database: bytes, slide: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return all keys and values of a database, or those whose keys begin with the number of a slide."""
        prefix, environment = b"" if slide is None else slide_key(slide), self._environment
        with (
            environment.read() as transaction,
            transaction.cursor(db=environment.databases[database]) as cursor,
        ):
            if not cursor.set_range(prefix):  # otherwise, the cursor would begin at the first key
                return []
            entries = ((bytes(key), bytes(value)) for key, value in cursor)
            return list(itertools.takewhile(lambda entry: entry[0].startswith(prefix), entries))

    def further_meta(self) -> dict[bytes, bytes]:
        """Return the entries of `meta` that this version does not know."""
        return {key: value for key, value in self.entries(META) if key not in META_NAMES}

    def stains(self) -> dict[int, StainFit]:
        """Return the stain fits of complete slides by number, as far as there are any.

        Raises:
            DamagedStore: an entry cannot be read.
        """
        if STAINS not in self.databases:
            return {}
        numbers = {slide_key(number): number for number in self.complete}
        return read_fits(
            {numbers[key]: value for key, value in self.entries(STAINS) if key in numbers},
            where=str(self.path),
        )

    def close(self) -> None:
        """Close the store. Its views are not valid afterwards."""
        self._opened.close()

    def close_later(self) -> None:
        """Close it when a store is opened next. For finalisers, which may run at any point of a program."""
        self._opened.close_later()

    @property
    def _environment(self) -> Environment:
        """Environment of this process. It is opened again after a fork."""
        if self._opened.pid != os.getpid():
            self._opened, self._columns = open_environment(Path(self._opened.real_path)), {}
        return self._opened


class StoreSet(NumberedSlides):
    """Several stores, read as one. A slide id may be in only one of them.

    Raises:
        UsageError: there is no store, or the patch sizes differ.

    Attributes:
        stores: the stores.
        records: the slide records of all stores, by a running number.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise UsageError("no store given")
        self.stores: list[Store] = []
        with run_on_error(self.close):
            for path in paths:
                self.stores.append(Store(path))
            check_patch_sizes(self.stores)
        self._slides = [(store, number) for store in self.stores for number in store.records]
        self.records = {i: store.records[n] for i, (store, n) in enumerate(self._slides)}

    @property
    def patch_size(self) -> int:
        """Side of every patch, pixels."""
        return self.stores[0].patch_size

    def index(self, slide: int) -> Columns:
        """Return the index columns of a slide by its number in `records`, as `Store.index`."""
        if slide not in self.records:
            raise UsageError(f"the stores have no slide number {slide!r}", found=len(self.records))
        store, number = self._slides[slide]
        return store.index(number)

    def read(self, slide_id: str, row: int) -> NDArray[np.uint8]:
        """Return the pixels of a patch from the store that has the slide, as `Store.read`."""
        store, _ = self._slides[self.number(slide_id)]
        return store.read(slide_id, row)

    def close(self) -> None:
        """Close every store."""
        for store in self.stores:
            store.close()


def check_patch_sizes(stores: Sequence[Store]) -> None:
    """Check that the patches of stores fit into one batch.

    Raises:
        UsageError: the patch sizes differ. The message has the size of each store.
    """
    if len({store.patch_size for store in stores}) > 1:
        raise UsageError(
            "the stores' patch sizes differ",
            found=", ".join(f"{store.path}: {store.patch_size}" for store in stores),
            expected="one size",
        )


def open_store(path: str | Path | Sequence[str | Path]) -> Store | StoreSet:
    """Open a store, or several as one, for reading. A folder of parts counts as several stores.

    Example:
        >>> store = open_store("patches.lmdb")  # doctest: +SKIP
        >>> len(store), store.slides[0].id  # doctest: +SKIP
        (1204, 'CMU-1')
    """
    if isinstance(path, str | Path):
        stores = parts_of(Path(path))
        return Store(stores[0]) if len(stores) == 1 else StoreSet(stores)
    return StoreSet([store for part in path for store in parts_of(Path(part))])


@contextmanager
def opened_parts(path: Path) -> Iterator[list[Store]]:
    """Open a store, or all stores of a folder of parts.

    Raises:
        NothingToDo: there is none.
    """
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(part)) for part in parts_of(path)]
        if not stores:
            raise no_store(path)
        yield stores


def recorded(store: Path) -> dict[int, SlideRecord]:
    """Return the records of a store by number, or of a folder of parts by a running number; empty without a store."""
    if folder_kind(store) is FolderKind.PARTS:
        if not parts_of(store):
            return {}
        with opened_parts(store) as parts:
            return dict(enumerate(record for part in parts for record in part.slides))
    with suppress(NothingToDo), Store(store) as opened:
        return opened.records
    return {}


_CATALOG_VERSION = 1


@dataclass(slots=True)
class Catalog:
    """Slides of a folder of parts, which several machines have ingested: the file name of each slide's part, by slide id.

    Only the process that assigns slides writes it. Two parts may contain the same slide, for example after a machine
    counted as lost. The catalog then names one of them, and readers ignore the slide in the other one.
    """

    folder: Path
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    slides: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[Path]:
        """Paths of the parts that contain slides, sorted by name."""
        return [self.folder / name for name in sorted(set(self.slides.values()))]

    def write(self) -> None:
        """Write the catalog into its folder with one rename."""
        content = {"version": _CATALOG_VERSION, "uuid": self.uuid, "slides": self.slides}
        with atomic_write(self.folder / CATALOG) as part:
            part.write_text(json.dumps(content, ensure_ascii=False, indent=0))
            flush_to_disk(part)


def read_catalog(folder: Path) -> Catalog | None:
    """Read the catalog of a folder; None if there is none. A `catalog.json` of another tool is ignored.

    Raises:
        DamagedStore, UnknownVersion: the catalog cannot be read, or a later version wrote it.
    """
    path = find_catalog(folder)
    if path is None:
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DamagedStore(f"cannot read {path}", found=str(error)[:200]) from error
    if not isinstance(content, dict) or content.get("version") != _CATALOG_VERSION:
        version = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise UnknownVersion(
            f"{path} has version {version}", expected=f"version {_CATALOG_VERSION}"
        )
    identity, slides = content.get("uuid"), content.get("slides")
    if not isinstance(identity, str) or not _are_parts(slides):
        raise DamagedStore(f"{path} is damaged", expected="a uuid, and the part of each slide")
    return Catalog(folder, identity, dict(slides))


def _are_parts(slides: Any) -> TypeGuard[dict[str, str]]:
    """Check that each slide has the name of a part in the folder."""
    return isinstance(slides, dict) and all(
        isinstance(part, str) and part.endswith(PART_SUFFIX) and part[0] != "." and "/" not in part
        for part in set(slides.values())
    )


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a folder that has a catalog, or the path itself."""
    catalog = None if folder_kind(path) is FolderKind.STORE else read_catalog(path)
    return [path] if catalog is None else catalog.parts


def seen_in(store: Path, records: dict[int, SlideRecord]) -> dict[int, SlideRecord]:
    """Return the records of a part, without slides that the catalog in its folder assigns to another part."""
    real = store.resolve()
    path = find_catalog(real.parent) if real.name.endswith(PART_SUFFIX) else None
    if path is None:
        return records
    stat = path.stat()
    part_of = _read_parts(real.parent, stat.st_ino, stat.st_mtime_ns)
    if real.name not in part_of.values():
        return records
    return {n: record for n, record in records.items() if part_of.get(record.id) == real.name}


@functools.lru_cache(maxsize=4)
def _read_parts(folder: Path, _inode: int, _time: int) -> Mapping[str, str]:
    """Return the part of each slide, cached until the catalog changes. A damaged catalog counts as empty."""
    with suppress(DamagedStore):
        catalog = read_catalog(folder)
        return catalog.slides if catalog else {}
    return {}
