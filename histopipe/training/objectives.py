"""The objective of a task: from its training targets, or from the facts that a run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.training.objective import (
    ClassObjective,
    MultilabelObjective,
    Objective,
    RegressionObjective,
)
from histopipe.training.survival_objective import CoxObjective, DiscreteSurvival


def make_objective(
    task: str,
    loss: str,
    targets: NDArray[np.float64],
    *,
    classes: int,
    draws: NDArray[np.float64] | None,
) -> Objective:
    """Return the objective of a task, from the (N, T) training targets.

    `draws` is the number of samples per epoch with each of these targets. With it, the 1 of each label of multilabel is
    weighted by the ratio of zeros to ones among the samples.
    """
    if task == "multilabel":
        weights = np.ones(targets.shape[1])
        if draws is not None:
            ones, zeros = (
                np.nansum(draws[:, None] * (targets == value), axis=0) for value in (1, 0)
            )
            np.divide(zeros, ones, out=weights, where=(ones > 0) & (zeros > 0))
        return MultilabelObjective(weights)
    if task == "regression":
        return RegressionObjective.of(targets, loss)
    if task == "survival":
        return CoxObjective.of(targets) if loss == "cox" else DiscreteSurvival.of(targets)
    return ClassObjective(classes)


def recorded_objective(
    task: str, loss: str, facts: Mapping[str, Any], *, outputs: int
) -> Objective:
    """Return the objective of a finished run, from its `Objective.facts`. `outputs` is the number of classes or labels.

    Raises:
        KeyError, TypeError: the facts are not those of this task.
    """
    if task == "multilabel":
        return MultilabelObjective(np.ones(outputs))
    if task == "regression":
        return RegressionObjective(facts["mean"], facts["deviation"], loss)
    if task == "survival" and loss == "cox":
        return CoxObjective(facts["times"], facts["baseline"])
    if task == "survival":
        return DiscreteSurvival(facts["times"], facts["edges"])
    return ClassObjective(outputs)
