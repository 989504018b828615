"""Write fixed predictions of all tasks, and what the evaluation makes of them, for tests of later versions.

    python tools/make_golden_evaluation.py tests/golden/evaluation

Each task has a table of validation and test predictions, drawn at random, and a JSON file with the evaluation. If a
change of the evaluation is intended, run this again and state the change in the changelog.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.evaluation.evaluate import evaluate_subsets
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.tasks.classification import Classification, Multilabel
from histopipe.tasks.predictions import EvaluationSettings, Predictions
from histopipe.tasks.regression import Regression
from histopipe.tasks.survival import Survival
from histopipe.tasks.task import Task

SLIDES, ROWS = 24, 4
SETTINGS = EvaluationSettings(resamples=50, top_k=2)
TASKS: dict[str, Task] = {
    "two-classes": Classification(classes=("normal", "tumour")),
    "three-classes": Classification(classes=("a", "b", "c")),
    "multilabel": Multilabel(("msi", "braf")),
    "regression": Regression(("age", "share")),
    "survival": Survival(("time", "event"), (0.5, 1.0, 2.0)),
}


def draw(name: str, task: Task, rng: np.random.Generator) -> Predictions:
    """Draw predictions of patches; of slides for survival. Two slides belong to each patient."""
    rows = 1 if name == "survival" else ROWS
    slide = np.repeat(np.arange(SLIDES, dtype=np.int32), rows)
    signal = rng.normal(size=SLIDES // 2)
    risk = np.round(signal[slide // 2] + rng.normal(size=len(slide)), 3)
    target: Any
    if name == "survival":
        time = np.exp(-signal) * rng.exponential(size=len(signal))
        target = np.round(np.stack([time, rng.random(len(signal)) < 0.7], axis=1), 3)[slide // 2]
        curves = np.exp(-np.outer(np.exp(risk), (0.2, 0.4, 0.8)))
        output = np.column_stack([risk, curves])
    elif name == "regression":
        target = np.round(np.stack([60 + 10 * signal, signal], axis=1), 3)[slide // 2]
        target[slide // 2 == 1, 0] = np.nan
        output = np.stack([60 + 8 * risk, risk], axis=1)
    elif name == "multilabel":
        target = np.stack([signal > 0, signal < 0.3], axis=1).astype(np.float64)[slide // 2]
        target[slide // 2 == 1, 0] = np.nan
        output = 1 / (1 + np.exp(-np.stack([risk, -risk], axis=1)))
    else:
        edges = np.quantile(signal, np.linspace(0, 1, len(task.classes) + 1)[1:-1])
        target = np.searchsorted(edges, signal)[slide // 2].astype(np.float64)[:, None]
        output = np.exp(-((risk[:, None] - np.linspace(-1, 1, len(task.classes))) ** 2))
        output /= output.sum(axis=1, keepdims=True)
    corner = np.tile(np.arange(rows) * 64, SLIDES).astype(np.int64)
    return Predictions(
        task,
        tuple(f"s{i}" for i in range(SLIDES)),
        tuple(f"P{i}" for i in range(SLIDES // 2)),
        slide,
        slide // 2,
        corner,
        np.zeros_like(corner),
        target.astype(np.float64),
        output.astype(np.float32),
        "slide" if rows == 1 else "patch",
    )


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, task) in enumerate(TASKS.items()):
        rng = np.random.default_rng(seed)
        parts = [({"split": side}, draw(name, task, rng)) for side in ("validation", "test")]
        write_predictions(folder / f"{name}.csv", parts)
        evaluated = evaluate_subsets(read_predictions(folder / f"{name}.csv"), SETTINGS)
        value = {side: evaluation.to_json() for side, evaluation in evaluated.items()}
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
