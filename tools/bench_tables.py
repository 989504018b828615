"""Compare slide models on public tables with linear models on the same splits.

    python tools/bench_tables.py FOLDER [--sets cancer,diabetes,whas500] [--variants raw,x100,covariates] [--seeds 5]
        [--pooling mean,gated] [--bags MUSK1.npz,FOX.npz] [--csv rossi.csv:week:arrest] [--set learning_rate=1e-3]

Tables come with scikit-learn and scikit-survival; each row is a bag of one patch. Variants: `raw` values, `standard`ised,
times 100 (`x100`), rows of unit length (`l2`), half of the columns as `covariates`, and all columns as covariates with
`noise` as features. Bags are npz files with `features`, `bag` and `label`. CSV files, such as those of
lifelines, are named with their columns of time and event; rows with missing values are left out. The first seed is tested on the first of five
folds, the second on the second, and so on; from the sixth on, of other folds. 15 % of all bags are for validation. All trainings run in this process, with
the defaults of `histopipe train --mil` and the settings of `--set`. Print the means and standard deviations over seeds
of the main metric (C-index, AUC, R²), of the log loss, and of the epochs; and the processor time per training.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gc
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import h5py
import numpy as np
from numpy.typing import NDArray

import histopipe

CLASSES, NUMBERS = ("cancer", "wine", "digits"), ("diabetes",)
SURVIVAL = ("gbsg2", "whas500", "veterans", "aids", "flchain")
VARIANTS = ("raw", "standard", "x100", "l2", "covariates", "noise")
_MOST, _NOISE = 1500, 64
"""Rows used of the largest table, and columns of noise."""
_FOLDS = 5
Array = NDArray[np.float64]


class Table(NamedTuple):
    """A table: (N, K) columns and (N, T) targets: a class, a number, or time and event. Bags are rows of each group."""

    name: str
    task: str
    columns: Array
    targets: Array
    groups: NDArray[np.int64] | None = None


def read_table(name: str) -> Table:
    """Read a table of scikit-learn or scikit-survival."""
    import sklearn.datasets
    import sksurv.datasets

    if name in CLASSES:
        loader = "load_breast_cancer" if name == "cancer" else f"load_{name}"
        data = getattr(sklearn.datasets, loader)()
        return Table(name, "classification", data.data.astype(float), data.target[:, None] * 1.0)
    if name in NUMBERS:
        data = sklearn.datasets.load_diabetes(scaled=False)
        return Table(name, "regression", data.data, data.target[:, None])
    import pandas as pd

    loader = "load_veterans_lung_cancer" if name == "veterans" else f"load_{name}"
    frame, outcome = getattr(sksurv.datasets, loader)()
    columns = pd.get_dummies(frame, drop_first=True, dtype=float)
    kept = [column for column in columns if not column.startswith("chapter")]
    columns = columns[kept].fillna(columns[kept].mean()).to_numpy()
    event, duration = (outcome[field].astype(float) for field in outcome.dtype.names)
    rows = np.random.default_rng(0).permutation(len(columns))[:_MOST]
    return Table(name, "survival", columns[rows], np.column_stack([duration, event])[rows])


def read_csv_table(spec: str) -> Table:
    """Read a table of survival from `FILE:TIME:EVENT`. Columns of texts become 0 and 1."""
    import pandas as pd

    name, time_column, event_column = spec.split(":")
    frame = pd.read_csv(name).dropna()
    outcome = frame[[time_column, event_column]].to_numpy(float)
    columns = pd.get_dummies(
        frame.drop(columns=[time_column, event_column]), drop_first=True, dtype=float
    )
    outcome[:, 1] = outcome[:, 1] == outcome[:, 1].max()  # some tables have 1 and 2
    return Table(Path(name).stem, "survival", columns.to_numpy(float), outcome)


def read_bags(path: Path) -> Table:
    """Read an npz file of bags."""
    with np.load(path) as data:
        order = np.argsort(data["bag"], kind="stable")
        _, groups = np.unique(data["bag"][order], return_inverse=True)
        features = data["features"][order].astype(float)
        return Table(path.stem, "classification", features, data["label"][:, None] * 1.0, groups)


def inputs_of(table: Table, variant: str) -> tuple[Array, Array]:
    """Return features and covariates, (N, D) and (N, K)."""
    columns = table.columns
    spread = columns.std(axis=0)
    none = columns[:, :0]
    match variant:
        case "standard":
            return (columns - columns.mean(axis=0)) / np.where(spread > 0, spread, 1), none
        case "x100":
            return columns * 100, none
        case "l2":
            return columns / np.linalg.norm(columns, axis=1, keepdims=True), none
        case "covariates":
            varied = columns[:, spread > 0]
            return varied[:, ::2], varied[:, 1::2]
        case "noise":
            noise = np.random.default_rng(5).normal(size=(len(columns), _NOISE))
            return noise, columns[:, spread > 0]
    return columns, none


def write_bags(
    folder: Path, table: Table, features: Array, covariates: Array, seeds: int
) -> dict[str, Any]:
    """Write features, labels, and a split for each seed. Return the settings of the task."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "features").mkdir(parents=True)
    targets = {"classification": ["label"], "regression": ["y"], "survival": ["time", "event"]}
    covariate_names = [f"c{number}" for number in range(covariates.shape[1])]
    groups = np.arange(len(features)) if table.groups is None else table.groups
    sides = fold_sides(len(table.targets), seeds)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["slide", *targets[table.task], *covariate_names, *map(str, range(1, seeds + 1))]
        )
        for number, values in enumerate(table.targets):
            cells = [f"class{values[0]:.0f}"] if table.task == "classification" else values.tolist()
            writer.writerow([f"s{number:05}", *cells, *covariates[number].tolist(), *sides[number]])
            with h5py.File(folder / "features" / f"s{number:05}.h5", "w") as bag:
                bag["features"] = features[groups == number].astype(np.float32)
    columns: dict[str, dict[str, Any]] = {
        "classification": {},
        "regression": {"target": ("y",)},
        "survival": {"time": "time", "event": "event"},
    }
    return {
        "mil": str(folder / "features"),
        "labels": str(folder / "labels.csv"),
        "task": table.task,
        "covariates": tuple(covariate_names),
        **columns[table.task],
    }


def fold_sides(count: int, seeds: int) -> NDArray[np.str_]:
    """Return (count, seeds) sides of bags. With five seeds each bag is in one test set."""
    sides = np.full((count, seeds), "validation", dtype="<U10")
    for seed in range(seeds):
        partition, fold = divmod(seed, _FOLDS)
        test_folds = np.random.default_rng(partition).permutation(np.arange(count) % _FOLDS)
        remaining = np.random.default_rng(seed).permutation(np.flatnonzero(test_folds != fold))
        sides[remaining[round(0.15 * count) :], seed] = "train"
        sides[test_folds == fold, seed] = "test"
    return sides


def split_of(run: Path) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the bags of each side."""
    slides = json.loads((run / "splits.json").read_text())["slides"]
    numbers: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for slide in slides:
        numbers[slide["side"]].append(int(slide["id"][1:]))
    return {side: np.array(sorted(bags)) for side, bags in numbers.items()}


def linear_result(task: str, inputs: Array, targets: Array, run: Path) -> tuple[float, float]:
    """Return main metric and log loss of a linear model on the test bags of a run."""
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.metrics import log_loss, r2_score, roc_auc_score
    from sklearn.preprocessing import StandardScaler

    split = split_of(run)
    train, test = split["train"], split["test"]
    scaled = StandardScaler().fit(inputs[train]).transform(inputs)
    truth = targets[test, 0]
    if task == "classification":
        model = LogisticRegression(max_iter=5000).fit(scaled[train], targets[train, 0])
        probabilities = model.predict_proba(scaled[test])
        classes = model.classes_
        ranks = [
            roc_auc_score(truth == label, probabilities[:, i]) for i, label in enumerate(classes)
        ]
        return float(np.mean(ranks)), float(log_loss(truth, probabilities, labels=classes))
    if task == "regression":
        model = RidgeCV(np.logspace(-2, 3, 20)).fit(scaled[train], targets[train, 0])
        return float(r2_score(truth, model.predict(scaled[test]))), np.nan
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.metrics import concordance_index_censored
    from sksurv.util import Surv

    outcome = Surv.from_arrays(targets[:, 1] == 1, np.maximum(targets[:, 0], 0.5))
    model = CoxPHSurvivalAnalysis(alpha=1e-2).fit(scaled[train], outcome[train])
    risk = model.predict(scaled[test])
    return float(concordance_index_censored(targets[test, 1] == 1, truth, risk)[0]), np.nan


def trained_result(settings: dict[str, Any], run: Path) -> tuple[float, float, int, int]:
    """Train. Return main metric and log loss on the test bags, best epoch and number of epochs."""
    import keras

    shutil.rmtree(run, ignore_errors=True)
    result = histopipe.train(out=run, in_process=True, resamples=0, **settings)
    values = result.metrics["test"].finest.values
    names = [name for name in ("c_index", "auc", "r2", "r2:y", "macro_auc") if name in values]
    keras.backend.clear_session()
    gc.collect()
    loss = values.get("log_loss")
    main = float(values[names[0]] or np.nan)
    return main, np.nan if loss is None else float(loss), result.best_epoch, result.epochs


def compare(
    table: Table, variant: str, folder: Path, seeds: int, settings: dict[str, Any]
) -> Iterator[str]:
    """Yield the cells of a row of the table."""
    features, covariates = inputs_of(table, variant)
    settings = write_bags(folder / table.name, table, features, covariates, seeds) | settings
    inputs = covariates if variant == "noise" else np.hstack([features, covariates])
    ours, theirs, seconds = [], [], time.process_time()
    for seed in range(1, seeds + 1):
        ours.append(
            trained_result({**settings, "seed": seed, "split_column": str(seed)}, folder / "run")
        )
        if table.groups is None:
            theirs.append(linear_result(table.task, inputs, table.targets, folder / "run"))
    seconds = (time.process_time() - seconds) / seeds
    yield from (table.name, variant, str(settings.get("pooling", "default")))
    both = np.array(ours)
    linear = np.array(theirs) if theirs else np.full((1, 2), np.nan)
    for column in (0, 1):
        for values in (linear[:, column], both[:, column]):
            yield "" if np.isnan(values).all() else f"{values.mean():.3f} ± {values.std():.3f}"
    yield f"{both[:, 2].mean():.0f} of {both[:, 3].mean():.0f}"
    yield f"{seconds:.0f} s"


def main() -> None:
    """Compare all tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join((*CLASSES, *NUMBERS, *SURVIVAL)))
    parser.add_argument("--bags", default="", help="npz files")
    parser.add_argument("--csv", default="", help="FILE:TIME:EVENT, with commas between files")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--pooling", default="")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE")
    options = parser.parse_args()
    pairs = (text.split("=", 1) for text in options.set)
    settings = {name: _value(text) for name, text in pairs}
    tables = [read_table(name) for name in options.sets.split(",") if name]
    tables += [read_bags(Path(name)) for name in options.bags.split(",") if name]
    tables += [read_csv_table(spec) for spec in options.csv.split(",") if spec]
    titles = (
        "set",
        "features",
        "pooling",
        "linear",
        "slide model",
        "its log loss",
        "log loss",
        "epoch",
        "CPU time",
    )
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for table in tables:
        for variant in ("raw",) if table.groups is not None else options.variants.split(","):
            for pooling in options.pooling.split(","):
                pooling_settings = settings | ({"pooling": pooling} if pooling else {})
                cells = compare(table, variant, options.folder, options.seeds, pooling_settings)
                print(f"| {' | '.join(cells)} |", flush=True)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
