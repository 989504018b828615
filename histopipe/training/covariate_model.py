"""The model of the covariates alone, which a slide model begins with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from histopipe.splits.labelling import Covariates
from histopipe.splits.splits import Splits
from histopipe.splits.subsets import Subset
from histopipe.training.objective import Objective


def baseline_weights(
    splits: Splits, covariates: Covariates, objective: Objective
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (K, C) kernel and (C,) bias of a last layer that predicts as the model of the covariates alone."""
    return objective.fit_linear(
        encoded_covariates(splits, covariates, "train"), splits.targets_on("train")
    )


def encoded_covariates(
    splits: Splits, covariates: Covariates, subset: Subset
) -> NDArray[np.float64]:
    """Return the (N, K) covariates of the slides in a subset."""
    return np.array(
        [covariates.encode(slide.covariates) for slide in splits.slides_on(subset)], np.float64
    )
