"""Slides that differ from a training: marked by `predict` for patch and slide models, and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

import histopipe
from helpers.bags import features_of, pixels_of
from helpers.bags import write_bag as write_features
from helpers.commands import Run
from helpers.stores import a_store, jpegs
from histopipe.evaluation.unusual import beyond, read_range
from histopipe.predictions.prediction_tables import read_patch_values
from histopipe.predictions.sources import PredictionsFolder
from histopipe.store.store import Store
from histopipe.system.table_files import read_dicts
from histopipe.viewer.collection import open_collection
from histopipe.viewer.layers import slide_layers

SIDE = 32


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of forty slides of twelve pictures, a store of new ones, of which two are dark; and a run on the first."""
    folder = tmp_path_factory.mktemp("unusual")
    pictures = jpegs(0, 720, SIDE)
    slides = {f"{'nt'[i % 2]}{i}": pictures[12 * i : 12 * i + 12] for i in range(60)}
    dark = [
        simplejpeg.encode_jpeg(simplejpeg.decode_jpeg(value) // 4, quality=95)
        for value in pictures[-24:]
    ]
    names = list(slides)
    a_store(folder / "old.lmdb", {name: slides[name] for name in names[:40]}, patch_size=SIDE)
    new = {name: slides[name] for name in names[40:58]}
    new |= {name: dark[12 * i : 12 * i + 12] for i, name in enumerate(names[58:])}
    a_store(folder / "new.lmdb", new, patch_size=SIDE)
    settings: dict[str, Any] = {"epochs": 2, "devices": "cpu", "resamples": 0, "model": "small-cnn"}
    histopipe.train(folder / "old.lmdb", out=folder / "run", **settings)
    return folder


def test_patches_and_slides_of_a_patch_model(
    cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from histopipe.training.models import without_last_layer

    out = cohort / "p"
    histopipe.predict(cohort / "run", cohort / "new.lmdb", out=out)
    rows = {row["slide"]: float(row["unusual"]) for row in read_dicts(out / "slides.csv")}
    marked = {name for name, share in rows.items() if share > 1}
    assert {"n58", "t59"} <= marked and len(marked) < 6
    assert f"{len(marked)} of 20 slides differ more from the training" in capsys.readouterr().err
    reference = read_range(cohort / "run")
    assert reference is not None and reference.whitening.shape[1] <= 128
    network = without_last_layer(keras.models.load_model(cohort / "run" / "model.keras"))
    for slide, pixels in pixels_of(cohort / "new.lmdb").items():
        features = np.asarray(network(pixels))
        patches, share = beyond([reference], [features @ reference.whitening])
        assert rows[slide] == pytest.approx(share, rel=1e-3)
        table = read_patch_values([out / "unusual" / f"{slide}.csv"], "unusual")[slide]
        with Store(cohort / "new.lmdb") as store:
            (number,) = [n for n, record in store.records.items() if record.id == slide]
            index = store.index(number)
            corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        np.testing.assert_array_equal(table[:, :2], corners[order])
        np.testing.assert_allclose(table[:, 2], patches[order], rtol=2e-3)
    page = histopipe.report(out).file.read_text()
    assert "slides differ more from the training than about 95%" in page
    # Not done again: kept slides have their values.
    histopipe.predict(cohort / "run", cohort / "new.lmdb", out=out)
    assert rows == {row["slide"]: float(row["unusual"]) for row in read_dicts(out / "slides.csv")}


def test_the_viewer_shows_unusual_patches(trained: Path, made_store: Path, tmp_path: Path) -> None:
    histopipe.predict(trained, made_store, out=tmp_path / "p")
    source = PredictionsFolder(tmp_path / "p", "p")
    with open_collection([made_store]) as collection:
        entry = collection.entries[0]
        (layer,) = [
            layer for layer in slide_layers(entry, [source]).layers if layer.key == "p:unusual"
        ]
    table = source.unusual(entry.id)
    assert table is not None and layer.high == 2
    np.testing.assert_allclose(np.sort(layer.values), np.sort(table[:, 2]), rtol=1e-6)
    assert isinstance(source.by_slide()[entry.id]["unusual"], float)


def test_runs_of_earlier_versions_mark_nothing(cohort: Path, tmp_path: Path) -> None:
    path = cohort / "run" / "training-range.npz"
    path.rename(tmp_path / "kept")
    histopipe.predict(cohort / "run", cohort / "new.lmdb", out=tmp_path / "p")
    (tmp_path / "kept").rename(path)
    assert "unusual" not in next(iter(read_dicts(tmp_path / "p" / "slides.csv")))
    assert not (tmp_path / "p" / "unusual").exists()


def test_slides_of_a_slide_model(target_bags: Path, run: Run, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "task": "regression",
        "target": ("age",),
        "epochs": 1,
        "devices": "cpu",
    }
    labels = target_bags / "labels.csv"
    histopipe.train(mil=target_bags, labels=labels, out=tmp_path / "run", resamples=0, **settings)
    for number, (name, features) in enumerate(sorted(features_of(target_bags).items())[:20]):
        shifted = features + 2 * (number < 3)
        coordinates = np.arange(2 * len(features)).reshape(-1, 2) * 512
        write_features(tmp_path / "new" / f"{name}.h5", shifted.astype(np.float32), coordinates)
    done = run("predict", "run", "new", "--out", "p")
    assert done.returncode == 0, done.stderr
    rows = list(read_dicts(tmp_path / "p" / "slides.csv"))
    shares = [float(row["unusual"]) for row in rows]
    assert min(shares[:3]) > 1 and sum(share > 1 for share in shares[3:]) <= 3
    assert f"{sum(share > 1 for share in shares)} of 20 slides differ more" in done.stderr
    table = PredictionsFolder(tmp_path / "p").unusual(rows[0]["slide"])
    assert table is not None and table[1, :2].tolist() == [1024, 1536]
    assert np.mean(table[:, 2] > 1) > 0.5


def test_a_training_is_complete_without_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from histopipe.training import feature_range

    def fail(*_: object) -> None:
        raise MemoryError("no memory\nfor features")

    monkeypatch.setattr(feature_range, "range_of_training", fail)
    arguments: Any = (None, None, None)
    feature_range.write_range(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
    assert "unusual slides will not be marked: no memory" in capsys.readouterr().err
