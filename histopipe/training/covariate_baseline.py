"""A model of the covariates alone, which shows what the slides add: logistic, linear or Cox regression.

A slide model with covariates starts from this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.covariates import Covariates
from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.splits import SlideSplit, Splits
from histopipe.evaluation.levels import Level
from histopipe.evaluation.predictions import PatchScores
from histopipe.evaluation.survival import partial_likelihood
from histopipe.evaluation.target_scores import TargetScores
from histopipe.training.objective import Objective
from histopipe.training.survival_objective import CoxObjective

_PENALTY = 0.1
"""Ridge penalty of Cox' regression per patient, without which few events have no finite solution."""
_ABSENT = 20.0
"""Log odds of the rarest class against one without a training bag."""


def baseline_scores(
    splits: Splits, covariates: Covariates, objective: Objective, level: Level
) -> dict[Side, PatchScores | TargetScores]:
    """Fit a model to the covariates of the training bags, and return its predictions for the other sides."""
    if splits.task == "survival":
        objective = CoxObjective.of(splits.targets_on("train"))
    slides = {side: [it for it in splits.slides if len(it.on(side))] for side in SIDES}
    kernel, bias = baseline_weights(splits, covariates, objective)
    logits = {
        side: _inputs(of_side, covariates) @ kernel + bias for side, of_side in slides.items()
    }
    if isinstance(objective, CoxObjective):
        objective.fit_baseline(logits["train"][:, 0], splits.targets_on("train"))
    scores: dict[Side, PatchScores | TargetScores] = {}
    for side in SIDES[1:]:
        if not slides[side]:
            continue
        places = _places(slides[side])
        activated = objective.activate(tf.constant(logits[side]))
        output = objective.predictions(np.asarray(activated, np.float32))
        if splits.kind is None:
            label = np.array([splits.classes.index(it.label) for it in slides[side]], np.int32)
            scores[side] = PatchScores(
                splits.classes, **places, label=label, probability=output, level=level
            )
        else:
            grid = tuple(getattr(objective, "grid", ()))
            scores[side] = TargetScores(
                splits.task, splits.targets, grid, **places, target=splits.targets_on(side),
                output=output, level=level,
            )  # fmt: skip
    return scores


def baseline_weights(
    splits: Splits, covariates: Covariates, objective: Objective
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (K, C) kernel and (C,) bias of a last layer that predicts as the model of the covariates alone."""
    slides = [it for it in splits.slides if len(it.on("train"))]
    inputs, targets = _inputs(slides, covariates), splits.targets_on("train")
    if splits.kind is None:
        return _class_weights(inputs, [splits.classes.index(it.label) for it in slides], splits)
    if splits.task == "survival":
        weights = _cox_weights(inputs, targets)
        # Discrete survival starts with the same ratio of hazards in all intervals.
        bias = np.zeros(objective.outputs) if objective.bias is None else objective.bias
        kernel = np.tile(weights[:, None], objective.outputs)
        return kernel, bias - float(inputs.mean(axis=0) @ weights)
    from sklearn.linear_model import LogisticRegression, Ridge

    if splits.task == "regression":
        targets = np.asarray(objective.logits(tf.constant(targets)))
    kernels, biases = [], []
    for column in targets.T:
        rows = np.isfinite(column)
        model = LogisticRegression(max_iter=1000) if splits.task == "multilabel" else Ridge()
        model.fit(inputs[rows], column[rows])
        kernels.append(np.ravel(model.coef_))
        biases.append(float(np.ravel(model.intercept_)[0]))
    return np.stack(kernels, axis=1), np.array(biases)


def _class_weights(
    inputs: NDArray[np.float64], labels: Sequence[int], splits: Splits
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1000).fit(inputs, labels)
    kernel, bias = model.coef_.T, model.intercept_
    if len(bias) == 1:  # the log odds of the second of two classes
        kernel, bias = np.hstack([-kernel, kernel]) / 2, np.array([-bias[0], bias[0]]) / 2
    all_kernels = np.zeros((len(kernel), len(splits.classes)))
    all_biases = np.full(len(splits.classes), bias.min() - _ABSENT)
    all_kernels[:, model.classes_], all_biases[model.classes_] = kernel, bias
    return all_kernels, all_biases


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


def _cox_weights(inputs: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (K,) coefficients of Cox' regression."""
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
    return weights
