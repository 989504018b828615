"""Test `embed`: features equal those of the network, on all devices, and feature files are complete."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import histopipe
from helpers.bags import PREPROCESSING, SIZE, features_of, make_onnx, pixels_of
from helpers.commands import INTERRUPTIBLE, Run
from helpers.slides import make_slides
from helpers.stores import a_store, flip_a_byte, jpegs
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
    PatchBatch,
    SlideRun,
    batch_rule,
    slide_batches,
)
from histopipe.splits.slide_table import Exclusion, read_slide_table
from histopipe.store.store import Store
from histopipe.system.output import Bar, Progress

NETWORK = ["--model", "mobilenet", "--weights", "none"]


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    by_slide = {}
    for name, path in feature_files(folder).items():
        header = read_header(path)
        coords = read_coords(header)
        assert coords is not None
        by_slide[name] = (read_features(header).tobytes(), coords.tobytes())
    return by_slide


@pytest.fixture(scope="module")
def a_run(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    histopipe.train(small_store, out=folder, epochs=1, batch_size=16)
    return folder


def test_features_equal_those_of_keras(small_store: Path, a_run: Path, tmp_path: Path) -> None:
    import keras

    from histopipe.training.backbones import build_backbone

    trained = keras.models.load_model(a_run / "model.keras")
    inside = keras.Model(trained.input, trained.get_layer("logits").input)
    keras.utils.set_random_seed(1)
    image = keras.Input((32, 32, 3), dtype="uint8")
    backbone = build_backbone("mobilenet", patch_size=32, weights="none", training=False)
    named = keras.Model(image, backbone(image))
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "run": ({"model": a_run}, inside),
        "named": ({"model": "MobileNet", "weights": "none"}, named),
    }
    for name, (arguments, network) in cases.items():
        result = histopipe.embed(small_store, out=tmp_path / name, batch_size=16, **arguments)
        assert len(result.done) == 12
        assert (result.patches, result.kept, result.failed) == (120, (), {})
        assert 0 <= result.input_wait <= result.seconds
        features = features_of(tmp_path / name)
        for slide, pixels in pixels_of(small_store).items():
            expected = network.predict(pixels, verbose=0)
            assert expected.std() > 0
            np.testing.assert_allclose(features[slide], expected, rtol=1e-5, atol=1e-5)


def test_devices_do_not_change_features(run: Run, small_store: Path, tmp_path: Path) -> None:
    """A batch of 8 cannot be divided evenly among three devices, and the last batch, of 2, not among all."""
    devices = ["cpu", "cpu:3"]
    for name in devices:
        flags = ["--out", tmp_path / name, "--devices", name, "--batch-size", 8]
        done = run("embed", small_store, *NETWORK, *flags)
        assert done.returncode == 0, done.stderr
    one, three = (features_of(tmp_path / name) for name in devices)
    for slide, values in one.items():
        np.testing.assert_allclose(three[slide], values, rtol=1e-5, atol=1e-6)


UNTRAINED: dict[str, Any] = {"model": "mobilenet", "weights": "none", "batch_size": 4}


@pytest.fixture(scope="module")
def uninterrupted(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "features"
    histopipe.embed(small_store, out=folder, **UNTRAINED)
    return folder


@pytest.mark.nightly(
    reason="an interrupt of a new process; test_killed_prediction_continues shows a kill"
)
def test_continued_run_equals_uninterrupted_run(
    small_store: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Kills are tested with `predict`, which runs slides through a network in the same way."""
    arguments = ["embed", small_store, *NETWORK, "--batch-size", 4, "--json"]
    command = [*INTERRUPTIBLE, *map(str, arguments), "--out", str(tmp_path / "parts")]
    with subprocess.Popen(
        command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("2/12"):
                process.send_signal(signal.SIGINT)
                break
        assert "run the same command again to continue" in process.stderr.read()
        assert process.wait(60) == 130
    assert 2 <= len(feature_files(tmp_path / "parts")) < 12
    again = histopipe.embed(small_store, out=tmp_path / "parts", **UNTRAINED)
    assert len(again.kept) >= 2
    assert len(again.kept) + len(again.done) == 12
    assert f"{len(again.kept)} already done, 0 failed" in str(again)
    assert contents(tmp_path / "parts") == contents(uninterrupted)
    assert not list((tmp_path / "parts").rglob("*part-*"))


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
    for slide, pixels in pixels_of(small_store).items():
        resized = [
            np.asarray(Image.fromarray(p).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
            for p in pixels
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


def test_damaged_patch_fails_its_slide_or_is_skipped(
    tmp_path: Path, onnx_file: Path, run: Run
) -> None:
    store = a_store(tmp_path / "s.lmdb", {"n1": jpegs(0, 9), "t1": jpegs(9, 5), "t2": jpegs(14, 6)})
    flip_a_byte(store, 1, 3)
    arguments = ["embed", "s.lmdb", "--model", onnx_file, "--batch-size", 2]
    failed = run(*arguments, "--out", "f")
    assert failed.returncode == 3
    assert "failed: t1: " in failed.stdout
    assert "patch 3: does not match its checksum" in failed.stdout
    assert set(feature_files(tmp_path / "f")) == {"n1", "t2"}
    skipped = run(*arguments, "--out", "f", "--on-error", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 damaged patch left out" in skipped.stdout
    again = run(*arguments, "--out", "f")
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
    with Store(first) as a, Store(other) as b:
        assert a.uuid != b.uuid
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
    with header.path.open("r+b") as file:
        file.seek(header.offset + 7)
        byte = file.read(1)
        file.seek(header.offset + 7)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedStore, match="the features do not match their checksum"):
        read_features(header)


def test_slide_ids_outside_of_the_folder_are_rejected(tmp_path: Path) -> None:
    assert feature_path(tmp_path, "a/b.c") == tmp_path / "a" / "b.c.h5"
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(DamagedStore, match="a path within"):
            feature_path(tmp_path, name)


def test_attributes_of_real_slides_follow_clam_and_trident(
    data: Path, tmp_path: Path, onnx_file: Path, run: Run
) -> None:
    slide = data / "slides" / "CMU-1-Small-Region.svs"
    assert run("ingest", slide, "--patch-size", 240, "--mag", 20).returncode == 0
    assert run("embed", "patches.lmdb", "--model", onnx_file, "--out", "f/h5_files").returncode == 0
    with h5py.File(tmp_path / "f" / "h5_files" / "CMU-1-Small-Region.h5") as file:
        features, coords = file["features"][:], file["coords"][:]
        attributes = dict(file["coords"].attrs)
        assert file["features"].attrs["name"] == "CMU-1-Small-Region"
        assert file.attrs["patient"] == "CMU-1-Small-Region"
        assert len(file.attrs["pixel_hash"]) == 64
    assert features.shape == (len(coords), 8)
    assert features.dtype == np.float32
    with Store(tmp_path / "patches.lmdb") as store:
        index = store.index(0)
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


def test_out_of_memory_reduces_the_pieces(
    small_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import tensorflow as tf

    from histopipe.training.devices import one_per_replica

    def short(strategy: Any, parts: Any, first: int) -> Any:
        if len(parts[0]) > 3:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return one_per_replica(strategy, parts, first)

    arguments: dict[str, Any] = {"model": "mobilenet", "weights": "none", "batch_size": 8}
    histopipe.embed(small_store, out=tmp_path / "a", **arguments)
    monkeypatch.setattr("histopipe.inference.networks.one_per_replica", short)
    histopipe.embed(small_store, out=tmp_path / "b", **arguments)
    assert "continuing with 2 patches per device at once" in capsys.readouterr().err
    for slide, values in features_of(tmp_path / "a").items():
        features = features_of(tmp_path / "b")[slide]
        np.testing.assert_allclose(features, values, rtol=1e-5, atol=1e-6)


def test_errors_are_raised_before_anything_is_written(
    small_store: Path, a_run: Path, made_store: Path, onnx_file: Path, tmp_path: Path, run: Run
) -> None:
    cases: list[tuple[Path, dict[str, Any], int, str]] = [
        (
            small_store,
            {"model": "nonsense"},
            2,
            "small-cnn, a run's folder, an ONNX file, a SavedModel folder",
        ),
        (small_store, {"model": a_run, "weights": "none"}, 2, "which already contains weights"),
        (small_store, {"model": onnx_file, "devices": "gpu"}, 2, "an onnxruntime without CUDA"),
        (small_store, {"model": onnx_file, "batch_size": 0}, 2, "--batch-size: found 0"),
        (small_store, UNTRAINED | {"stain_norm": "macenko"}, 4, "histopipe stains"),
        (
            made_store,
            {"model": a_run},
            2,
            "takes patches of another size: found 32 pixels, expected 128",
        ),
        (tmp_path / "none.lmdb", {"model": onnx_file}, 4, "none.lmdb"),
    ]
    for number, (store, options, code, expected) in enumerate(cases):
        with pytest.raises(HistopipeError) as error:
            histopipe.embed(store, out=tmp_path / f"f{number}", **options)
        assert (error.value.exit_code, expected in str(error.value)) == (code, True), error.value
    environment = os.environ | {
        "https_proxy": "http://127.0.0.1:9",
        "KERAS_HOME": str(tmp_path / "k"),
    }
    # In a separate process, because Keras reads KERAS_HOME when it is imported.
    done = run("embed", small_store, "--out", "g", "--model", "mobilenet", env=environment)
    assert done.returncode == 2, done.stderr
    assert "imagenet weights are downloaded once; without a network, copy the file" in done.stderr
    assert not list(tmp_path.rglob("*.h5"))
    gc.collect()


def test_results_that_are_not_finite_fail_their_slide_only(tmp_path: Path) -> None:
    """The network computes the mean of a patch, and NaN for black patches."""

    class Means:
        dimension, batch_size, identity = 1, 3, {"encoder": "means"}

        def prepare(self, images: np.ndarray) -> np.ndarray:
            return images

        def start(self, inputs: np.ndarray) -> np.ndarray:
            means = inputs.mean(axis=(1, 2, 3), dtype=np.float32)[:, None]
            return np.where(means > 0, means, np.nan)

        def finish(self, started: Any) -> np.ndarray:
            return np.asarray(started)

    class Patches:
        steps, rows, waits_for = 4, 8, "disk"

        def __init__(self, slide_id: str, black: int) -> None:
            self.id, self.black = slide_id, black

        def load(self, step: int) -> PatchBatch:
            images = np.full((3, 2, 2, 3), 9, np.uint8)
            images[2] = 0  # padding
            images[1] *= 3 * step + 1 != self.black
            corners = np.array([[2 * (3 * step + i), 5] for i in range(3)])
            return PatchBatch(images, corners, np.array([True, True, False]))

        def close(self) -> None:
            pass

    slides = SlideRun(Means(), "embedding", 3, Progress(), tmp_path)

    def write(slide: Any, results: Any) -> tuple[int, int]:
        with writing(tmp_path / f"{slide.id}.h5", 8, 1, "float32") as writer:
            for features, corners in results:
                writer.append(features, corners)
            writer.finish({}, {})
        return 8, 0

    patches: Any = [Patches("a", -1), Patches("b", 4), Patches("c", -1)]
    slides.run(patches, write)
    assert slides.done == ["a", "c"]
    assert list(slides.failed) == ["b"]
    assert "found nan for the patch at x, y [8, 5]" in slides.failed["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "c.h5"]


class Sums:
    """An encoder that computes the sums of patches, and records the sizes of its batches."""

    dimension, batch_size, patch_size = 1, 4, 32

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.identity = {"encoder": "sums", "sha256": "0"}

    def prepare(self, images: np.ndarray) -> np.ndarray:
        return images

    def start(self, inputs: np.ndarray) -> np.ndarray:
        self.sizes.append(len(inputs))
        return np.resize(inputs, (5, *inputs.shape[1:]))  # a network may compute more rows

    def finish(self, started: np.ndarray) -> np.ndarray:
        return np.asarray(started.sum(axis=(1, 2, 3), dtype=np.float32)[:, None])


def test_slides_cost_what_they_have_and_folders_keep_their_rule(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slide of 10 patches has batches of 4, 4 and 2. In a folder of an earlier version all have 4."""
    encoder = Sums()
    monkeypatch.setattr("histopipe.inference.embed.load_encoder", lambda *_, **__: encoder)
    arguments: dict[str, Any] = {"model": "small-cnn", "batch_size": 4}
    histopipe.embed(small_store, out=tmp_path / "new", **arguments)
    assert encoder.sizes == [4, 4, 2] * 12
    record = json.loads((tmp_path / "new/features.json").read_text())
    assert record.pop("batches") == BATCHES
    for slide, pixels in pixels_of(small_store).items():
        sums = pixels.sum(axis=(1, 2, 3), dtype=np.float32)
        np.testing.assert_array_equal(features_of(tmp_path / "new")[slide][:, 0], sums)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/features.json").write_text(json.dumps(record))
    encoder.sizes.clear()
    histopipe.embed(small_store, out=tmp_path / "old", **arguments)
    assert encoder.sizes == [4, 4, 4] * 12
    assert "batches" not in json.loads((tmp_path / "old/features.json").read_text())
    assert contents(tmp_path / "old") == contents(tmp_path / "new")


def test_stores_of_features_are_found(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recorded path, or else next to the folder of features, where those of earlier versions are."""
    monkeypatch.setattr("histopipe.inference.embed.load_encoder", lambda *_, **__: Sums())
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


SLIDES: dict[str, Any] = {"model": "small-cnn", "batch_size": 16}


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
        {"patch_size": 64, "level": 0},  # tiles are copied
        {"patch_size": 48, "mpp": 0.75, "overlap": 8, "codec": "png", "tissue": "none"},
    ],
    ids=["decoded", "copied", "png"],
)
def test_features_of_slides_are_those_of_a_store(
    made: Path, tmp_path: Path, tiling: dict[str, Any]
) -> None:
    store, features, direct = (tmp_path / name for name in ("s.lmdb", "stored", "direct"))
    common = {**tiling, "labels": made / "labels.csv", "allow_extra_rows": True}
    slides = sorted(made.glob("*.svs"))[:3]
    histopipe.ingest(slides, store, **common)
    histopipe.embed(store, out=features, **SLIDES)
    result = histopipe.embed(slides, out=direct, **SLIDES, **common)
    assert len(result.done) == 3
    assert not result.failed and contents(direct) == contents(features) != {}
    assert attributes(direct) == attributes(features)
    again = histopipe.embed(slides, out=direct, **SLIDES, **common)
    assert not again.done and len(again.kept) == len(result.done)
    with pytest.raises(UsageError, match="other settings: found patch_size"):
        histopipe.embed(slides, out=direct, **SLIDES, **{**common, "patch_size": 32})


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
    histopipe.embed(tmp_path / "s.lmdb", out=tmp_path / "stored", **SLIDES)
    result = histopipe.embed([slide], out=tmp_path / "direct", **SLIDES, **common)
    assert contents(tmp_path / "direct") == contents(tmp_path / "stored") != {}
    assert attributes(tmp_path / "direct") == attributes(tmp_path / "stored")
    # Corrected masks and outlines are another source; with --join, nothing is removed.
    masks = tmp_path / "masks"
    (outlines,) = masks.glob("*.geojson")
    content = json.loads(outlines.read_text())
    content["features"] = content["features"][:1]
    outlines.write_text(json.dumps(content))
    again = histopipe.embed([slide], out=tmp_path / "direct", **SLIDES, **common)
    assert again.done and not again.kept
    kept = histopipe.embed([slide], out=tmp_path / "direct", **SLIDES, **common)
    assert kept.kept and not kept.done
    whole = histopipe.embed(
        [slide], out=tmp_path / "whole", **SLIDES, patch_size=128, mpp=0.5, tissue="none"
    )
    assert 0 < result.patches < whole.patches


class KeptBar(Bar):
    """Keeps the number of patches and their total."""

    def __init__(self, updates: list[tuple[int, int | None]]) -> None:
        super().__init__()
        self.updates = updates

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        """Keep an update."""
        self.updates.append((done, total))


class KeptProgress(Progress):
    """Keeps what bars of patches show."""

    def __init__(self, updates: list[tuple[int, int | None]]) -> None:
        self.updates = updates

    def bar(self, title: str, **_: Any) -> Bar:
        """Return a bar whose updates are kept."""
        return KeptBar(self.updates)


def test_slides_without_patches_are_recorded(tmp_path: Path) -> None:
    folder, out = tmp_path / "slides", tmp_path / "features"
    make_slides(folder, "--count", "1", "--size", "1024x1024")
    (small,) = make_slides(tmp_path / "small", "--count", "1", "--size", "300x300")
    shutil.copy(small, folder / "small.tiff")
    (folder / "bad.svs").write_bytes(b"no slide")
    updates: list[tuple[int, int | None]] = []
    progress = KeptProgress(updates)
    result = histopipe.embed(
        folder, out=out, patch_size=512, level=0, tissue="none", progress=progress, **SLIDES
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
        histopipe.embed(small_store, out=tmp_path / "f", patch_size=64, **SLIDES)
    with pytest.raises(UsageError, match="unknown options: found force"):
        histopipe.embed(small_store, out=tmp_path / "f", force=True, **SLIDES)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "features.json").write_text("{}")
    with pytest.raises(UsageError, match="expected a slide encoder: chief"):
        histopipe.embed(tmp_path / "g", out=tmp_path / "f", **SLIDES)
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
    histopipe.embed(small_store, out=tmp_path / "a", **UNTRAINED)
    histopipe.embed(small_store, out=tmp_path / "b", model="small-cnn", batch_size=4)
    result = histopipe.embed(small_store, out=tmp_path / "f-{model}", **TOGETHER)
    assert len(result.done) == 12 and result.each == (1024, 64) and result.dimension == 1088
    assert "patches of 1024 + 64 features" in str(result)
    for name, single in (("f-mobilenet", "a"), ("f-small-cnn", "b")):
        assert contents(tmp_path / name) == contents(tmp_path / single)
        records = [json.loads((tmp_path / f / "features.json").read_text()) for f in (name, single)]
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
