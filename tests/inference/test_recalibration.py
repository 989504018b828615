"""`predict --calibrate-with`: temperature and thresholds from slides that no training has used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.runs import without_training
from helpers.scores import class_scores, task_scores
from helpers.trainings import csv_rows
from histopipe.errors import UsageError
from histopipe.inference.options import PredictOptions
from histopipe.predicting.external_evaluation import recalibration
from histopipe.predictions.sources import SETTINGS
from histopipe.system.output import Progress
from histopipe.tasks.classification import Multilabel
from histopipe.tasks.curves import recalibration as slope_of
from histopipe.tasks.predictions import EvaluationSettings, Predictions
from histopipe.tasks.survival import Survival


def extreme(seed: int, count: int) -> Predictions:
    """Return slides of as many patients with two patches each, whose logits are two and a half times too large."""
    rng = np.random.default_rng(seed)
    label = (rng.random(count) < 0.5).astype(int)
    logits = 2.5 * np.repeat(2 * label - 1 + 1.4 * rng.normal(size=count), 2)
    p = 1 / (1 + np.exp(-logits))
    part = class_scores(np.repeat(label, 2), np.stack([1 - p, p], 1), np.repeat(range(count), 2))
    names = tuple(f"s{number}" for number in range(count))
    return replace(part, slide=part.patient, slides=names, patients=names)


def options_of(path: Path) -> PredictOptions:
    return PredictOptions(calibrate_with=path)


def test_probabilities_and_thresholds_are_those_of_other_slides(tmp_path: Path) -> None:
    parts, table = extreme(1, 400), tmp_path / "labels.csv"
    names = [f"s{number}" for number in range(200)]
    truth = dict(zip(parts.ids("slide"), parts.label.tolist(), strict=True))
    table.write_text("slide,label\n" + "\n".join(f"{name},{'ab'[truth[name]]}" for name in names))
    used, settings = names[:20], EvaluationSettings()
    # The labels of the predictions themselves are not used: they may be unknown.
    unlabelled = replace(parts, target=np.full_like(parts.target, np.nan))
    fitted = recalibration([unlabelled], options_of(table), used, settings, Progress())
    assert fitted.patients == set(names[20:])
    assert 1.7 < fitted.temperature[0] < 3.5
    kept = fitted.kept([parts])
    assert {*kept[0].ids("patient")} == {*used, *(f"s{number}" for number in range(200, 400))}
    calibrated = fitted.applied(kept[0].output)
    event = kept[0].label == 1
    before, after = (
        slope_of(output[:, 1].astype(float), event, kept[0].patient)[0]["calibration_slope"]
        for output in (kept[0].output, calibrated)
    )
    assert (before or 9) < 0.6 and after == pytest.approx(1, abs=0.35)
    assert {"patch", "slide_mean", "patient_mean"} <= {*fitted.thresholds}
    assert all(len(limits.values) == 1 for limits in fitted.thresholds.values())
    nothing = recalibration([parts], PredictOptions(), (), settings, Progress())
    assert not nothing.temperature and nothing.kept([parts])[0] is not None
    assert (nothing.applied(parts.output) == parts.output).all()


@pytest.mark.parametrize(
    ("text", "used", "message"),
    [
        ("slide,label\ns0,a\ns1,b\n", ("s1",), r"1 slide that no training has used, not of two"),
        ("slide,label\ns0,\n", (), r"0 slides that no training has used, not of two classes"),
        ("slide,label\nother,a\n", (), "match"),
    ],
)
def test_slides_that_cannot_calibrate_are_named(
    tmp_path: Path, text: str, used: tuple[str, ...], message: str
) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(text)
    with pytest.raises(UsageError, match=message):
        recalibration([extreme(2, 8)], options_of(table), used, EvaluationSettings(), Progress())


def test_other_patients_of_the_table_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label,patient\ns0,a,s0\ns1,b,another\n")
    message = "--calibrate-with .*s1: found patient another, expected s1"
    with pytest.raises(UsageError, match=message):
        recalibration([extreme(2, 8)], options_of(table), (), EvaluationSettings(), Progress())


def test_survival_is_refused_and_labels_have_a_temperature_each(tmp_path: Path) -> None:
    table, rng = tmp_path / "labels.csv", np.random.default_rng(3)
    survival = task_scores(Survival(("t", "e")), np.ones((3, 2)), np.ones((3, 1)), range(3))
    table.write_text("slide,t,e\n0,1,1\n")
    with pytest.raises(UsageError, match="found a model of survival, expected one with prob"):
        recalibration([survival], options_of(table), (), EvaluationSettings(), Progress())
    target = (rng.random((60, 2)) < 0.5) * 1.0
    output = 1 / (1 + np.exp(-4 * (target - 0.5) - 4 * rng.normal(size=(60, 2))))
    labels = task_scores(Multilabel(("u", "v")), target, output, range(60))
    rows = [f"{n},{u:g},{v:g}" for n, (u, v) in enumerate(target)]
    table.write_text("slide,u,v\n" + "\n".join(rows))
    fitted = recalibration(
        [replace(labels, level="slide")], options_of(table), (), EvaluationSettings(), Progress()
    )
    assert len(fitted.temperature) == 2 and min(fitted.temperature) > 1


@pytest.mark.usefixtures("numpy_networks")
def test_folds_are_named_and_calibrated_together(small_store: Path, tmp_path: Path) -> None:
    cv: Any = {"folds": 2, "resamples": 0, "fractions": (0.4, 0.3, 0.3), "out": tmp_path / "cv"}
    with without_training():
        histopipe.cross_validate(small_store, **cv)
    slides = {row["slide"]: row["label"] for row in csv_rows(tmp_path / "cv/fold-1/slides.csv")}
    (tmp_path / "labels.csv").write_text(
        "slide,label\n" + "\n".join(f"{name},{label}" for name, label in slides.items())
    )
    out = tmp_path / "p"
    # All slides were used by a fold.
    with pytest.raises(UsageError, match="that no fold has used"):
        histopipe.predict(
            tmp_path / "cv", small_store, out=out, calibrate_with=tmp_path / "labels.csv"
        )
    histopipe.predict(tmp_path / "cv", small_store, out=out)
    settings = json.loads((out / SETTINGS).read_text())
    assert (settings["run"], settings["models"]) == (str(tmp_path / "cv"), 2)
    page = histopipe.report(out).file.read_text()
    assert f"by {tmp_path / 'cv'}" in page and "Means of 2 models" in page
    # As if the second half were new slides.
    for fold in (1, 2):
        path = tmp_path / f"cv/fold-{fold}/splits.json"
        splits = json.loads(path.read_text())
        splits["slides"] = splits["slides"][: len(splits["slides"]) // 2]
        path.write_text(json.dumps(splits))
    result = histopipe.predict(
        tmp_path / "cv", small_store, out=out, calibrate_with=tmp_path / "labels.csv"
    )
    assert result.evaluated is not None
    excluded = result.evaluated.flow["slides"].excluded
    half = len(slides) // 2
    assert excluded == {"calibrates the probabilities": len(slides) - half}
    assert result.evaluated.evaluation.patient["mean"].patients <= half
    assert "fitted to" in histopipe.report(out).file.read_text()
