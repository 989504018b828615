"""Training of the last layer on features of patches, and predictions of such a run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

import histopipe
from helpers.trainings import TINY, in_fork, opened_setup
from histopipe.errors import UsageError
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.runs.train import chosen_settings
from histopipe.system.folders import ENCODER
from histopipe.system.output import Progress

QUIET: dict[str, Any] = {"progress": Progress()}


def outputs_of(folder: Path) -> np.ndarray:
    """Return the probabilities in `slides.csv`, and the numbers of patches."""
    with (folder / "slides.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["slide"])
    return np.array([[row["p_n"], row["p_t"], row["patches"]] for row in rows], np.float64)


def check_run(store: str, place: str) -> None:
    """Predictions of features are those of the store, from which the recorded encoder computes them."""
    folder = Path(place)
    features, run = folder / "features", folder / "run"
    encoder = {"model": TINY["model"], "weights": TINY["weights"]}
    histopipe.embed(store, out=features, **encoder, **QUIET)
    train: dict[str, Any] = {"in_process": True, "split_by": "slide", "batch_size": 16, **QUIET}
    result = histopipe.train(store, out=run, features=features, epochs=4, **train)
    assert result.metrics["test"].patch is not None
    assert 'model = "features"' in (run / "config.toml").read_text()
    histopipe.predict(run, features, out=folder / "of-features", **QUIET)
    histopipe.predict(run, store, out=folder / "of-store", **QUIET)
    of_features, of_store = outputs_of(folder / "of-features"), outputs_of(folder / "of-store")
    assert len(of_features) == 12 and (of_features[:, 2] == 10).all()
    assert np.allclose(of_features, of_store, rtol=1e-5)
    assert np.ptp(of_features[:, 0]) > 1e-4
    histopipe.export(run, to="keras", out=folder / "exported", **QUIET)
    described = json.loads((folder / "exported" / "model.json").read_text())
    assert described["inputs"]["features"]["content"].startswith("(N, D)")
    with pytest.raises(UsageError, match="takes features, not patches"):
        histopipe.embed(store, out=folder / "x", model=str(run), **QUIET)

    # A training that is continued needs the features with which it began.
    other = folder / "other"
    shutil.copytree(features, other)
    with h5py.File(other / "n0.h5", "r+") as file:
        file["features"][0] += 1
        del file.attrs["crc32"]
    digests = set()
    for source in (features, features, other):
        with opened_setup(stores=(store,), features=str(source), split_by="slide") as opened:
            digests.add(opened.description["backbone"]["features_crc32"])
    assert len(digests) == 2 and result.folder == run
    recorded = json.loads((run / "metrics.json").read_text())["backbone"]["features_crc32"]
    assert recorded in digests

    # A feature that is not finite is no patch, and a file of other patches no features.
    damaged = folder / "damaged"
    shutil.copytree(features, damaged)
    with h5py.File(damaged / "n0.h5", "r+") as file:
        file["features"][3] = np.nan
        del file.attrs["crc32"]
    histopipe.predict(run, damaged, out=folder / "of-damaged", **QUIET)
    assert outputs_of(folder / "of-damaged")[0, 2] == 9
    setup: dict[str, Any] = {"stores": (store,), "features": str(damaged), "split_by": "slide"}
    with pytest.raises(UsageError, match=r"none at 1 of 10 places"), opened_setup(**setup):
        pass
    setup["on_error"] = "skip"
    with opened_setup(**setup) as opened:
        keys, values = opened._features
        assert np.isnan(values).all(axis=1).sum() == 1 and len(keys) == 120
    with (
        mock.patch("histopipe.dataset.batches.available_memory", lambda: 1000),
        pytest.raises(UsageError, match=r"features of 120 patches: found 0\.0 GB"),
        opened_setup(**setup),
    ):
        pass
    with h5py.File(damaged / "n0.h5", "r+") as file:
        file["coords"][:] += 1
    with (
        pytest.raises(UsageError, match=r"n0.h5: features of other patches"),
        opened_setup(**setup),
    ):
        pass
    with h5py.File(damaged / "n0.h5", "r+") as file:
        file["coords"][:] -= 1
        short = file["features"][:, :-1]
        del file["features"]
        file["features"] = short
    with pytest.raises(UsageError, match="features per patch: found"), opened_setup(**setup):
        pass
    (damaged / "n0.h5").unlink()
    with pytest.raises(UsageError, match="has no features of n0"), opened_setup(**setup):
        pass

    # Features of another encoder are refused; of another tool, only their length is compared.
    record = json.loads((damaged / ENCODER).read_text())
    (damaged / ENCODER).write_text(json.dumps({**record, "sha256": "0"}))
    with pytest.raises(UsageError, match="other features than in the training: found sha256 0"):
        histopipe.predict(run, damaged, out=folder / "y", **QUIET)
    (damaged / ENCODER).unlink()
    assert len(histopipe.predict(run, damaged, out=folder / "y", **QUIET).done) == 11


@pytest.mark.long(reason="embeds, trains twice and predicts four times in one process")
def test_a_run_on_features_predicts_features_and_patches(small_store: Path, tmp_path: Path) -> None:
    in_fork(check_run, small_store, tmp_path)


def test_a_run_on_patches_predicts_no_features(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / ENCODER).write_text("{}")
    with pytest.raises(UsageError, match="is a model of patches: found features"):
        histopipe.predict(trained, tmp_path / "f", out=tmp_path / "out")


def test_settings_that_features_decide_are_refused() -> None:
    chosen = chosen_settings({"features": "f", "epochs": 3})
    assert (
        chosen["trainable"] == "head" and chosen["augment"] == ("none",) and "epochs" not in chosen
    )
    assert not chosen_settings({"features": "f", **chosen}).keys() - {"epochs"}
    for name, value in (("model", "resnet50"), ("stain_norm", "macenko"), ("time_budget", 60.0)):
        with pytest.raises(UsageError, match=f"--features: found --{name.replace('_', '-')},"):
            chosen_settings({"features": "f", name: value})
    # A search has them in its space, after the choice.
    with pytest.raises(UsageError, match="--model resnet50: found --features"):
        PatchTrainConfig(
            features="f", **{**chosen_settings({"features": "f"}), "model": "resnet50"}
        )
