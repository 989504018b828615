"""Choices without NumPy, since `--help` lists them: tasks and their losses, subsets of a split, levels of an evaluation
and aggregations of patches to them, what changes patches before a network gets them.
"""

from __future__ import annotations

from typing import Literal, get_args

TaskName = Literal["classification", "multilabel", "regression", "survival", "segmentation"]
Loss = Literal["auto", "huber", "squared", "cox", "discrete"]
LOSSES: dict[TaskName, tuple[Loss, ...]] = {
    "classification": (),
    "multilabel": (),
    "regression": ("huber", "squared"),
    "survival": ("cox", "discrete"),
    "segmentation": (),
}
"""Losses of each task; the first is the default."""


def chosen_loss(task: TaskName, loss: str) -> str:
    """Return a loss, that of a task for "auto"; empty for tasks with one loss, and for unknown tasks."""
    return loss if loss != "auto" else next(iter(LOSSES.get(task, ())), "")


Subset = Literal["train", "validation", "test", "calibration"]
SplitBy = Literal["patient", "site", "slide", "region", "patch"]
LabelsFrom = Literal["slide", "annotation"]

SUBSETS: tuple[Subset, ...] = get_args(Subset)
EVALUATED = SUBSETS[:3]
"""Those that fractions divide, and that have metrics. Patients who calibrate prediction sets are set aside from training."""
TRAIN, VALIDATION, TEST, CALIBRATION = range(len(SUBSETS))
"""Numbers of the subsets, as in arrays."""

EvaluationLevel = Literal["patch", "slide", "patient"]
Aggregation = Literal["mean", "top_k", "majority"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
LEVELS: tuple[tuple[EvaluationLevel, Aggregation], ...] = (
    ("patch", "mean"),
    *(("slide", how) for how in AGGREGATIONS),
    *(("patient", how) for how in AGGREGATIONS),
)
"""Levels and aggregations of an evaluation; patches are not aggregated."""
LEVELS_OF: dict[EvaluationLevel, tuple[tuple[EvaluationLevel, Aggregation], ...]] = {
    "patch": LEVELS,
    "slide": (("slide", "mean"), ("patient", "mean")),
    "patient": (("patient", "mean"),),
}
"""Levels at which predictions of each level can be evaluated. Slides are aggregated to patients by their mean only."""


def name_of(level: EvaluationLevel, how: Aggregation) -> str:
    """Return the name of a level: `patch`, `slide_mean`, …"""
    return level if level == "patch" else f"{level}_{how}"


Balance = Literal["none", "class", "slide", "patient"]
Augmentation = Literal["flips", "crop", "stain", "colour"]
StainNorm = Literal["none", "reinhard", "macenko"]
AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
"""Augmentations, in the order in which they are applied."""
