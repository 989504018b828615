"""The objective of a task: from its training targets, or from the facts that a run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.training.objective import (
    Classification,
    MultilabelObjective,
    Objective,
    RegressionObjective,
)
from histopipe.training.survival_objective import CoxObjective, DiscreteSurvival


def make_objective(
    task: str, loss: str, targets: NDArray[np.float64], *, classes: int, balanced: bool
) -> Objective:
    """Return the objective of a task, from the (N, T) training targets. `balanced` weights the labels of multilabel."""
    if task == "multilabel":
        positives = np.maximum(np.nansum(targets, axis=0), 1)
        negatives = np.maximum(np.isfinite(targets).sum(axis=0) - positives, 1)
        return MultilabelObjective(negatives / positives if balanced else np.ones(targets.shape[1]))
    if task == "regression":
        return RegressionObjective.of(targets, loss)
    if task == "survival":
        return CoxObjective.of(targets) if loss == "cox" else DiscreteSurvival.of(targets)
    return Classification(classes)


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
    return Classification(outputs)
