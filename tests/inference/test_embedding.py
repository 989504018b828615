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
from helpers.bags import PREPROCESSING, SIZE, features_of, make_onnx, pixels_of, write_bag
from helpers.networks import DIMENSION, keras_encoder
from helpers.paths import GOLDEN
from helpers.results import files
from helpers.slides import CMU, TCGA, make_slides
from helpers.stores import a_store, flip_a_byte, jpegs, patched
from histopipe.errors import DamagedStore, HistopipeError, SlideError, UsageError
from histopipe.features.feature_file import (
    feature_files,
    feature_path,
    read_coords,
    read_features,
    read_header,
    writing,
)
from histopipe.features.feature_sets import record_encoder, stores_of_features
from histopipe.inference.embed import preset_tiling
from histopipe.inference.options import BATCHES
from histopipe.inference.slide_run import (
    batch_rule,
    slide_batches,
)
from histopipe.splits.slide_table import Exclusion, read_slide_table
from histopipe.store.store import Store

NETWORK: dict[str, Any] = {"model": "small-cnn", "batch_size": 16}

TOGETHER: dict[str, Any] = {
    "model": ("mobilenet", "small-cnn"),
    "weights": ("mobilenet=none",),
    "batch_size": 4,
}

pytestmark = pytest.mark.usefixtures("numpy_networks")


def contents(folder: Path) -> dict[str, list[Any]]:
    """Return features, corners, and what describes the slide, by slide."""
    by_slide = {}
    for name, path in feature_files(folder).items():
        header = read_header(path)
        coords = read_coords(header)
        assert coords is not None
        described = map(header.attributes.get, ("slide", "label", "patient", "site", "geometry"))
        by_slide[name] = [read_features(header).tobytes(), coords.tobytes(), *described]
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
    ("command", "number", "sources", "options"),
    [
        ("predict", signal.SIGKILL, ("run", "slides"), {}),
        ("embed", signal.SIGINT, ("store.lmdb",), {"model": "small-cnn"}),
    ],
)
def test_a_run_that_was_ended_continues(
    golden_runs: Path,
    tmp_path: Path,
    command: str,
    number: signal.Signals,
    sources: tuple[str, ...],
    options: dict[str, str],
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    arguments = [golden_runs / name for name in sources]
    words = [*map(str, arguments), *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        [sys.executable, "-c", HANG, command, *words, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        errors: Any = process.stderr
        if any(line.startswith("3/") for line in errors):
            process.send_signal(number)
        rest = errors.read()
    run: Any = getattr(histopipe, command)
    total = len(run(*arguments, out=whole, **options).done)
    done = sorted(out.glob("patches/*.json" if command == "predict" else "*.h5"))
    assert len(done) == 3
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command again to continue" in rest
    else:
        assert process.returncode == -number
        done.pop().unlink()  # a slide without it is not complete
    again = run(*arguments, out=out, **options)
    assert (len(again.kept), len(again.done)) == (len(done), total - len(done))
    assert files(out) == files(whole)


@pytest.mark.parametrize(("rows", "devices"), [("N", "cpu"), (5, "auto"), ("N", "cpu:2")])
def test_onnx_input_is_preprocessed_as_the_json_file_defines(
    small_store: Path, tmp_path: Path, rows: int | str, devices: str
) -> None:
    weights = make_onnx(tmp_path / "encoder.onnx", rows=rows)
    # The last batch of a slide has one patch: fewer than devices.
    arguments: dict[str, Any] = {"devices": devices, "batch_size": 9}
    for dtype in ("float32", "float16"):
        result = histopipe.embed(
            small_store,
            model=tmp_path / "encoder.onnx",
            out=tmp_path / dtype,
            dtype=dtype,
            **arguments,
        )
        assert (result.dimension, result.patches) == (8, 120)
    features, halves = features_of(tmp_path / "float32"), features_of(tmp_path / "float16")
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
        ("{", "encoder.json cannot be read"),
        ("[]", "encoder.json: wrong mean, size, std"),
        ({"std": [1, 0, 1]}, "encoder.json: wrong std"),
        ({"mean": 0.5}, "encoder.json: wrong mean"),
        ({"size": "24"}, "encoder.json: wrong size"),
        ({"interpolation": "area"}, "encoder.json: wrong interpolation"),
        ({"means": 1}, "encoder.json: wrong means"),
        ({"size": 32}, "encoder.onnx: wrong inputs"),
    ],
)
def test_onnx_with_wrong_preprocessing_is_rejected(
    small_store: Path, tmp_path: Path, onnx_file: Path, settings: Any, expected: str
) -> None:
    text = settings if isinstance(settings, str) else json.dumps(PREPROCESSING | settings)
    onnx_file.with_suffix(".json").write_text(text)
    with pytest.raises(UsageError, match=expected):
        histopipe.embed(small_store, model=onnx_file, out=tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    make_onnx(tmp_path / "encoder.onnx")
    return tmp_path / "encoder.onnx"


def test_damaged_patch_fails_its_slide_or_is_skipped(tmp_path: Path, onnx_file: Path) -> None:
    store = a_store(tmp_path / "s.lmdb", {"n1": jpegs(0, 9), "t1": jpegs(9, 5), "t2": jpegs(14, 6)})
    flip_a_byte(store, 1, 3)
    options: dict[str, Any] = {"model": onnx_file, "batch_size": 2, "out": tmp_path / "f"}
    failed = histopipe.embed(store, **options)
    assert "patch 3: does not match its checksum" in failed.failed["t1"]
    assert set(feature_files(tmp_path / "f")) == {"n1", "t2"}
    skipped = histopipe.embed(store, on_error="skip", **options)
    assert (skipped.done, skipped.failed) == (("t1",), {})
    # A file with skipped patches is not complete.
    assert histopipe.embed(store, **options).failed == failed.failed
    header = read_header(feature_files(tmp_path / "f")["t1"])
    assert np.asarray(read_coords(header))[:, 0].tolist() == [0, 10, 20, 40]
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
    assert histopipe.embed(first, model=onnx_file, out=folder).done == ("n1",)
    assert contents(folder) == whole
    # Slides that were ingested again.
    other = a_store(tmp_path / "b.lmdb", {"n1": jpegs(40, 9), "t1": jpegs(9, 5)})
    assert histopipe.embed(other, model=onnx_file, out=folder).done == ("n1",)
    assert "the patches in the store have changed" in capsys.readouterr().err
    # Another precision, and a file of another tool.
    with pytest.raises(UsageError, match="contains features computed with other settings"):
        histopipe.embed(other, model=onnx_file, out=folder, dtype="float16")
    write_bag(tmp_path / "g" / "n1.h5", np.zeros((9, 8), np.float32))
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
    histopipe.embed(
        a_store(tmp_path / "a.lmdb", {"n1": jpegs(0, 9)}), model=onnx_file, out=tmp_path / "f"
    )
    header = read_header(feature_path(tmp_path / "f", "n1"))
    rows = np.array([0, 3, 8])
    assert (read_features(header, rows) == read_features(header)[rows]).all()
    patched(header.path, (header.offset or 0) + 7)
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
    slide, store = data / "slides" / f"{CMU}.svs", tmp_path / "patches.lmdb"
    histopipe.ingest([slide], store, patch_size=240, mag=20.0)
    histopipe.embed(store, model=onnx_file, out=tmp_path / "f" / "h5_files")
    with h5py.File(tmp_path / "f" / "h5_files" / f"{CMU}.h5") as file, Store(store) as opened:
        index, features, coords = opened.index(0), file["features"], file["coords"]
        assert coords[:].tolist() == np.stack([index["x_l0"], index["y_l0"]], 1).tolist()
        assert (features.shape, features.dtype) == ((len(coords), 8), np.float32)
        assert features.attrs["name"] == file.attrs["patient"] == CMU
        assert len(file.attrs["pixel_hash"]) == 64
        assert {
            "patch_size": 240,
            "patch_size_level0": 240,
            "level0_magnification": 20,
            "target_magnification": 20,
            "overlap": 0,
            "level0_width": 2220,
            "level0_height": 2967,
            "patch_level": 0,
            "name": CMU,
        }.items() <= dict(coords.attrs).items()


def test_errors_are_raised_before_anything_is_written(
    small_store: Path,
    golden_runs: Path,
    onnx_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_onnx(tmp_path / "maps.onnx", output="maps")
    make_onnx(tmp_path / "alone.onnx")
    (tmp_path / "alone.json").unlink()
    (tmp_path / "text.onnx").write_text("hello")
    (tmp_path / "text.json").write_text(json.dumps(PREPROCESSING))
    patches = {"model": "small-cnn"}
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (small_store, {"model": "alone.onnx"}, "alone.json is missing: an ONNX file does not desc"),
        (small_store, {"model": "maps.onnx"}, r"wrong first output: found shape \(1, 8, 6, 6\)"),
        (small_store, {"model": "text.onnx"}, "text.onnx cannot be loaded"),
        (small_store, {"model": "none.onnx"}, "none.onnx does not exist"),
        (
            small_store,
            {"model": golden_runs / "run", "weights": "none"},
            "which already contains weights",
        ),
        (
            small_store,
            {"model": onnx_file, "precision": "mixed_bfloat16"},
            "expected a network that is not an ONNX file or a run",
        ),
        (small_store, {"model": onnx_file, "devices": "gpu"}, "an onnxruntime without CUDA"),
        (small_store, {"model": onnx_file, "batch_size": 0}, "--batch-size: found 0"),
        (small_store, {**patches, "patch_size": 64}, "--patch-size: found stores, expected slides"),
        (small_store, {**patches, "force": True}, "unknown options: found force"),
        (golden_runs / "features", patches, "expected a slide encoder: chief"),
        (
            small_store,
            {**TOGETHER, "out": "f"},
            r"--out: found f, expected \{model\} in the name, such as features/\{model\}",
        ),
        (
            small_store,
            {**TOGETHER, "weights": ("none",)},
            "--weights: found none, expected NAME=FILE, each NAME once, of --m",
        ),
        (
            small_store,
            {**TOGETHER, "weights": ("mobilenet=none", "uni=x")},
            "--weights: found mobilenet=none, uni=x",
        ),
        (
            small_store,
            {**TOGETHER, "model": ("small-cnn", "small-cnn")},
            "--model: found small-cnn, small-cnn, expected diff",
        ),
        (
            small_store,
            {"model": ("uni", "gigapath")},
            "the encoders need different patches: .*uni 224 pixels at 0.5 mpp, gigapath 256",
        ),
    ]
    before = files(tmp_path)
    for source, options, expected in cases:
        with pytest.raises(UsageError, match=expected):
            histopipe.embed(source, **{"out": "f-{model}", **options})
    with pytest.raises(HistopipeError, match=r"none\.lmdb") as error:
        histopipe.embed(tmp_path / "none.lmdb", model=onnx_file, out="f")
    assert error.value.exit_code == 4
    assert files(tmp_path) == before


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
    (tmp_path / "old").mkdir()
    (tmp_path / "old/features.json").write_text(json.dumps(record))
    encoder.sizes.clear()
    histopipe.embed(small_store, out=tmp_path / "old", **arguments)
    assert encoder.sizes == [4, 4, 4] * 12
    assert "batches" not in json.loads((tmp_path / "old/features.json").read_text())
    assert contents(tmp_path / "old") == contents(tmp_path / "new")


def test_stores_of_features_are_found(small_store: Path, tmp_path: Path) -> None:
    """By the recorded path, or else next to the folder of features, where those of earlier versions are."""
    folder, near = tmp_path / "features", tmp_path / "small.lmdb"
    histopipe.embed(small_store, model="small-cnn", out=folder)
    assert stores_of_features([folder, folder]) == [small_store]
    record = json.loads((folder / "features.json").read_text())
    (folder / "features.json").write_text(json.dumps(record | {"stores": ["/nowhere/small.lmdb"]}))
    with pytest.raises(UsageError, match=r"no store at /nowhere/small\.lmdb; name it with --store"):
        stores_of_features([folder])
    near.symlink_to(small_store)
    assert stores_of_features([folder]) == [near]
    del record["stores"]
    (folder / "features.json").write_text(json.dumps(record))
    assert stores_of_features([folder]) == [near]
    near.unlink()
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
    for text, message in (
        ('{"batches": "newer-2"}', "found newer-2, expected remainder-1; update histopipe"),
        ("[]", r"predict\.json is damaged"),
    ):
        record.write_text(text)
        with pytest.raises(HistopipeError, match=message):
            batch_rule(record)


def test_float16_overflow_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(SlideError, match="--dtype float16: found a feature of 70000"),
        writing(tmp_path / "x.h5", 2, 3, "float16") as writer,
    ):
        writer.append(np.full((2, 3), 7e4, np.float32), np.zeros((2, 2), np.int64))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("route", "tiling"),
    [
        ("decode", {"patch_size": 64, "mpp": 0.5}),
        ("copy", {"patch_size": 256, "level": 0}),
        ("openslide", {"patch_size": 128, "mpp": 0.6, "default_mpp": 0.25}),
        ("decode", {"patch_size": 48, "mpp": 0.75, "overlap": 8, "codec": "png", "tissue": "none"}),
    ],
    ids=["decode", "copy", "openslide", "png"],
)
def test_features_of_slides_are_those_of_a_store(
    golden_runs: Path, data: Path, tmp_path: Path, route: str, tiling: dict[str, Any]
) -> None:
    store, features, direct = (tmp_path / name for name in ("s.lmdb", "stored", "direct"))
    common = {**tiling, "labels": golden_runs / "labels.csv", "allow_extra_rows": True}
    slides = sorted((golden_runs / "slides").glob("*.svs"))[:3]
    if route == "openslide":
        slides = [data / "slides" / f"{TCGA}.svs"]
    histopipe.ingest(slides, store, **common)
    with Store(store) as opened:
        assert {record.route for record in opened.complete.values()} == {route}
    histopipe.embed(store, out=features, **NETWORK)
    result = histopipe.embed(slides, out=direct, **NETWORK, **common)
    assert (len(result.done), result.failed) == (len(slides), {})
    assert contents(direct) == contents(features)
    assert histopipe.embed(slides, out=direct, **NETWORK, **common).kept == result.done
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
    histopipe.embed([slide], out=tmp_path / "direct", **NETWORK, **common)
    assert contents(tmp_path / "direct") == contents(tmp_path / "stored") != {}
    # Corrected masks and outlines are another source.
    (outlines,) = (tmp_path / "masks").glob("*.geojson")
    content = json.loads(outlines.read_text())
    content["features"] = content["features"][:1]
    outlines.write_text(json.dumps(content))
    assert histopipe.embed([slide], out=tmp_path / "direct", **NETWORK, **common).done == (CMU,)


def test_slides_without_patches_are_recorded(golden_runs: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "slides", tmp_path / "features"
    (small,) = make_slides(folder, "--count", "1", "--size", "300x300")
    shutil.copy(golden_runs / "slides" / "slide-001.svs", folder)
    (folder / "bad.svs").write_bytes(b"no slide")
    result = histopipe.embed(folder, out=out, patch_size=320, level=0, tissue="none", **NETWORK)
    assert len(result.done) == 1 and list(result.failed) == ["bad"]
    assert {slide.slide: slide.reason for slide in read_slide_table(out / "slides.csv")} == {
        result.done[0]: None,
        small.stem: Exclusion.NO_PATCHES,
        "bad": Exclusion.EMBEDDING_FAILED,
    }
    assert list(feature_files(out)) == list(result.done)


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


def test_encoders_in_one_pass_equal_single_ones(small_store: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"batch_size": 4}
    histopipe.embed(small_store, model="mobilenet", weights="none", out=tmp_path / "a", **common)
    histopipe.embed(small_store, model="small-cnn", out=tmp_path / "b", **common)
    result = histopipe.embed(small_store, out=tmp_path / "f-{model}", **TOGETHER)
    assert (len(result.done), result.each, result.dimension) == (12, (DIMENSION,) * 2, 16)
    assert contents(tmp_path / "a") != contents(tmp_path / "b")
    assert files(tmp_path / "f-mobilenet") == files(tmp_path / "a")
    assert files(tmp_path / "f-small-cnn") == files(tmp_path / "b")
    # A slide that is missing in one folder is computed again.
    feature_path(tmp_path / "f-mobilenet", result.done[3]).unlink()
    again = histopipe.embed(small_store, out=tmp_path / "f-{model}", **TOGETHER)
    assert again.done == (result.done[3],)
    assert files(tmp_path / "f-mobilenet") == files(tmp_path / "a")


def test_features_of_version_0_2_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "0.2.0" / "features", tmp_path / "features")
    with pytest.raises(UsageError, match=r"cannot be continued: found features of version 0\.2"):
        record_encoder(Path(folder), {"dtype": "float32"})
