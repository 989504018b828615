"""A cross-validation with parts of the training patients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import histopipe
from helpers.bags import a_bag, write_bag
from helpers.commands import RunCommand
from helpers.runs import without_training
from helpers.trainings import csv_rows
from histopipe.errors import UsageError
from histopipe.evaluation.label_errors import read_label_errors
from histopipe.runs.folder import runs_of
from histopipe.splits.splits import load_splits
from histopipe.splits.splitting import part_of_training

SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "fractions": (0.8, 0.0, 0.2),
    "devices": "cpu",
    "resamples": 50,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folds of 24 patients, each trained on three shares; the label of one slide is wrong."""
    folder = tmp_path_factory.mktemp("curve")
    rows = ["slide,label,patient"]
    for i in range(24):
        corners = np.stack([256 * np.arange(8), np.zeros(8, int)], axis=1)
        write_bag(folder / "features" / f"s{i}.h5", a_bag(i, 8, positive=i % 2 == 1), corners)
        rows.append(f"s{i},{'np'[i % 2] if i else 'p'},P{i}")
    (folder / "labels.csv").write_text("\n".join(rows))
    with mock.patch("helpers.runs.SKILL", 4.0), without_training({"s0": 0}):
        result = histopipe.cross_validate(
            mil=folder / "features",
            labels=folder / "labels.csv",
            folds=2,
            learning_curve=("25", "50%"),
            out=folder / "study",
            **SETTINGS,
        )
    assert not result.failed and result.curve
    return folder


def test_each_fold_is_trained_on_each_share(study: Path) -> None:
    out = study / "study"
    assert [run.name for run in runs_of(out)] == ["fold-1", "fold-2"]
    for fold in ("fold-1", "fold-2"):
        names = (f"{fold}-share-25", f"{fold}-share-50", fold)
        small, half, whole = (load_splits(out / name / "splits.json") for name in names)
        tested = [{s.id for s in each.slides_on("test")} for each in (small, half, whole)]
        assert tested == [tested[0]] * 3 and len(tested[0]) == 12
        trained = [{s.patient for s in each.slides_on("train")} for each in (small, half, whole)]
        assert trained[0] < trained[1] < trained[2] and len(trained[2]) == 12


def test_the_summary_has_the_curve_of_the_whole_folds(study: Path, tmp_path: Path) -> None:
    out = study / "study"
    summary = json.loads((out / "summary.json").read_text())
    points = summary["learning_curve"]["points"]
    shares = [(point["share"], point["patients"]) for point in points]
    assert shares == [(25, 4.0), (50, 6.5), (100, 12.0)]
    assert points[-1]["value"] == summary["within_folds"]["slide"]["mean"]["auc"]
    rows = csv_rows(out / "summary.csv")
    assert [row["run"] for row in rows[:3]] == ["fold-1-share-25", "fold-1-share-50", ""]
    assert len(csv_rows(out / "predictions.csv")) == 24
    assert read_label_errors(out)[0]["slide"] == "s0"
    page = histopipe.report(out, out=tmp_path / "page.html").file.read_text()
    for text in ("Learning curve", "twice as many, 24 patients", "Labels to check"):
        assert text in page


def test_a_curve_is_resumed_but_not_changed(study: Path) -> None:
    again = histopipe.cross_validate(out=study / "study", resume=True)
    assert again.curve and len(again.folds) == 6
    with pytest.raises(UsageError, match="--resume cannot change --learning-curve"):
        histopipe.cross_validate(out=study / "study", resume=True, learning_curve=("10",))


@pytest.mark.parametrize("text", ["0", "101", "half", "-5", "1e1"])
def test_wrong_percentages_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--learning-curve"):
        histopipe.cross_validate(tmp_path, out=tmp_path / "out", folds=2, learning_curve=(text,))


def test_a_curve_needs_several_trainings(study: Path, tmp_path: Path, run: RunCommand) -> None:
    done = run(
        "train", "--mil", study / "features", "--learning-curve", "50", "--out", tmp_path / "x"
    )
    assert done.returncode == 2 and "--learning-curve" in done.stderr


def test_parts_are_nested_and_have_every_label(study: Path) -> None:
    splits = load_splits(study / "study" / "fold-1" / "splits.json")
    previous: set[str] = set()
    for share in (0.01, 0.3, 0.5, 0.9, 1.0):
        part = part_of_training(splits, share)
        train = part.slides_on("train")
        patients = {slide.patient for slide in train}
        assert previous <= patients and {slide.label for slide in train} == {"n", "p"}
        assert len(part.slides) == len(splits.slides)
        previous = patients
    assert previous == {slide.patient for slide in splits.slides_on("train")}
