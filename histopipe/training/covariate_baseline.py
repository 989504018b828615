"""A model of the covariates alone, which shows what the slides add: logistic, linear or Cox regression.

A slide model with covariates starts from this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.splits.labelling import Covariates
from histopipe.splits.splits import SlideSplit, Splits
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.task import Predictions
from histopipe.training.objective import Objective
from histopipe.training.objectives import CoxObjective, DiscreteSurvival


def baseline_scores(
    splits: Splits, covariates: Covariates, objective: Objective, level: EvaluationLevel
) -> dict[Subset, Predictions]:
    """Fit a model to the covariates of the training bags, and return its predictions for the other subsets."""
    if isinstance(objective, CoxObjective | DiscreteSurvival):
        # Cox' regression is fitted, and the objective of the slide model keeps its own baseline.
        objective = CoxObjective.of(splits.targets_on("train"))
    slides = {
        subset: [slide for slide in splits.slides if len(slide.on(subset))] for subset in SUBSETS
    }
    kernel, bias = baseline_weights(splits, covariates, objective)
    logits = {
        subset: _inputs(of_subset, covariates) @ kernel + bias
        for subset, of_subset in slides.items()
    }
    if isinstance(objective, CoxObjective):
        objective.fit_baseline(logits["train"][:, 0], splits.targets_on("train"))
    task, predictions = objective.described(splits.task), {}
    for subset in SUBSETS[1:]:
        if slides[subset]:
            activated = objective.activate(tf.constant(logits[subset]))
            output = objective.predictions(np.asarray(activated, np.float32))
            predictions[subset] = Predictions(
                task,
                **_places(slides[subset]),
                target=splits.targets_on(subset),
                output=output,
                level=level,
            )
    return predictions


def baseline_weights(
    splits: Splits, covariates: Covariates, objective: Objective
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (K, C) kernel and (C,) bias of a last layer that predicts as the model of the covariates alone."""
    slides = [slide for slide in splits.slides if len(slide.on("train"))]
    return objective.fit_linear(_inputs(slides, covariates), splits.targets_on("train"))


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
