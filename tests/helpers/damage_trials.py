"""Damage copies of a store at random, and compare the findings of `verify` with the data that a reader returns.

If a reader returns other data than was written, or cannot read the store, `verify` must have a finding. Each damaged store
is then repaired without files of slides. Afterwards, only slides that the repair has named may still be damaged, and the
others must be as before.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

from helpers.inline import SharedPool
from helpers.lmdb_pages import PAGE, Pages, nodes_of, pages_of
from helpers.stores import a_store
from histopipe.errors import DamagedStore, HistopipeError
from histopipe.maintenance.repair import repair
from histopipe.maintenance.verify import verify
from histopipe.store.data_file import make_readable
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool, silence

Damage = Callable[[bytearray, Pages, random.Random], None]
_SECONDS = 60.0


def flip(data: bytearray, offset: int, rng: random.Random) -> None:
    """Change one bit or one byte."""
    data[offset] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])


def in_pages(*names: str, kind: str) -> Damage:
    """Return a function that damages one byte on a page of one kind, in one of several databases."""

    def damage(data: bytearray, pages: Pages, rng: random.Random) -> None:
        name = rng.choice([n for n in names if getattr(pages, kind).get(n)])
        page = rng.choice(getattr(pages, kind)[name])
        if kind == "overflow":
            first, count = page
            flip(data, PAGE * first + rng.randrange(PAGE * count), rng)
            return
        offsets = [rng.randrange(16), rng.randrange(64), rng.randrange(PAGE)]
        nodes = list(nodes_of(bytes(data), page))
        if nodes:
            offsets += [rng.choice(nodes) - PAGE * page + rng.randrange(16)] * 2
        flip(data, PAGE * page + min(rng.choice(offsets), PAGE - 1), rng)

    return damage


def in_meta_pages(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Damage one byte in the used part of a meta page."""
    flip(data, PAGE * rng.randrange(2) + rng.randrange(152), rng)


def lengths(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Change the length of a key or a value on a leaf page; LMDB's keys are 1 to 511 bytes long."""
    leaves = [page for numbers in pages.leaves.values() for page in numbers]
    node = rng.choice(list(nodes_of(bytes(data), rng.choice(leaves))))
    place = node + rng.choice([0, 6])
    (length,) = struct.unpack_from("<H", data, place)
    changed = rng.choice([0, max(0, length + rng.randrange(-4, 5)), rng.randrange(PAGE)])
    struct.pack_into("<H", data, place, changed)


def anywhere(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Damage one byte anywhere."""
    flip(data, rng.randrange(len(data)), rng)


def overwritten(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Overwrite a page with zeros or noise."""
    page = rng.randrange(len(data) // PAGE)
    data[PAGE * page : PAGE * (page + 1)] = rng.choice([bytes(PAGE), rng.randbytes(PAGE)])


def exchanged(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Exchange two pages."""
    one, other = (PAGE * rng.randrange(len(data) // PAGE) for _ in range(2))
    first, second = data[one : one + PAGE], data[other : other + PAGE]
    data[one : one + PAGE], data[other : other + PAGE] = second, first


def truncated(data: bytearray, pages: Pages, rng: random.Random) -> None:
    """Truncate the file at a random length."""
    del data[rng.randrange(1, len(data)) :]


DAMAGES: dict[str, Damage] = {
    "values": in_pages("patches", kind="overflow"),
    "small values": in_pages("patches", kind="leaves"),
    "patch tree": in_pages("patches", kind="branches"),
    "index blocks": in_pages("index", kind="overflow"),
    "other leaves": in_pages(
        "index", "slides", "meta", "thumbnails", "main", "free", kind="leaves"
    ),
    "records": in_pages("slides", kind="leaves"),
    "meta pages": in_meta_pages,
    "lengths": lengths,
    "anywhere": anywhere,
    "overwritten": overwritten,
    "exchanged": exchanged,
    "truncated": truncated,
}


def make_store(path: Path) -> Path:
    """Create a store of three slides with small and large values, a thumbnail, and free pages of a removed slide."""
    rng = random.Random(0)
    slides = {
        name: [rng.randbytes(rng.choice([40, 300, 1500, 3000, 9000])) for _ in range(count)]
        for name, count in (("a", 400), ("b", 60), ("c", 90), ("removed", 40))
    }
    a_store(path, slides)
    with Store(path) as store:
        spec, index, records = store.spec, store.index(1), store.records
    with StoreWriter(path, spec) as writer:
        writer.complete(1, records[1], index, {"thumb": rng.randbytes(6000), "mask": b"m" * 90})
        writer.remove(3)
    return path


def read_all(store: Path, *ignored: type[Exception]) -> dict[str, Any]:
    """Return all data of slides as a reader does, without a check of values against their checksums."""
    with Store(store) as opened:
        content: dict[str, Any] = {"classes": opened.classes}
        for number, record in opened.complete.items():
            with contextlib.suppress(*ignored):
                content[record.id] = slide_of(opened, number)
        return content


def slide_of(store: Store, number: int) -> tuple[Any, ...]:
    """Return all data of a slide as a reader does."""
    record = store.records[number]
    index = {name: column.tobytes() for name, column in store.index(number).items()}
    values = [crc32(store.value(number, row)) for row in range(record.planned)]
    pictures = store.thumbnail(number), store.thumbnail(number, "mask")
    return record, index, values, pictures, store.stains()


def read_in_worker(pool: WorkerPool, store: Path) -> Any:
    """Return the result of `read_all` in a worker; the text of the error if it raises or dies."""
    try:
        return pool.submit_within(_SECONDS, read_all, store).result()
    except (WorkerDied, HistopipeError, ValueError) as error:
        return repr(error)


def find_fault_of_repair(store: Path, no_slide: Path, expected: dict[str, Any]) -> str | None:
    """Repair a damaged store, and return what is wrong with the result; None if the settings of the store are lost."""
    try:
        make_readable(store)  # otherwise, only the length of a truncated file is verified
        damaged = verify(store, progress=Progress()).damaged_slides
        done = repair(store, no_slide, progress=Progress(), workers=1)
    except DamagedStore as error:  # also UnknownVersion
        return None if "lost" in str(error) or "version" in str(error) else repr(error)
    result = verify(store, progress=Progress())
    named = {finding.slide for finding in result.findings} <= done.left.keys()
    if done.remaining or result.is_structural or not named:
        return f"still damaged: {result}"
    after, names = read_all(store, DamagedStore), [name for name in expected if name != "classes"]
    lost = [n for i, n in enumerate(names) if i not in damaged and after.get(n) != expected[n]]
    return f"lost {lost}; damaged were {damaged}" if lost else None


def run_trials(folder: Path, count: int, seed: int) -> list[str]:
    """Run trials, and return descriptions of missed damage."""
    rng = random.Random(seed)
    intact = make_store(folder / "intact.lmdb")
    content, pages = (intact / "data.mdb").read_bytes(), pages_of(intact)
    store, no_slide = folder / "damaged.lmdb", folder / "none.svs"
    no_slide.touch()
    missed: list[str] = []
    with (
        contextlib.closing(SharedPool(1)) as pool,
        contextlib.closing(SharedPool(1, silence)) as verifiers,
        patch("histopipe.maintenance.verify.WorkerPool", lambda *_: verifiers),
        patch("histopipe.maintenance.repair.WorkerPool", lambda *_: verifiers),
        patch("histopipe.maintenance.reingest.WorkerPool", lambda *_: pool),
    ):
        expected = read_in_worker(pool, intact)
        assert isinstance(expected, dict), expected
        for trial in range(count):
            name = list(DAMAGES)[trial % len(DAMAGES)]
            data = bytearray(content)
            DAMAGES[name](data, pages, rng)
            shutil.rmtree(store, ignore_errors=True)
            store.mkdir()
            (store / "data.mdb").write_bytes(data)
            try:
                result = verify(store, progress=Progress())
                is_found = bool(result.findings)
                assert int(result.exit_code) == (5 if is_found else 0)
            except DamagedStore as error:  # also UnknownVersion
                assert int(error.exit_code) == 5
                is_found = True
            returned = read_in_worker(pool, store)
            if not is_found and returned != expected:
                missed.append(f"{name}, trial {trial}: a reader returns {returned!r:.300}")
            fault = find_fault_of_repair(store, no_slide, expected)
            if fault is not None:
                missed.append(f"{name}, trial {trial}: repair: {fault:.300}")
    return missed
