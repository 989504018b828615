"""A model of the covariates alone, which shows what the slides add: logistic, linear or Cox regression.

A slide model with covariates starts from this model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.splits.labelling import Covariates
from histopipe.splits.splits import SlideSplit, Splits
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.task import Predictions
from histopipe.training.objective import Objective


def baseline_scores(
    splits: Splits, covariates: Covariates, objective: Objective, level: EvaluationLevel
) -> dict[Subset, Predictions]:
    """Fit a model to the covariates of the training bags, and return its predictions for the other subsets."""
    targets = splits.targets_on("train")
    objective = objective.for_covariates(targets)  # that of the slide model keeps its baseline
    slides = {
        subset: [slide for slide in splits.slides if len(slide.on(subset))] for subset in SUBSETS
    }
    kernel, bias = baseline_weights(splits, covariates, objective)
    logits = {
        subset: _inputs(of_subset, covariates) @ kernel + bias
        for subset, of_subset in slides.items()
    }
    objective.fit_baseline(logits["train"][:, 0], targets)
    task, predictions = objective.described(splits.task), {}
    for subset in SUBSETS[1:]:
        if slides[subset]:
            patients, patient = np.unique(
                [slide.patient for slide in slides[subset]], return_inverse=True
            )
            zeros = np.zeros(len(patient), np.int64)
            output = np.asarray(objective.activate(tf.constant(logits[subset])), np.float32)
            predictions[subset] = Predictions(
                task,
                tuple(slide.id for slide in slides[subset]),
                tuple(patients.tolist()),
                slide=np.arange(len(patient), dtype=np.int32),
                patient=patient.astype(np.int32),
                x_l0=zeros,
                y_l0=zeros,
                target=splits.targets_on(subset),
                output=objective.predictions(output),
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
    return np.array([covariates.encode(slide.covariates) for slide in slides], np.float64).reshape(
        len(slides), len(covariates.inputs)
    )
