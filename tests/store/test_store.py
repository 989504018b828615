"""Tests of the store: exact format, refused input, and faults."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.commands import run_python, small_disk
from helpers.paths import TESTS
from helpers.stores import RECORD, SPEC, columns_of, flip_a_byte, one_slide, put
from histopipe.errors import (
    DamagedStore,
    MachineShort,
    NothingToDo,
    UnknownVersion,
    UsageError,
)
from histopipe.maintenance.merge import merge
from histopipe.store import data_file
from histopipe.store.claims import Claims, lock_for_writing
from histopipe.store.environment import open_environment
from histopipe.store.format import (
    INDEX_COLUMNS,
    decode_index,
    encode_index,
    patch_key,
    stored_size,
    value_crc,
)
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Catalog, Store, StoreSet, open_store, parts_of
from histopipe.store.writer import StoreWriter
from histopipe.system.folders import CATALOG


def test_golden_store_matches_format_documentation(golden: Path) -> None:
    """Read it as docs/reference/store-format.md describes, with lmdb, json, struct and numpy, but without histopipe."""
    values: dict[str, dict[bytes, bytes]] = {}
    with lmdb.open(str(golden), max_dbs=16, readonly=True) as env:
        for name in ("meta", "slides", "patches", "index", "thumbnails"):
            db = env.open_db(name.encode(), create=False)
            with env.begin(db=db) as txn:
                values[name] = {bytes(key): bytes(value) for key, value in txn.cursor()}
    assert json.loads(values["meta"][b"format"]) == {"name": "histopipe-store", "version": 1}
    assert json.loads(values["meta"][b"required_features"]) == []
    records = {int.from_bytes(key): json.loads(value) for key, value in values["slides"].items()}
    assert {n: (r["id"], r["state"], r["stored"]) for n, r in records.items()} == {
        0: ("a", "complete", 5),
        1: ("b/c", "complete", 2),
        2: ("bad", "failed", 0),
    }
    for number in (0, 1):
        block = values["index"][struct.pack(">I", number)]
        (length,) = struct.unpack_from("<Q", block)
        header = json.loads(block[8 : 8 + length])["columns"]
        columns = {
            c["name"]: np.frombuffer(block, c["dtype"], c["count"], c["offset"]) for c in header
        }
        assert all(c["offset"] % 8 == 0 for c in header)
        assert columns["x_l0"].tolist() == [16 * i for i in range(records[number]["planned"])]
        for row, crc in enumerate(columns["crc"]):
            key = struct.pack(">II", number, row)
            value = values["patches"][key]
            assert len(value) == columns["length"][row] and bool(value) == ((number, row) != (1, 1))
            if value:
                assert zlib.crc32(value, zlib.crc32(key)) == crc
                pixels = simplejpeg.decode_jpeg(value)
                assert abs(pixels[0, 0].astype(int) - (40 * number, 20 * row, 100)).max() <= 2
    assert values["thumbnails"][struct.pack(">I", 0) + b"thumb"]


def test_golden_store_is_readable_by_this_version(golden: Path) -> None:
    with Store(golden) as store:
        assert len(store) == 7
        states = [("a", "complete"), ("b/c", "complete"), ("bad", "failed")]
        assert [(r.id, r.state.value) for r in store.slides] == states
        assert abs(store.read("b/c", 2)[8, 8].astype(int) - (40, 40, 100)).max() <= 2
        for wrong in (("b/c", 1), ("a", 5), ("a", -1), ("bad", 0), ("none", 0)):
            message = "could not be read from the slide" if wrong == ("b/c", 1) else None
            with pytest.raises(UsageError, match=message):
                store.read(*wrong)
        assert store.thumbnail(0) is not None and store.thumbnail(0, "mask") is None


@given(st.integers(0, 50), st.data())
def test_index_round_trip(count: int, data: st.DataObject) -> None:
    columns = {
        name: data.draw(hnp.arrays(np.dtype(kind), count)) for name, kind in INDEX_COLUMNS.items()
    }
    columns["later"] = np.arange(count, dtype=np.int16)  # of a later version
    again = decode_index(b"key", encode_index(b"key", columns), where="here")
    assert list(again) == list(columns)
    for name, values in columns.items():
        np.testing.assert_array_equal(again[name], values)


@given(st.binary(max_size=300))
def test_damaged_index_is_reported(block: bytes) -> None:
    with pytest.raises(DamagedStore, match="here: the index block is damaged"):
        decode_index(b"key", block, where="here")
    assert value_crc(patch_key(0, 1), block) != value_crc(patch_key(0, 2), block)


def test_only_complete_slides_are_visible(tmp_path: Path) -> None:
    path = tmp_path / "s.lmdb"
    with StoreWriter(path, SPEC) as writer:
        assert writer.register([RECORD]) == {"a": 0}
        crc = writer.put_patches(0, [0, 1], [b"x", b"y"])
        with Store(path) as store:
            assert len(store) == 0
            with pytest.raises(UsageError, match="found pending"):
                store.read("a", 0)
        record = dataclasses.replace(RECORD, planned=2, stored=2)
        writer.complete(0, record, columns_of(crc, np.ones(2)), {})
        with Store(path) as store:
            assert len(store) == 2
        writer.fail(0, record.with_failure("why"))
        with Store(path) as store:
            assert len(store) == 0
            assert store.records[0].error == "why"
            with pytest.raises(DamagedStore, match="patch 0 is missing"):
                store.value(0, 0)


def test_slide_numbers_are_ascending_and_another_spec_is_refused(tmp_path: Path) -> None:
    for names, numbers in (("a", (0,)), ("abc", (0, 1, 2)), ("d", (3,))):
        with StoreWriter(tmp_path / "s.lmdb", SPEC) as writer:
            records = [dataclasses.replace(RECORD, id=name) for name in names]
            numbered = dict(zip(names, numbers, strict=True))
            assert writer.register(records).items() >= numbered.items()
        with pytest.raises(UsageError, match="patch_size: 16 in the store, 32 asked for"):
            StoreWriter(tmp_path / "s.lmdb", dataclasses.replace(SPEC, patch_size=32))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            b"format",
            {"name": "histopipe-store", "version": 2},
            UnknownVersion,
            "found 2, expected 1",
        ),
        (b"format", {"name": "else", "version": 1}, DamagedStore, "found 'else'"),
        (b"format", [], DamagedStore, r"found \[\], expected a JSON dict"),
        (b"required_features", 5, DamagedStore, "expected a JSON list"),
        (b"required_features", [["a"]], UnknownVersion, "needs a feature"),
        (b"required_features", ["zebra"], UnknownVersion, "needs a feature.*found zebra"),
    ],
)
def test_unknown_versions_and_features_are_refused(
    golden: Path, name: bytes, value: object, error: type[Exception], message: str
) -> None:
    put(golden, "meta", name, json.dumps(value).encode())
    with pytest.raises(error, match=message):
        Store(golden)
    with pytest.raises(error, match=message):
        StoreWriter(golden, SPEC)


@pytest.mark.parametrize("value", [None, {}, {"patch_size": "x"}, 3])
def test_damaged_spec_is_reported(golden: Path, value: object) -> None:
    put(golden, "meta", b"spec", json.dumps(value).encode())
    with pytest.raises(DamagedStore, match="meta 'spec'"):
        Store(golden)
    put(golden, "meta", b"spec", json.dumps(SPEC.to_json()).encode())
    put(golden, "meta", b"next_number", b"null")
    with StoreWriter(golden, SPEC) as writer, pytest.raises(DamagedStore, match="'next_number'"):
        writer.register([RECORD])


def test_unknown_record_fields_are_kept_and_wrong_ones_named() -> None:
    value = {**RECORD.to_json(), "added_later": [1]}
    record = SlideRecord.from_json(value, where="here")
    assert dataclasses.replace(record, label="x").to_json() == {**value, "label": "x"}
    for wrong in ({"planned": "3"}, {"state": "odd"}, {"mpp": "x"}, {"notes": [1]}, {"id": None}):
        with pytest.raises(DamagedStore, match=f"here: field '{next(iter(wrong))}'"):
            SlideRecord.from_json(value | wrong, where="here")


def test_paths_that_are_not_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lmdb.open("other").close()
    with lmdb.open("foreign") as env, env.begin(write=True) as txn:
        txn.put(b"foreign-key", b"x")
    for name in ("started", "empty", "folder", "damaged"):
        Path(name).mkdir()
    Path("started/data.mdb").touch()
    open_environment(Path("empty"), write=True).close()
    Path("folder/thesis.doc").touch()
    Path("damaged/data.mdb").write_bytes(b"garbage" * 5000)
    cases: tuple[tuple[type[Any], str, type[Exception], str], ...] = (
        (Store, "none", NothingToDo, "no store at"),
        (Store, "other", NothingToDo, "not a histopipe store"),
        (Store, "started", NothingToDo, "no store at"),
        (Store, "empty", NothingToDo, "is empty: an ingest has just started"),
        (Store, "damaged", DamagedStore, "is not an LMDB file"),
        (StoreWriter, "foreign", UsageError, "an LMDB environment of another program"),
        (StoreWriter, "folder", UsageError, r"is not a store, and not empty: found thesis\.doc"),
        (StoreWriter, "folder/thesis.doc", UsageError, "is a file"),
    )
    for kind, name, error, message in cases:
        with pytest.raises(error, match=message):
            kind(Path(name), SPEC) if kind is StoreWriter else open_store(Path(name))
    assert not Path("none").exists()
    with lmdb.open("foreign") as env, env.begin() as txn:
        assert [key for key, _ in txn.cursor()] == [b"foreign-key"]


def test_a_store_that_a_writer_extends_is_not_truncated(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's commit comes between the two reads of the check: of the meta page, and of the file's length."""
    newest_meta = data_file.newest_meta

    def extended(path: Path) -> Any:
        meta = newest_meta(path)
        os.truncate(path, path.stat().st_size + meta.page_size)
        return meta._replace(length=path.stat().st_size)

    monkeypatch.setattr(data_file, "newest_meta", extended)
    data_file.check_length(golden / "data.mdb")


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.1])
def test_truncated_store_is_refused_without_sigbus(tmp_path: Path, keep: float) -> None:
    one_slide(tmp_path, [bytes(10_000)] * 20).close()
    os.truncate(tmp_path / "data.mdb", int((tmp_path / "data.mdb").stat().st_size * keep))
    with pytest.raises(DamagedStore, match="is truncated"):
        Store(tmp_path)


def test_changed_value_is_detected(golden: Path) -> None:
    flip_a_byte(golden, 0, 1)
    with Store(golden) as store:
        assert store.read("a", 0).shape == (16, 16, 3)
        with pytest.raises(DamagedStore, match="slide a: patch 1 does not match its checksum"):
            store.read("a", 1)


def test_environment_is_shared_within_process(golden: Path) -> None:
    first, second = Store(golden), Store(golden)
    first.close()
    assert second.read("a", 0).shape == (16, 16, 3)
    with pytest.raises(UsageError, match="open for reading in this process"):
        StoreWriter(golden)
    second.close()
    with StoreWriter(golden), Store(golden) as third:
        assert third.read("a", 0).shape == (16, 16, 3)


def test_store_set_reads_several_stores(tmp_path: Path, golden: Path) -> None:
    one_slide(tmp_path / "s.lmdb", [b"x"]).close()
    StoreWriter(tmp_path / "other.lmdb", dataclasses.replace(SPEC, patch_size=32)).close()
    with pytest.raises(UsageError, match=r"patch sizes differ.*golden: 16.*other\.lmdb: 32"):
        StoreSet([golden, tmp_path / "other.lmdb"])
    with open_store([golden, tmp_path / "s.lmdb"]) as both, Store(golden) as store:
        assert isinstance(both, StoreSet) and (len(both), both.patch_size) == (8, 16)
        assert both.read("b/c", 0).shape == (16, 16, 3)
        number = both.number("b/c")
        assert both.complete[number].id == both.slides[number].id == "b/c"
        indices = [opened.index(opened.number("b/c")) for opened in (both, store)]
        of_set, of_store = ({n: c.tobytes() for n, c in index.items()} for index in indices)
        assert of_set == of_store
        stores: list[Any] = [both, *both.stores]
        calls: list[tuple[Any, str]] = [
            (
                lambda: both.read("a", 0),
                "slide 'a': found complete, complete, expected one complete slide",
            ),
            (lambda: both.number("a"), "found complete, complete"),
            *((partial(opened.index, 99), "no slide number 99") for opened in stores),
            *(
                (partial(opened.read, "b/c" if opened is both else "a", "0"), ROW_MESSAGE)
                for opened in stores
            ),
        ]
        for call, message in calls:
            with pytest.raises(UsageError, match=message):
                call()


ROW_MESSAGE = "row: found '0', expected a whole number"


def test_index_is_decoded_once(golden: Path) -> None:
    patched = mock.patch("histopipe.store.reading.decode_index", wraps=decode_index)
    with patched as decode, Store(golden) as store:
        for row in (0, 1, 0, 1):
            store.read("a", row)
    assert decode.call_count == 1


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
sys.path.insert(0, sys.argv[2])
from helpers.stores import SPEC, one_slide
from histopipe.store.writer import StoreWriter
one_slide(Path(sys.argv[1]), [b"x" * 1000] * 5).close()
writer = StoreWriter(Path(sys.argv[1]), SPEC)
writer.environment.handle.set_mapsize(1 << 20)
writer.put_patches(1, range(40), [b"y" * 100_000] * 40)  # 4 MB into a map of 1
print(writer.environment.handle.info()["map_size"])
"""


def test_map_grows_with_limited_address_space(tmp_path: Path) -> None:
    done = run_python(LIMITED, tmp_path / "s.lmdb", TESTS, cwd=tmp_path)
    assert (4 << 20) <= int(done.stdout) < (64 << 20)


def fill(writer: StoreWriter) -> None:
    for first in range(0, 100, 10):
        writer.put_patches(1, range(first, first + 10), [b"y" * 100_000] * 10)


def test_full_disk_is_reported_without_data_loss(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with one_slide(disk / "s.lmdb", [b"x" * 1000] * 3) as writer:
            with pytest.raises(MachineShort, match=r"the disk that holds .* is full"):
                fill(writer)
            with Store(disk / "s.lmdb") as store:
                assert store.value(0, 2) == b"x" * 1000
        with Store(disk / "s.lmdb") as store:
            assert len(store) == 3


def test_lock_file_on_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """Without its disk space, the first write to the mapped file would be a SIGBUS: in another process."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        one_slide(disk / "s.lmdb", [b"x" * 1000] * 3).close()
        (disk / "s.lmdb" / "lock.mdb").unlink()
        with suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        code = "import sys; from histopipe.store.store import Store; Store(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, disk / "s.lmdb"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and "MachineShort: the disk that holds" in done.stderr


def test_store_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB must not use the data of one folder with the locks of another."""
    path, other, opened = tmp_path / "s.lmdb", tmp_path / "other.lmdb", []
    for place, size in ((path, 1000), (other, 2000)):
        one_slide(place, [b"x" * size] * 3).close()
    open_folder = data_file._open

    def replaced(*arguments: Any, **options: Any) -> Any:
        opened.append(open_folder(*arguments, **options))
        if len(opened) == 1:
            path.rename(tmp_path / "old.lmdb")
            other.rename(path)
        return opened[-1]

    monkeypatch.setattr(data_file, "_open", replaced)
    with Store(path) as store:
        assert len(store.value(0, 0)) == 2000
    assert len(opened) == 2


def test_lock_of_a_store_that_was_just_replaced_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, take = tmp_path / "s.lmdb", tmp_path / "other.lmdb", Claims.take
    for folder in (path, other):
        folder.mkdir()

    def replaced(claims: Claims, byte: int, *, shared: bool = False) -> bool:
        if other.exists():
            path.rename(tmp_path / "old.lmdb")
            other.rename(path)
        return take(claims, byte, shared=shared)

    monkeypatch.setattr(Claims, "take", replaced)
    with lock_for_writing(path):
        assert not Claims(path).take(1 << 40)  # the byte of writers


def test_store_beyond_the_limit_of_file_size(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one_slide(tmp_path / "s.lmdb", [b"x" * 1000] * 3) as writer, ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(MachineShort, match=r"file size|ulimit -f"):
            fill(writer)


def test_store_on_read_only_mount(tmp_path: Path, golden: Path) -> None:
    with small_disk(tmp_path / "mount", "8m") as mount:
        store_path = shutil.copytree(golden, mount / "s.lmdb")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with Store(store_path) as store:
            assert len(store) == 7
        with pytest.raises(UsageError, match=r"read-only|cannot be written"):
            StoreWriter(store_path, SPEC)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers.stores import SPEC
from histopipe.store.writer import StoreWriter
writer = StoreWriter(Path(sys.argv[1]), SPEC)
print("ready", flush=True)
for first in range(0, 10**9, 50):
    writer.put_patches(1, range(first, first + 50), [b"z" * 5000] * 50)
"""


def test_killed_writer_leaves_intact_store(tmp_path: Path) -> None:
    """At two moments; tools/kill_store.py kills at many."""
    path = tmp_path / "s.lmdb"
    one_slide(path, [b"x" * 1000] * 3).close()
    program = [sys.executable, "-c", KILLED, str(path), str(TESTS)]
    for seconds in (0.01, 0.2):
        with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(seconds)
            child.kill()
    command = [sys.executable, "-m", "lmdb", "verify", "-e", str(path)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "verify: OK" in check.stdout + check.stderr
    with StoreWriter(path, SPEC) as writer, Store(path) as store:
        assert writer.records()[0].state is SlideState.COMPLETE
        assert store.value(0, 1) == b"x" * 1000


def test_space_of_deleted_values_is_reused(tmp_path: Path) -> None:
    """A restarted slide frees the space of its values, which is used before the file grows."""
    with StoreWriter(tmp_path / "s.lmdb", SPEC) as writer:
        writer.register([RECORD])
        before = writer.reusable_bytes()
        writer.put_patches(0, range(300), [bytes(20_000)] * 300)
        used = int(stored_size(np.full(300, 20_000)).sum())
        assert writer.reusable_bytes() - before < used / 50
        writer.restart(0, RECORD)
        assert writer.reusable_bytes() - before == pytest.approx(used, rel=0.02)
        size = (tmp_path / "s.lmdb" / "data.mdb").stat().st_size
        for first in range(0, 280, 10):  # LMDB reuses freed pages two transactions later
            writer.put_patches(0, range(first, first + 10), [bytes(20_000)] * 10)
        assert (tmp_path / "s.lmdb" / "data.mdb").stat().st_size < size * 1.05


STAC = '{"type": "Catalog", "id": "slides", "stac_version": "1.0.0", "links": []}'


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("catalog.json", STAC, NothingToDo),
        ("catalog.json", "[]", NothingToDo),
        ("catalog.json", "not JSON", NothingToDo),
        ("catalog.json", '{"version": 2}', NothingToDo),
        (CATALOG, '{"version": 2}', UnknownVersion),
    ],
)
def test_catalog_of_another_tool_or_version_hides_no_slides(
    tmp_path: Path, name: str, content: str, error: type[Exception]
) -> None:
    one_slide(tmp_path / "s.lmdb", [b"x"]).close()
    (tmp_path / name).write_text(content)
    with Store(tmp_path / "s.lmdb") as store:
        assert len(store) == 1
    with pytest.raises(error, match=r"expected a folder with a data\.mdb|has version 2"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", [CATALOG, "catalog.json"])
def test_folder_of_parts_is_opened_by_catalog(tmp_path: Path, name: str) -> None:
    for part in ("part-a.lmdb", "part-b.lmdb"):
        one_slide(tmp_path / part, [b"x"]).close()
    Catalog(tmp_path, slides={"a": "part-b.lmdb"}).write()
    (tmp_path / CATALOG).rename(tmp_path / name)
    assert parts_of(tmp_path) == [tmp_path / "part-b.lmdb"]
    merged = tmp_path / "all.lmdb"  # next to the parts, but not in the catalog
    assert merge([tmp_path], merged).slides == ["a"]
    with Store(merged) as store:
        assert len(store) == 1
