"""Vectors of slides and patients: `embed` of features, and what uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

import histopipe
from helpers.bags import write_bag
from helpers.slide_encoders import features_folder, options
from histopipe.errors import UsageError
from histopipe.features.feature_file import read_features, read_header
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources, splits_and_slides

pytestmark = [pytest.mark.xdist_group("tensorflow"), pytest.mark.usefixtures("tensorflow")]
SLIDES = {"a": 50, "b": 30, "c": 80, "d": 5}


@pytest.fixture
def features(tmp_path: Path) -> Path:
    return features_folder(tmp_path / "features", SLIDES)


def vector(folder: Path, name: str) -> np.ndarray:
    return np.asarray(read_features(read_header(folder / f"{name}.h5"))[0])


def test_vectors_are_written_once_and_again_if_features_change(
    features: Path, tmp_path: Path
) -> None:
    chosen, out = options(tmp_path), tmp_path / "slides"
    result = histopipe.embed(features, out=out, **chosen)
    assert (result.done, result.dimension, result.unit) == (("a", "b", "c", "d"), 48, "slide")
    before = vector(out, "a")
    assert histopipe.embed(features, out=out, **chosen).kept == ("a", "b", "c", "d")
    with h5py.File(features / "a.h5", "r+") as file:
        file["features"][0] += 1
    assert histopipe.embed(features, out=out, **chosen).done == ("a",)
    assert np.abs(vector(out, "a") - before).max() > 1e-4
    table = pd.read_csv(out / "vectors.csv")
    assert table.columns[:4].tolist() == ["slide", "patient", "label", "0"]
    values = [vector(out, name) for name in table["slide"]]
    np.testing.assert_allclose(table.iloc[:, 3:], values, rtol=1e-6)
    with h5py.File(out / "a.h5") as file:
        # Patho-Bench drops the first axis of `features`; STAMP reads `feats`, and the level from the attributes.
        np.testing.assert_array_equal(file["features"][:], values[:1])
        np.testing.assert_array_equal(file["feats"][:], values[0])
        assert file.attrs["feat_type"] == "slide" and file.attrs["label"] == "a"
        assert "coords" not in file
    record = json.loads((out / "features.json").read_text())
    assert record["of"]["encoder"] == "tiny" and record["level"] == "slide"


def test_vectors_of_patients(features: Path, tmp_path: Path) -> None:
    for family in ("moozy", "clam"):
        chosen = options(tmp_path, family)
        histopipe.embed(features, out=tmp_path / family / "slide", **chosen)
        result = histopipe.embed(
            features, out=tmp_path / family / "patient", **chosen, bag="patient"
        )
        assert (result.done, result.unit) == (("p0", "p1"), "patient")
    moozy, clam = tmp_path / "moozy", tmp_path / "clam"
    # MOOZY has a transformer of slides, CLAM has none.
    assert np.abs(vector(moozy / "patient", "p0") - vector(moozy / "slide", "a")).max() > 1e-3
    expected = (vector(clam / "slide", "a") + vector(clam / "slide", "b")) / 2
    np.testing.assert_allclose(vector(clam / "patient", "p0"), expected, atol=1e-6)


@pytest.mark.long(reason="a training, and a trace of each size of a bag")
def test_probe_of_vectors_predicts_patches_and_shows_them(tmp_path: Path) -> None:
    """It takes features of patches of the same encoder, and vectors of the same level and encoder."""
    slides = {f"s{number:02}": 20 + number for number in range(24)}
    features = features_folder(tmp_path / "features", slides)
    chosen, vectors, run = options(tmp_path, "abmil"), tmp_path / "slides", tmp_path / "run"
    histopipe.embed(features, out=vectors, **chosen)
    result = histopipe.train(
        mil=vectors, out=run, devices="cpu", pooling="none", epochs=30, learning_rate=0.01
    )
    assert result.metrics["test"].slide["mean"].auc == 1
    new = features_folder(tmp_path / "new", {"x": 40, "y": 40, "z": 30})
    other = features_folder(tmp_path / "other", {"a": 9}, sha256="1" * 64)
    histopipe.embed(new, out=tmp_path / "new-vectors", **chosen)
    histopipe.embed(new, out=tmp_path / "patients", bag="patient", **chosen)
    histopipe.embed(other, out=tmp_path / "other-slides", **chosen)
    for name in ("new", "new-vectors"):
        histopipe.predict(run, tmp_path / name, out=tmp_path / f"from-{name}", devices="cpu")
    tables = [(tmp_path / n / "slides.csv").read_text() for n in ("from-new", "from-new-vectors")]
    assert tables[0] == tables[1]
    attention = pd.read_csv(tmp_path / "from-new" / "attention" / "x.csv")
    assert len(attention) == 40 and attention["attention"].sum() == pytest.approx(1, abs=1e-6)
    assert {"contribution_a", "contribution_b"} <= set(attention)
    for folder, message in (
        ("patients", "level patient"),
        ("other-slides", "of_sha256 1111"),
        ("other", "other features"),
    ):
        with pytest.raises(UsageError, match=message):
            histopipe.predict(run, tmp_path / folder, out=tmp_path / "p", devices="cpu")
        assert not list((tmp_path / "p").glob("*.csv"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": ()}, "expected the file of the weights"),
        ({"model": "uni"}, "expected a slide encoder: chief, "),
        ({"batch_size": 8}, "--batch-size"),
        ({"patch_size": 224}, "--patch-size"),
        ({"part": "1/2"}, "--part"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    changes: dict[str, Any], expected: str, features: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        histopipe.embed(features, out=tmp_path / "slides", **{**options(tmp_path), **changes})
    assert not (tmp_path / "slides").exists()


def test_features_of_another_encoder_or_scale_are_refused(tmp_path: Path) -> None:
    chosen, out = options(tmp_path), tmp_path / "slides"
    other = features_folder(tmp_path / "other", {"a": 9}, encoder="uni")
    far = features_folder(tmp_path / "far", {"a": 9}, patches={"patch_size": 224, "patch_mpp": 1.0})
    for features, message in ((other, "features of uni.* tiny"), (far, "patches of 224 µm")):
        with pytest.raises(UsageError, match=message):
            histopipe.embed(features, out=out, **chosen)
    assert histopipe.embed(other, out=out, **chosen, allow_mismatch=True).done == ("a",)
    assert "uni" in json.loads((out / "features.json").read_text())["mismatch"]


def test_vectors_and_features_of_patches_are_told_apart(tmp_path: Path) -> None:
    from histopipe.training.training_setup import BagTraining

    features = features_folder(tmp_path / "features", {f"s{number:02}": 5 for number in range(12)})
    chosen, out = options(tmp_path), tmp_path / "slides"
    histopipe.embed(features, out=out, **chosen)
    with pytest.raises(UsageError, match="vectors of moozy"):
        histopipe.embed(out, out=tmp_path / "again", **chosen)

    def check(folder: Path, pooling: str) -> None:
        """Prepare a training in this process."""
        config: Any = make_config({"mil": folder, "pooling": pooling})
        with opened_sources(config) as sources:
            bags: Any = sources
            BagTraining(config, bags, splits_and_slides(config, sources, tmp_path, resume=False)[0])

    check(out, "none")
    check(features, "gated")
    with pytest.raises(UsageError, match="vectors of slides"):
        check(out, "gated")
    with pytest.raises(UsageError, match="features of patches"):
        check(features, "none")
    write_bag(out / "e.h5", np.ones((2, 48), np.float32), label="a", patient="p1")
    with pytest.raises(UsageError, match="mixed features"):
        check(out, "none")


def test_vectors_of_other_tools_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = np.arange(4, dtype=np.float32)  # as TRIDENT writes them
    header = read_header(tmp_path / "a.h5")
    assert (header.level, read_features(header).tolist()) == ("slide", [[0, 1, 2, 3]])


def test_attention_of_slides_is_drawn(features: Path, tmp_path: Path) -> None:
    histopipe.embed(features, out=tmp_path / "slides", **options(tmp_path, "titan"), attention=True)
    attention = pd.read_csv(tmp_path / "slides" / "attention" / "a.csv")["attention"]
    assert len(attention) == 50 and attention.sum() == pytest.approx(1, abs=1e-6)


def test_slides_that_cannot_be_computed_have_a_reason(features: Path, tmp_path: Path) -> None:
    """A refused command costs no vectors. Those of earlier features are removed."""
    chosen, out = options(tmp_path), tmp_path / "slides"
    histopipe.embed(features, out=out, **chosen)
    with pytest.raises(UsageError, match="which has none for patches"):
        histopipe.embed(features, out=out, attention=True, **chosen)
    assert len(list(out.glob("*.h5"))) == 4
    with h5py.File(features / "b.h5", "r+") as b, h5py.File(features / "c.h5", "r+") as c:
        b["features"][::3] = np.nan
        c["coords"][1] = c["coords"][0]
    result = histopipe.embed(features, out=out, **chosen)
    assert (result.kept, result.done, set(result.failed)) == (("a", "d"), (), {"b", "c"})
    assert "not finite" in result.failed["b"] and "overlap" in result.failed["c"]
    assert {path.stem for path in out.glob("*.h5")} == {"a", "d"}
