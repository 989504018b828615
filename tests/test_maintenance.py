"""Merging, removing, splitting, compacting and repairing stores: nothing is lost, whenever they end."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import COMMAND, TOOLS, Run, make_slides
from test_reader import a_store, flip_a_byte, flip_bytes, jpegs
from test_store import SPEC
from test_verify import edited, pages_of, patched

from histopipe.dataset.split_makers import make_splits
from histopipe.dataset.splits import write_splits
from histopipe.errors import NothingToDo, SpecMismatch, UsageError
from histopipe.maintenance.finding import Kind
from histopipe.maintenance.merge import merge
from histopipe.maintenance.remove import remove
from histopipe.maintenance.repair import RepairOptions, repair
from histopipe.maintenance.verify import verify
from histopipe.slides.discovery import discover
from histopipe.store.claims import Claims
from histopipe.store.columns import ColumnWriter
from histopipe.store.data_file import DataFile
from histopipe.store.format import encode_index, slide_key
from histopipe.store.record import FailureKind, SlideState
from histopipe.store.store import Store
from histopipe.store.structure import Structure
from histopipe.store.writer import StoreWriter


def contents(path: Path) -> dict[str, Any]:
    """All that a store holds, slide by slide, without numbers and what depends on them."""
    with Store(path) as store:
        found = {}
        for number, record in store.complete.items():
            columns = {n: c.tolist() for n, c in store.index(number).items() if n != "crc"}
            columns["label"] = [store.classes[i] if i >= 0 else None for i in columns["label"]]
            facts = dataclasses.replace(record, thumbnail_crc={})
            values = [store.value(number, row) for row in range(record.planned)]
            found[record.id] = facts, repr(columns), values, store.thumbnail(number)
        return found


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two stores of three slides each, none in both."""
    one = a_store(tmp_path / "one.lmdb", {n: jpegs(10 * i, 5) for i, n in enumerate("abc")})
    two = a_store(tmp_path / "two.lmdb", {n: jpegs(50 + 10 * i, 4) for i, n in enumerate("def")})
    return [one, two]


def label(path: Path, slide: int, name: str) -> None:
    with ColumnWriter(path) as writer, Store(path) as store:
        index = store.index(slide)
        number = writer.class_numbers([name])[name]
        writer.put(
            slide,
            {"label": np.full(len(index["crc"]), number)},
            crc=index["crc"],
            annotations="drawn",
        )


def add_what_a_later_version_has(path: Path) -> None:
    """A column, a database, a field of a record and an entry of meta that this version does not know."""
    with Store(path) as store:
        columns = {n: c.copy() for n, c in store.index(1).items()}
    columns["later"] = np.arange(len(columns["crc"]), dtype="<f8")

    def field(txn: Any, db: Any) -> None:
        record = json.loads(bytes(txn.get(slide_key(1), db=db)))
        del record["crc"]
        record["scanner"] = {"serial": 7}
        txn.put(slide_key(1), json.dumps(record).encode(), db=db)

    edited(
        path,
        "index",
        lambda txn, db: txn.put(slide_key(1), encode_index(slide_key(1), columns), db=db),
    )
    edited(path, "slides", field)
    edited(path, "later", lambda txn, db: txn.put(slide_key(1) + b"embedding", b"value", db=db))
    edited(path, "meta", lambda txn, db: txn.put(b"scanner_park", b'["x"]', db=db))


def check_what_a_later_version_has(path: Path, name: str) -> None:
    with Store(path) as store:
        number = store.number(name)
        assert store.index(number)["later"].tolist() == list(range(store.records[number].planned))
        assert store.records[number].unknown == {"scanner": {"serial": 7}}
        assert store.entries(b"later", number) == [(slide_key(number) + b"embedding", b"value")]
        assert store.further_meta() == {b"scanner_park": b'["x"]'}


def test_a_merge_holds_all_that_its_parts_held(parts: list[Path], tmp_path: Path, run: Run) -> None:
    label(parts[0], 1, "tumour")
    label(parts[1], 0, "stroma")
    label(parts[1], 2, "tumour")
    add_what_a_later_version_has(parts[1])
    expected = contents(parts[0]) | contents(parts[1])
    out = tmp_path / "out" / "all.lmdb"
    done = run("merge", *parts, "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}: 6 slides copied; 27 patches\n")
    assert contents(out) == expected
    check_what_a_later_version_has(out, "e")
    assert verify(out).findings == []
    with Store(out) as store, Store(parts[0]) as part:
        assert store.uuid != part.uuid
    again = run("merge", *parts, "--out", out, "--json")
    (value,) = json.loads(again.stdout)
    assert (value["slides"], sorted(value["already"])) == ([], list("abcdef"))
    assert contents(out) == expected


def test_a_folder_of_parts_is_merged(parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.lmdb"
    assert merge([tmp_path], out).slides == list("abcdef")
    assert merge([tmp_path], out).slides == []  # itself is left out
    shutil.copytree(parts[0], tmp_path / ".part-one.lmdb")  # as a killed compaction leaves one
    remove(out, ["a"])
    assert merge([tmp_path], out).slides == ["a"]
    assert not any(".part" in note for note in merge([tmp_path], tmp_path / "b.lmdb").notes)
    with pytest.raises(NothingToDo, match="no store"):
        merge([tmp_path / "nowhere"], out)
    with pytest.raises(UsageError, match="one of the stores"):
        merge([out], out)


def test_what_several_stores_have(parts: list[Path], tmp_path: Path) -> None:
    same = a_store(tmp_path / "same.lmdb", {"a": jpegs(0, 5), "g": jpegs(70, 2)})
    result = merge([parts[0], same], tmp_path / "all.lmdb")
    assert result.slides == ["a", "b", "c", "g"]
    assert any("1 slides are in" in note and note.endswith(": a") for note in result.notes)
    other = a_store(tmp_path / "other.lmdb", {"a": jpegs(30, 5)})
    before = contents(tmp_path / "all.lmdb")
    for sources in ([other], [parts[0], other]):
        with pytest.raises(UsageError, match="slides of one id are not the same"):
            merge(sources, tmp_path / "all.lmdb")
    assert contents(tmp_path / "all.lmdb") == before
    differs = a_store(tmp_path / "differs.lmdb", {"z": jpegs(0, 1)}, quality=80)
    with pytest.raises(SpecMismatch, match=r"quality: 80 in .*differs"):
        merge([parts[0], differs], tmp_path / "new.lmdb")
    assert not (tmp_path / "new.lmdb").exists()


def test_failed_and_unfinished_slides(parts: list[Path], tmp_path: Path) -> None:
    with StoreWriter(parts[0], SPEC) as writer:
        records = [dataclasses.replace(writer.record(0), id=name) for name in ("bad", "half", "d")]
        numbers = writer.register(
            [dataclasses.replace(r, state=SlideState.PENDING) for r in records]
        )
        for record in records:
            if record.id != "half":
                writer.fail(numbers[record.id], record, "cannot be opened", FailureKind.FILE)
    result = merge(parts, tmp_path / "all.lmdb")
    assert any("half of" in note and "not done" in note for note in result.notes)
    with Store(tmp_path / "all.lmdb") as store:
        states = {record.id: str(record.state) for record in store.slides}
    assert states == dict.fromkeys("abcdef", "complete") | {
        "bad": "failed"
    }  # d: one of them is complete
    assert verify(tmp_path / "all.lmdb").findings == []


def test_damage_does_not_spread(parts: list[Path], tmp_path: Path, run: Run) -> None:
    flip_a_byte(parts[0], 1, 3)
    done = run("merge", *parts, "--out", tmp_path / "all.lmdb")
    assert done.returncode == 5
    assert "slide b: patch 3 is not what was written" in done.stderr
    with Store(tmp_path / "all.lmdb") as store:
        assert [record.id for record in store.complete.values()] == ["a"]


def test_slides_are_taken_out(parts: list[Path], run: Run) -> None:
    store = parts[0]
    add_what_a_later_version_has(store)
    before = contents(store)
    done = run("remove", store, "b", "nosuch")
    assert done.returncode == 2
    assert "has no such slide: found nosuch, expected a, b, c" in done.stderr
    assert contents(store) == before
    with Claims(store) as claims:
        assert claims.take(1)
        with pytest.raises(UsageError, match="an ingest is at slide b"):
            remove(store, ["b"])
    done = run("remove", store, "b")
    assert (done.returncode, "1 slides of 5 patches taken out" in done.stdout) == (0, True)
    assert contents(store) == {name: slide for name, slide in before.items() if name != "b"}
    assert verify(store).findings == []
    with Store(store) as opened:
        assert opened.entries(b"later", 1) == []
    with StoreWriter(store, SPEC) as writer:
        numbers = writer.register([dataclasses.replace(before["b"][0], state=SlideState.PENDING)])
        assert numbers["b"] == 3  # not given again


def test_a_compacted_store_is_smaller_and_the_same(tmp_path: Path, run: Run) -> None:
    path = a_store(
        tmp_path / "s.lmdb", {n: [bytes([i]) * 9000 for i in range(200)] for n in "abcd"}
    )
    add_what_a_later_version_has(path)
    (path / "ingest.log").write_text("as it was")
    remove(path, ["a", "c"])
    expected = contents(path)
    with Store(path) as store:
        uuid, spec = store.uuid, store.spec
    done = run("compact", path, "--out", tmp_path / "copy.lmdb")
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "copy.lmdb"
    assert (copy / "data.mdb").stat().st_size < 0.6 * (path / "data.mdb").stat().st_size
    done = run("compact", path)
    assert done.returncode == 0, done.stderr
    assert "MB before" in done.stdout
    for one in (path, copy):
        assert contents(one) == expected
        assert verify(one).findings == []
        check_what_a_later_version_has(one, "b")
        assert (one / "ingest.log").read_text() == "as it was"
        with Store(one) as store:
            assert (store.uuid, store.spec) == (uuid, spec)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.lmdb", "s.lmdb"]
    done = run("compact", path, "--out", copy)
    assert (done.returncode, "exists already" in done.stderr) == (2, True)


def test_nobody_may_be_writing_what_is_compacted(parts: list[Path]) -> None:
    with StoreWriter(parts[0], SPEC):
        done = subprocess.run(
            [*COMMAND, "compact", str(parts[0])], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert "is being written by another process" in done.stderr
    assert verify(parts[0]).findings == []


def test_who_reads_goes_on_reading_while_it_is_compacted(parts: list[Path]) -> None:
    with Store(parts[0]) as store:
        before = store.value(1, 2)
        subprocess.run([*COMMAND, "compact", str(parts[0])], check=True, capture_output=True)
        assert store.value(1, 2) == before
    with Store(parts[0]) as store:
        assert store.value(1, 2) == before


def test_a_disk_that_has_no_room_for_a_copy(tmp_path: Path, run: Run) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        path = a_store(disk / "s.lmdb", {"a": [bytes(9000)] * 1000})
        before = contents(path)
        for command in (
            ["compact", path],
            ["merge", path, "--out", disk / "all.lmdb"],
        ):
            done = run(*command)
            assert (done.returncode, "no room" in done.stderr) == (6, True), done.stderr
            assert [p.name for p in disk.iterdir() if p.name.startswith(".part")] == []
        assert contents(path) == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_store_is_split_as_a_run_was(
    made_store: Path, trained: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "sides"
    done = run("split", made_store, "--splits", trained / "splits.json", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    whole, sides = contents(made_store), json.loads((trained / "splits.json").read_text())
    found = {path.stem: contents(path) for path in out.glob("*.lmdb")}
    assert set(found) == {"train", "validation", "test"}
    assert sorted(name for side in found.values() for name in side) == sorted(
        s["id"] for s in sides["slides"]
    )
    for side in found.values():
        assert all(whole[name] == slide for name, slide in side.items())
    for path in out.glob("*.lmdb"):
        assert verify(path).findings == []
    wrong = run(
        "split", out / "train.lmdb", "--splits", trained / "splits.json", "--out", tmp_path / "no"
    )
    assert wrong.returncode == 5


def test_two_splits_do_not_mix(made_store: Path, tmp_path: Path, run: Run) -> None:
    for seed in (1, 2):
        with Store(made_store) as store:
            write_splits(
                make_splits([store], split_by="slide", seed=seed), tmp_path / f"{seed}.json"
            )
    assert (
        run(
            "split", made_store, "--splits", tmp_path / "1.json", "--out", tmp_path / "sides"
        ).returncode
        == 0
    )
    before = {side: contents(tmp_path / "sides" / f"{side}.lmdb") for side in ("train", "test")}
    done = run("split", made_store, "--splits", tmp_path / "2.json", "--out", tmp_path / "sides")
    assert (done.returncode, "not of its side" in done.stderr) == (2, True), done.stderr
    assert before == {side: contents(tmp_path / "sides" / f"{side}.lmdb") for side in before}


def test_a_split_that_divides_slides_is_refused(made_store: Path, tmp_path: Path, run: Run) -> None:
    run("train", made_store, "--epochs", 1, "--split-by", "patch", "--out", tmp_path / "run")
    done = run(
        "split",
        made_store,
        "--splits",
        tmp_path / "run" / "splits.json",
        "--out",
        tmp_path / "sides",
    )
    assert (done.returncode, "divides slides among sides" in done.stderr) == (2, True)
    assert not (tmp_path / "sides").exists()


# Repair.


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four slides in `slides`, and `s.lmdb` of them, with labels, and classes of patches on the second."""
    folder = tmp_path_factory.mktemp("repair")
    made = make_slides(
        folder / "slides", "--count", "4", "--size", "1024x1024", "--classes", "normal,tumour"
    )
    store = folder / "s.lmdb"
    subprocess.run(
        [*COMMAND, "ingest", str(folder / "slides"), "--out", str(store), "--patch-size", "64", "--tissue", "none"],
        check=True, capture_output=True,
    )  # fmt: skip
    assert len(made) == 4
    label(store, 1, "stroma")
    return folder


@pytest.fixture
def damaged(drawn: Path, tmp_path: Path) -> Path:
    """A copy of that store, to be damaged."""
    return Path(shutil.copytree(drawn / "s.lmdb", tmp_path / "s.lmdb"))


def numbers(path: Path) -> tuple[str, dict[int, str]]:
    with Store(path) as store:
        return store.uuid, {number: record.id for number, record in store.records.items()}


def as_ingested(path: Path) -> dict[str, Any]:
    """Contents without what says where and how a slide was found."""
    return {
        name: (dataclasses.replace(facts, mpp_source=None, path="", resolved_path=""), *rest)
        for name, (facts, *rest) in contents(path).items()
    }


def rewritten_record(path: Path, slide: int) -> None:
    def change(txn: Any, db: Any) -> None:
        record = bytes(txn.get(slide_key(slide), db=db))
        txn.put(slide_key(slide), record.replace(b'"vendor":', b'"vendoR":'), db=db)

    edited(path, "slides", change)


def leaf_of_the_patches(path: Path) -> None:
    _, leaves, _ = pages_of(path)
    patched(path / "data.mdb", 4096 * leaves[len(leaves) // 2] + 2)


def root_of_the_index(path: Path) -> None:
    _, _, roots = pages_of(path)
    patched(path / "data.mdb", 4096 * roots[b"index"] + 2)


@pytest.mark.parametrize(
    ("damage", "hit"),
    [
        (lambda path: flip_bytes(path, [(1, 5), (3, 0), (3, 1)]), [1, 3]),
        (lambda path: edited(path, "index", lambda t, db: t.delete(slide_key(2), db=db)), [2]),
        (lambda path: edited(path, "thumbnails", lambda t, db: t.delete(slide_key(1) + b"thumb", db=db)), [1]),
        (lambda path: rewritten_record(path, 0), [0]),
        (leaf_of_the_patches, None),
        (root_of_the_index, [0, 1, 2, 3]),
        (lambda path: edited(path, "patches", lambda t, db: t.put(slide_key(9) * 2, b"x", db=db)), []),
        (lambda path: edited(path, "patches", lambda t, db: t.put(b"stray", b"x", db=db)), []),
        (lambda path: edited(path, "stains", lambda t, db: t.put(slide_key(1), b'{"algorithm":"stain-1"}', db=db)), []),
        (lambda path: edited(path, "meta", lambda t, db: t.put(b"next_number", b"1", db=db)), []),
    ],
    ids=["values", "index", "thumbnail", "record", "leaf", "root", "orphan", "stray", "stain", "number"],
)  # fmt: skip
def test_repair_brings_back_exactly_what_is_damaged(
    drawn: Path, damaged: Path, run: Run, damage: Callable[[Path], None], hit: list[int] | None
) -> None:
    whole, before = as_ingested(damaged), numbers(damaged)
    damage(damaged)
    found = verify(damaged)
    assert found.findings
    if hit is None:
        hit = list(found.damaged_slides)
        assert 0 < len(hit) < 4
    done = run("repair", damaged, drawn / "slides", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert sorted(value["slides"]) == [before[1][number] for number in hit]
    assert verify(damaged, full=True).findings == []
    after = as_ingested(damaged)
    assert numbers(damaged) == before
    if hit == [0]:  # what a person has said of it went with its record, and that is told
        lost = before[1][0]
        assert f"the record of {lost} was lost" in str(value["notes"])
        assert after.pop(lost)[1:] == whole.pop(lost)[1:]
    if hit == [0, 1, 2, 3]:  # what was drawn is lost with the index, and told
        name = before[1][1]
        assert "annotate" in str(after[name][0].notes)
        del after[name], whole[name]
    assert after == whole
    assert [path.name for path in damaged.parent.iterdir()] == ["s.lmdb"]
    again = run("repair", damaged, drawn / "slides")
    assert again.stdout == f"{damaged} is whole: nothing to repair\n"


def leaf_of_the_records(path: Path) -> None:
    _, _, roots = pages_of(path)
    patched(path / "data.mdb", 4096 * roots[b"slides"] + 12)


def test_slides_whose_records_are_lost_are_known_by_their_patches(
    drawn: Path, damaged: Path, run: Run
) -> None:
    whole, before = as_ingested(damaged), numbers(damaged)
    leaf_of_the_records(damaged)
    files = sorted((drawn / "slides").glob("*.svs"))
    done = run("repair", damaged, *files[:3], "--json")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["left"] == {"lost-slide-3": "its file is not among those given"}
    assert numbers(damaged) == (before[0], {**before[1], 3: "lost-slide-3"})
    assert verify(damaged).findings == []  # hidden, as one that an ingest has not finished
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 0, done.stderr
    assert numbers(damaged) == before
    assert {n: slide[1:] for n, slide in as_ingested(damaged).items()} == {
        n: slide[1:] for n, slide in whole.items()
    }
    assert verify(damaged).findings == []


def test_what_can_be_read_of_a_slide_stays_until_it_is_back(
    drawn: Path, damaged: Path, run: Run
) -> None:
    leaf_of_the_patches(damaged)
    hit = set(verify(damaged).damaged_slides)
    held = {n: slide[2] for n, slide in as_ingested_but(damaged, hit).items()}
    wrong = sorted((drawn / "slides").glob("*.svs"))[min(set(range(4)) - hit)]
    done = run("repair", damaged, wrong)
    assert (done.returncode, "could not be brought back" in done.stderr) == (3, True), done.stderr
    found = verify(damaged)
    assert not found.is_structural
    assert {f.kind for f in found.findings} == {Kind.HOLE}
    assert set(found.damaged_slides) == hit
    assert {n: slide[2] for n, slide in as_ingested_but(damaged, hit).items()} == held
    with Store(damaged) as store:
        (first, *_) = hit
        assert store.value(first, 0)  # the other patches of a damaged slide are there
    assert run("repair", damaged, drawn / "slides").returncode == 0
    assert verify(damaged).findings == []


def as_ingested_but(path: Path, numbers: set[int]) -> dict[str, Any]:
    """What can be read of the slides that are sound, past LMDB's own view of a damaged file."""
    with Store(path) as store:
        return {
            record.id: (record, None, [store.value(n, row) for row in range(record.planned)])
            for n, record in store.complete.items()
            if n not in numbers
        }


class WritesMeanwhile:
    """A progress that changes the store as soon as the ingest has begun."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def begin(self, slides: int) -> None:
        label(self._store, 1, "meanwhile")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_what_is_written_during_a_repair_is_not_lost(drawn: Path, damaged: Path) -> None:
    with Store(damaged) as store:
        free = store.records[0]
    flip_overflow_head(damaged, 0)
    with pytest.raises(UsageError, match="was written meanwhile"):
        repair(damaged, discover([drawn / "slides"]), RepairOptions(), WritesMeanwhile(damaged))
    with Store(damaged) as store:
        assert "meanwhile" in store.classes
        assert store.records[0] == free


def flip_overflow_head(path: Path, slide: int) -> None:
    """Damage the head of the pages that a slide's index lies on."""
    with DataFile(path / "data.mdb") as file:
        metas = [meta for meta in file.metas if meta is not None]
        structure = Structure(file, max(metas, key=lambda meta: meta.transaction))
        structure.read_databases()
        for read in structure.reads("index", structure.trees["index"]):
            place = read.place(slide)
            assert isinstance(place, tuple)
    patched(path / "data.mdb", 4096 * place[0] + 12)


def test_the_pages_of_an_index_are_looked_at(damaged: Path, drawn: Path, run: Run) -> None:
    flip_overflow_head(damaged, 2)
    found = verify(damaged)
    assert (found.is_structural, set(found.damaged_slides)) == (True, {2})
    assert run("repair", damaged, drawn / "slides").returncode == 0
    assert verify(damaged).findings == []


def test_a_repair_from_within_the_store_s_folder(drawn: Path, damaged: Path, run: Run) -> None:
    leaf_of_the_patches(damaged)
    done = run("repair", ".", drawn / "slides", cwd=damaged)
    assert done.returncode == 0, done.stderr
    assert verify(damaged).findings == []
    assert [path.name for path in damaged.parent.iterdir()] == ["s.lmdb"]


def test_slides_that_are_not_given_stay_as_they_are(
    drawn: Path, damaged: Path, tmp_path: Path, run: Run
) -> None:
    flip_bytes(damaged, [(1, 5), (3, 0)])
    files = sorted((drawn / "slides").glob("*.svs"))
    before = (damaged / "data.mdb").stat().st_size
    done = run("repair", damaged, files[1])
    assert done.returncode == 3
    assert "could not be brought back: its file is not among those given" in done.stderr
    assert set(verify(damaged).damaged_slides) == {3}
    assert (damaged / "data.mdb").stat().st_size < 2 * before
    done = run("repair", damaged, files[0])  # the file of another slide
    assert done.returncode == 3
    other = tmp_path / "other" / files[3].name
    other.parent.mkdir()
    shutil.copy(files[0], other)
    done = run("repair", damaged, other)
    assert (done.returncode, "another" in done.stderr) == (3, True), done.stderr
    assert set(verify(damaged).damaged_slides) == {3}
    assert run("repair", damaged, files[3]).returncode == 0
    assert verify(damaged).findings == []


def test_what_a_store_says_of_itself_cannot_be_repaired(
    drawn: Path, damaged: Path, run: Run
) -> None:
    edited(damaged, "meta", lambda txn, db: txn.delete(b"spec", db=db))
    done = run("repair", damaged, drawn / "slides")
    assert (done.returncode, "says of itself is lost" in done.stderr) == (5, True)


def test_a_repair_that_is_killed_goes_on(drawn: Path, damaged: Path, run: Run) -> None:
    whole = as_ingested(damaged)
    for share in (0.4, 0.6, 0.8, 0.95):
        flip_bytes(damaged, [(number, 5) for number in range(4)])
        started = time.monotonic()
        process = subprocess.Popen(
            [*COMMAND, "repair", str(damaged), str(drawn / "slides")],
            start_new_session=True,
            stdout=-3,
            stderr=-3,
        )
        time.sleep(share * 1.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = run("repair", damaged, drawn / "slides")
        assert done.returncode == 0, (done.stderr, started)
        assert verify(damaged).findings == []
        assert {name: slide[2] for name, slide in as_ingested(damaged).items()} == {
            name: slide[2] for name, slide in whole.items()
        }


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Ingests, merges, removals and compactions; what they leave is whole, and done again they end."""
    done = subprocess.run(
        [sys.executable, "-P", str(TOOLS / "kill_store.py"), "--kills", "8", "--side", "1536", "--work", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 kills" in done.stdout
