"""A cross-validation with parts of the training patients."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import histopipe
from helpers.bags import a_bag, write_bag
from helpers.commands import Run
from helpers.runs import without_training
from histopipe.errors import UsageError
from histopipe.evaluation.label_errors import read_label_errors
from histopipe.runs.folder import runs_of
from histopipe.splits.splits import load_splits
from histopipe.splits.splitting import part_of_training
from histopipe.system.table_files import read_dicts

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
    rows = [("slide", "label", "patient")]
    for i in range(24):
        corners = np.stack([256 * np.arange(8), np.zeros(8, int)], axis=1)
        write_bag(folder / "features" / f"s{i}.h5", a_bag(i, 8, positive=i % 2 == 1), corners)
        rows.append((f"s{i}", "np"[i % 2] if i else "p", f"P{i}"))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
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
        whole = load_splits(out / fold / "splits.json")
        before: set[str] = set()
        for name in (f"{fold}-share-25", f"{fold}-share-50", fold):
            splits = load_splits(out / name / "splits.json")
            tested = [[s.id for s in each.slides_on("test")] for each in (splits, whole)]
            assert tested[0] == tested[1] and len(tested[0]) == 12
            trained = {slide.patient for slide in splits.slides_on("train")}
            assert before < trained
            before = trained
        assert len(before) == 12


def test_the_summary_has_the_curve_of_the_whole_folds(study: Path, tmp_path: Path) -> None:
    out = study / "study"
    summary = json.loads((out / "summary.json").read_text())
    curve = summary["learning_curve"]
    assert [point["share"] for point in curve["points"]] == [25, 50, 100]
    assert [point["patients"] for point in curve["points"]] == [4.0, 6.5, 12.0]
    assert curve["points"][-1]["value"] == summary["pooled"]["slide"]["mean"]["auc"]
    rows = [*read_dicts(out / "summary.csv")]
    assert [row["run"] for row in rows[:3]] == ["fold-1-share-25", "fold-1-share-50", ""]
    assert len([*read_dicts(out / "predictions.csv")]) == 24
    histopipe.report(out, out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Learning curve" in page and "twice as many, 24 patients" in page
    assert "Labels to check" in page


def test_the_wrong_label_is_found(study: Path) -> None:
    assert read_label_errors(study / "study")[0]["slide"] == "s0"


def test_a_curve_is_resumed_but_not_changed(study: Path) -> None:
    again = histopipe.cross_validate(out=study / "study", resume=True)
    assert again.curve and len(again.folds) == 6
    with pytest.raises(UsageError, match="--resume cannot change --learning-curve"):
        histopipe.cross_validate(out=study / "study", resume=True, learning_curve=("10",))


@pytest.mark.parametrize("text", ["0", "101", "half", "-5", "1e1"])
def test_wrong_percentages_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--learning-curve"):
        histopipe.cross_validate(tmp_path, out=tmp_path / "out", folds=2, learning_curve=(text,))


def test_a_curve_needs_several_trainings(study: Path, tmp_path: Path, run: Run) -> None:
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
