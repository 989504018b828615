"""Test `embed`: features equal those of the network, on all devices, and feature files are complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import histopipe
from helpers.bags import PREPROCESSING, SIZE, features_of, make_onnx, pixels_of
from helpers.commands import run_command
from helpers.networks import DIMENSION, keras_encoder, pixels
from helpers.results import files
from helpers.slides import make_slides
from helpers.stores import a_store, flip_a_byte, jpegs, patched
from histopipe.errors import DamagedStore, HistopipeError, SlideError, UsageError
from histopipe.features.feature_file import (
    feature_files,
    feature_path,
    read_coords,
    read_features,
    read_header,
    stores_of_features,
    writing,
)
from histopipe.inference.embed import preset_tiling
from histopipe.inference.options import BATCHES
from histopipe.inference.slide_run import (
    batch_rule,
    slide_batches,
)
from histopipe.splits.slide_table import Exclusion, read_slide_table
from histopipe.store.store import Store
from histopipe.system.output import Bar, Progress

NETWORK: dict[str, Any] = {"model": "small-cnn", "batch_size": 16}

pytestmark = pytest.mark.usefixtures("numpy_networks")


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    by_slide = {}
    for name, path in feature_files(folder).items():
        header = read_header(path)
        coords = read_coords(header)
        assert coords is not None
        by_slide[name] = (read_features(header).tobytes(), coords.tobytes())
    return by_slide


HANG = """
import itertools, signal, time
import pytest
from helpers import networks
from histopipe.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
networks.replace_networks(pytest.MonkeyPatch())
finish, batches = networks.KerasNetwork.finish, itertools.count()
def hang(*arguments):
    time.sleep(600 if next(batches) == 3 else 0)
    return finish(*arguments)
networks.KerasNetwork.finish = hang
main()
"""
"""Program that runs a command with networks of NumPy, and hangs at the fourth slide."""


@pytest.mark.parametrize(
    ("command", "number"), [("predict", signal.SIGKILL), ("embed", signal.SIGINT)]
)
def test_a_run_that_was_ended_continues(
    golden_runs: Path, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    arguments: tuple[Any, ...] = (golden_runs / "run", golden_runs / "slides")
    options: dict[str, Any] = {}
    if command == "embed":
        arguments, options = (golden_runs / "store.lmdb",), {"model": "small-cnn"}
    words = [*arguments, *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        [sys.executable, "-c", HANG, command, *map(str, words), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        if any(line.startswith("3/") for line in process.stderr):
            process.send_signal(number)
        errors = process.stderr.read()
    run: Any = getattr(histopipe, command)
    total = len(run(*arguments, out=whole, **options).done)
    done = sorted(out.glob("patches/*.json" if command == "predict" else "*.h5"))
    assert len(done) == 3
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command again to continue" in errors
    else:
        assert process.returncode == -number
        done.pop().unlink()  # a slide without it is not complete
    again = run(*arguments, out=out, **options)
    assert (len(again.kept), len(again.done)) == (len(done), total - len(done))
    assert f"{len(done)} already done, 0 failed" in str(again)
    assert files(out) == files(whole)
    assert not list(out.rglob("*part-*"))


@pytest.mark.parametrize(("rows", "devices"), [("N", "cpu"), (5, "auto"), ("N", "cpu:2")])
def test_onnx_input_is_preprocessed_as_the_json_file_defines(
    small_store: Path, tmp_path: Path, rows: int | str, devices: str
) -> None:
    weights = make_onnx(tmp_path / "encoder.onnx", rows=rows)
    arguments: dict[str, Any] = {
        "model": tmp_path / "encoder.onnx",
        "devices": devices,
        "batch_size": 9,  # the last batch of a slide has one patch: fewer than devices
    }
    result = histopipe.embed(small_store, out=tmp_path / "f", **arguments)
    half = histopipe.embed(small_store, out=tmp_path / "h", dtype="float16", **arguments)
    assert (result.dimension, result.patches, half.patches) == (8, 120, 120)
    features, halves = features_of(tmp_path / "f"), features_of(tmp_path / "h")
    for slide, patches in pixels_of(small_store).items():
        resized = [
            np.asarray(Image.fromarray(p).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
            for p in patches
        ]
        inputs = (np.stack(resized) / 255 - PREPROCESSING["mean"]) / PREPROCESSING["std"]
        blocks = inputs.reshape(-1, SIZE // 4, 4, SIZE // 4, 4, 3)
        maps = np.einsum("nyaxbc,fcab->nyxf", blocks, weights)
        expected = np.maximum(maps, 0).mean(axis=(1, 2))
        np.testing.assert_allclose(features[slide], expected, rtol=1e-4, atol=1e-5)
        assert halves[slide].dtype == np.float16
        assert (halves[slide] == features[slide].astype(np.float16)).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, "encoder.json is missing: an ONNX file does not describe its preprocessing"),
        ("{", "encoder.json cannot be read"),
        ([], "encoder.json: wrong mean, size, std"),
        (PREPROCESSING | {"std": [1, 0, 1]}, "encoder.json: wrong std"),
        (PREPROCESSING | {"mean": 0.5}, "encoder.json: wrong mean"),
        (PREPROCESSING | {"size": "24"}, "encoder.json: wrong size"),
        (PREPROCESSING | {"interpolation": "area"}, "encoder.json: wrong interpolation"),
        (PREPROCESSING | {"means": 1}, "encoder.json: wrong means"),
        (PREPROCESSING | {"size": 32}, "encoder.onnx: wrong inputs"),
    ],
)
def test_onnx_with_wrong_preprocessing_is_rejected(
    small_store: Path, tmp_path: Path, settings: Any, expected: str
) -> None:
    make_onnx(tmp_path / "encoder.onnx")
    json_file = tmp_path / "encoder.json"
    if settings is None:
        json_file.unlink()
    else:
        json_file.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    with pytest.raises(UsageError) as error:
        histopipe.embed(small_store, model=tmp_path / "encoder.onnx", out=tmp_path / "f")
    assert expected in str(error.value)
    assert not (tmp_path / "f").exists()


def test_onnx_files_that_are_not_encoders_are_rejected(small_store: Path, tmp_path: Path) -> None:
    make_onnx(tmp_path / "maps.onnx", output="maps")
    (tmp_path / "text.onnx").write_text("hello")
    (tmp_path / "text.json").write_text(json.dumps(PREPROCESSING))
    for name, expected in (
        ("maps", "wrong first output: found shape (1, 8, 6, 6)"),
        ("text", "text.onnx cannot be loaded"),
        ("none", "none.onnx does not exist"),
    ):
        with pytest.raises(UsageError) as error:
            histopipe.embed(small_store, model=tmp_path / f"{name}.onnx", out=tmp_path / "f")
        assert expected in str(error.value)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    make_onnx(tmp_path / "encoder.onnx")
    return tmp_path / "encoder.onnx"


def test_damaged_patch_fails_its_slide_or_is_skipped(tmp_path: Path, onnx_file: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {"n1": jpegs(0, 9), "t1": jpegs(9, 5), "t2": jpegs(14, 6)})
    flip_a_byte(store, 1, 3)
    words = ("embed", store, "--model", onnx_file, "--batch-size", 2, "--out", tmp_path / "f")
    failed = run_command(*words)
    assert failed.returncode == 3
    assert "failed: t1: " in failed.stdout
    assert "patch 3: does not match its checksum" in failed.stdout
    assert set(feature_files(tmp_path / "f")) == {"n1", "t2"}
    skipped = run_command(*words, "--on-error", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 damaged patch left out" in skipped.stdout
    again = run_command(*words)
    assert again.returncode == 3  # a file with skipped patches is not complete
    assert "failed: t1" in again.stdout
    header = read_header(feature_files(tmp_path / "f")["t1"])
    coords = read_coords(header)
    assert coords is not None
    assert coords[:, 0].tolist() == [0, 10, 20, 40]
    assert len(read_features(header)) == header.rows == 4


def test_outdated_or_foreign_files_are_replaced_or_rejected(
    tmp_path: Path, onnx_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    first = a_store(tmp_path / "a.lmdb", {"n1": jpegs(0, 9), "t1": jpegs(9, 5)})
    histopipe.embed(first, model=onnx_file, out=folder)
    whole = contents(folder)
    # A truncated file, as after an interrupted copy.
    with feature_path(folder, "n1").open("r+b") as file:
        file.truncate(1500)
    again = histopipe.embed(first, model=onnx_file, out=folder)
    assert (again.done, again.kept) == (("n1",), ("t1",))
    assert contents(folder) == whole
    # Slides that were ingested again.
    other = a_store(tmp_path / "b.lmdb", {"n1": jpegs(40, 9), "t1": jpegs(9, 5)})
    changed = histopipe.embed(other, model=onnx_file, out=folder)
    assert changed.done == ("n1",)
    assert "the patches in the store have changed" in capsys.readouterr().err
    # Another precision, and a file of another tool.
    with pytest.raises(UsageError, match="contains features computed with other settings"):
        histopipe.embed(other, model=onnx_file, out=folder, dtype="float16")
    (tmp_path / "g").mkdir()
    with h5py.File(feature_path(tmp_path / "g", "n1"), "w") as file:
        file["features"] = np.zeros((9, 8), np.float32)
    with pytest.raises(
        UsageError, match="files that were not written by `histopipe embed`: found n1"
    ):
        histopipe.embed(other, model=onnx_file, out=tmp_path / "g")
    assert len(list((tmp_path / "g").iterdir())) == 1
    # The same encoder in a file with another name.
    for suffix in (".onnx", ".json"):
        shutil.copy(onnx_file.with_suffix(suffix), tmp_path / f"copy{suffix}")
    assert histopipe.embed(other, model=tmp_path / "copy.onnx", out=folder).done == ()
    with pytest.raises(UsageError, match="slides with the same id in several stores"):
        histopipe.embed([first, other], model=onnx_file, out=tmp_path / "h")


def test_flipped_byte_is_detected_when_features_are_read(tmp_path: Path, onnx_file: Path) -> None:
    store = a_store(tmp_path / "a.lmdb", {"n1": jpegs(0, 9)})
    histopipe.embed(store, model=onnx_file, out=tmp_path / "f")
    header = read_header(feature_path(tmp_path / "f", "n1"))
    rows = np.array([0, 3, 8])
    assert (read_features(header, rows) == read_features(header)[rows]).all()
    assert header.offset is not None
    patched(header.path, header.offset + 7)
    with pytest.raises(DamagedStore, match="the features do not match their checksum"):
        read_features(header)


def test_slide_ids_outside_of_the_folder_are_rejected(tmp_path: Path) -> None:
    assert feature_path(tmp_path, "a/b.c") == tmp_path / "a" / "b.c.h5"
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(DamagedStore, match="a path within"):
            feature_path(tmp_path, name)


def test_attributes_of_real_slides_follow_clam_and_trident(
    data: Path, tmp_path: Path, onnx_file: Path
) -> None:
    slide, store = data / "slides" / "CMU-1-Small-Region.svs", tmp_path / "patches.lmdb"
    histopipe.ingest([slide], store, patch_size=240, mag=20.0)
    histopipe.embed(store, model=onnx_file, out=tmp_path / "f" / "h5_files")
    with h5py.File(tmp_path / "f" / "h5_files" / "CMU-1-Small-Region.h5") as file:
        features, coords = file["features"][:], file["coords"][:]
        attributes = dict(file["coords"].attrs)
        assert file["features"].attrs["name"] == "CMU-1-Small-Region"
        assert file.attrs["patient"] == "CMU-1-Small-Region"
        assert len(file.attrs["pixel_hash"]) == 64
    assert features.shape == (len(coords), 8)
    assert features.dtype == np.float32
    with Store(store) as opened:
        index = opened.index(0)
        assert coords.tolist() == np.stack([index["x_l0"], index["y_l0"]], 1).tolist()
    assert {
        "patch_size": 240,
        "patch_size_level0": 240,
        "level0_magnification": 20,
        "target_magnification": 20,
        "overlap": 0,
        "level0_width": 2220,
        "level0_height": 2967,
        "patch_level": 0,
        "name": "CMU-1-Small-Region",
    }.items() <= attributes.items()


def test_errors_are_raised_before_anything_is_written(
    small_store: Path, golden_runs: Path, onnx_file: Path, tmp_path: Path
) -> None:
    cases: list[tuple[Path, dict[str, Any], int, str]] = [
        (
            small_store,
            {"model": golden_runs / "run", "weights": "none"},
            2,
            "which already contains weights",
        ),
        (
            small_store,
            {"model": onnx_file, "precision": "mixed_bfloat16"},
            2,
            "expected a network that is not an ONNX file or a run",
        ),
        (small_store, {"model": onnx_file, "devices": "gpu"}, 2, "an onnxruntime without CUDA"),
        (small_store, {"model": onnx_file, "batch_size": 0}, 2, "--batch-size: found 0"),
        (tmp_path / "none.lmdb", {"model": onnx_file}, 4, "none.lmdb"),
    ]
    for store, options, code, expected in cases:
        with pytest.raises(HistopipeError) as error:
            histopipe.embed(store, out=tmp_path / "f", **options)
        assert (error.value.exit_code, expected in str(error.value)) == (code, True), error.value
        assert not (tmp_path / "f").exists()


def test_slides_cost_what_they_have_and_folders_keep_their_rule(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slide of 10 patches has batches of 4, 4 and 2. In a folder of an earlier version all have 4."""
    encoder = keras_encoder("x", patch_size=32, batch_size=4, devices="cpu")
    monkeypatch.setattr("histopipe.inference.embed.load_encoder", lambda *_, **__: encoder)
    arguments: dict[str, Any] = {"model": "small-cnn", "batch_size": 4}
    histopipe.embed(small_store, out=tmp_path / "new", **arguments)
    assert encoder.sizes == [4, 4, 2] * 12
    record = json.loads((tmp_path / "new/features.json").read_text())
    assert record.pop("batches") == BATCHES
    for slide, patches in pixels_of(small_store).items():
        expected = pixels(patches, DIMENSION, "x").astype(np.float32)
        np.testing.assert_array_equal(features_of(tmp_path / "new")[slide], expected)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/features.json").write_text(json.dumps(record))
    encoder.sizes.clear()
    histopipe.embed(small_store, out=tmp_path / "old", **arguments)
    assert encoder.sizes == [4, 4, 4] * 12
    assert "batches" not in json.loads((tmp_path / "old/features.json").read_text())
    assert contents(tmp_path / "old") == contents(tmp_path / "new")


def test_stores_of_features_are_found(small_store: Path, tmp_path: Path) -> None:
    """By the recorded path, or else next to the folder of features, where those of earlier versions are."""
    folder = tmp_path / "features"
    histopipe.embed(small_store, model="small-cnn", out=folder)
    assert stores_of_features([folder, folder]) == [small_store]
    record = json.loads((folder / "features.json").read_text())
    record["stores"] = ["/nowhere/small.lmdb"]
    (folder / "features.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"no store at /nowhere/small\.lmdb; name it with --store"):
        stores_of_features([folder])
    (tmp_path / "small.lmdb").symlink_to(small_store)
    assert stores_of_features([folder]) == [tmp_path / "small.lmdb"]
    del record["stores"]
    (folder / "features.json").write_text(json.dumps(record))
    assert stores_of_features([folder]) == [tmp_path / "small.lmdb"]
    (tmp_path / "small.lmdb").unlink()
    assert not stores_of_features([folder])
    histopipe.embed(small_store, model="small-cnn", out=folder)
    assert stores_of_features([folder]) == [small_store]
    with pytest.raises(UsageError, match="name the store of their patches with --store"):
        stores_of_features([tmp_path / "moved"])


def test_batches_of_a_slide(tmp_path: Path) -> None:
    for rows, most in [(0, 4), (1, 64), (3, 4), (4, 4), (9, 4), (64, 64), (65, 64)]:
        batches, padded = slide_batches(rows, most), slide_batches(rows, most, None)
        assert [row for batch in batches for row in batch] == list(range(rows))
        assert [batch.start for batch in padded] == [batch.start for batch in batches]
        assert all(len(batch) == most for batch in padded)
    record = tmp_path / "predict.json"
    assert batch_rule(record) == BATCHES
    record.write_text("{}")
    assert batch_rule(record) is None
    record.write_text('{"batches": "newer-2"}')
    with pytest.raises(UsageError, match="found newer-2, expected remainder-1; update histopipe"):
        batch_rule(record)
    record.write_text("[]")
    with pytest.raises(DamagedStore, match=r"predict\.json is damaged"):
        batch_rule(record)


def test_float16_overflow_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(SlideError, match="--dtype float16: found a feature of 70000"),
        writing(tmp_path / "x.h5", 2, 3, "float16") as writer,
    ):
        writer.append(np.full((2, 3), 7e4, np.float32), np.zeros((2, 2), np.int64))
    assert not list(tmp_path.iterdir())


def attributes(folder: Path) -> dict[str, dict[str, Any]]:
    names = ("slide", "label", "patient", "site", "geometry")
    return {
        name: {attribute: read_header(path).attributes.get(attribute) for attribute in names}
        for name, path in feature_files(folder).items()
    }


@pytest.mark.parametrize(
    "tiling",
    [
        {"patch_size": 64, "mpp": 0.5},
        {"patch_size": 256, "level": 0},
        {"patch_size": 48, "mpp": 0.75, "overlap": 8, "codec": "png", "tissue": "none"},
    ],
    ids=["decoded", "copied", "png"],
)
def test_features_of_slides_are_those_of_a_store(
    golden_runs: Path, tmp_path: Path, tiling: dict[str, Any]
) -> None:
    store, features, direct = (tmp_path / name for name in ("s.lmdb", "stored", "direct"))
    common = {**tiling, "labels": golden_runs / "labels.csv", "allow_extra_rows": True}
    slides = sorted((golden_runs / "slides").glob("*.svs"))[:3]
    histopipe.ingest(slides, store, **common)
    with Store(store) as opened:
        route = "decode" if tiling.get("mpp") else "copy"
        assert {record.route for record in opened.complete.values()} == {route}
    histopipe.embed(store, out=features, **NETWORK)
    result = histopipe.embed(slides, out=direct, **NETWORK, **common)
    assert len(result.done) == 3
    assert not result.failed and contents(direct) == contents(features) != {}
    assert attributes(direct) == attributes(features)
    again = histopipe.embed(slides, out=direct, **NETWORK, **common)
    assert not again.done and len(again.kept) == len(result.done)
    with pytest.raises(UsageError, match="other settings: found patch_size"):
        histopipe.embed(slides, out=direct, **NETWORK, **{**common, "patch_size": 32})


def test_features_of_slides_heed_masks_and_outlines(data: Path, tmp_path: Path) -> None:
    slide = data / "slides" / "CMU-1-Small-Region.svs"
    histopipe.tissue([slide], out=tmp_path / "masks", tissue="otsu-1")
    common: dict[str, Any] = {
        "patch_size": 128,
        "mpp": 0.5,
        "tissue": str(tmp_path / "masks"),
        "annotations": data / "annotations" / "CMU-1-Small-Region.geojson",
        "exclude": ("Dermis",),
    }
    histopipe.ingest([slide], tmp_path / "s.lmdb", **common)
    histopipe.embed(tmp_path / "s.lmdb", out=tmp_path / "stored", **NETWORK)
    result = histopipe.embed([slide], out=tmp_path / "direct", **NETWORK, **common)
    assert contents(tmp_path / "direct") == contents(tmp_path / "stored") != {}
    assert attributes(tmp_path / "direct") == attributes(tmp_path / "stored")
    # Corrected masks and outlines are another source; with --join, nothing is removed.
    masks = tmp_path / "masks"
    (outlines,) = masks.glob("*.geojson")
    content = json.loads(outlines.read_text())
    content["features"] = content["features"][:1]
    outlines.write_text(json.dumps(content))
    again = histopipe.embed([slide], out=tmp_path / "direct", **NETWORK, **common)
    assert again.done and not again.kept
    kept = histopipe.embed([slide], out=tmp_path / "direct", **NETWORK, **common)
    assert kept.kept and not kept.done
    whole = histopipe.embed(
        [slide], out=tmp_path / "whole", **NETWORK, patch_size=128, mpp=0.5, tissue="none"
    )
    assert 0 < result.patches < whole.patches


def test_slides_without_patches_are_recorded(
    golden_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "slides", tmp_path / "features"
    folder.mkdir()
    shutil.copy(golden_runs / "slides" / "slide-000.svs", folder)
    (small,) = make_slides(tmp_path / "small", "--count", "1", "--size", "300x300")
    shutil.copy(small, folder / "small.tiff")
    (folder / "bad.svs").write_bytes(b"no slide")
    updates: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Bar, "update", lambda _, *numbers: updates.append(numbers[:2]))
    result = histopipe.embed(
        folder, out=out, patch_size=320, level=0, tissue="none", progress=Progress(), **NETWORK
    )
    assert updates[-1][0] == updates[-1][1] == result.patches  # the bar is full at the end
    assert len(result.done) == 1 and list(result.failed) == ["bad"]
    reasons = {slide.slide: slide.reason for slide in read_slide_table(out / "slides.csv")}
    assert reasons == {
        result.done[0]: None,
        "small": Exclusion.NO_PATCHES,
        "bad": Exclusion.EMBEDDING_FAILED,
    }
    assert list(feature_files(out)) == list(result.done)


def test_options_of_slides_are_refused_for_stores(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--patch-size: found stores, expected slides"):
        histopipe.embed(small_store, out=tmp_path / "f", patch_size=64, **NETWORK)
    with pytest.raises(UsageError, match="unknown options: found force"):
        histopipe.embed(small_store, out=tmp_path / "f", force=True, **NETWORK)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "features.json").write_text("{}")
    with pytest.raises(UsageError, match="expected a slide encoder: chief"):
        histopipe.embed(tmp_path / "g", out=tmp_path / "f", **NETWORK)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("model", "tiling", "expected"),
    [
        ("uni", {}, {"patch_size": 224, "mpp": 0.5}),
        ("uni", {"patch_size": 448}, {"patch_size": 448, "mpp": 0.25}),
        ("uni", {"mag": 20.0}, {"patch_size": 224, "mag": 20.0}),
        ("mobilenet", {"mpp": 1.0}, {"mpp": 1.0}),
    ],
)
def test_named_encoders_choose_the_patches(
    model: str, tiling: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert preset_tiling(model, tiling) == expected


TOGETHER: dict[str, Any] = {
    "model": ("mobilenet", "small-cnn"),
    "weights": ("mobilenet=none",),
    "batch_size": 4,
}


def test_encoders_in_one_pass_equal_single_ones(small_store: Path, tmp_path: Path) -> None:
    single: dict[str, dict[str, Any]] = {
        "a": {"model": "mobilenet", "weights": "none"},
        "b": {"model": "small-cnn"},
    }
    for name, options in single.items():
        histopipe.embed(small_store, out=tmp_path / name, batch_size=4, **options)
    result = histopipe.embed(small_store, out=tmp_path / "f-{model}", **TOGETHER)
    assert len(result.done) == 12 and result.each == (DIMENSION,) * 2
    assert "patches of 8 + 8 features" in str(result) and result.dimension == 16
    assert contents(tmp_path / "a") != contents(tmp_path / "b")
    for name, folder in (("f-mobilenet", "a"), ("f-small-cnn", "b")):
        assert contents(tmp_path / name) == contents(tmp_path / folder)
        records = [json.loads((tmp_path / f / "features.json").read_text()) for f in (name, folder)]
        assert records[0] == records[1]
    # A slide that is missing in one folder is computed again.
    feature_path(tmp_path / "f-mobilenet", result.done[3]).unlink()
    again = histopipe.embed(small_store, out=tmp_path / "f-{model}", **TOGETHER)
    assert again.done == (result.done[3],)
    assert contents(tmp_path / "f-mobilenet") == contents(tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"out": "f"},
            r"--out: found f, expected \{model\} in the name, such as features/\{model\}",
        ),
        (
            {"weights": ("none",)},
            "--weights: found none, expected NAME=FILE, each NAME once, of --m",
        ),
        ({"weights": ("mobilenet=none", "uni=x")}, "--weights: found mobilenet=none, uni=x"),
        (
            {"model": ("small-cnn", "small-cnn")},
            "--model: found small-cnn, small-cnn, expected diff",
        ),
        (
            {"model": ("uni", "gigapath"), "weights": ()},
            "the encoders need different patches: .*expected uni 224 pixels at 0.5 mpp, gigapath 256",
        ),
    ],
)
def test_encoders_that_cannot_be_together(
    small_store: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        histopipe.embed(small_store, **{"out": "f-{model}", **TOGETHER, **changes})
    assert not list(tmp_path.iterdir())
