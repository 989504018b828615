"""Tests of merge and remove: no data is lost, also after an interruption."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import COMMAND, RunCommand, small_disk
from helpers.paths import GOLDEN, TOOLS
from helpers.stores import (
    RECORD,
    SPEC,
    a_store,
    edit_record,
    entry,
    flip_a_byte,
    jpegs,
    label_slide,
    put,
    read_slides,
)
from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.maintenance.merge import merge
from histopipe.maintenance.remove import remove
from histopipe.maintenance.verify import verify
from histopipe.splits.splits import read_splits
from histopipe.store.claims import Claims
from histopipe.store.format import decode_index, encode_index, slide_key
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter

pytestmark = pytest.mark.usefixtures("shared_verifiers")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two stores with three different slides each."""
    one = a_store(tmp_path / "one.lmdb", {n: jpegs(10 * i, 5) for i, n in enumerate("abc")})
    two = a_store(tmp_path / "two.lmdb", {n: jpegs(50 + 10 * i, 4) for i, n in enumerate("def")})
    return [one, two]


def add_entries_of_later_version(path: Path) -> None:
    """Add a column, a database, a record field and an entry of `meta` that this version does not know."""
    key = slide_key(1)
    columns = dict(decode_index(key, entry(path, "index", key), where="index"))
    columns["later"] = np.arange(len(columns["crc"]), dtype="<f8")
    put(path, "index", key, encode_index(key, columns))
    edit_record(path, 1, scanner={"serial": 7})
    put(path, "later", key + b"embedding", b"value")
    put(path, "meta", b"scanner_park", b'["x"]')


def check_entries_of_later_version(path: Path, name: str) -> None:
    with Store(path) as store:
        number = store.number(name)
        assert store.index(number)["later"].tolist() == list(range(store.records[number].planned))
        assert store.records[number].unknown == {"scanner": {"serial": 7}}
        assert store.entries(b"later", number) == [(slide_key(number) + b"embedding", b"value")]
        assert store.further_meta() == {b"scanner_park": b'["x"]'}


def test_merge_copies_all_entries(parts: list[Path], tmp_path: Path, run: RunCommand) -> None:
    label_slide(parts[0], 1, "tumour")
    label_slide(parts[1], 0, "stroma")
    label_slide(parts[1], 2, "tumour")
    add_entries_of_later_version(parts[1])
    expected = read_slides(parts[0]) | read_slides(parts[1])
    out = tmp_path / "out" / "all.lmdb"
    done = run("merge", *parts, "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}: 6 slides copied; 27 patches\n")
    assert read_slides(out) == expected
    check_entries_of_later_version(out, "e")
    assert verify(out).findings == []
    with Store(out) as store, Store(parts[0]) as part:
        assert store.uuid != part.uuid


def test_merge_of_folder_of_stores(parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.lmdb"
    assert merge([tmp_path], out).slides == list("abcdef")
    assert merge([tmp_path], out).slides == []  # without the output store
    shutil.copytree(parts[0], tmp_path / ".part-one.lmdb")  # left by a killed compaction
    remove(out, ["a"])
    assert merge([tmp_path], out).slides == ["a"]
    assert not any(".part" in note for note in merge([tmp_path], tmp_path / "b.lmdb").notes)
    with pytest.raises(NothingToDo, match="nowhere is not a store"):
        merge([tmp_path / "nowhere"], out)
    with pytest.raises(UsageError, match="one of the stores to merge"):
        merge([out], out)


def test_merge_of_slides_in_several_stores(parts: list[Path], tmp_path: Path) -> None:
    out, new = tmp_path / "all.lmdb", tmp_path / "new.lmdb"
    same = a_store(tmp_path / "same.lmdb", {"a": jpegs(0, 5), "g": jpegs(70, 2)})
    result = merge([parts[0], same], out)
    assert result.slides == ["a", "b", "c", "g"]
    assert re.search(r"\b1 slide in both .*: a$", result.notes[0])
    before = read_slides(out)
    other = a_store(tmp_path / "other.lmdb", {"a": jpegs(30, 5)})
    differs = a_store(tmp_path / "differs.lmdb", {"z": jpegs(0, 1)}, quality=80)
    labelled = Path(shutil.copytree(same, tmp_path / "label.lmdb"))
    edit_record(labelled, 0, label="y")
    for sources, path, message in (
        ([other], out, "slides with the same id differ"),
        ([parts[0], other], out, "slides with the same id differ"),
        ([parts[0], labelled], new, r"a: label 'a' and 'y' in .*one.lmdb and in .*label"),
        ([parts[0], differs], new, r"quality: 80 in .*differs"),
    ):
        with pytest.raises(UsageError, match=message):
            merge(sources, path)
    assert read_slides(out) == before and not new.exists()


@pytest.mark.parametrize(("field", "value"), [("patient", "p9"), ("quality", "y")])
def test_merge_of_records_with_different_fields(
    parts: list[Path], tmp_path: Path, field: str, value: str
) -> None:
    """A patient that equals the slide id is the default of ingest."""
    same = a_store(tmp_path / "same.lmdb", {"a": jpegs(0, 5)})
    edit_record(parts[0], 0, patient="a")
    edit_record(same, 0, **{field: value})
    notes = merge([parts[0], same], tmp_path / "new.lmdb").notes
    assert any("a: its record in" in note and "more fields than" in note for note in notes)


def test_interrupted_merge_continues(parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.lmdb"
    merge(parts, out)
    expected = read_slides(out)
    with StoreWriter(out, SPEC) as writer:
        for number in (3, 4):
            writer.restart(number, writer.record(number))
    result = merge(parts, out)
    assert (len(result.slides), len(result.already), result.patches) == (2, 4, 27)
    assert result.notes == []
    assert read_slides(out) == expected


def test_merge_of_failed_and_unfinished_slides(parts: list[Path], tmp_path: Path) -> None:
    with StoreWriter(parts[0], SPEC) as writer:
        records = [dataclasses.replace(RECORD, id=name) for name in ("bad", "d", "half")]
        numbers = writer.register(records)
        for record in records[:2]:
            writer.fail(numbers[record.id], record.with_failure("cannot be opened"))
    result = merge(parts, tmp_path / "all.lmdb")
    assert any("half of" in note and "not complete" in note for note in result.notes)
    with Store(tmp_path / "all.lmdb") as store:
        # Slide d is complete in one of the stores.
        assert {record.id: str(record.state) for record in store.slides} == {
            **dict.fromkeys("abcdef", "complete"),
            "bad": "failed",
        }
    assert verify(tmp_path / "all.lmdb").findings == []


def test_merge_refuses_damaged_values(parts: list[Path], tmp_path: Path, run: RunCommand) -> None:
    flip_a_byte(parts[0], 1, 3)
    done = run("merge", *parts, "--out", tmp_path / "all.lmdb")
    assert done.returncode == 5
    assert "slide b: patch 3 does not match its checksum" in done.stderr
    assert read_slides(tmp_path / "all.lmdb").keys() == {"a"}


def test_remove_deletes_all_entries_of_slide(parts: list[Path], run: RunCommand) -> None:
    store = parts[0]
    add_entries_of_later_version(store)
    before = read_slides(store)
    with pytest.raises(UsageError, match="no such slide: found nosuch, expected a, b, c"):
        remove(store, ["b", "nosuch"])
    assert read_slides(store) == before
    with Claims(store) as claims:
        assert claims.take(1)
        with pytest.raises(UsageError, match=r"slide b of .* is being ingested"):
            remove(store, ["b"])
    done = run("remove", store, "b", "c")
    assert (done.returncode, "2 slides with 10 patches removed" in done.stdout) == (0, True)
    assert read_slides(store) == {"a": before["a"]}
    assert verify(store).findings == []
    with Store(store) as opened:
        assert opened.entries(b"later", 1) == []
    with StoreWriter(store, SPEC) as writer:
        numbers = writer.register([dataclasses.replace(RECORD, id="c")])
    assert numbers["c"] == 3  # not reused


def test_compacted_store_is_smaller_with_same_contents(tmp_path: Path) -> None:
    path = a_store(
        tmp_path / "s.lmdb", {n: [bytes([i]) * 9000 for i in range(200)] for n in "abcd"}
    )
    add_entries_of_later_version(path)
    (path / "ingest.log").write_text("unchanged")
    expected = read_slides(path)
    with Store(path) as store:
        uuid = store.uuid
    before = (path / "data.mdb").stat().st_size
    result = remove(path, ["a", "c"], compact=True)
    assert (result.slides, result.patches, result.reusable_bytes) == (["a", "c"], 400, 0)
    assert result.before is not None and result.before >= before
    assert result.after == (path / "data.mdb").stat().st_size < 0.6 * before
    with Store(path) as store:
        again = remove(path, compact=True)
        assert store.value(1, 2) == bytes([2]) * 9000  # readers continue with the old file
    assert (again.slides, again.before, again.after) == ([], result.after, result.after)
    assert read_slides(path) == {name: expected[name] for name in "bd"}
    assert verify(path).findings == []
    check_entries_of_later_version(path, "b")
    assert (path / "ingest.log").read_text() == "unchanged"
    with Store(path) as store:
        ids = {number: record.id for number, record in store.records.items()}
        assert (store.uuid, ids) == (uuid, {1: "b", 3: "d"})
    assert [p.name for p in tmp_path.iterdir()] == ["s.lmdb"]


def test_store_that_cannot_be_compacted_is_unchanged(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (parts[0] / "data.mdb").read_bytes()
    with pytest.raises(UsageError, match="no slide given"):
        remove(parts[0])
    with StoreWriter(parts[0], SPEC):  # in another process, since locks belong to processes
        done = subprocess.run(
            [*COMMAND, "remove", str(parts[0]), "--compact"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, "is being written by another" in done.stderr) == (2, True)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="mount the parent folder"):
        patch.setattr(Path, "is_mount", lambda _: True)
        remove(parts[0], compact=True)
    assert (parts[0] / "data.mdb").read_bytes() == content
    assert sorted(p.name for p in parts[0].parent.iterdir()) == ["one.lmdb", "two.lmdb"]


def test_compaction_killed_before_the_exchange(parts: list[Path]) -> None:
    expected = read_slides(parts[0])
    program = parts[0].parent / "program.py"
    program.write_text("""
import os, signal, sys
from histopipe.maintenance import remove
remove.carry_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    remove.remove(sys.argv[1], compact=True)
""")
    command = [sys.executable, "-P", str(program), str(parts[0])]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (parts[0].parent / ".part-one.lmdb").exists()
    assert read_slides(parts[0]) == expected
    assert verify(parts[0]).findings == []
    remove(parts[0], compact=True)
    assert read_slides(parts[0]) == expected
    assert not (parts[0].parent / ".part-one.lmdb").exists()


def test_not_enough_disk_space_for_copy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        path = a_store(disk / "s.lmdb", {"a": [bytes(9000)] * 1000})
        before = read_slides(path)
        with pytest.raises(MachineShort, match=r"not enough disk space.*remove .*--compact"):
            remove(path, compact=True)
        with pytest.raises(MachineShort, match="not enough disk space"):
            merge([path], disk / "all.lmdb")
        assert [p.name for p in disk.iterdir()] == ["s.lmdb"]
        assert read_slides(path) == before


HEADER = "slide,train,validation,test\n"


@pytest.mark.parametrize(
    ("text", "subset", "ids"),
    [
        ("b\ne\n", None, "be"),
        ("Slide;label\na;x\nf;y\n", None, "af"),
        (f"{HEADER}a,5,0,0\nb,0,5,0\nd,0,0,4\ne,4,0,0\nc,0,0,0\n", "train", "ae"),
        (f"{HEADER}a,5,0,0\nb,0,0,0\ne,4,0,0\n", None, "ae"),
    ],
)
def test_merge_of_listed_slides(
    parts: list[Path], tmp_path: Path, text: str, subset: Any, ids: str
) -> None:
    path, out = tmp_path / "list.csv", tmp_path / "out.lmdb"
    path.write_text(text)
    expected = read_slides(parts[0]) | read_slides(parts[1])
    assert merge(parts, out, slides=path, subset=subset).slides == list(ids)
    assert read_slides(out) == {name: expected[name] for name in ids}


@pytest.mark.parametrize(
    ("text", "subset", "message"),
    [
        ("a\nnosuch\n", None, "slides that are in none of the stores: found nosuch"),
        ("a\nb\n", "test", "found test, expected --slides with the slides.csv of a run"),
        (
            f"{HEADER}a,5,0,0\nb,0,5,0\n",
            None,
            "--subset for .*: found none, expected train or validation",
        ),
        (f"{HEADER}a,5,0,0\nb,3,2,0\n", "train", "patches in several subsets: found b"),
        (f"{HEADER}a,5,0,0\nb,0,5,0\n", "test", "found test, expected train or validation"),
        ("slide\n", None, "has no slides"),
    ],
)
def test_wrong_lists_are_refused(
    parts: list[Path], tmp_path: Path, text: str, subset: Any, message: str
) -> None:
    path = tmp_path / "list.csv"
    path.write_text(text)
    with pytest.raises((UsageError, NothingToDo), match=message):
        merge(parts, tmp_path / "out.lmdb", slides=path, subset=subset)
    assert not (tmp_path / "out.lmdb").exists()


def test_stores_of_the_subsets_of_a_run(tmp_path: Path) -> None:
    run = GOLDEN / "2026-11-25" / "run"
    store = Path(shutil.copytree(run.with_name("store.lmdb"), tmp_path / "s.lmdb"))
    splits = json.loads((run / "splits.json").read_text())["slides"]
    settings: dict[str, Any] = {"slides": run / "slides.csv"}
    merge([store], tmp_path / "train.lmdb", subset="train", **settings)
    with pytest.raises(UsageError, match=r"train.lmdb contains slides of another subset"):
        merge([store], tmp_path / "train.lmdb", subset="validation", **settings)
    # A compacted store keeps its id and numbers, so that the splits still fit.
    remove(store, compact=True)
    with Store(store) as opened:
        assert len(read_splits(run / "splits.json", [opened]).slides) == len(splits)


@pytest.mark.nightly(reason="kills four commands")
def test_killed_commands_leave_intact_stores(tmp_path: Path) -> None:
    """After a kill, the store is intact, and the same command succeeds."""
    program = TOOLS / "kill_store.py"
    flags = "--kills 4 --side 768 --commands merge remove compact repair"
    command = [sys.executable, "-P", str(program), "--work", str(tmp_path), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
