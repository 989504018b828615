"""`--time-budget`: what is trained, epochs and patches, chosen once before a training by the time of measured steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import DEFAULTS, PatchTrainConfig, changed_config
from histopipe.system.forecast import spelled
from histopipe.system.output import message
from histopipe.system.tensorflow import in_cluster, load_quietly
from histopipe.system.worker_pool import WorkerPool, result_of
from histopipe.tasks.choices import Subset

_PLANNED = 0.8
"""Share of the time that is planned: a few steps are not the whole training."""
_SHARE, _MOST_SECONDS = 0.02, 20.0
"""Share of the time for steps that are measured, training and prediction each; and the most seconds."""
_NAMED = ("trainable", "epochs", "head_copies", "patches_per_slide")
_ALL = "more time would change nothing"
_FEWEST_EPOCHS, _FEWEST_PATCHES, _FEWER = 3, 8, 0.8
"""Fewest epochs, fewest patches of a slide, and the factor from one number of patches to the next."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured speed of a training.

    Attributes:
        step, prediction: seconds of a sample in a step of the training, and in a prediction.
        start: seconds until the first step.
        samples: (S,) int samples of each slide in each subset.
    """

    step: float
    prediction: float
    start: float
    samples: Mapping[Subset, NDArray[np.int64]]

    def seconds(self, config: TrainConfig, runs: int = 1) -> float:
        """Return the expected seconds of `runs` trainings. They share the features of a frozen network."""
        most = getattr(config, "patches_per_slide", 0) or math.inf
        samples = {subset: np.minimum(n, most) for subset, n in self.samples.items()}
        drawn = np.minimum(samples["train"], config.max_per_slide or math.inf).sum()
        validated, tested = samples["validation"].sum(), samples["test"].sum()
        copies = getattr(config, "head_copies", 0)
        once = self.prediction * (copies * drawn + validated + tested) if copies else 0.0
        epoch = 0.0 if copies else drawn * self.step + validated * self.prediction
        last = 0.0 if copies else self.prediction * (validated + tested)
        return float(once + runs * (self.start + config.epochs * epoch + last))


def within_budget(config: TrainConfig, fixed: Mapping[str, Any], *, runs: int = 1) -> TrainConfig:
    """Return a configuration whose trainings take at most `time_budget`; without a budget, the same.

    The best of these that fits: all as configured; fewer epochs, but three; the last layer on features of augmented
    copies; without copies; and then fewer patches of each slide. `fixed` settings do not change. A choice is recorded in
    `more_time`, and not made again.

    Raises:
        UsageError: none fits, or this is one of several workers.
        HistopipeError: as a training.
    """
    budget = config.time_budget
    if not budget or config.more_time:
        return config
    if in_cluster():
        raise UsageError(
            "--time-budget", found="several workers (TF_CONFIG or Slurm)", expected="one machine"
        )
    message("measuring some steps for --time-budget")
    unchanged = {"head_copies": 0} if isinstance(config, PatchTrainConfig) else {}
    with WorkerPool(1) as pool:
        limit = min(_MOST_SECONDS, _SHARE * budget)
        pace = result_of(pool.submit(_measured, changed_config(config, **unchanged), limit))
    return chosen(config, fixed, pace, runs)


def chosen(config: TrainConfig, fixed: Collection[str], pace: Pace, runs: int) -> TrainConfig:
    """Return the best configuration that fits the budget at a measured speed; see `within_budget`."""
    budget, largest = (
        spelled(config.time_budget),
        max(n.max(initial=0) for n in pace.samples.values()),
    )
    for changes in _plans(config, fixed, int(largest)):
        planned = changed_config(config, **changes)
        seconds = pace.seconds(planned, runs)
        if seconds <= _PLANNED * config.time_budget:
            break
    else:
        raise UsageError(
            f"--time-budget {budget}",
            found=f"about {spelled(seconds / _PLANNED)}{_text(planned, changes, ' for ')}",
            expected="enough time for this",
            todo="give more time or fewer slides, and leave out --epochs, --trainable and --patches-per-slide",
        )
    message(f"--time-budget {budget}: about {spelled(seconds)}{_text(planned, changes, ' for ')}")
    minutes = math.ceil(pace.seconds(config, runs) / _PLANNED / 60)
    text = f"with --time-budget {minutes}m: {_text(config, changes)}" if changes else _ALL
    return changed_config(planned, more_time=text)


def _measured(config: TrainConfig, seconds: float) -> Pace:
    module = load_quietly("histopipe.training.pace", lean=True)
    return cast(Pace, module.measured_pace(config, seconds))


def _plans(config: TrainConfig, fixed: Collection[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that are not fixed, the best ones first. Slides have at most `most` patches."""
    changes: dict[str, Any] = {}
    yield changes
    copies = getattr(config, "head_copies", 0)
    for epochs in range(config.epochs - 1, _FEWEST_EPOCHS - 1, -1):
        if "epochs" not in fixed and not copies:
            changes = {"epochs": epochs}
            yield changes
    if not isinstance(config, PatchTrainConfig):
        return
    if not ("trainable" in fixed or config.max_per_slide or config.used_weights == "none"):
        of_head = {"trainable": "head", **DEFAULTS["patches"]["head"]}
        changes = {name: value for name, value in of_head.items() if name not in fixed}
        yield changes
    if changes.get("head_copies", copies) > 1 and "head_copies" not in fixed:
        changes = changes | {"head_copies": 1}
        yield changes
    while "patches_per_slide" not in fixed and (most := int(most * _FEWER)) >= _FEWEST_PATCHES:
        yield changes | {"patches_per_slide": most}


def _text(config: TrainConfig, changes: Mapping[str, Any], before: str = "") -> str:
    """Return the values of changed settings as text, after `before` if there is any."""
    values = {name: getattr(config, name) for name in _NAMED if name in changes}
    texts = [
        f"{name.replace('_', ' ')} {value or 'all'}"
        for name, value in values.items()
        if value or name != "head_copies"
    ]
    return before * bool(texts) + ", ".join(texts)
