"""Writing columns of the index that are measured or decided after the patches were stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.folder import open_for_change
from histopipe.store.format import (
    INDEX,
    META,
    SLIDES,
    decode_index,
    encode_index,
    slide_key,
    to_json,
)
from histopipe.store.meta import read_meta, read_record
from histopipe.system.files import Closing


class ColumnWriter(Closing):
    """Puts columns into slides' indices. No patch is touched, and other processes may read or write the store meanwhile.

    Open it before any `Store` of the same folder in this process. Raises as `open_for_change`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._environment = open_for_change(path)

    def class_numbers(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each class of patches. New classes are added after the known ones."""
        with self._environment.write() as transaction:
            return add_classes(transaction, self._environment.databases, names, path=self._path)

    def put(
        self,
        slide: int,
        columns: Mapping[str, NDArray[Any]],
        *,
        crc: NDArray[np.integer],
        **facts: Any,
    ) -> None:
        """Add or replace columns, (N,) each, and fields of the slide's record, in one transaction.

        Raises:
            DamagedStore: the store has patches of other checksums than `crc`, (N,), by now.
        """
        key, databases = slide_key(slide), self._environment.databases
        where = f"{self._path}, slide {slide}"
        with self._environment.write() as transaction:
            block = transaction.get(key, db=databases[INDEX])
            held = decode_index(key, bytes(block), where=where) if block is not None else {}
            if not np.array_equal(held.get("crc", ()), crc):
                raise DamagedStore(f"{where} was ingested anew meanwhile", todo="run it once more")
            record = read_record(transaction, databases, slide, self._path)
            record = dataclasses.replace(record, **facts)
            transaction.put(key, encode_index(key, {**held, **columns}), db=databases[INDEX])
            transaction.put(key, record.to_bytes(slide), db=databases[SLIDES])

    def close(self) -> None:
        """Close the store."""
        self._environment.close()


def add_classes(
    transaction: lmdb.Transaction,
    databases: Mapping[bytes, Any],
    names: Sequence[str],
    *,
    path: Path,
) -> dict[str, int]:
    """Return the number of each class in `meta.classes`, to which new ones are added."""
    classes = read_meta(transaction, databases, "classes", list, path)
    new = [name for name in names if name not in classes]
    if new:
        classes = [*classes, *new]
        transaction.put(b"classes", to_json(classes), db=databases[META])
    return {name: classes.index(name) for name in names}
