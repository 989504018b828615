"""Repairing stores: exactly the damaged slides come back, with all that was known of them, whenever it ends."""

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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND, Run, make_slides
from test_maintenance import contents, label
from test_reader import flip_bytes
from test_verify import edited, pages_of, patched

from histopipe.errors import UsageError
from histopipe.maintenance.finding import Kind
from histopipe.maintenance.repair import RepairOptions, repair
from histopipe.maintenance.verify import verify
from histopipe.slides.discovery import discover
from histopipe.store.data_file import DataFile
from histopipe.store.format import patch_key, seal, slide_key
from histopipe.store.record import SlideState
from histopipe.store.store import Store
from histopipe.store.structure import Structure
from histopipe.system.progress import Bar, SilentProgress


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


class WritesMeanwhile(SilentProgress):
    """A progress that changes the store as soon as the ingest has begun."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def bar(self, title: str, **options: Any) -> Bar:
        if not options.get("detail"):
            label(self._store, 1, "meanwhile")
        return super().bar(title, **options)


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


def deleted(path: Path, database: str, slide: int) -> None:
    edited(path, database, lambda txn, db: txn.delete(slide_key(slide), db=db))


def renamed_in_its_record(path: Path, slide: int, name: str) -> None:
    """A few bits of a slide's id are others."""

    def change(txn: Any, db: Any) -> None:
        record = bytes(txn.get(slide_key(slide), db=db))
        before = json.loads(record)["id"]
        txn.put(
            slide_key(slide), record.replace(f'"{before}"'.encode(), f'"{name}"'.encode()), db=db
        )

    edited(path, "slides", change)


@pytest.mark.parametrize("name", ["slide-002", "slide-0s3", "slide-00/"])
def test_a_name_that_was_hit_names_no_slide(
    drawn: Path, damaged: Path, run: Run, name: str
) -> None:
    whole, before = as_ingested(damaged), numbers(damaged)
    renamed_in_its_record(damaged, 3, name)
    done = run("repair", damaged, drawn / "slides", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["slides"] == ["slide-003"]
    assert numbers(damaged) == before
    after = as_ingested(damaged)
    assert {n: slide[1:] for n, slide in after.items()} == {n: s[1:] for n, s in whole.items()}


def test_another_scan_does_not_take_a_lost_slide_s_place(
    drawn: Path, damaged: Path, tmp_path: Path, run: Run
) -> None:
    other = tmp_path / "other" / "slide-003.svs"
    other.parent.mkdir()
    shutil.copy(drawn / "slides" / "slide-001.svs", other)
    rewritten_record(damaged, 3)
    done = run("repair", damaged, other)
    assert (done.returncode, "lost-slide-3 could not be brought back" in done.stderr) == (3, True)
    assert numbers(damaged)[1][3] == "lost-slide-3"
    with Store(damaged) as store:
        assert len(store.entries(b"patches", 3)) == store.records[2].planned  # all are kept


def test_a_slide_whose_record_and_index_are_lost_is_known_by_its_values(
    drawn: Path, damaged: Path, run: Run
) -> None:
    whole, before = as_ingested(damaged), numbers(damaged)
    flip_bytes(damaged, [(2, 0)])
    deleted(damaged, "slides", 2)
    deleted(damaged, "index", 2)
    done = run("repair", damaged, drawn / "slides", "--json")
    assert (done.returncode, json.loads(done.stdout)["slides"]) == (0, ["slide-002"]), done.stderr
    assert numbers(damaged) == before
    assert as_ingested(damaged)["slide-002"][2] == whole["slide-002"][2]
    assert verify(damaged, full=True).findings == []


def test_slides_that_are_gone_without_a_trace_are_told(
    drawn: Path, damaged: Path, run: Run
) -> None:
    _, _, roots = pages_of(damaged)
    for number in range(4):
        for database in ("index", "patches", "thumbnails"):
            edited(damaged, database, partial(drop, slide=number))
    patched(damaged / "data.mdb", 4096 * roots[b"slides"] + 12)
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 3, done.stderr
    for number in range(4):
        assert f"slide-00{number} could not be brought back: it is not in the store" in done.stderr
    assert run("ingest", drawn / "slides", "--out", damaged, *FLAGS).returncode == 0
    assert verify(damaged, full=True).findings == []


def drop(txn: Any, db: Any, slide: int) -> None:
    with txn.cursor(db=db) as cursor:
        while cursor.set_range(slide_key(slide)) and cursor.key() < slide_key(slide + 1):
            cursor.delete()


KILLED = """
import os, signal, sys
from pathlib import Path
from histopipe.cli import main
from histopipe.store.transfer import Transfer
Transfer.copy = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
sys.argv = ["histopipe", "repair", *sys.argv[1:]]
main()
"""


def killed_as_it_puts_back(store: Path, slides: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, store, slides], check=False)
    assert done.returncode == -signal.SIGKILL


def test_killed_while_a_lost_slide_is_put_back(drawn: Path, damaged: Path, run: Run) -> None:
    whole, before = as_ingested(damaged), numbers(damaged)
    deleted(damaged, "slides", 3)
    killed_as_it_puts_back(damaged, drawn / "slides")
    done = run("repair", damaged, drawn / "slides", "--json")
    assert (done.returncode, json.loads(done.stdout)["slides"]) == (0, ["slide-003"]), done.stderr
    assert numbers(damaged) == before
    assert as_ingested(damaged)["slide-003"][1:] == whole["slide-003"][1:]


@pytest.mark.parametrize("killed", [False, True])
def test_all_that_is_known_of_a_slide_comes_back_with_it(
    drawn: Path, damaged: Path, run: Run, killed: bool
) -> None:
    """Classes, focus, stains, and what a later version holds; a kill as it is put back loses none of it."""
    assert run("quality", damaged).returncode == 0
    assert run("stains", damaged).returncode == 0
    edited(damaged, "later", lambda txn, db: txn.put(slide_key(1) + b"embedding", b"value", db=db))
    with Store(damaged) as store:
        stains, classes = repr(store.stains()), store.index(1)["label"].copy()
    assert "1: StainFit" in stains and (classes >= 0).all()
    whole = as_ingested(damaged)
    flip_bytes(damaged, [(1, 5)])
    if killed:
        killed_as_it_puts_back(damaged, drawn / "slides")
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 0, done.stderr
    assert as_ingested(damaged) == whole
    with Store(damaged) as store:
        assert repr(store.stains()) == stains
        assert store.entries(b"later", 1) == [(slide_key(1) + b"embedding", b"value")]
    assert verify(damaged, full=True).findings == []


def test_classes_that_are_gone_are_told(drawn: Path, damaged: Path, run: Run) -> None:
    deleted(damaged, "index", 1)
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 0
    assert "slide-001: the classes of its patches are gone" in done.stderr
    edited(damaged, "stains", lambda t, db: t.put(slide_key(0), b'{"algorithm":"stain-1"}', db=db))
    done = run("repair", damaged, drawn / "slides")
    assert (done.returncode, "`histopipe stains` fits it anew" in done.stderr) == (0, True)


def test_classes_without_names_are_not_kept(drawn: Path, damaged: Path, run: Run) -> None:
    edited(damaged, "meta", lambda txn, db: txn.put(b"classes", b"[]", db=db))
    assert set(verify(damaged).damaged_slides) == {1}
    done = run("repair", damaged, drawn / "slides")
    assert (done.returncode, "classes of its patches are gone" in done.stderr) == (0, True), (
        done.stderr
    )
    assert verify(damaged).findings == []


class IngestsMeanwhile(SilentProgress):
    """A progress that has another command add slides to the store as soon as the repair's ingest has begun."""

    def __init__(self, store: Path, slides: Path) -> None:
        self._command = [*COMMAND, "ingest", str(slides), "--out", str(store), *FLAGS]

    def bar(self, title: str, **options: Any) -> Bar:
        if not options.get("detail"):
            subprocess.run(self._command, check=True, capture_output=True)
        return super().bar(title, **options)


FLAGS = ("--patch-size", "64", "--tissue", "none")


def test_what_is_ingested_during_a_repair_keeps_its_numbers(
    drawn: Path, damaged: Path, tmp_path: Path, run: Run
) -> None:
    for name in ("new", "newer"):
        (tmp_path / name).mkdir()
        shutil.copy(drawn / "slides" / "slide-000.svs", tmp_path / name / f"{name}.svs")
    flip_bytes(damaged, [(0, 1)])
    progress = IngestsMeanwhile(damaged, tmp_path / "new")
    repair(damaged, discover([drawn / "slides"]), RepairOptions(), progress)
    assert verify(damaged).findings == []
    assert run("ingest", tmp_path / "newer", "--out", damaged, *FLAGS).returncode == 0
    assert sorted(numbers(damaged)[1].items())[4:] == [(4, "new"), (5, "newer")]
    edited(damaged, "meta", lambda txn, db: txn.put(b"next_number", b"1", db=db))
    shutil.move(tmp_path / "newer" / "newer.svs", tmp_path / "newer" / "newest.svs")
    run("ingest", tmp_path / "newer", "--out", damaged, *FLAGS)
    assert numbers(damaged)[1].keys() == {*range(7)}  # no slide is written over


def test_an_unfinished_ingest_is_not_a_repair_s(drawn: Path, damaged: Path, run: Run) -> None:
    """Its labels and options are known to whoever ingests."""
    with Store(damaged) as store:
        record = dataclasses.replace(store.records[2], state=SlideState.PENDING)
    edited(damaged, "slides", lambda t, db: t.put(slide_key(2), record.to_bytes(2), db=db))
    flip_bytes(damaged, [(1, 0)])
    done = run("repair", damaged, drawn / "slides", "--json")
    assert (done.returncode, json.loads(done.stdout)["slides"]) == (0, ["slide-001"]), done.stderr
    with Store(damaged) as store:
        assert store.records[2].state is SlideState.PENDING


def test_a_store_of_levels_and_regions_of_interest(drawn: Path, tmp_path: Path, run: Run) -> None:
    store = tmp_path / "roi.lmdb"
    made = run(
        "ingest", drawn / "slides", "--out", store, "--patch-size", 64, "--level", 0, "--allow-mixed-mpp",
        "--annotations", drawn / "slides", "--roi", "tumour",
    )  # fmt: skip
    with Store(store) as opened:
        (number, *_) = opened.complete
        name = opened.records[number].id
    assert made.returncode == 3  # nothing is outlined on the normal ones
    before = contents(store)
    flip_bytes(store, [(number, 0)])
    done = run("repair", store, drawn / "slides", "--annotations", drawn / "slides", "--json")
    assert json.loads(done.stdout)["slides"] == [name], done.stderr
    assert (done.returncode, verify(store).findings) == (0, [])
    assert {n: slide[2] for n, slide in contents(store).items()} == {
        n: slide[2] for n, slide in before.items()
    }


def test_it_looks_again(drawn: Path, damaged: Path, run: Run) -> None:
    """What cannot be mended is told, and what only --full sees is mended with it."""
    with Store(damaged) as store:
        length = len(store.value(2, 3))
    no_image(damaged, 2, 3, length)
    assert verify(damaged).findings == []
    done = run("repair", damaged, drawn / "slides")
    assert done.stdout == f"{damaged} is whole: nothing to repair\n"
    done = run("repair", damaged, drawn / "slides", "--full", "--json")
    assert json.loads(done.stdout)["slides"] == ["slide-002"], done.stderr
    assert verify(damaged, full=True).findings == []

    def twice(txn: Any, db: Any) -> None:
        record = json.loads(bytes(txn.get(slide_key(3), db=db)))
        del record["crc"]
        txn.put(slide_key(3), seal(slide_key(3), {**record, "id": "slide-002"}), db=db)

    edited(damaged, "slides", twice)
    done = run("repair", damaged, drawn / "slides")
    assert (done.returncode, "still wrong: 2 slides are called 'slide-002'" in done.stderr) == (
        5,
        True,
    )


def no_image(path: Path, slide: int, row: int, length: int) -> None:
    """Put in a patch's place what is no image, with a checksum that says it is right."""
    from histopipe.store.format import encode_index, value_crc

    value = b"x" * length
    with Store(path) as store:
        columns = {n: c.copy() for n, c in store.index(slide).items()}
    columns["crc"][row] = value_crc(patch_key(slide, row), value)
    block = encode_index(slide_key(slide), columns)
    edited(path, "patches", lambda t, db: t.put(patch_key(slide, row), value, db=db))
    edited(path, "index", lambda t, db: t.put(slide_key(slide), block, db=db))


def test_a_lost_slide_that_was_ingested_anew(drawn: Path, damaged: Path, run: Run) -> None:
    leaf_of_the_records(damaged)
    assert run("repair", damaged, drawn / "slides" / "slide-000.svs").returncode == 3
    assert run("ingest", drawn / "slides", "--out", damaged, *FLAGS).returncode == 0
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 3
    assert "it is in the store as slide-003, too: `histopipe remove` lost-slide-3" in done.stderr
    assert run("remove", damaged, "lost-slide-1", "lost-slide-2", "lost-slide-3").returncode == 0
    assert run("repair", damaged, drawn / "slides").stdout.endswith("nothing to repair\n")


def test_one_repair_at_a_time(drawn: Path, damaged: Path, run: Run) -> None:
    flip_bytes(damaged, [(0, 1)])

    class Repairs(SilentProgress):
        def bar(self, title: str, **options: Any) -> Bar:
            if not options.get("detail"):
                done.append(run("repair", damaged, drawn / "slides"))
            return super().bar(title, **options)

    done: list[subprocess.CompletedProcess[str]] = []
    repair(damaged, discover([drawn / "slides"]), RepairOptions(), Repairs())
    assert (done[0].returncode, "another repair of the store is at work" in done[0].stderr) == (
        2,
        True,
    )
    assert verify(damaged).findings == []


def test_what_an_earlier_repair_of_another_store_left(drawn: Path, damaged: Path, run: Run) -> None:
    left = damaged.with_name(".repair-s.lmdb")
    slides = drawn / "slides"
    assert run("ingest", slides, "--out", left, "--patch-size", 128).returncode == 0
    flip_bytes(damaged, [(0, 1)])
    done = run("repair", damaged, slides)
    assert (done.returncode, verify(damaged).findings) == (0, []), done.stderr
    assert not left.exists()
