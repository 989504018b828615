"""Slides that differ from a training: marked by `predict` for patch and slide models, and shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

import histopipe
from helpers.bags import TARGET_DIMENSION, features_of, pixels_of, write_bag
from helpers.networks import DIMENSION, pixels
from helpers.runs import without_training
from helpers.stores import a_store, jpegs
from histopipe.evaluation.unusual import PatchFeatures, beyond, read_range, spread, training_range
from histopipe.predictions.prediction_tables import read_patch_values
from histopipe.predictions.sources import PredictionsFolder
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.splits.splits import SlideSplit, load_splits
from histopipe.store.store import Store
from histopipe.system.table_files import read_dicts
from histopipe.viewer.collection import open_collection
from histopipe.viewer.layers import slide_layers

SIDE = 32
Features = Callable[[str], np.ndarray]


def range_of(features: Features, splits: Any, subset: str) -> PatchFeatures:
    """Return the features of the slides of a subset."""

    def part(slide: SlideSplit) -> PatchFeatures:
        values = features(slide.id)
        values = values[spread(len(values))]
        columns = (np.full(len(values), text) for text in (slide.label, slide.id, slide.patient))
        return PatchFeatures(values, *columns)

    return PatchFeatures.joined([part(slide) for slide in splits.slides_on(subset)])


def write_range(run: Path, features: Features) -> None:
    """Write the range of a run that was written without a training."""
    splits = load_splits(run / "splits.json")
    training, held_out = (range_of(features, splits, name) for name in ("train", "validation"))
    measured = training_range(training, held_out, splits.seed)
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
    pictures = jpegs(0, 720, SIDE)
    slides = {f"{'nt'[i % 2]}{i}": pictures[12 * i : 12 * i + 12] for i in range(60)}
    dark = [
        simplejpeg.encode_jpeg(simplejpeg.decode_jpeg(value) // 4, quality=95)
        for value in pictures[-24:]
    ]
    names = list(slides)
    old = a_store(
        tmp_path / "old.lmdb", {name: slides[name] for name in names[:40]}, patch_size=SIDE
    )
    new = {name: slides[name] for name in names[40:58]}
    new |= {name: dark[12 * i : 12 * i + 12] for i, name in enumerate(names[58:])}
    a_store(tmp_path / "new.lmdb", new, patch_size=SIDE)
    with without_training():
        histopipe.train(old, out=tmp_path / "run", epochs=1, resamples=0)
    of_slide = pixels_of(old)
    write_range(tmp_path / "run", lambda slide: pixels(of_slide[slide], DIMENSION, "run"))
    return tmp_path


def test_patches_and_slides_of_a_patch_model(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, store = cohort / "p", cohort / "new.lmdb"
    histopipe.predict(cohort / "run", store, out=out)
    rows = {row["slide"]: float(row["unusual"]) for row in read_dicts(out / "slides.csv")}
    marked = {name for name, share in rows.items() if share > 1}
    assert {"n58", "t59"} <= marked and len(marked) < 6
    assert f"{len(marked)} of 20 slides differ more from the training" in capsys.readouterr().err
    reference = read_range(cohort / "run")
    assert reference is not None
    for slide, images in pixels_of(store).items():
        white = pixels(images, DIMENSION, "run") @ reference.whitening
        patches, share = beyond([reference], [white])
        assert rows[slide] == pytest.approx(share, rel=1e-3)
        table = read_patch_values([out / "unusual" / f"{slide}.csv"], "unusual")[slide]
        with Store(store) as opened:
            (number,) = [n for n, record in opened.records.items() if record.id == slide]
            index = opened.index(number)
            corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        np.testing.assert_array_equal(table[:, :2], corners[order])
        np.testing.assert_allclose(table[:, 2], patches[order], rtol=2e-3)
    page = histopipe.report(out).file.read_text()
    assert "slides differ more from the training than about 95%" in page
    # Not done again: kept slides have their values.
    histopipe.predict(cohort / "run", store, out=out)
    assert rows == {row["slide"]: float(row["unusual"]) for row in read_dicts(out / "slides.csv")}


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
    for number, (name, features) in enumerate(sorted(of_slide.items())[:20]):
        shifted = features + 2 * (number < 3)
        coordinates = np.arange(2 * len(features)).reshape(-1, 2) * 512
        write_bag(tmp_path / "new" / f"{name}.h5", shifted.astype(np.float32), coordinates)
    histopipe.predict(run, tmp_path / "new", out=out)
    slides = list(read_dicts(out / "slides.csv"))
    shares = [float(row["unusual"]) for row in slides]
    assert min(shares[:3]) > 1 and sum(share > 1 for share in shares[3:]) <= 3
    assert f"{sum(share > 1 for share in shares)} of 20 slides differ" in capsys.readouterr().err
    table = PredictionsFolder(out).unusual(slides[0]["slide"])
    assert table is not None and table[1, :2].tolist() == [1024, 1536]
    assert np.mean(table[:, 2] > 1) > 0.5


@pytest.mark.xdist_group("tensorflow")
@pytest.mark.usefixtures("tensorflow")
@pytest.mark.parametrize("kind", ["patches", "bags"])
def test_the_range_of_a_training_is_that_of_its_features(
    golden_runs: Path, target_bags: Path, tmp_path: Path, kind: str
) -> None:
    """The limits are those of other patients, of whom there are enough."""
    import keras

    from histopipe.training.devices import make_strategy
    from histopipe.training.feature_range import range_of_training
    from histopipe.training.models import without_last_layer
    from histopipe.training.training_setup import BagTraining, PatchTraining

    common = {"fractions": (0.4, 0.4, 0.2), "seed": 2}
    if kind == "patches":
        values = {f"{'nt'[i % 2]}{i}": jpegs(3 * i, 3, 64) for i in range(60)}
        store = a_store(tmp_path / "s.lmdb", values, patch_size=64)
        config: Any = make_config({"stores": (str(store),), "model": "small-cnn", **common})
        model = keras.models.load_model(golden_runs / "run" / "model.keras")
        network, images = without_last_layer(model), pixels_of(store)
        features = {name: np.asarray(network(part)) for name, part in images.items()}
    else:
        labels = str(labels_of(target_bags, tmp_path))
        config = make_config({"mil": str(target_bags), "labels": labels, **common})
        model, features = None, features_of(target_bags)
    with opened_sources(config) as sources:
        opened: Any = sources
        splits, _ = splits_and_slides(config, sources, tmp_path, resume=False)
        setup: Any = (PatchTraining if kind == "patches" else BagTraining)(config, opened, splits)
        step = setup.train_step(make_strategy("cpu"), 1) if kind == "patches" else None
        measured = range_of_training(setup, model, step)  # type: ignore[arg-type]
    parts = [range_of(features.__getitem__, splits, name) for name in ("train", "validation")]
    expected = training_range(parts[0], parts[1], splits.seed)
    assert measured is not None and expected is not None
    assert len(np.unique(parts[1].patient)) >= 19 and measured.rate == expected.rate
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
    from histopipe.training import feature_range

    def fail(*_: object) -> None:
        raise MemoryError("no memory\nfor features")

    monkeypatch.setattr(feature_range, "range_of_training", fail)
    arguments: Any = (None, None, None)
    feature_range.write_range(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
    assert "unusual slides will not be marked: no memory" in capsys.readouterr().err
