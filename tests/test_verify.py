"""`histopipe verify`: every kind of damage found and named, a healthy store quiet, no file that brings it down."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb.verify import VerifyError
from lmdb.verify import verify as lmdb_verify
from test_reader import a_store, flip_a_byte, jpegs
from test_store import SPEC

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.finding import Kind, Verified
from histopipe.maintenance.verify import verify
from histopipe.store.data_file import DataFile
from histopipe.store.format import DATABASES, patch_key, slide_key
from histopipe.store.store import Store
from histopipe.store.structure import Fault, Structure, meta_faults
from histopipe.store.writer import StoreWriter


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides of 400 values, some among the keys and some on pages of their own: trees of two and three levels."""
    rng = random.Random(0)
    slides = {
        name: [rng.randbytes(rng.choice([40, 300, 1500, 3000, 9000])) for _ in range(400)]
        for name in ("a", "b", "c")
    }
    return a_store(tmp_path_factory.mktemp("verify") / "sound.lmdb", slides)


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "s.lmdb"))


_IDLE_META_BYTES = {8, 9, 12, 13, 14, 15, *range(32, 40), *range(88, 92), 128, *range(136, 144)}
"""What nothing depends on: padding, a page's unused bounds, how large a map once was, and of the state before the last one
how many pages there were, or that it is one before that."""


def kinds(found: Verified) -> set[tuple[Kind, str | None]]:
    return {(finding.kind, finding.slide) for finding in found.findings}


def patched(path: Path, at: int, byte: int | None = None) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 0x40 if byte is None else byte]))


def edited(path: Path, database: str, change: Callable[[Any, Any], object]) -> None:
    """Change a database by LMDB itself, past all that keeps a store right."""
    with (
        lmdb.open(str(path), max_dbs=32, map_size=1 << 30) as env,
        env.begin(write=True) as txn,
    ):
        change(txn, env.open_db(database.encode(), txn=txn))


def _put(key: bytes, value: bytes, txn: Any, db: Any) -> None:
    txn.put(key, value, db=db)


def walked(path: Path) -> list[Fault]:
    """All that is wrong with the structure of a file."""
    with DataFile(path / "data.mdb") as file:
        faults = meta_faults(file)
        metas = [meta for meta in file.metas if meta is not None]
        structure = Structure(file, max(metas, key=lambda meta: meta.transaction))
        structure.read_databases()
        for name, tree in structure.trees.items():
            for _ in structure.small(name, tree):
                pass
        structure.finish()
        return faults + structure.faults


def pages_of(path: Path) -> tuple[list[int], list[int], dict[bytes, int]]:
    """Branch pages and leaf pages of the patches, and the pages of the databases' roots."""
    with DataFile(path / "data.mdb") as file:
        metas = [meta for meta in file.metas if meta is not None]
        structure = Structure(file, max(metas, key=lambda meta: meta.transaction))
        structure.read_databases()
        leaves = [
            p.page for some in structure.leaves("patches", structure.trees["patches"]) for p in some
        ]
        return (
            sorted(structure._branches),
            leaves,
            {n.encode(): t.root for n, t in structure.trees.items()},
        )


def test_a_healthy_store_is_quiet(store: Path, golden: Path, made_store: Path, run: Any) -> None:
    for path, patches in ((store, 1200), (golden, 8)):
        before = (path / "data.mdb").read_bytes()
        found = verify(path)
        assert (found.findings, found.patches, int(found.exit_code)) == ([], patches, 0)
        assert (path / "data.mdb").read_bytes() == before
    done = run("verify", made_store, "--full", "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["findings"], done.stderr) == (0, [], "")
    assert value["patches"] > 100
    assert "is whole" in run("verify", made_store).stdout


def test_a_flipped_byte_in_a_value(store: Path, run: Any) -> None:
    flip_a_byte(store, 1, 7)
    done = run("verify", store, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 5
    assert [(f["kind"], f["slide"], f["what"]) for f in found["findings"]] == [
        ("value", "b", "a patch is not what was written: 7")
    ]
    assert found["damaged_slides"] == ["b"]
    text = run("verify", store)
    assert (text.returncode, text.stdout.splitlines()[0]) == (
        5, "value: b: a patch is not what was written: 7",
    )  # fmt: skip


@pytest.mark.parametrize("column", ["x_l0", "tissue", "crc", "label"])
def test_a_flipped_byte_in_an_index_block(store: Path, column: str) -> None:
    def flip(txn: Any, db: Any) -> None:
        block = bytearray(txn.get(slide_key(2), db=db))
        (length,) = struct.unpack_from("<Q", block)
        header = json.loads(bytes(block[8 : 8 + length]))
        (place,) = (c["offset"] for c in header["columns"] if c["name"] == column)
        block[place + 41] ^= 1
        txn.put(slide_key(2), bytes(block), db=db)

    edited(store, "index", flip)
    assert kinds(verify(store)) == {(Kind.INDEX, "c")}
    with (
        Store(store) as opened,
        pytest.raises(DamagedStore, match="slide c: the index block is damaged"),
    ):
        opened.index(2)


def test_a_flipped_byte_on_a_branch_page(store: Path) -> None:
    branches, _, roots = pages_of(store)
    assert roots[b"patches"] in branches
    patched(store / "data.mdb", 4096 * roots[b"patches"] + 10)  # its kind
    found = verify(store)
    structural = [f for f in found.findings if f.kind is Kind.STRUCTURE]
    assert {f.slide for f in structural} == {"a", "b", "c"}
    assert all(f"page {roots[b'patches']}" in f.what for f in structural)


def test_a_flipped_byte_on_a_leaf_page_names_the_slides_under_it(store: Path) -> None:
    _, leaves, _ = pages_of(store)
    patched(store / "data.mdb", 4096 * leaves[1] + 2)  # its number
    found = verify(store)
    structural = [f for f in found.findings if f.kind is Kind.STRUCTURE]
    assert [(f.slide, f"page {leaves[1]}" in f.what) for f in structural] == [("a", True)]
    assert (Kind.HOLE, "a") in kinds(found)
    assert set(found.damaged_slides.values()) == {"a"}


def test_flipped_bytes_in_the_meta_pages(store: Path) -> None:
    whole = (store / "data.mdb").read_bytes()
    quiet = []
    for page in (0, 1):
        for at in range(16 + 136):
            damaged = bytearray(whole)
            damaged[4096 * page + at] ^= 0x04
            (store / "data.mdb").write_bytes(damaged)
            if not walked(store):
                quiet.append((page, at))
    assert {at for _, at in quiet} <= _IDLE_META_BYTES


def test_a_file_cut_short(store: Path, run: Any) -> None:
    whole = (store / "data.mdb").read_bytes()
    for keep in (0.9, 0.5, 0.1):
        (store / "data.mdb").write_bytes(whole[: int(len(whole) * keep)])
        done = run("verify", store)
        assert done.returncode == 5
        assert "last page" in done.stdout
    for keep in (0, 1, 100, 4096, 4200, 8192, 8300):
        (store / "data.mdb").write_bytes(whole[:keep])
        done = run("verify", store)
        assert done.returncode in (4, 5), done.stderr
        assert "Traceback" not in done.stderr


def test_swapped_values(store: Path) -> None:
    def swap(txn: Any, db: Any) -> None:
        one, other = patch_key(0, 3), patch_key(2, 9)
        values = bytes(txn.get(one, db=db)), bytes(txn.get(other, db=db))
        txn.put(one, values[1], db=db)
        txn.put(other, values[0], db=db)

    edited(store, "patches", swap)
    assert {(f.kind, f.slide, f.what) for f in verify(store).findings} == {
        (Kind.SWAPPED, "a", "patch 3 holds the value of patch 9 of c"),
        (Kind.SWAPPED, "c", "patch 9 holds the value of patch 3 of a"),
    }


def test_what_is_missing_and_what_is_too_much(store: Path) -> None:
    edited(store, "index", lambda txn, db: txn.delete(slide_key(0), db=db))
    edited(store, "patches", lambda txn, db: txn.delete(patch_key(1, 399), db=db))
    edited(store, "patches", lambda txn, db: txn.put(patch_key(2, 400), b"x", db=db))
    edited(store, "patches", lambda txn, db: txn.put(patch_key(77, 0), b"x", db=db))
    edited(store, "patches", lambda txn, db: txn.put(b"stray", b"x", db=db))
    edited(store, "stains", lambda txn, db: txn.put(slide_key(1), b"{}", db=db))
    edited(store, "thumbnails", lambda txn, db: txn.put(slide_key(1), b"x", db=db))
    found = verify(store)
    assert {(f.kind, f.slide, f.number) for f in found.findings} == {
        (Kind.HOLE, "a", 0),
        (Kind.HOLE, "b", 1),
        (Kind.ORPHAN, "c", 2),
        (Kind.ORPHAN, None, 77),
        (Kind.ORPHAN, None, None),
    }
    texts = " | ".join(f.what for f in found.findings)
    assert "its index is missing" in texts
    assert "1 of 400 patches are missing: 399" in texts


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("stored", 399, Kind.RECORD),  # planned = stored + unreadable no longer holds
        ("stored_bytes", 1, Kind.COUNT),
        ("width", -1, Kind.RECORD),
        ("state", "perfect", Kind.RECORD),
        ("id", "../../etc/passwd", Kind.RECORD),
        ("id", "/etc/passwd", Kind.RECORD),
        ("mpp", 1e999, Kind.RECORD),
        ("thumbnail_crc", {"thumb": 1}, Kind.HOLE),
    ],
)
def test_records_are_held_against_their_schema(
    store: Path, field: str, value: object, kind: Kind
) -> None:
    def change(txn: Any, db: Any) -> None:
        record = json.loads(bytes(txn.get(slide_key(1), db=db)))
        record[field] = value
        del record["crc"]  # one that agrees would be no defence either
        txn.put(slide_key(1), json.dumps(record).encode(), db=db)

    edited(store, "slides", change)
    found = verify(store)
    assert {(f.kind, f.number) for f in found.findings} == {(kind, 1)}


def test_a_changed_record_and_a_wrong_count(store: Path) -> None:
    def change(txn: Any, db: Any) -> None:
        record = bytes(txn.get(slide_key(1), db=db))
        assert b'"label":"b"' in record
        txn.put(slide_key(1), record.replace(b'"label":"b"', b'"label":"a"'), db=db)

    edited(store, "slides", change)
    (finding,) = verify(store).findings
    assert (finding.kind, finding.number) == (Kind.RECORD, 1)
    assert "not what was written" in finding.what


def test_meta_is_held_against_what_it_should_be(store: Path) -> None:
    for name, value, what in (
        (b"next_number", b"1", "'next_number'"),
        (b"spec", b"{}", "meta 'spec'"),
        (b"classes", b'["x","x"]', "meta 'classes'"),
        (b"uuid", b"7", "meta 'uuid'"),
        (b"created", b"[" * 50_000, "meta 'created'"),
    ):
        other = store.with_name(name.decode())
        shutil.copytree(store, other)
        edited(other, "meta", partial(_put, name, value))
        found = verify(other).findings
        assert [what in f.what for f in found] == [True], found
    for name, value in (
        (b"required_features", b'["antigravity"]'),
        (b"format", b'{"name":"histopipe-store","version":2}'),
    ):
        other = store.with_name(name.decode())
        shutil.copytree(store, other)
        edited(other, "meta", partial(_put, name, value))
        with pytest.raises(UnknownVersion, match=r"antigravity|version"):
            verify(other)
    with pytest.raises(NothingToDo):
        verify(store / "nowhere")


def test_pictures_stains_and_images(tmp_path: Path) -> None:
    path = a_store(tmp_path / "s.lmdb", {"a": jpegs(0, 4), "b": [*jpegs(0, 3), b"no image"]})
    found = verify(path, full=True)
    assert {(f.kind, f.slide) for f in found.findings} == {(Kind.IMAGE, "b")}
    assert "patches 3 are no images" in found.findings[0].what
    assert verify(path).findings == []


def test_a_store_that_is_being_written_is_whole(tmp_path: Path) -> None:
    """Pages that the newest state does not use are given out again only when nobody reads that state any more."""
    from test_store import one_slide

    path = tmp_path / "s.lmdb"
    writer = one_slide(path, [bytes([i]) * 3000 for i in range(50)])
    with writer:
        for round_ in range(5):
            writer.put_patches(0, range(50), [bytes([i]) * 3000 for i in range(50)])
            assert verify(path).findings == [], round_


@pytest.mark.parametrize("databases", [0, 3, 6])
def test_a_store_that_has_only_just_begun_is_no_damage(tmp_path: Path, databases: int) -> None:
    """As a kill leaves it before its first transaction, or before its second."""
    store = tmp_path / "s.lmdb"
    with lmdb.open(str(store), max_dbs=32) as env:
        for name in DATABASES[:databases]:
            env.open_db(name)
    for look in (verify, Store):
        with pytest.raises(NothingToDo, match=r"empty|no histopipe store"):
            look(store)
    StoreWriter(store, SPEC).close()
    assert verify(store).findings == []


def test_an_unfinished_ingest_is_no_damage(tmp_path: Path) -> None:
    from test_store import RECORD, SPEC

    with StoreWriter(tmp_path / "s.lmdb", SPEC) as writer:
        writer.register([RECORD])
        writer.put_patches(0, range(3), [b"x", b"y", None])
        assert verify(tmp_path / "s.lmdb").findings == []


def test_what_a_later_version_has_added_is_no_damage(store: Path) -> None:
    edited(store, "later", lambda txn, db: txn.put(slide_key(0) + b"new", bytes(5000), db=db))
    edited(store, "thumbnails", lambda txn, db: txn.put(slide_key(0) + b"overview", b"x", db=db))
    assert verify(store).findings == []


# The structure, held to lmdb.verify: an independent reading of the same file.


def theirs(path: Path) -> list[str]:
    try:
        return list(lmdb_verify(str(path)))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000)), max_size=60), max_size=12
    ),
    st.data(),
)
def test_any_history_leaves_a_whole_structure(
    tmp_path_factory: pytest.TempPathFactory,
    commits: list[list[tuple[int, int]]],
    data: st.DataObject,
) -> None:
    """Values put, replaced and deleted (length 0), by many transactions."""
    path = tmp_path_factory.mktemp("history")
    with lmdb.open(str(path), max_dbs=4, map_size=1 << 30) as env:
        db = env.open_db(b"patches")
        for commit in commits:
            with env.begin(write=True) as txn:
                for key, length in dict(
                    commit
                ).items():  # twice in one transaction is a fault to lmdb.verify
                    if length:
                        txn.put(patch_key(key % 3, key), bytes(length), db=db)
                    else:
                        txn.delete(patch_key(key % 3, key), db=db)
    assert theirs(path) == []
    assert walked(path) == []


def test_whatever_lmdb_s_own_verifier_finds_is_found(store: Path) -> None:
    """Bytes on all pages that are used, heads of values' own pages and of nodes, and all that is written down of databases."""
    rng = random.Random(1)
    branches, leaves, roots = pages_of(store)
    whole = (store / "data.mdb").read_bytes()
    heads = [0, 1, *branches, *leaves, *roots.values(), *range(2, len(whole) // 4096, 7)]
    pages = [page for page in heads if page < len(whole) // 4096]
    with DataFile(store / "data.mdb") as file:
        metas = [meta for meta in file.metas if meta is not None]
        main = max(metas, key=lambda meta: meta.transaction).main.root
    missed, found_by_both = [], 0
    places = [
        4096 * rng.choice(pages)
        + rng.choice([rng.randrange(16), rng.randrange(64), rng.randrange(4096)])
        for _ in range(600)
    ]
    for page in {*leaves[::40], *roots.values()} & set(
        pages
    ):  # heads of nodes: sizes, flags, length of the key
        (lower,) = struct.unpack_from("<H", whole, 4096 * page + 12)
        starts = struct.unpack_from(f"<{(lower - 16) // 2}H", whole, 4096 * page + 16)
        places += [4096 * page + start + at for start in starts[::20] for at in range(8)]
    for name in roots:  # what is written down of databases, behind their names
        at = whole.rindex(name, 4096 * main, 4096 * (main + 1)) + len(name)
        places += range(at, at + 48)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        page, at = divmod(place, 4096)
        (store / "data.mdb").write_bytes(damaged)
        expected = theirs(store)
        try:
            faults = [
                f.what
                for f in verify(store, untrusted=True).findings
                if "lmdb.verify" not in f.what
            ]
        except DamagedStore as error:
            faults = [str(error)]
        found_by_both += bool(expected and faults)
        if expected and not faults:
            missed.append((page, at, expected))
    assert missed == []
    assert found_by_both > 100


@settings(max_examples=60)
@given(st.data())
def test_no_file_brings_it_down(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes at any places, in files of any length: findings, or a refusal."""
    path = tmp_path_factory.mktemp("any") / "s.lmdb"
    path.mkdir()
    content = bytearray((sound / "data.mdb").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(
            st.integers(0, len(content) - 1) | st.integers(0, 64) | st.integers(4096, 4250)
        )
        new = data.draw(st.binary(min_size=1, max_size=64))
        content[at : at + len(new)] = new
    (path / "data.mdb").write_bytes(
        content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    )
    try:
        found = verify(path, untrusted=True, workers=1)
    except (DamagedStore, NothingToDo):
        return
    if not found.findings:  # bytes that hold nothing
        with Store(path) as theirs, Store(sound) as ours:
            assert theirs.records == ours.records
            assert all(
                theirs.value(slide, row) == ours.value(slide, row)
                for slide in range(3)
                for row in range(400)
            )
