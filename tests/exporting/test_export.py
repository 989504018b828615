"""Export for other tools: every patch is written once and unchanged, and only complete files become visible."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from helpers.commands import run_command, small_disk
from helpers.lazy import tf
from helpers.stores import RECORD, SPEC, a_store, flip_a_byte, jpegs
from helpers.trainings import IN_TENSORFLOW
from histopipe.errors import (
    DamagedStore,
    Interrupted,
    MachineShort,
    NothingToDo,
    RemoteError,
    UsageError,
)
from histopipe.exporting.export import export
from histopipe.exporting.patches import ExportResult
from histopipe.store.format import value_crc
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.object_storage import write_file

pytestmark = IN_TENSORFLOW
SLIDES = {"n1": (0, 12), "t1": (12, 7), "dir/t2": (19, 12)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return a_store(tmp_path / "a.lmdb", {name: jpegs(*rows) for name, rows in SLIDES.items()})


def exported(store: Path, *, out: Path, to: Any, **options: Any) -> ExportResult:
    """Export patches, and return the result."""
    result = export(store, out, to=to, **options)
    assert isinstance(result, ExportResult)
    return result


def values_of(path: Path) -> dict[tuple[str, int], bytes]:
    with Store(path) as store:
        return {
            (record.id, row): store.value(number, row)
            for number, record in store.complete.items()
            for row in range(record.planned)
        }


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_index_has_one_row_per_patch(
    store: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("histopipe.exporting.export._GROUP_ROWS", 10)
    other = a_store(tmp_path / "b.lmdb", {"n9": jpegs(40, 5)})
    out = tmp_path / f"index.{kind}"
    result = export([store, other], out, index=kind)
    assert result.to_json() == {"file": str(out), "rows": 36, "exit_code": 0}
    assert f"{result}" == f"36 patches: {out}"
    table = pd.read_csv(out) if kind == "csv" else pd.read_parquet(out)
    assert len(table) == 36
    assert not table.duplicated(["store", "slide", "patch"]).any()
    row = 0
    for path in (store, other):
        with Store(path) as opened:
            for number, record in opened.complete.items():
                part = table.iloc[row : row + record.planned]
                row += record.planned
                columns = opened.index(number)
                assert set(part["slide"]) == {record.id}
                assert set(part["label"]) == {record.label}
                assert part["patch"].tolist() == list(range(record.planned))
                for name, column in (("x_l0", "x_l0"), ("y_l0", "y_l0"), ("bytes", "length")):
                    assert part[name].tolist() == columns[column].tolist()
                np.testing.assert_allclose(part["tissue"], columns["tissue"], rtol=1e-5)
    assert table["annotation"].isna().all()
    with pytest.raises(UsageError, match="exists"):
        export(store, out, index=kind)
    assert not list(tmp_path.glob("part-*"))


def test_tfrecords_have_features_of_slideflow(store: Path, tmp_path: Path) -> None:
    result = exported(store, out=tmp_path / "out", to="tfrecord")
    assert (result.files, result.patches) == (3, 31)
    fields = {
        "slide": tf.io.FixedLenFeature([], tf.string),
        "image_raw": tf.io.FixedLenFeature([], tf.string),
        "loc_x": tf.io.FixedLenFeature([], tf.int64),
        "loc_y": tf.io.FixedLenFeature([], tf.int64),
    }
    images = {}
    half = round((RECORD.read_size or 0) * (RECORD.downsample or 0)) // 2
    for name in SLIDES:
        for row, raw in enumerate(
            tf.data.TFRecordDataset(str(tmp_path / "out" / f"{name}.tfrecords"))
        ):
            example = tf.io.parse_single_example(raw, fields)
            assert example["slide"].numpy().decode() == name
            assert (example["loc_x"].numpy(), example["loc_y"].numpy()) == (
                10 * row + half,
                row + half,
            )
            images[name, row] = example["image_raw"].numpy()
    assert images == values_of(store)


def samples_of(folder: Path) -> dict[tuple[str, int], bytes]:
    images = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            names = archive.getnames()
            for name in names:
                stem, _, suffix = name.rpartition(".")
                value = archive.extractfile(name)
                assert value is not None
                if suffix == "json":
                    info = json.load(value)
                    assert f"{info['slide']}/{info['patch']:06d}" == stem
                    assert info["label"] == info["slide"].split("/")[-1][0] or info["label"] == "d"
                    assert {"x_l0", "y_l0", "size_l0", "mpp", "tissue", "focus"} <= set(info)
                    assert f"{stem}.jpg" in names
                else:
                    slide, _, row = stem.rpartition("/")
                    images[slide, int(row)] = value.read()
    return images


def test_tar_files_have_each_patch_once(store: Path, tmp_path: Path) -> None:
    result = exported(store, out=tmp_path / "out", to="webdataset", shard_patches=10)
    assert (result.files, result.patches) == (4, 31)
    assert samples_of(tmp_path / "out") == values_of(store)


def test_folder_names_are_classes(store: Path, tmp_path: Path) -> None:
    exported(store, out=tmp_path / "out", to="folder")
    images = {}
    for path in (tmp_path / "out").rglob("*.jpg"):
        label, slide, name = path.relative_to(tmp_path / "out").parts
        x, y = map(int, name.removesuffix(".jpg").split("_"))
        assert x == 10 * y
        assert label == slide[0]
        images[slide.replace("__", "/"), y] = path.read_bytes()
    assert images == values_of(store)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fail_at_patch(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error at the checksum of a patch."""
    calls = iter(range(1, 10**6))

    def fail(*arguments: Any) -> int:
        if next(calls) == number:
            raise error
        return value_crc(*arguments)

    monkeypatch.setattr("histopipe.exporting.patches.value_crc", fail)


@pytest.mark.parametrize("to", ["tfrecord", "webdataset", "folder"])
def test_resumed_export_equals_uninterrupted_export(
    store: Path, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    exported(store, out=whole, to=to, shard_patches=10)
    fail_at_patch(15, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(Interrupted, match=r"1 of \d files complete"):
        exported(store, out=parts, to=to, shard_patches=10)
    monkeypatch.undo()
    assert not list(parts.rglob("*part-*"))
    # A killed process leaves an incomplete file or folder.
    name = f".part-{2**30:x}-0123abcd"  # of a process that does not run
    left = parts / "t" / name if to == "folder" else parts / f"{name}.tfrecords"
    left.parent.mkdir(exist_ok=True)
    if to == "folder":
        left.mkdir(exist_ok=True)
        (left / "1_1.jpg").write_text("x")
    elif to == "tfrecord":
        left.write_text("x")
    again = exported(store, out=parts, to=to, shard_patches=10)
    assert again.kept == 1
    assert files_of(parts) == files_of(whole)


def test_unexpected_error_fails_only_its_slide(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(store, out=tmp_path / "whole", to="folder")
    fail_at_patch(15, KeyError("x"), monkeypatch)
    first = exported(store, out=tmp_path / "parts", to="folder")
    (reason,) = first.failed.values()
    assert "KeyError: 'x'; this is a bug in histopipe" in reason and first.exit_code == 3
    assert "failed: " in str(first)
    second = exported(store, out=tmp_path / "parts", to="folder")
    assert (second.files, second.kept, second.exit_code) == (1, first.files, 0)
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    written = [path for path in files_of(tmp_path / "whole") if path.endswith(".jpg")]
    assert first.patches + second.patches == len(written)


def test_different_export_into_same_folder_is_refused(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(store, out=out, to="folder")
    with pytest.raises(UsageError, match="holds another export: found another to"):
        exported(store, out=out, to="tfrecord")
    other = a_store(tmp_path / "b.lmdb", {"n1": jpegs(60, 3)})
    with pytest.raises(UsageError, match="found another store"):
        exported(other, out=out, to="folder")
    exported(store, out=tmp_path / "w", to="webdataset")
    with StoreWriter(store, SPEC) as writer:
        number = next(n for n, r in writer.records().items() if r.id == "n1")
        writer.update(number, dataclasses.replace(writer.records()[number], label="t"))
    for folder, to in ((out, "folder"), (tmp_path / "w", "webdataset")):
        with pytest.raises(UsageError, match="ingested, labelled or removed since"):
            exported(store, out=folder, to=to)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        exported(store, out=tmp_path / "full", to="folder")
    with pytest.raises(NothingToDo):
        exported(a_store(tmp_path / "c.lmdb", {}), out=tmp_path / "none", to="folder")


def test_damaged_patches_are_skipped_and_reported(tmp_path: Path) -> None:
    a_store(tmp_path / "s.lmdb", {"n1": jpegs(0, 4), "t1": jpegs(4, 4)})
    flip_a_byte(tmp_path / "s.lmdb", 1, 2)
    done = run_command("export", "s.lmdb", "--to", "folder", "--out", "out", cwd=tmp_path)
    assert done.returncode == 3
    assert "skipped: t1: patch 2: does not match its checksum" in done.stdout
    assert len(list((tmp_path / "out").rglob("*.jpg"))) == 7


def test_slide_ids_cannot_escape_output_folder(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {"n/../../../x": jpegs(0, 2)})
    for to in ("tfrecord", "webdataset", "folder"):
        with pytest.raises(DamagedStore, match=r"slide 0: its id.*expected a valid file name"):
            exported(store, out=tmp_path / to, to=to)
        assert not (tmp_path / to).exists()


def test_nested_slide_ids_use_separate_files(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {"a/b": jpegs(0, 3), "a": jpegs(5, 4)})
    for to in ("folder", "tfrecord"):
        result = exported(store, out=tmp_path / to, to=to)
        assert (result.files, result.patches) == (2, 7)
    assert len(list((tmp_path / "folder").rglob("*.jpg"))) == 7
    same = a_store(tmp_path / "t.lmdb", {"a/b": jpegs(0, 3), "a__b": jpegs(5, 4)})
    with pytest.raises(UsageError, match="two slides would use the same file"):
        exported(same, out=tmp_path / "x", to="folder")


def test_full_disk_leaves_no_partial_files(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {"n0": jpegs(0, 160, 64)}, patch_size=64)
    with small_disk(tmp_path / "disk", "700k") as disk:
        for to in ("webdataset", "tfrecord", "folder"):
            with pytest.raises(MachineShort, match="is full"):
                exported(store, out=disk / to, to=to, shard_patches=40)
            assert not list((disk / to).rglob("*part-*"))
            shutil.rmtree(disk / to)


def test_wrong_settings_are_refused(store: Path, tmp_path: Path) -> None:
    settings: list[tuple[Any, dict[str, Any], str]] = [
        (store, {}, "found neither"),
        (store, {"index": "csv", "to": "folder"}, "found both"),
        (store, {"to": "folder", "shard_patches": 0}, "shard.patches"),
        ([store, store], {"to": "folder"}, "found 2 stores"),
        (store, {"index": "csv", "out": store / "data.mdb" / "x.csv"}, "data.mdb"),
    ]
    for sources, options, expected in settings:
        with pytest.raises(UsageError, match=expected):
            export(sources, **{"out": tmp_path / "out", **options})
    with pytest.raises(NothingToDo, match=r"nothing\.lmdb"):
        export(tmp_path / "nothing.lmdb", tmp_path / "out", index="csv")


def test_shards_at_a_url_equal_local_ones_and_the_export_continues(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote/shards"
    options: dict[str, Any] = {"to": "webdataset", "shard_patches": 5}
    exported(store, out=tmp_path / "local", **options)
    sent: list[str] = []

    def cut(target: str, path: Path) -> None:
        sent.append(target)
        if len(sent) == 4:
            raise RemoteError("connection lost")
        write_file(target, path)

    monkeypatch.setattr("histopipe.exporting.patches.write_file", cut)
    with pytest.raises(RemoteError):
        export(store, url, **options)
    second = export(store, url, **options)
    assert isinstance(second, ExportResult)
    assert (second.kept, second.files, second.folder) == (2, 5, url)
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").glob("*.*")}
    remote = {path.name: path.read_bytes() for path in (tmp_path / "remote" / "shards").iterdir()}
    assert remote == {name: data for name, data in local.items() if name in remote}
    assert len(remote) == 8
    third = export(store, url, **options)
    assert isinstance(third, ExportResult)
    assert third.files == 0
    with pytest.raises(UsageError, match="holds another export"):
        export(store, url, to="webdataset", shard_patches=6)
    with pytest.raises(UsageError, match="local folder"):
        export(store, url, to="folder")
    with pytest.raises(UsageError, match="local path"):
        export(store, url, index="csv")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        export(store, f"file://{tmp_path}/other", to="webdataset")
