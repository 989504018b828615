"""Public tables as bags of one row, against Cox, logistic and ridge regression on the same folds."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from run import Row, result_row

import histopipe
from histopipe.runs.folder import runs_of
from histopipe.splits.splits import load_splits

TITLE = "Survival, classification and regression of public tables"
METRIC = "metric"
SEEDS = 3
REFERENCE = "reference, run here"
SOURCE = """
Tables that are part of scikit-survival, lifelines and scikit-learn, each row as a bag of one patch
with the columns as features. The reference is a regression of standardised columns by these libraries
(Cox, logistic or ridge) on the same folds, of all test rows of five folds together.
"""
DIFFERENCES = """
- The slide model has `--pooling mean`, 20 epochs without validation, and the default settings
  otherwise; the Cox loss needs batches of 32. No setting was searched.
- The C-index and AUC of a cross-validation are those of all test rows together, as histopipe
  reports them; those of the regressions are computed in the same way. Models of different folds
  differ in their offsets, which lowers both.
- Published values on other splits, for orientation: veterans, Cox, 0.736 on its own training data;
  GBSG2, Cox with elastic net, 0.688 on a test set (documentation of scikit-survival); rossi, Cox,
  0.64 on its own training data (documentation of lifelines); diabetes, ridge, R² 0.356 on a test set
  (documentation of scikit-learn).
- rossi needs lifelines, which the project does not install; without it, the row is left out.
"""


_TITLES = {"c_index": "C-index", "auc": "AUC", "r2": "R²"}


@dataclass(frozen=True)
class Table:
    """A table: standardised columns (N, D), targets (N, T), and the settings of the task."""

    name: str
    features: NDArray[np.float64]
    target: NDArray[np.float64]
    metric: str
    settings: dict[str, Any]
    reference: Callable[..., Any]


def has_data(shared: Path) -> bool:  # noqa: ARG001 - as all recipes
    """Return whether the libraries with the tables are installed."""
    try:
        import sksurv  # noqa: F401 - only whether it can be imported
    except ImportError:
        return False
    return True


def survival_tables() -> Iterator[tuple[str, pd.DataFrame, Any, Any]]:
    """Yield name, columns, times and events of the tables with survival."""
    from sksurv import datasets

    for name, load in (
        ("veterans", datasets.load_veterans_lung_cancer),
        ("GBSG2", datasets.load_gbsg2),
        ("WHAS500", datasets.load_whas500),
    ):
        columns, outcome = load()
        event, time = outcome.dtype.names
        yield name, columns, outcome[time], outcome[event]
    with suppress(ImportError):
        from lifelines.datasets import load_rossi

        rossi = load_rossi()
        yield "rossi", rossi.drop(columns=["week", "arrest"]), rossi["week"], rossi["arrest"]


def tables() -> Iterator[Table]:
    """Yield the tables."""
    from sklearn.datasets import load_breast_cancer, load_diabetes
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    survival = {"task": "survival", "time": "time", "event": "event", "epochs": 20}
    for name, columns, time, event in survival_tables():
        features = pd.get_dummies(columns, drop_first=True).to_numpy(np.float64)
        target = np.stack([time, event], axis=1).astype(np.float64)
        yield Table(name, features, target, "c_index", survival, CoxPHSurvivalAnalysis)
    classes = load_breast_cancer()
    yield Table(
        "breast cancer",
        classes.data,
        classes.target[:, None],
        "auc",
        {"epochs": 20},
        LogisticRegression,
    )
    numbers = load_diabetes(scaled=False)
    yield Table(
        "diabetes",
        numbers.data,
        numbers.target[:, None],
        "r2",
        {"task": "regression", "target": ("value",), "epochs": 20},
        RidgeCV,
    )


def run(work: Path, shared: Path, seeds: int, done: Collection[tuple[str, str]]) -> Iterator[Row]:  # noqa: ARG001 - as all recipes
    """Yield a row for each table."""
    for table in tables():
        if (f"{table.name}, {_TITLES[table.metric]}", "mean") in done:
            continue
        folder = work / table.name.replace(" ", "-")
        write_bags(folder, table)
        result = histopipe.cross_validate(
            mil=folder,
            labels=folder.with_suffix(".csv"),
            pooling="mean",
            folds=5,
            seeds=seeds,
            fractions=(0.8, 0.0, 0.2),
            parallel_folds=2,
            devices="cpu",
            out=work / f"{folder.name}-runs",
            **table.settings,
        )
        values = [reference(table, runs) for runs in by_seed(result.folder)]
        name = table.reference.__name__
        published = f"{np.mean(values):.3f} ({name})"
        data = f"{table.name}, {_TITLES[table.metric]}"
        yield result_row(data, "mean", published, result, table.metric)


def by_seed(folder: Path) -> list[list[Path]]:
    """Return the folders of the folds of each seed."""
    seeds: dict[str, list[Path]] = {}
    for path in runs_of(folder):
        seeds.setdefault(path.name.partition("-fold-")[0], []).append(path)
    return list(seeds.values())


def reference(table: Table, folds: list[Path]) -> float:
    """Return the metric of a regression on the same folds, of all test rows together."""
    predicted = np.full(len(table.target), np.nan)
    for fold in folds:
        splits = load_splits(fold / "splits.json")
        train, test = (
            np.array([int(slide.id[3:]) for slide in splits.slides_on(subset)])
            for subset in ("train", "test")
        )
        mean, deviation = table.features[train].mean(axis=0), table.features[train].std(axis=0)
        scaled = (table.features - mean) / np.where(deviation > 0, deviation, 1.0)
        with warnings.catch_warnings(action="ignore"):
            model = table.reference().fit(scaled[train], _outcome(table, train))
        predicted[test] = (
            model.predict_proba(scaled[test])[:, 1]
            if table.metric == "auc"
            else model.predict(scaled[test])
        )
    return _metric(table, predicted)


def _outcome(table: Table, rows: NDArray[np.intp]) -> Any:
    target = table.target[rows]
    if table.metric != "c_index":
        return target[:, 0]
    return np.array(
        [(bool(event), time) for time, event in target], dtype=[("event", bool), ("time", float)]
    )


def _metric(table: Table, predicted: NDArray[np.float64]) -> float:
    from sklearn.metrics import r2_score, roc_auc_score
    from sksurv.metrics import concordance_index_censored

    if table.metric == "auc":
        return float(roc_auc_score(table.target[:, 0], predicted))
    if table.metric == "r2":
        return float(r2_score(table.target[:, 0], predicted))
    time, event = table.target.T
    return float(concordance_index_censored(event == 1, time, predicted)[0])


def write_bags(folder: Path, table: Table) -> None:
    """Write a feature file for each row, and the labels file."""
    folder.mkdir(parents=True)
    columns = {"c_index": ["time", "event"], "auc": ["label"], "r2": ["value"]}[table.metric]
    with folder.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["slide", *columns])
        for number, values in enumerate(table.target.tolist()):
            texts = [f"class {int(values[0])}"] if table.metric == "auc" else values
            rows.writerow([f"row{number}", *texts])
            with h5py.File(folder / f"row{number}.h5", "w") as bag:
                bag["features"] = table.features[number][None].astype(np.float32)
                bag["coords"] = np.zeros((1, 2), np.int64)
                bag["coords"].attrs["patch_size_level0"] = 256
