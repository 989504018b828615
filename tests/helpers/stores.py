"""Small stores, damage to their values, and their contents."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import simplejpeg

from histopipe.geometry import Mpp
from histopipe.store.format import INDEX_COLUMNS, patch_key, slide_key
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tiling.spec import TilingSpec

SPEC = TilingSpec(mpp=Mpp(0.5), patch_size=16)
SIDE = SPEC.patch_size
RECORD = SlideRecord(id="a", path="a.svs", resolved_path="/a.svs")


def columns_of(crc: Any, length: Any) -> dict[str, Any]:
    return {name: np.zeros(len(crc)) for name in INDEX_COLUMNS} | {
        "crc": crc,
        "length": length,
        "label": np.full(len(crc), -1),
    }


def one_slide(path: Path, values: list[bytes | None]) -> StoreWriter:
    writer = StoreWriter(path, SPEC)
    number = writer.register([RECORD])["a"]
    crc = writer.put_patches(number, range(len(values)), values)
    length = np.array([len(v or b"") for v in values])
    lost = values.count(None)
    record = dataclasses.replace(
        RECORD,
        planned=len(values),
        stored=len(values) - lost,
        unreadable=lost,
        stored_bytes=int(length.sum()),
    )
    writer.complete(number, record, columns_of(crc, length), {"thumb": b"t"})
    return writer


def picture(number: int, side: int = SIDE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)


def a_store(path: Path, slides: dict[str, list[bytes]], **changes: Any) -> Path:
    """Write a store of the given values by slide. The label of a slide is its first letter."""
    with StoreWriter(path, dataclasses.replace(SPEC, **changes)) as writer:
        records = [dataclasses.replace(RECORD, id=name, label=name[0]) for name in slides]
        numbers = writer.register(records)
        for record, values in zip(records, slides.values(), strict=True):
            rows = range(len(values))
            crc = writer.put_patches(numbers[record.id], rows, values)
            columns = columns_of(crc, np.array([len(v) for v in values]))
            columns["x_l0"], columns["y_l0"] = 10 * np.arange(len(values)), np.arange(len(values))
            done = dataclasses.replace(
                record, planned=len(values), stored=len(values), stored_bytes=sum(map(len, values))
            )
            writer.complete(numbers[record.id], done, columns, {})
    return path


def jpegs(first: int, count: int, side: int = SIDE) -> list[bytes]:
    return [simplejpeg.encode_jpeg(picture(first + i, side), quality=95) for i in range(count)]


def flip_a_byte(store: Path, slide: int, row: int, at: int = -20) -> None:
    """Change a byte of a value on disk, without an update of its checksum."""
    flip_bytes(store, [(slide, row)], at)


def flip_bytes(store: Path, places: Sequence[tuple[int, int]], at: int = -20) -> None:
    """Change a byte of each of several values on disk, without an update of their checksums."""
    gc.collect()
    Store(store).close()  # also closes the stores of deleted datasets
    with lmdb.open(str(store), max_dbs=32, map_size=1 << 30) as handle:
        database = handle.open_db(b"patches", create=False)
        with handle.begin(write=True) as transaction:
            for place in places:
                value = bytearray(transaction.get(patch_key(*place), b"", db=database))
                value[at] ^= 0x10
                transaction.put(patch_key(*place), bytes(value), db=database)


def patched(path: Path, offset: int, byte: int | None = None) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0x40 if byte is None else byte]))


def edited(path: Path, database: str, change: Callable[[Any, Any], object]) -> None:
    """Change a database directly with LMDB, without the checks of a store."""
    with (
        lmdb.open(str(path), max_dbs=32, map_size=1 << 30) as env,
        env.begin(write=True) as txn,
    ):
        change(txn, env.open_db(database.encode(), txn=txn))


def put(path: Path, database: str, key: bytes, value: bytes) -> None:
    """Write an entry directly with LMDB."""
    edited(path, database, lambda txn, db: txn.put(key, value, db=db))


def delete(path: Path, database: str, key: bytes) -> None:
    """Delete an entry directly with LMDB."""
    edited(path, database, lambda txn, db: txn.delete(key, db=db))


def entry(path: Path, database: str, key: bytes) -> bytes:
    """Read an entry directly with LMDB."""
    with lmdb.open(str(path), max_dbs=32) as env:
        db = env.open_db(database.encode(), create=False)
        with env.begin() as txn:
            return bytes(txn.get(key, b"", db=db))


def edit_record(path: Path, slide: int, **fields: Any) -> None:
    """Change fields of a record directly with LMDB, and leave out its checksum."""
    record = json.loads(entry(path, "slides", slide_key(slide))) | fields
    del record["crc"]
    put(path, "slides", slide_key(slide), json.dumps(record).encode())


def outcomes(stdout: str) -> dict[str, dict[str, Any]]:
    return {slide["id"]: slide for slide in json.loads(stdout)["slides"]}


def read_store(path: Path) -> dict[str, Any]:
    """Return all values of a store's complete slides, without times and uuid."""
    with Store(path) as store:
        return {
            record.id: (
                number,
                record.to_json(),
                {k: v.tobytes() for k, v in store.index(number).items()},
                [store.value(number, row) for row in range(record.planned)],
                store.thumbnail(number),
                store.thumbnail(number, "mask"),
            )
            for number, record in store.complete.items()
        }


def read_slides(path: Path) -> dict[str, Any]:
    """Return the contents of a store by slide id, without slide numbers and checksums that depend on them."""
    with Store(path) as store:
        by_slide = {}
        for number, record in store.complete.items():
            columns = {n: c.tolist() for n, c in store.index(number).items() if n != "crc"}
            columns["label"] = [store.classes[i] if i >= 0 else None for i in columns["label"]]
            plain = dataclasses.replace(record, thumbnail_crc={})
            values = [store.value(number, row) for row in range(record.planned)]
            by_slide[record.id] = plain, repr(columns), values, store.thumbnail(number)
        return by_slide


def label_slide(path: Path, slide: int, name: str) -> None:
    with StoreWriter(path) as writer, Store(path) as store:
        index = store.index(slide)
        number = writer.class_numbers([name])[name]
        writer.put_columns(
            slide,
            {"label": np.full(len(index["crc"]), number)},
            crc=index["crc"],
            annotations="drawn",
        )
