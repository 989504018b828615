"""Export for other tools: every patch is written once and unchanged, and only complete files become visible."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pkgutil
import shutil
import tarfile
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest

from helpers.commands import small_disk
from helpers.lazy import tf
from helpers.results import files
from helpers.stores import RECORD, SPEC, a_store, jpegs
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
from histopipe.exporting.export_formats import EXPORTS, FolderFormat, IndexFormat
from histopipe.store.format import value_crc
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.object_storage import write_file

pytestmark = IN_TENSORFLOW
exported: Any = export
"""`export`, whose result depends on its options."""
SLIDES = {"n1": (0, 12), "t1": (12, 7), "dir/t2": (19, 12)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return a_store(tmp_path / "a.lmdb", {name: jpegs(*rows) for name, rows in SLIDES.items()})


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
    assert export([store, other], out, index=kind).to_json() == {
        "file": str(out),
        "rows": 36,
        "exit_code": 0,
    }
    parts = []
    for path in (store, other):
        with Store(path) as opened:
            for number, record in opened.complete.items():
                columns = opened.index(number)
                part = pd.DataFrame({name: columns[name] for name in ("x_l0", "y_l0", "tissue")})
                parts.append(part.assign(bytes=columns["length"], patch=range(record.planned)))
                parts[-1][["store", "slide", "label"]] = str(path), record.id, record.label
    expected = pd.concat(parts, ignore_index=True)
    table = pd.read_csv(out) if kind == "csv" else pd.read_parquet(out)
    pd.testing.assert_frame_equal(
        table[[*expected]], expected, rtol=1e-5, check_dtype=False, check_categorical=False
    )
    assert table["annotation"].isna().all()
    with pytest.raises(UsageError, match="exists"):
        export(store, out, index=kind)
    assert not list(tmp_path.glob("part-*"))


def test_tfrecords_have_features_of_slideflow(store: Path, tmp_path: Path) -> None:
    result = exported(store, out=tmp_path / "out", to="tfrecord")
    assert (result.files, result.patches) == (3, 31)
    fields = {name: tf.io.FixedLenFeature([], tf.string) for name in ("slide", "image_raw")}
    fields |= {name: tf.io.FixedLenFeature([], tf.int64) for name in ("loc_x", "loc_y")}
    images, half = {}, round((RECORD.read_size or 0) * (RECORD.downsample or 0)) // 2
    for name in SLIDES:
        records = tf.data.TFRecordDataset(str(tmp_path / "out" / f"{name}.tfrecords"))
        for row, raw in enumerate(records):
            values = tf.io.parse_single_example(raw, fields)
            example = {key: value.numpy() for key, value in values.items()}
            images[name, row] = example.pop("image_raw")
            centre = {"loc_x": 10 * row + half, "loc_y": row + half}
            assert example == {"slide": name.encode(), **centre}
    assert images == values_of(store)


def test_tar_files_have_each_patch_once(store: Path, tmp_path: Path) -> None:
    result = exported(store, out=tmp_path / "out", to="webdataset", shard_patches=10)
    assert (result.files, result.patches) == (4, 31)
    images = {}
    for path in (tmp_path / "out").glob("*.tar"):
        with tarfile.open(path) as archive:
            archive.extractall(path.with_suffix(""), filter="data")
        for picture in path.with_suffix("").rglob("*.jpg"):
            info = json.loads(picture.with_suffix(".json").read_text())
            sample = picture.relative_to(path.with_suffix("")).with_suffix("").as_posix()
            assert sample == f"{info['slide']}/{info['patch']:06d}"
            assert info["label"] == info["slide"][0]
            assert {"x_l0", "y_l0", "size_l0", "mpp", "tissue", "focus"} <= set(info)
            images[info["slide"], info["patch"]] = picture.read_bytes()
    assert images == values_of(store)


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


def test_classes_of_dots_have_folders_of_their_own(tmp_path: Path) -> None:
    """A class `..` would leave the folder, and `.` would have none."""
    store = a_store(tmp_path / "s.lmdb", {name: jpegs(0, 2) for name in ("a", "b", "c", "d")})
    with StoreWriter(store, SPEC) as writer:
        for number, label in enumerate(("..", ".", "...", ".x")):
            writer.update(number, dataclasses.replace(writer.records()[number], label=label))
    exported(store, out=tmp_path / "out", to="folder")
    folders = {path.name: path for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert set(folders) == {"%2E%2E", "%2E", "%2E%2E%2E", ".x"}
    assert all(len([*path.rglob("*.jpg")]) == 2 for path in folders.values())


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
    assert not list(parts.rglob("*part-*"))
    # A killed process leaves an incomplete file or folder.
    name = f".part-{2**30:x}-0123abcd"  # of a process that does not run
    left = {
        "folder": parts / "t" / name / "1_1.jpg",
        "tfrecord": parts / f"{name}.tfrecords",
        "webdataset": parts / f"{name}.tar",
    }[to]
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("x")
    assert exported(store, out=parts, to=to, shard_patches=10).kept == 1
    assert files(parts) == files(whole)


def test_unexpected_error_fails_only_its_slide(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(store, out=tmp_path / "whole", to="folder")
    fail_at_patch(15, KeyError("x"), monkeypatch)
    first = exported(store, out=tmp_path / "parts", to="folder")
    (reason,) = first.failed.values()
    assert "KeyError: 'x'; this is a bug in histopipe" in reason and first.exit_code == 3
    second = exported(store, out=tmp_path / "parts", to="folder")
    assert (second.files, second.kept, second.exit_code) == (1, first.files, 0)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert first.patches + second.patches == whole.patches


def test_different_export_into_same_folder_is_refused(store: Path, tmp_path: Path) -> None:
    folder, shards = tmp_path / "folder", tmp_path / "webdataset"
    for out in (folder, shards):
        exported(store, out=out, to=out.name)
    other = a_store(tmp_path / "b.lmdb", {"n1": jpegs(60, 3)})
    with StoreWriter(store, SPEC) as writer:
        writer.update(0, dataclasses.replace(writer.records()[0], label="t"))
    for source, out, to, message in (
        (store, folder, "tfrecord", "holds another export: found another to"),
        (other, folder, "folder", "found another store"),
        (store, folder, "folder", "ingested, labelled or removed since"),
        (store, shards, "webdataset", "ingested, labelled or removed since"),
    ):
        with pytest.raises(UsageError, match=message):
            exported(source, out=out, to=to)


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
    url = f"file://{tmp_path}"
    empty = a_store(tmp_path / "empty.lmdb", {})
    settings: list[tuple[Any, dict[str, Any], str]] = [
        (store, {}, "found neither"),
        (store, {"index": "csv", "to": "folder"}, "found both"),
        (store, {"to": "folder", "shard_patches": 0}, "shard.patches"),
        ([store, store], {"to": "folder"}, "found 2 stores"),
        (store, {"index": "csv", "out": store / "data.mdb" / "x.csv"}, "data.mdb"),
        (store, {"to": "folder", "out": url}, "local folder"),
        (store, {"index": "csv", "out": url}, "local path"),
        (store, {"to": "webdataset", "out": url}, "not empty"),
        (store, {"to": "folder", "out": tmp_path}, "not empty"),
        (tmp_path / "nothing.lmdb", {"index": "csv"}, r"nothing\.lmdb"),
        (empty, {"to": "folder"}, "no patch to export"),
    ]
    for sources, options, expected in settings:
        with pytest.raises((UsageError, NothingToDo), match=expected):
            export(sources, **{"out": tmp_path / "out", **options})


def test_shards_at_a_url_equal_local_ones_and_the_export_continues(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, sent = f"file://{tmp_path}/remote/shards", list[str]()
    options: dict[str, Any] = {"to": "webdataset", "shard_patches": 5}
    exported(store, out=tmp_path / "local", **options)

    def cut(target: str, path: Path) -> None:
        sent.append(target)
        if len(sent) == 4:
            raise RemoteError("connection lost")
        write_file(target, path)

    monkeypatch.setattr("histopipe.exporting.patches.write_file", cut)
    with pytest.raises(RemoteError):
        exported(store, url, **options)
    second = exported(store, url, **options)
    assert (second.kept, second.files, second.folder) == (2, 5, url)
    local, remote = files(tmp_path / "local"), files(tmp_path / "remote" / "shards")
    assert len(remote) == 8 and remote.items() <= local.items()
    assert exported(store, url, **options).files == 0
    with pytest.raises(UsageError, match="holds another export"):
        export(store, url, to="webdataset", shard_patches=6)


def test_every_format_has_a_function_that_takes_its_options() -> None:
    assert [*EXPORTS] == [*get_args(IndexFormat), *get_args(FolderFormat)]
    for each in EXPORTS.values():
        function = pkgutil.resolve_name(f"histopipe.exporting.{each.function}")
        assert {"out", *each.options} - {"url"} <= inspect.signature(function).parameters.keys()
