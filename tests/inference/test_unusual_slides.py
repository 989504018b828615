"""Slides that differ from a training: marked by `predict` for patch and slide models, and shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import simplejpeg

import histopipe
from helpers.bags import TARGET_DIMENSION, features_of, pixels_of, write_bag
from helpers.lazy import keras, training
from helpers.networks import DIMENSION, pixels
from helpers.runs import without_training
from helpers.stores import a_store, jpegs
from helpers.trainings import opened_setup
from histopipe.evaluation.unusual import PatchFeatures, beyond, read_range, spread, training_range
from histopipe.predictions.prediction_tables import read_patch_values
from histopipe.predictions.sources import PredictionsFolder
from histopipe.splits.splits import load_splits
from histopipe.store.store import Store
from histopipe.system.table_files import read_dicts
from histopipe.viewer.collection import open_collection
from histopipe.viewer.layers import slide_layers

SIDE = 32
Features = Callable[[str], np.ndarray]


def range_of(features: Features, splits: Any, subset: str) -> PatchFeatures:
    """Return the features of the slides of a subset."""
    parts = []
    for slide in splits.slides_on(subset):
        values = features(slide.id)
        values = values[spread(len(values))]
        columns = (np.full(len(values), text) for text in (slide.label, slide.id, slide.patient))
        parts.append(PatchFeatures(values, *columns))
    return PatchFeatures.joined(parts)


def write_range(run: Path, features: Features) -> None:
    """Write the range of a run that was written without a training."""
    splits = load_splits(run / "splits.json")
    train, held_out = (range_of(features, splits, name) for name in ("train", "validation"))
    measured = training_range(train, held_out, splits.seed)
    assert measured is not None
    measured.write(run)


def labels_of(target_bags: Path, folder: Path) -> Path:
    """Write the table of the labels of bags: classes of one of their targets."""
    rows = [f"{row['slide']},{row['MSI']}" for row in read_dicts(target_bags / "labels.csv")]
    (folder / "labels.csv").write_text("\n".join(["slide,label", *rows]))
    return folder / "labels.csv"


@pytest.fixture
def cohort(numpy_networks: None, tmp_path: Path) -> Path:
    """Store of forty slides of twelve pictures, a store of new ones, of which two are dark; and a run on the first."""
    slides = {f"{'nt'[i % 2]}{i}": jpegs(12 * i, 12, SIDE) for i in range(60)}
    for name in ("n58", "t59"):
        pictures = (simplejpeg.decode_jpeg(value) // 4 for value in slides[name])
        slides[name] = [simplejpeg.encode_jpeg(picture, quality=95) for picture in pictures]
    old = a_store(tmp_path / "old.lmdb", dict(list(slides.items())[:40]), patch_size=SIDE)
    a_store(tmp_path / "new.lmdb", dict(list(slides.items())[40:]), patch_size=SIDE)
    with without_training():
        histopipe.train(old, out=tmp_path / "run", epochs=1, resamples=0)
    of_slide = pixels_of(old)
    write_range(tmp_path / "run", lambda slide: pixels(of_slide[slide], DIMENSION, "run"))
    return tmp_path


def test_patches_and_slides_of_a_patch_model(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run, images = cohort / "p", cohort / "run", pixels_of(cohort / "new.lmdb")
    histopipe.predict(run, cohort / "new.lmdb", out=out)
    rows = {row["slide"]: float(row["unusual"]) for row in read_dicts(out / "slides.csv")}
    marked = {name for name, share in rows.items() if share > 1}
    assert {"n58", "t59"} <= marked and len(marked) < 6
    assert f"{len(marked)} of 20 slides differ more from the training" in capsys.readouterr().err
    reference = read_range(run)
    assert reference is not None
    with Store(cohort / "new.lmdb") as store:
        for slide, unusual in rows.items():
            white = pixels(images[slide], DIMENSION, "run") @ reference.whitening
            patches, share = beyond([reference], [white])
            assert unusual == pytest.approx(share, rel=1e-3)
            table = read_patch_values([out / "unusual" / f"{slide}.csv"], "unusual")[slide]
            index = store.index(store.number(slide))
            expected = np.stack([index["x_l0"], index["y_l0"], patches], axis=1)
            order = np.lexsort((index["x_l0"], index["y_l0"]))
            np.testing.assert_allclose(table[:, :3], expected[order], rtol=2e-3)
    page = histopipe.report(out).file.read_text()
    assert "slides differ more from the training than about 95%" in page
    before = (out / "slides.csv").read_bytes()
    histopipe.predict(run, cohort / "new.lmdb", out=out)
    assert (out / "slides.csv").read_bytes() == before  # kept slides have their values


def test_the_viewer_shows_unusual_patches(
    numpy_networks: None, golden_runs: Path, tmp_path: Path
) -> None:
    store, run = golden_runs / "store.lmdb", tmp_path / "run"
    shutil.copytree(golden_runs / "run", run)
    images = pixels_of(store)
    write_range(run, lambda slide: pixels(images[slide], DIMENSION, "run"))
    histopipe.predict(run, store, out=tmp_path / "p")
    source = PredictionsFolder(tmp_path / "p", "p")
    with open_collection([store]) as collection:
        entry = collection.entries[0]
        layers = {layer.key: layer for layer in slide_layers(entry, [source]).layers}
    values, layer = source.unusual(entry.id), layers["p:unusual"]
    assert values is not None and layer.high == 2
    np.testing.assert_allclose(np.sort(layer.values), np.sort(values[:, 2]), rtol=1e-6)
    assert isinstance(source.by_slide()[entry.id]["unusual"], float)


def test_slides_of_a_slide_model(
    numpy_networks: None, target_bags: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert DIMENSION == TARGET_DIMENSION
    labels, run, out = labels_of(target_bags, tmp_path), tmp_path / "run", tmp_path / "p"
    with without_training():
        histopipe.train(mil=target_bags, labels=labels, out=run, resamples=0)
    of_slide = features_of(target_bags)
    write_range(run, of_slide.__getitem__)
    names = sorted(of_slide)[:20]
    for name in names:
        shifted = of_slide[name] + np.float32(2 * (name in names[:3]))
        coordinates = np.arange(2 * len(shifted)).reshape(-1, 2) * 512
        write_bag(tmp_path / "new" / f"{name}.h5", shifted, coordinates)
    histopipe.predict(run, tmp_path / "new", out=out)
    unusual = [float(row["unusual"]) > 1 for row in read_dicts(out / "slides.csv")]
    assert all(unusual[:3]) and sum(unusual[3:]) <= 3
    assert f"{sum(unusual)} of 20 slides differ" in capsys.readouterr().err
    table = PredictionsFolder(out).unusual(names[0])
    assert table is not None and table[1, :2].tolist() == [1024, 1536]
    assert np.mean(table[:, 2] > 1) > 0.5


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.usefixtures("tensorflow")
@pytest.mark.parametrize("kind", ["patches", "bags"])
def test_the_range_of_a_training_is_that_of_its_features(
    golden_runs: Path, target_bags: Path, tmp_path: Path, kind: str
) -> None:
    """The limits are those of other patients, of whom there are enough."""
    model = step = None
    if kind == "patches":
        values = {f"{'nt'[i % 2]}{i}": jpegs(3 * i, 3, 64) for i in range(60)}
        store = a_store(tmp_path / "s.lmdb", values, patch_size=64)
        source: dict[str, Any] = {"stores": (str(store),), "model": "small-cnn"}
        model = keras.models.load_model(golden_runs / "run" / "model.keras")
        network, images = training.models.without_last_layer(model), pixels_of(store)
        features = {name: np.asarray(network(part)) for name, part in images.items()}
    else:
        source = {"mil": str(target_bags), "labels": str(labels_of(target_bags, tmp_path))}
        features = features_of(target_bags)
    with opened_setup(fractions=(0.4, 0.4, 0.2), seed=2, **source) as setup:
        if kind == "patches":
            step = setup.train_step(training.devices.make_strategy("cpu"), 1)
        measured = training.epochs.range_of_training(
            setup, model, step, {subset: setup.batches(subset, 1) for subset in setup.subsets}
        )
        reference, validation = (
            range_of(features.__getitem__, setup.splits, name) for name in ("train", "validation")
        )
    expected = training_range(reference, validation, 2)
    assert measured is not None and expected is not None
    assert len(np.unique(validation.patient)) >= 19 and measured.rate == expected.rate
    np.testing.assert_allclose(measured.limits, expected.limits, rtol=1e-3)
    products = [each.whitening @ each.whitening.T for each in (measured, expected)]
    np.testing.assert_allclose(products[0], products[1], rtol=1e-2, atol=1e-3 * products[1].max())


@pytest.mark.xdist_group("tensorflow")
def test_a_training_is_complete_without_its_range(
    tensorflow: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = Mock(side_effect=MemoryError("no memory\nfor features"))
    monkeypatch.setattr("histopipe.training.epochs.range_of_training", failure)
    training.epochs.write_range(tmp_path, None, None, None, {})
    assert not list(tmp_path.iterdir())
    assert "unusual slides will not be marked: no memory" in capsys.readouterr().err
