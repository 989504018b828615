"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from histopipe.tasks.choices import TaskName
from histopipe.tasks.classification import Classification, Multilabel
from histopipe.tasks.regression import Regression
from histopipe.tasks.segmentation import Segmentation
from histopipe.tasks.survival import Survival
from histopipe.tasks.task import Task

TASKS: Mapping[TaskName, type[Task]] = {
    task.name: task for task in (Classification, Multilabel, Regression, Survival, Segmentation)
}


def make_task(name: TaskName, columns: Sequence[str], classes: Sequence[str] = ()) -> Task:
    """Return the task of a name, with the columns of its target, or with its classes."""
    kind: Any = TASKS[name]
    task: Task = kind(classes=tuple(classes)) if kind.by_class else kind(tuple(columns))
    return task


def task_of_header(names: Sequence[str]) -> Task:
    """Return the task of a table of predictions, from its columns after those of the places.

    Raises:
        ValueError: there is none.
    """
    header_task = next(filter(None, (task.of_header(names) for task in TASKS.values())), None)
    if header_task is None:
        raise ValueError(f"unknown columns {', '.join(names)}")
    return header_task
