"""Tests of `histopipe verify`: all kinds of damage, no findings in intact stores, and no crash on any file."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import succeed
from helpers.damage_trials import run_trials
from helpers.examples import examples
from helpers.lmdb_pages import damage_page, nodes_of, pages_of
from helpers.paths import TESTS
from helpers.stores import (
    SPEC,
    a_store,
    delete,
    edit_record,
    entry,
    flip_a_byte,
    one_slide,
    patched,
    put,
)
from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.maintenance.checks import FindingKind
from histopipe.maintenance.verify import verify
from histopipe.store import data_file
from histopipe.store.data_file import page_faults
from histopipe.store.format import DATABASES, patch_key, slide_key
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter

pytestmark = pytest.mark.usefixtures("shared_verifiers")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides of 400 values, on the pages of keys and on separate pages: trees with two and three levels."""
    rng = random.Random(0)
    slides = {
        name: [rng.randbytes(rng.choice([40, 300, 1500, 3000, 9000])) for _ in range(400)]
        for name in ("a", "b", "c")
    }
    return a_store(tmp_path_factory.mktemp("verify") / "intact.lmdb", slides)


@pytest.fixture
def store(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "s.lmdb"))


def test_intact_store_has_no_findings(store: Path, golden: Path, made_store: Path) -> None:
    for path, patches in ((store, 1200), (golden, 8)):
        before = (path / "data.mdb").read_bytes()
        result = verify(path)
        assert (result.findings, result.patches, int(result.exit_code)) == ([], patches, 0)
        assert (path / "data.mdb").read_bytes() == before
    value = json.loads(succeed("verify", made_store, "--full", "--json"))
    assert value["findings"] == [] and value["patches"] > 100
    assert "is intact" in succeed("verify", made_store)


def test_flipped_byte_in_value(store: Path, run: Any) -> None:
    flip_a_byte(store, 1, 7)
    done = run("verify", store)
    first = done.stdout.splitlines()[0]
    assert (done.returncode, first) == (5, "value: b: 1 patch does not match its checksum: 7")
    result = json.loads(run("verify", store, "--json").stdout)
    assert [(f["kind"], f["slide"]) for f in result["findings"]] == [("value", "b")]
    assert result["damaged_slides"] == ["b"]


@pytest.mark.parametrize("column", ["x_l0", "tissue", "crc", "label"])
def test_flipped_byte_in_index_block(store: Path, column: str) -> None:
    block = bytearray(entry(store, "index", slide_key(2)))
    (length,) = struct.unpack_from("<Q", block)
    columns = json.loads(bytes(block[8 : 8 + length]))["columns"]
    (offset,) = (c["offset"] for c in columns if c["name"] == column)
    block[offset + 41] ^= 1
    put(store, "index", slide_key(2), bytes(block))
    assert {(f.kind, f.slide) for f in verify(store).findings} == {("index", "c")}
    with Store(store) as opened, pytest.raises(DamagedStore, match="slide c: the index block is"):
        opened.index(2)


@pytest.mark.parametrize(("kind", "position", "slides"), [("branches", 0, 3), ("leaves", 1, 1)])
def test_flipped_byte_on_page_of_keys(store: Path, kind: str, position: int, slides: int) -> None:
    """The root of the tree leads to all slides. A leaf has keys of one slide."""
    page = getattr(pages_of(store), kind)["patches"][position]
    damage_page(store, page)
    result = verify(store)
    assert any(
        f.kind == "structure" and re.search(rf"page {page}\b", f.what) for f in result.findings
    )
    assert len(result.damaged_slides) == slides


def test_key_that_lookup_does_not_reach(store: Path) -> None:
    """A branch page that leads to the wrong leaf, which LMDB's verifier does not detect."""
    data = (store / "data.mdb").read_bytes()
    nodes = [n for page in pages_of(store).branches["patches"] for n in [*nodes_of(data, page)][1:]]
    # A key of the second slide.
    node = next(n for n in nodes if data[n + 8 : n + 12] == slide_key(1) and data[n + 15] > 1)
    patched(store / "data.mdb", node + 15, data[node + 15] - 1)
    result = verify(store)
    assert result.is_structural and "does not reach" in str(result)
    assert set(result.damaged_slides) == {1}


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1, 8300, 8192, 4200, 4096, 100, 1, 0])
def test_truncated_file(store: Path, run: Any, keep: float) -> None:
    size = (store / "data.mdb").stat().st_size
    os.truncate(store / "data.mdb", int(keep * size) if isinstance(keep, float) else keep)
    done = run("verify", store)
    assert done.returncode == 5 or (keep <= 8300 and done.returncode == 4)
    assert "is truncated: found" in done.stdout or isinstance(keep, int)
    assert "Traceback" not in done.stderr


def test_swapped_values(store: Path) -> None:
    keys = patch_key(0, 3), patch_key(2, 9)
    values = [entry(store, "patches", key) for key in keys]
    for key, value in zip(keys, reversed(values), strict=True):
        put(store, "patches", key, value)
    assert {(f.kind, f.slide, f.what) for f in verify(store).findings} == {
        ("swapped", "a", "patch 3 has the value of patch 9 of c"),
        ("swapped", "c", "patch 9 has the value of patch 3 of a"),
    }


def test_missing_and_unexpected_entries(store: Path) -> None:
    delete(store, "index", slide_key(0))
    delete(store, "patches", patch_key(1, 399))
    for key in (patch_key(2, 400), patch_key(77, 0), b"stray"):
        put(store, "patches", key, b"x")
    put(store, "stains", slide_key(1), b"{}")
    put(store, "thumbnails", slide_key(1), b"x")
    assert {(f.kind, f.slide, f.what) for f in verify(store).findings} == {
        ("hole", "a", "its index is missing"),
        ("hole", "b", "1 of 400 patches are missing: 399"),
        ("orphan", "c", "patches 400 are not in its index of 400"),
        ("orphan", None, "1 patches of slide number 77, which has no record"),
        ("orphan", None, "patches: unexpected key 7374726179"),
        ("orphan", None, "thumbnails: unexpected key 00000001"),
    }


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("stored", 399, "record"),  # planned != stored + unreadable
        ("stored_bytes", 1, "count"),
        ("width", -1, "record"),
        ("state", "perfect", "record"),
        ("id", "../../etc/passwd", "record"),
        ("id", "/etc/passwd", "record"),
        ("mpp", 1e999, "record"),
        ("thumbnail_crc", {"thumb": 1}, "hole"),
    ],
)
def test_records_are_checked_against_schema(
    store: Path, field: str, value: object, kind: FindingKind
) -> None:
    """Also without a checksum."""
    edit_record(store, 1, **{field: value})
    assert {(f.kind, f.number) for f in verify(store).findings} == {(kind, 1)}


def test_changed_record_does_not_match_checksum(store: Path) -> None:
    record = entry(store, "slides", slide_key(1))
    assert b'"label":"b"' in record
    put(store, "slides", slide_key(1), record.replace(b'"label":"b"', b'"label":"a"'))
    (finding,) = verify(store).findings
    assert (finding.kind, finding.number) == ("record", 1)
    assert "does not match its checksum" in finding.what


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("next_number", b"1", "'next_number'"),
        ("spec", b"{}", "meta 'spec'"),
        ("classes", b'["x","x"]', "meta 'classes'"),
        ("uuid", b"7", "meta 'uuid'"),
        ("created", b"[" * 50_000, "meta 'created'"),
        ("required_features", b'["antigravity"]', None),
        ("format", b'{"name":"histopipe-store","version":2}', None),
    ],
)
def test_meta_is_checked_against_schema(
    store: Path, name: str, value: bytes, what: str | None
) -> None:
    put(store, "meta", name.encode(), value)
    if what is None:
        with pytest.raises(UnknownVersion, match=r"antigravity|version"):
            verify(store)
    else:
        (finding,) = verify(store).findings
        assert what in finding.what


WRITER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers.stores import SPEC
from histopipe.store.writer import StoreWriter
writer = StoreWriter(Path(sys.argv[1]), SPEC)
print("ready", flush=True)
for number in itertools.count():
    writer.put_patches(1, range(number % 40 * 5, number % 40 * 5 + 5), [b"z" * 5000] * 5)
"""


def test_store_is_intact_during_writes(tmp_path: Path) -> None:
    """A writer must not reuse pages of the state that is being verified: without that, 2 % of the checks find faults."""
    path = tmp_path / "s.lmdb"
    one_slide(path, [bytes([i]) * 3000 for i in range(50)]).close()
    command = [sys.executable, "-c", WRITER, str(path), str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            assert [faults for _ in range(200) if (faults := page_faults(path, True))] == []
        finally:
            writer.kill()


def test_file_that_a_writer_extends_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB's verifier reads the length of the file before the meta pages."""
    results = [["page 9 is beyond the end"]]
    verify_pages: Any = vars(data_file)["verify_pages"]

    def extended(*arguments: Any, **options: Any) -> Any:
        writer.put_patches(0, [len(results)], [b"x"])
        return results.pop() if results else verify_pages(*arguments, **options)

    monkeypatch.setattr(data_file, "verify_pages", extended)
    with one_slide(tmp_path / "s.lmdb", [b"y"] * 3) as writer:
        assert page_faults(tmp_path / "s.lmdb", False) == []


@pytest.mark.parametrize("databases", [0, 3, 6])
def test_just_created_store_is_not_damaged(tmp_path: Path, databases: int) -> None:
    """The state after a kill before the first or the second transaction."""
    store = tmp_path / "s.lmdb"
    with lmdb.open(str(store), max_dbs=32) as env:
        for name in DATABASES[:databases]:
            env.open_db(name)
    for read in (verify, Store):
        with pytest.raises(NothingToDo, match=r"empty|not a histopipe store"):
            read(store)
    StoreWriter(store, SPEC).close()
    assert verify(store).findings == []


@examples(8)
@given(st.data())
def test_verify_survives_any_file(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes at any offsets in files of any length result in findings or an error of histopipe."""
    path = tmp_path_factory.mktemp("any")
    content = bytearray((intact / "data.mdb").read_bytes())
    size = len(content)
    offsets = st.integers(0, size - 1) | st.integers(0, 64) | st.integers(4096, 4250)
    changes = st.lists(
        st.tuples(offsets, st.binary(min_size=1, max_size=64)), min_size=1, max_size=6
    )
    for offset, new in data.draw(changes):
        content[offset : offset + len(new)] = new
    (path / "data.mdb").write_bytes(content[: data.draw(st.integers(0, size) | st.just(size))])
    try:
        result = verify(path, untrusted=True, workers=1)
    except (DamagedStore, NothingToDo):
        return
    if not result.findings:  # only unused bytes were changed
        with Store(path) as changed, Store(intact) as original:
            assert changed.records == original.records
            assert all(
                changed.value(slide, row) == original.value(slide, row)
                for slide in range(3)
                for row in range(400)
            )


@pytest.mark.long(reason="22 damages")
@pytest.mark.parametrize(
    ("trials", "seed"),
    [(22, 1), pytest.param(110, 2, marks=pytest.mark.nightly(reason="more of the 22 damages"))],
)
def test_visible_damage_is_always_found(tmp_path: Path, trials: int, seed: int) -> None:
    assert run_trials(tmp_path, trials, seed) == []
