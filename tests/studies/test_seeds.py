"""Trainings repeated with several seeds, and trainings without validation."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.bags import a_bag, write_bag
from helpers.runs import without_training
from helpers.trainings import csv_rows
from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import evaluate
from histopipe.runs.folder import runs_of
from histopipe.runs.run import Run
from histopipe.runs.task_config import load_config
from histopipe.splits.splits import load_splits
from histopipe.studies.fold_results import Fold, read_parts, summarize
from histopipe.tasks.predictions import mean_resamples
from histopipe.tasks.statistics import bootstrap_draws

SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "fractions": (0.8, 0.0, 0.2),
    "devices": "cpu",
    "resamples": 50,
}


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty bags of ten patients, half of them positive, with their subset in a column."""
    folder = tmp_path_factory.mktemp("bags") / "features"
    rows = ["slide,label,patient,subset"]
    for i in range(20):
        corners = np.stack([256 * np.arange(8), np.zeros(8, int)], axis=1)
        write_bag(folder / f"s{i}.h5", a_bag(i, 8, positive=i % 2 == 1), corners)
        rows.append(f"s{i},{'np'[i % 2]},P{i // 4}{i % 2},{'test' if i < 8 else 'train'}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_training() -> Iterator[None]:
    """Write the results of all runs of this module without a training."""
    with without_training():
        yield


@pytest.fixture(scope="module")
def folds(bags: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of two folds, without validation."""
    out, labels = tmp_path_factory.mktemp("study") / "folds", bags / "labels.csv"
    histopipe.cross_validate(mil=bags, labels=labels, folds=2, seeds=2, seed=3, out=out, **SETTINGS)
    return out


def test_last_epoch_is_kept_without_validation(folds: Path) -> None:
    run = folds / "seed-3-fold-1"
    result, history = Run(run).result, csv_rows(run / "history.csv")
    assert result.best_epoch == result.epochs == len(history) == 2
    assert set(result.metrics) == {"test"}
    thresholds = result.thresholds["slide_mean"]
    assert thresholds.values == (0.5,)
    assert thresholds.note == "threshold 0.5 used: there is no validation set"
    assert not [name for name in history[0] if name.startswith("val_")]
    assert not load_splits(run / "splits.json").slides_on("validation")
    assert {row["split"] for row in csv_rows(run / "predictions.csv")} == {"test"}


def test_report_says_that_no_epoch_was_chosen(folds: Path, tmp_path: Path) -> None:
    run, page, card = folds / "seed-3-fold-1", tmp_path / "run.html", tmp_path / "card.md"
    histopipe.report(run, out=page)
    text = "Model after epoch 2 of 2, the last one: there is no validation set."
    assert text in page.read_text()
    histopipe.report(run, out=card, checklist="tripod-ai")
    assert "The model of epoch 2, the last one, was kept" in card.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"calibrate": True}, "--calibrate: found a split without validation"),
        ({"threshold": "sensitivity:0.9"}, "--threshold sensitivity:0.9: found a split without"),
        ({"fractions": (1.0, 0.0, 0.0)}, "--fractions: found"),
        ({"fractions": (0.0, 0.5, 0.5)}, "--fractions: found"),
    ],
)
def test_settings_that_need_validation_are_refused(
    settings: dict[str, Any], message: str, bags: Path, tmp_path: Path
) -> None:
    values = {"mil": bags, "labels": bags / "labels.csv", **SETTINGS, **settings}
    with pytest.raises(UsageError, match=message):
        histopipe.train(out=tmp_path / "run", **values)


def test_searches_need_validation() -> None:
    with pytest.raises(UsageError, match=r"--fractions.*a share of validation"):
        histopipe.tune(mil="features", space={"dropout": [0.1, 0.2]}, out="search", **SETTINGS)


def test_each_seed_has_its_split_and_its_metrics(folds: Path) -> None:
    runs = runs_of(folds)
    assert [run.name for run in runs] == [f"seed-{s}-fold-{f}" for s in (3, 4) for f in (1, 2)]
    assert [load_config(run / "config.toml").seed for run in runs] == [3, 3, 4, 4]
    tested = [
        [slide.id for slide in load_splits(run / "splits.json").slides_on("test")] for run in runs
    ]
    for one, two in (tested[:2], tested[2:]):  # each slide is tested once per seed
        assert sorted(one + two) == sorted(f"s{i}" for i in range(20))
    assert set(tested[0]) != set(tested[2])
    summary = json.loads((folds / "summary.json").read_text())
    config = load_config(runs[0] / "config.toml").evaluation_settings
    both: list[Any] = []
    for seed, pair in (("3", runs[:2]), ("4", runs[2:])):
        parts = read_parts([Run(run) for run in pair])
        both.append(evaluate(parts, config).slide["mean"].values["auc"])
        assert summary["seeds"][seed]["slide_mean_auc"] == pytest.approx(both[-1])
    assert summary["mean"]["slide_mean_auc"] == pytest.approx(np.mean(both))
    assert summary["deviation"]["slide_mean_auc"] == pytest.approx(np.std(both, ddof=1))
    # Each seed has an informative interval, also of metrics at an end of their range.
    for name, (low, high) in summary["intervals"].items():
        assert low < high and low <= summary["mean"][name] <= high, name
    # Numbers are those of one seed, and metrics the means of the values of each.
    within = summary["within_folds"]["slide"]["mean"]
    each: list[Any] = []
    for pair in (runs[:2], runs[2:]):
        parts = read_parts([Run(run) for run in pair])
        each.append(evaluate(parts, config, within_folds=True).slide["mean"].values)
    assert [of_class["count"] for of_class in within["classes"].values()] == [10, 10]
    assert np.sum(within["confusion"]) == 20
    for name in ("auc", "calibration_error", "calibration_error_by_chance", "calibration_slope"):
        mean = np.mean([values[name] for values in each])
        assert within[name] == pytest.approx(mean), name
    table = csv_rows(folds / "summary.csv")
    names = ["1", "2", "1", "2", "seed 3", "seed 4", "mean", "sd", "within folds", "pooled"]
    assert [row["fold"] for row in table] == names
    assert [row["run"] for row in table[:4]] == [run.name for run in runs]


def test_study_is_known_to_info_report_and_compare(folds: Path, tmp_path: Path) -> None:
    assert "4, 4 finished" in str(histopipe.info(folds))
    page = histopipe.report(folds, out=tmp_path / "study.html").file.read_text()
    for text in ("seed-4-fold-2", "seed 3", "Means over the seeds", "slide counts once per seed"):
        assert text in page
    notes = histopipe.compare([folds, folds / "seed-3-fold-1"]).notes
    assert "different items" in notes[0][0]
    # Without validation, models of other numbers of epochs are not averaged.
    for name in ("seeds", "epochs"):
        change: dict[str, Any] = {name: 3}
        message = f"--resume cannot change the number of {name}: found --{name} 3"
        with pytest.raises(UsageError, match=message):
            histopipe.cross_validate(out=folds, resume=True, **change)
    again = histopipe.cross_validate(out=folds, resume=True)
    assert not again.failed and len(again.seeds) == 2


def test_resume_evaluates_survival_at_another_horizon(bags: Path, tmp_path: Path) -> None:
    rows = [f"s{i},P{i // 4}{i % 2},{1 + i // 4 + i % 2},{i // 4 != 2:d}" for i in range(20)]
    labels, out = tmp_path / "labels.csv", tmp_path / "folds"
    labels.write_text("\n".join(["slide,patient,time,event", *rows]))
    survival: dict[str, Any] = {"task": "survival", "time": "time", "event": "event"}
    histopipe.cross_validate(mil=bags, labels=labels, folds=2, out=out, **SETTINGS, **survival)
    for horizon in (2.5, 3.5):
        histopipe.cross_validate(out=out, resume=True, horizon=horizon)
        assert [load_config(run / "config.toml").horizon for run in runs_of(out)] == [horizon] * 2
        summary = json.loads((out / "summary.json").read_text())
        assert summary["within_folds"]["patient"]["mean"]["checks"]["horizon"] == horizon


def test_seeds_of_one_split_are_compared(bags: Path, tmp_path: Path) -> None:
    """With a column of subsets, all seeds are tested on the same slides."""
    common = {
        **SETTINGS,
        "mil": bags,
        "labels": bags / "labels.csv",
        "split_column": "subset",
        "seeds": 2,
        "epochs": 1,
    }
    means = []
    for name, rate in (("a", 1e-4), ("b", 3e-3)):
        result = histopipe.cross_validate(out=tmp_path / name, learning_rate=rate, **common)
        assert [fold.folder.name for fold in result.folds] == ["seed-1", "seed-2"]
        assert not result.intervals  # the test set has four patients
        means.append(result.mean["slide_mean_auc"])
    assert histopipe.compare([tmp_path / "a", tmp_path / "a" / "seed-1"]).splits == (None,)
    compared = histopipe.compare([tmp_path / "a", tmp_path / "b"])
    assert compared.differences[0]["slide_mean"]["auc"].value == pytest.approx(means[1] - means[0])
    assert "learning_rate" in compared.settings


def test_seeds_with_unfinished_folds_are_not_averaged(folds: Path, tmp_path: Path) -> None:
    first, second, third, fourth = runs_of(folds)
    runs = [(1, 3, first), (2, 3, second), (1, 4, third), (1, 5, third), (2, 5, fourth)]
    named = [Fold(2, tmp_path / "seed-4-fold-2", 4, None)]
    for number, seed, run in runs:
        folder = Path(shutil.copytree(run, tmp_path / f"seed-{seed}-fold-{number}"))
        config = folder / "config.toml"  # that of seed 4 also as another seed
        config.write_text(re.sub(r"(?m)^seed = \d+", f"seed = {seed}", config.read_text()))
        named.append(Fold(number, folder, seed, Run(folder).result))
    summary = summarize(load_config(folds / "seed-3-fold-1" / "config.toml"), tmp_path, named)
    whole = histopipe.cross_validate(out=folds, resume=True)
    assert summary.seeds == {3: whole.seeds[3], 5: whole.seeds[4]} and summary.mean == whole.mean
    assert "seed 4 fold 2: not done; its seed is not in the mean" in str(summary)


def test_variance_of_the_mean_over_seeds() -> None:
    """The resamples have the variance of the seeds' mean, if patients do not vary."""
    values = np.array([0.2, 0.5, 0.6, 0.9])

    class Constant:
        """Scores, their task and its statistics: a metric that all resamples share."""

        patients = 1

        def __init__(self, value: float) -> None:
            self.value, self.task = value, self

        def statistics(self, scores: Constant) -> Constant:
            return scores

        def compute(self, weights: Any) -> dict[str, Any]:
            return {"auc": np.full(len(weights), self.value)}

    scores: Any = [Constant(value) for value in values]
    means = mean_resamples(scores, bootstrap_draws(1, 20_000, 1), 1)["auc"]
    assert means[0] == pytest.approx(values.mean())
    assert means[1:].mean() == pytest.approx(values.mean(), abs=0.01)
    assert means[1:].var() == pytest.approx(values.var(ddof=1) / 4, rel=0.03)
    assert (mean_resamples(scores[:1], bootstrap_draws(1, 10, 1), 1)["auc"] == 0.2).all()
