"""The objectives by task."""

from __future__ import annotations

from collections.abc import Mapping

from histopipe.training.objective import (
    ClassObjective,
    CoxObjective,
    DiscreteSurvival,
    MultilabelObjective,
    Objective,
    RegressionObjective,
)
from histopipe.training.segmenter import SegmentationObjective

OBJECTIVES: Mapping[str, type[Objective]] = {
    "classification": ClassObjective,
    "multilabel": MultilabelObjective,
    "regression": RegressionObjective,
    "survival": DiscreteSurvival,
    "segmentation": SegmentationObjective,
    "cox": CoxObjective,
}
"""The objective of each task, or of a loss that has another one."""


def objective_class(task: str, loss: str) -> type[Objective]:
    """Return the class of the objective of a task with this loss."""
    return OBJECTIVES.get(loss) or OBJECTIVES[task]
