"""Tests of `histopipe repair`: only the damaged slides are ingested again, and their data is not lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import histopipe
from helpers.commands import RunCommand, succeed
from helpers.inline import InlineWorkers
from helpers.lmdb_pages import PAGE, damage_page, nodes_of, pages_of
from helpers.slides import make_slides
from helpers.stores import (
    a_store,
    delete,
    edit_record,
    entry,
    flip_bytes,
    label_slide,
    patched,
    put,
    read_slides,
)
from helpers.tissue_files import box, feature, make_network, write_coords
from histopipe.errors import DamagedStore, UsageError
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.maintenance.reingest import _has_scan
from histopipe.maintenance.repair import rebuild
from histopipe.maintenance.repair import repair as repair_store
from histopipe.maintenance.verify import verify
from histopipe.slides.discovery import discover
from histopipe.store.format import slide_key
from histopipe.store.record import SlideRecord, SlideState, corrected_record
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.locks import locked_alone
from histopipe.system.output import Progress

FLAGS = ("--patch-size", "64", "--tissue", "none")
pytestmark = pytest.mark.usefixtures("shared_verifiers")

repair = partial(repair_store, progress=Progress(), workers=2)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four slides in `slides`, and their store `s.lmdb` with labels, and with patch labels for the second slide."""
    folder = tmp_path_factory.mktemp("repair")
    flags = ("--count", "4", "--size", "512x512", "--classes", "normal,tumour")
    make_slides(folder / "slides", *flags)
    # With one worker, each run writes the same pages, so that the same slides are damaged.
    succeed("ingest", folder / "slides", "--out", folder / "s.lmdb", *FLAGS, "--workers", 1)
    label_slide(folder / "s.lmdb", 1, "stroma")
    return folder


@pytest.fixture(autouse=True)
def inline_ingest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slides are read and ingested in this process."""
    for name in ("maintenance.reingest", "ingestion.request", "ingestion.ingest_slides"):
        monkeypatch.setattr(f"histopipe.{name}.WorkerPool", InlineWorkers)


@pytest.fixture
def damaged(drawn: Path, tmp_path: Path) -> Path:
    """A copy of that store, which a test damages."""
    return Path(shutil.copytree(drawn / "s.lmdb", tmp_path / "s.lmdb"))


def numbers(path: Path) -> tuple[str, dict[int, str]]:
    with Store(path) as store:
        return store.uuid, {number: record.id for number, record in store.records.items()}


def as_ingested(path: Path) -> dict[str, Any]:
    """Return the contents of a store without the paths of slides and the sources of their scales."""
    return {
        name: (dataclasses.replace(record, mpp_source=None, path="", resolved_path=""), *rest)
        for name, (record, *rest) in read_slides(path).items()
    }


def damage_patch_page(path: Path) -> None:
    leaves = pages_of(path).leaves["patches"]
    damage_page(path, leaves[len(leaves) // 2])


def damage_index_root(path: Path) -> None:
    damage_page(path, pages_of(path).roots["index"])


def damage_record(path: Path) -> None:
    record = entry(path, "slides", slide_key(0))
    put(path, "slides", slide_key(0), record.replace(b'"vendor":', b'"vendoR":'))


def damage_values(path: Path) -> None:
    flip_bytes(path, [(1, 5), (1, 6)])
    delete(path, "index", slide_key(2))
    delete(path, "thumbnails", slide_key(3) + b"thumb")


def add_orphans(path: Path) -> None:
    put(path, "patches", slide_key(9) * 2, b"x")
    put(path, "patches", b"stray", b"x")
    put(path, "stains", slide_key(1), b'{"algorithm":"stain-1"}')
    put(path, "meta", b"next_number", b"1")


def damage_older_meta_page(path: Path) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    older = PAGE * min((0, 1), key=lambda page: struct.unpack_from("<Q", data, PAGE * page + 144))
    data[older : older + PAGE] = bytes(PAGE)
    (path / "data.mdb").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "damaged_slides"),
    [
        (damage_values, [1, 2, 3]),
        (add_orphans, []),
        (damage_record, []),
        (damage_patch_page, None),
        (damage_index_root, [0, 1, 2, 3]),
        (damage_older_meta_page, []),
    ],
    ids=["values", "entries", "record", "leaf", "root", "meta page"],
)
@pytest.mark.long(reason="several damages of pages")
def test_repair_ingests_only_damaged_slides(
    drawn: Path, damaged: Path, damage: Callable[[Path], None], damaged_slides: list[int] | None
) -> None:
    expected, before = as_ingested(damaged), numbers(damaged)
    damage(damaged)
    assert verify(damaged).findings
    done = repair(damaged, drawn / "slides")
    assert int(done.exit_code) == 0, done.to_json()
    if damaged_slides is None:
        assert done.slides
    else:
        assert done.slides == [f"slide-00{number}" for number in damaged_slides]
    assert verify(damaged, full=True).findings == []
    assert numbers(damaged) == before
    after = as_ingested(damaged)
    if "histopipe annotate" in str(done.notes):  # the patch labels were lost with the index
        assert "annotate" in str(after.pop("slide-001")[0].notes)
        assert expected.pop("slide-001")[0].id in done.slides
    assert after == expected
    assert [path.name for path in damaged.parent.iterdir()] == ["s.lmdb"]
    assert str(repair(damaged, drawn / "slides")) == f"{damaged} is intact: nothing to repair"


def test_one_wrong_byte_of_record_is_corrected(damaged: Path) -> None:
    with Store(damaged) as store:
        record, stored = store.records[1], store.records[1].to_bytes(1)

    def changed(data: bytes, offset: int, bits: int) -> bytes:
        return data[:offset] + bytes([data[offset] ^ bits]) + data[offset + 1 :]

    last = stored.rindex(b',"crc":')
    for offset in range(0, last, 61):
        for bits in (0x01, 0x80, 0xFF):
            one = changed(stored, offset, bits)
            assert corrected_record(1, one) == record
            assert corrected_record(1, changed(one, (offset + last // 2) % last, 0x10)) is None
    for offset in (*range(last + 2, last + 5), *range(last + 7, len(stored) - 1)):  # of the CRC
        one = changed(stored, offset, 0x02)
        with pytest.raises(DamagedStore):
            SlideRecord.from_bytes(1, one, where="record")
        assert corrected_record(1, one) == record
    assert corrected_record(2, stored) is None
    assert corrected_record(1, b"") is None


def test_slides_with_lost_records_are_deleted(drawn: Path, damaged: Path, run: RunCommand) -> None:
    """Nothing can be read without a record. `ingest` adds the slides again, under numbers that no slide had."""
    delete(damaged, "slides", slide_key(3))
    done = run("repair", damaged, drawn / "slides")
    assert done.returncode == 3, done.stderr
    assert "slide number 3 could not be repaired: its record is lost" in done.stderr
    assert verify(damaged).findings == []
    assert run("ingest", drawn / "slides", "--out", damaged, *FLAGS).returncode == 0
    assert repair(damaged, drawn / "slides").to_json()["exit_code"] == 0
    assert numbers(damaged)[1] == {0: "slide-000", 1: "slide-001", 2: "slide-002", 4: "slide-003"}


@pytest.mark.long(reason="three repairs")
def test_readable_patches_stay_until_slide_file_is_given(drawn: Path, damaged: Path) -> None:
    damage_patch_page(damaged)
    damaged_slides = set(verify(damaged).damaged_slides)
    with Store(damaged) as store:
        readable = {}
        for number in store.complete:
            with contextlib.suppress(DamagedStore):  # on the damaged page
                readable[number] = store.value(number, 0)
    intact = min(set(range(4)) - damaged_slides)
    done = repair(damaged, drawn / "slides" / f"slide-00{intact}.svs")
    # A scan of the file finds patches that a lookup in the damaged tree does not.
    left = {number for number in damaged_slides if f"slide-00{number}" in done.left}
    assert (int(done.exit_code), len(done.left)) == (3, len(left))
    result = verify(damaged)
    assert {f.kind for f in result.findings} == {"hole"}
    assert set(result.damaged_slides) == left
    with Store(damaged) as store:  # also the other patches of a damaged slide
        assert {n: store.value(n, 0) for n in readable} == readable != {}
    assert int(repair(damaged, drawn / "slides").exit_code) == 0


def test_writes_during_repair_are_not_lost(
    drawn: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((first, _), *_) = pages_of(damaged).overflow["index"]
    patched(damaged / "data.mdb", PAGE * first + 12)  # the header of an index block
    assert verify(damaged).is_structural

    def rebuild_after_a_write(*arguments: Any) -> None:
        label_slide(damaged, 1, "new class")
        rebuild(*arguments)

    refused = pytest.raises(UsageError, match="was written after it was verified")
    with monkeypatch.context() as patch, refused:
        patch.setattr("histopipe.maintenance.repair.rebuild", rebuild_after_a_write)
        repair(damaged, drawn / "slides")
    with Store(damaged) as store:
        assert "new class" in store.classes
    assert int(repair(damaged, drawn / "slides").exit_code) == 0


def test_second_repair_at_the_same_time_is_refused(drawn: Path, damaged: Path) -> None:
    message = r"another repair of .*s\.lmdb is running"
    with locked_alone(damaged, "", ""), pytest.raises(UsageError, match=message):
        repair(damaged, drawn / "slides")


@pytest.mark.long(reason="a new process of the command")
def test_repair_with_store_as_working_directory(
    drawn: Path, damaged: Path, run: RunCommand
) -> None:
    damage_patch_page(damaged)
    done = run("repair", ".", drawn / "slides", cwd=damaged)
    assert done.returncode == 0, done.stderr
    assert verify(damaged).findings == []
    assert [path.name for path in damaged.parent.iterdir()] == ["s.lmdb"]


def test_slides_without_given_file_are_not_changed(
    drawn: Path, damaged: Path, tmp_path: Path
) -> None:
    flip_bytes(damaged, [(1, 5), (3, 0)])
    files = sorted((drawn / "slides").glob("*.svs"))
    done = repair(damaged, files[1])
    assert (int(done.exit_code), done.slides) == (3, ["slide-001"])
    assert done.left == {"slide-003": "its file is not among the given slides"}
    other = tmp_path / "other" / files[3].name
    other.parent.mkdir()
    shutil.copy(files[0], other)
    assert "another scan" in repair(damaged, other).left["slide-003"]
    other.write_text("no slide")
    assert "cannot be opened" in repair(damaged, other).left["slide-003"]
    assert set(verify(damaged).damaged_slides) == {3}
    shutil.copy(files[3], other)  # moved; the old file is still there
    assert repair(damaged, other).slides == ["slide-003"]


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        ({}, True),
        ({"pixel_hash": None}, True),
        ({"pixel_hash": "x"}, False),
        ({"height": 1}, False),
        ({"quickhash": "x"}, False),
    ],
)
def test_scans_are_compared(drawn: Path, fields: dict[str, Any], is_same: bool) -> None:
    (slide,) = discover([drawn / "slides" / "slide-003.svs"])
    record = read_slides(drawn / "s.lmdb")["slide-003"][0]
    assert _has_scan(slide, dataclasses.replace(record, **fields)) == is_same


def test_damaged_settings_cannot_be_repaired(drawn: Path, damaged: Path) -> None:
    short = Path(shutil.copytree(damaged, damaged.with_name("short.lmdb")))
    os.truncate(short / "data.mdb", 9 * PAGE)  # without the pages that were written last
    delete(damaged, "meta", b"spec")
    for store in (short, damaged):
        with pytest.raises(DamagedStore, match=r"the settings of .*\.lmdb are lost"):
            repair(store, drawn / "slides")
    assert (short / "data.mdb").stat().st_size == 9 * PAGE


KILLED = """
import os, signal, sys
from pathlib import Path
from histopipe.cli import main
from histopipe.maintenance import reingest
setattr(reingest, sys.argv[1], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
sys.argv = ["histopipe", "repair", *sys.argv[2:]]
main()
"""


@pytest.mark.long(reason="two kills in new processes")
def test_repair_restores_all_data_of_slide(drawn: Path, damaged: Path, run: RunCommand) -> None:
    """Labels, classes, focus, stains and entries of a later version are restored, also after a kill."""
    assert run("quality", damaged).returncode == 0
    assert run("stains", damaged).returncode == 0
    put(damaged, "later", slide_key(1) + b"embedding", b"value")
    with Store(damaged) as store:
        stains, classes = repr(store.stains()), store.index(1)["label"].copy()
        record = dataclasses.replace(store.records[1], patient="p-7", site="ward 3")
    assert "1: StainFit" in stains and (classes >= 0).all()
    put(damaged, "slides", slide_key(1), record.to_bytes(1))
    expected = as_ingested(damaged)
    flip_bytes(damaged, [(1, 5)])
    for function in ("ingest_slides", "_merged_record"):  # before and after the patches
        command = [sys.executable, "-P", "-c", KILLED, function, damaged, drawn / "slides"]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert verify(damaged).findings == []
        with Store(damaged) as store:
            assert store.records[1].patient == "p-7"
            assert store.records[1].state is SlideState.PENDING
            assert "run `histopipe repair` again" in str(store.records[1].error)
        ingested = run("ingest", drawn / "slides", "--out", damaged, *FLAGS)
        assert (ingested.returncode, "run `histopipe repair` again" in ingested.stderr) == (3, True)
    assert repair(damaged, drawn / "slides").slides == []  # all patches had been written again
    assert as_ingested(damaged) == expected
    flip_bytes(damaged, [(1, 5)])
    assert repair(damaged, drawn / "slides").slides == ["slide-001"]
    assert as_ingested(damaged) == expected
    with Store(damaged) as store:
        assert repr(store.stains()) == stains
        assert store.entries(b"later", 1) == [(slide_key(1) + b"embedding", b"value")]
    assert verify(damaged, full=True).findings == []


def test_lost_patch_labels_are_reported(drawn: Path, damaged: Path) -> None:
    put(damaged, "meta", b"classes", b"[]")
    assert set(verify(damaged).damaged_slides) == {1}
    done = repair(damaged, drawn / "slides")
    assert "slide-001: its patch labels are lost: run `histopipe annotate`" in str(done.notes)
    assert (int(done.exit_code), verify(damaged).findings) == (0, [])
    put(damaged, "stains", slide_key(0), b'{"algorithm":"stain-1"}')
    assert "run `histopipe stains`" in str(repair(damaged, drawn / "slides").notes)


def test_slide_with_missing_file_is_reported_and_repaired_later(
    drawn: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = as_ingested(damaged)
    flip_bytes(damaged, [(1, 1)])

    def ingest_without_the_file(slides: Any, *arguments: Any, **options: Any) -> Any:
        (slide,) = slides
        missing = dataclasses.replace(slide.file, problem="it is missing")
        return ingest_slides([dataclasses.replace(slide, file=missing)], *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("histopipe.maintenance.reingest.ingest_slides", ingest_without_the_file)
        done = repair(damaged, drawn / "slides")
    assert (int(done.exit_code), "it is missing" in done.left["slide-001"]) == (3, True)
    assert set(verify(damaged).damaged_slides) == {1}
    with Store(damaged) as store:  # as before the repair: visible, with the other patches
        assert store.value(1, 0) == expected["slide-001"][2][0]
    assert repair(damaged, drawn / "slides").slides == ["slide-001"]
    assert as_ingested(damaged) == expected


def test_repair_does_not_finish_ingest(drawn: Path, damaged: Path) -> None:
    """A pending slide stays pending, since repair does not know the labels and options of the ingest."""
    with Store(damaged) as store:
        record = dataclasses.replace(store.records[2], state=SlideState.PENDING)
    put(damaged, "slides", slide_key(2), record.to_bytes(2))
    flip_bytes(damaged, [(1, 0)])
    assert repair(damaged, drawn / "slides").slides == ["slide-001"]
    with Store(damaged) as store:
        assert store.records[2].state is SlideState.PENDING


def test_store_with_level_and_region_of_interest(drawn: Path, tmp_path: Path) -> None:
    store, slides = tmp_path / "roi.lmdb", drawn / "slides"
    histopipe.ingest(
        slides,
        store,
        patch_size=64,
        level=0,
        allow_mixed_mpp=True,
        annotations=slides,
        roi="tumour",
        progress=Progress(),
    )
    before = as_ingested(store)
    flip_bytes(store, [(1, 0)])
    assert repair(store, slides, annotations=slides).slides == ["slide-001"]
    assert as_ingested(store) == before


def write_files(slides: Path, folder: Path, *, shift: int) -> None:
    """Write a mask, a network, annotations and coordinates for each slide."""
    make_network(folder / "network.onnx", 64, mpp=4 + shift / 64)
    for slide in slides.glob("*.svs"):
        for kind, name, left in (("masks", "Tissue", shift), ("outlines", "Fold", 200 + shift)):
            (folder / kind).mkdir(exist_ok=True)
            square = feature([box(left, 0, left + 300, 400)], name)
            (folder / kind / f"{slide.stem}.geojson").write_text(json.dumps([square]))
        corners = [(shift, 0), (128, 64 + shift), (0, 256)]
        size = {"patch_size": 64, "level0_magnification": 20, "target_magnification": 20}
        write_coords(folder / "coords" / f"{slide.stem}_patches.h5", corners, **size)


@pytest.mark.parametrize(
    ("settings", "passed", "missing", "differs"),
    [
        ({"tissue": "masks"}, ["tissue"], "its mask was slide-001.geojson, crc32", "was passed"),
        ({"tissue": "network.onnx"}, ["tissue"], "its network was network.onnx", "was passed"),
        (
            {"tissue": "none", "annotations": "outlines", "exclude": ["Fold"]},
            ["annotations"],
            "its annotation file was slide-001.geojson, crc32",
            "was passed",
        ),
        ({"coords": "coords"}, ["coords"], "its coordinates were imported", "other coordinates"),
    ],
    ids=["masks", "network", "exclude", "coords"],
)
def test_repair_needs_the_files_that_chose_the_patches(
    drawn: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    passed: list[str],
    missing: str,
    differs: str,
) -> None:
    slides, store = drawn / "slides", tmp_path / "s.lmdb"
    for name, shift in (("right", 0), ("wrong", 64)):
        (tmp_path / name).mkdir()
        write_files(slides, tmp_path / name, shift=shift)

    def paths(folder: str, names: Iterable[str]) -> dict[str, Any]:
        return {name: tmp_path / folder / str(settings[name]) for name in names}

    options = settings | paths("right", passed)
    if "coords" in options:
        histopipe.import_coords(options["coords"], slides, store, progress=Progress())
    else:
        histopipe.ingest(slides, store, patch_size=64, mpp=0.5, progress=Progress(), **options)
    before = as_ingested(store)
    assert before["slide-001"][0].planned > 1
    flip_bytes(store, [(1, 0)])
    for files, reason in (({}, missing), (paths("wrong", passed), differs)):
        done = repair(store, slides, **files)
        assert (int(done.exit_code), done.slides) == (3, [])
        assert reason in done.left["slide-001"]
        assert set(verify(store).damaged_slides) == {1}
    done = repair(store, slides, **paths("right", passed))
    assert (int(done.exit_code), done.slides) == (0, ["slide-001"]), done.left
    assert verify(store, full=True).findings == []
    assert as_ingested(store) == before


def test_imported_coordinates_that_cannot_be_compared_are_noted(
    drawn: Path, tmp_path: Path
) -> None:
    write_files(drawn / "slides", tmp_path, shift=0)
    store = tmp_path / "s.lmdb"
    histopipe.import_coords(tmp_path / "coords", drawn / "slides", store, progress=Progress())
    before = as_ingested(store)
    put(store, "index", slide_key(1), b"lost")
    done = repair(store, drawn / "slides", coords=tmp_path / "coords")
    (note,) = done.notes
    assert note.startswith("slide-001: its index was lost: if its coordinates were not imported")
    assert (done.slides, verify(store, full=True).findings) == (["slide-001"], [])
    assert as_ingested(store) == before


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("tissue", "masks", "--tissue does not fit the store"),
        ("tissue", "network.onnx", "--tissue does not fit the store"),
        ("coords", "coords", "--coords does not fit the store"),
        ("tissue", "otsu", "--tissue: found '.*otsu', expected a folder of masks"),
    ],
)
def test_files_that_do_not_fit_the_store_are_refused(
    drawn: Path, damaged: Path, tmp_path: Path, name: str, path: str, message: str
) -> None:
    write_files(drawn / "slides", tmp_path, shift=0)
    flip_bytes(damaged, [(1, 0)])
    files: dict[str, Any] = {name: tmp_path / path}
    with pytest.raises(UsageError, match=message):
        repair(damaged, drawn / "slides", **files)
    assert set(verify(damaged).damaged_slides) == {1}


def test_repair_verifies_afterwards(drawn: Path, damaged: Path, run: RunCommand) -> None:
    """Remaining findings are reported. Damage that only --full finds is repaired with --full."""
    with StoreWriter(damaged) as writer, Store(damaged) as store:
        crc = store.index(2)["crc"].copy()
        new = crc.copy()
        new[3:4] = writer.put_patches(2, [3], [b"x" * len(store.value(2, 3))])
        writer.put_columns(2, {"crc": new}, crc=crc)
    assert str(repair(damaged, drawn / "slides")) == f"{damaged} is intact: nothing to repair"
    done = run("repair", damaged, drawn / "slides", "--full", "--json")
    assert json.loads(done.stdout)["slides"] == ["slide-002"], done.stderr
    assert verify(damaged, full=True).findings == []
    edit_record(damaged, 3, id="slide-002")
    result = repair(damaged, drawn / "slides")
    assert (int(result.exit_code), result.remaining) == (5, ["2 slides have the id 'slide-002'"])


@pytest.mark.parametrize(("place", "change"), [(6, 1), (0, 2)], ids=["key", "value"])
def test_a_wrong_length_costs_only_its_own_entry(tmp_path: Path, place: int, change: int) -> None:
    """LMDB moves the entries next to one that it deletes, by the length that the page states."""
    values = [bytes([row]) * 40 for row in range(30)]
    store, slide = a_store(tmp_path / "s.lmdb", {"a": values}), tmp_path / "none.svs"
    slide.touch()
    data = store / "data.mdb"
    content = data.read_bytes()
    node = list(nodes_of(content, pages_of(store).roots["patches"]))[4] + place
    patched(data, node, content[node] + change)
    assert "the length of one is wrong" in "".join(map(str, verify(store).findings))
    assert repair(store, slide).exit_code == 3
    with Store(store) as opened:
        kept = [row for row in range(30) if row != 4]
        assert [opened.value(0, row) for row in kept] == [values[row] for row in kept]
