"""A model of the covariates alone, which shows what the slides add: logistic, linear or Cox regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.covariates import Covariates
from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.splits import SlideSplit, Splits
from histopipe.evaluation.levels import Level
from histopipe.evaluation.predictions import PatchScores
from histopipe.evaluation.survival import breslow_survival, partial_likelihood, time_grid
from histopipe.evaluation.target_scores import TargetScores

_PENALTY = 0.1
"""Ridge penalty of Cox' regression per patient, without which few events have no finite solution."""


def baseline_scores(
    splits: Splits, covariates: Covariates, level: Level
) -> dict[Side, PatchScores | TargetScores]:
    """Fit a model to the covariates of the training bags, and return its predictions for the other sides."""
    slides: dict[Side, list[SlideSplit]] = {
        side: [slide for slide in splits.slides if len(slide.on(side))] for side in SIDES
    }
    inputs = {side: _inputs(own, covariates) for side, own in slides.items()}
    others: list[Side] = [side for side in SIDES[1:] if slides[side]]
    if splits.kind is None:
        from sklearn.linear_model import LogisticRegression

        numbers = {name: i for i, name in enumerate(splits.classes)}
        labels = {side: np.array([numbers[it.label] for it in own]) for side, own in slides.items()}
        model = LogisticRegression(max_iter=1000).fit(inputs["train"], labels["train"])
        return {
            side: PatchScores(
                splits.classes, **_places(slides[side]), label=labels[side].astype(np.int32),
                probability=_all_classes(model, inputs[side], len(numbers)), level=level,
            )
            for side in others
        }  # fmt: skip
    targets = {side: splits.targets_on(side) for side in ("train", *others)}
    grid, predict = _fitted(splits.task, inputs["train"], targets["train"])
    return {
        side: TargetScores(
            splits.task, splits.targets, grid, **_places(slides[side]), target=targets[side],
            output=predict(inputs[side]).astype(np.float32), level=level,
        )
        for side in others
    }  # fmt: skip


def _inputs(slides: Sequence[SlideSplit], covariates: Covariates) -> NDArray[np.float64]:
    rows = [covariates.encode(slide.covariates) for slide in slides]
    return np.array(rows, np.float64).reshape(len(slides), len(covariates.inputs))


def _places(slides: Sequence[SlideSplit]) -> dict[str, Any]:
    patients = sorted({slide.patient for slide in slides})
    number = {name: i for i, name in enumerate(patients)}
    zeros = np.zeros(len(slides), np.int64)
    return {
        "slides": tuple(slide.id for slide in slides), "patients": tuple(patients),
        "slide": np.arange(len(slides), dtype=np.int32),
        "patient": np.array([number[slide.patient] for slide in slides], np.int32),
        "x_l0": zeros, "y_l0": zeros,
    }  # fmt: skip


def _all_classes(model: Any, inputs: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """Return (N, C) probabilities; 0 for classes that are not in the training set."""
    found = np.zeros((len(inputs), count), np.float32)
    found[:, model.classes_] = model.predict_proba(inputs)
    return found


def _fitted(
    task: str, inputs: NDArray[np.float64], targets: NDArray[np.float64]
) -> tuple[Any, Any]:
    """Return the times of the survival probabilities, and a function from inputs to (N, C) outputs."""
    if task == "survival":
        return _cox(inputs, targets)
    from sklearn.linear_model import LogisticRegression, Ridge

    models = []
    for column in targets.T:
        known = np.isfinite(column)
        model = LogisticRegression(max_iter=1000) if task == "multilabel" else Ridge()
        models.append(model.fit(inputs[known], column[known]))

    def predict(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        if task == "regression":
            return np.stack([model.predict(rows) for model in models], axis=1)
        return np.stack([model.predict_proba(rows)[:, 1] for model in models], axis=1)

    return (), predict


def _cox(inputs: NDArray[np.float64], targets: NDArray[np.float64]) -> tuple[Any, Any]:
    from scipy.optimize import minimize

    time, event = targets.T
    varied = np.flatnonzero(inputs.std(axis=0) > 0)
    scale = inputs[:, varied].std(axis=0, ddof=1)
    standardised = (inputs[:, varied] - inputs[:, varied].mean(axis=0)) / scale

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        likelihood, slopes = partial_likelihood(standardised @ weights, time, event)
        gradient = slopes @ standardised / len(time) + _PENALTY * weights
        return likelihood / len(time) + _PENALTY / 2 * float(weights @ weights), gradient

    fitted = minimize(
        loss,
        np.zeros(len(varied)),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-12, "gtol": 1e-8},
    )
    weights = np.zeros(inputs.shape[1])
    weights[varied] = fitted.x / scale
    grid = time_grid(time, event)
    baseline = breslow_survival(inputs @ weights, time, event, grid)

    def predict(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        risk = rows @ weights
        return np.column_stack([risk, baseline[None] ** np.exp(np.minimum(risk, 50))[:, None]])

    return tuple(grid), predict
