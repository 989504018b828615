"""Settings of cross-validations and searches."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from histopipe.errors import UsageError
from histopipe.runs.setting_checks import flag, one_of

Metric = Literal["auc", "accuracy", "loss"]
Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """Settings of a cross-validation.

    Attributes:
        folds: number of folds; 0 for a single training.
        fold_timeout: time limit in seconds of one attempt at a fold; 0 for none.
        retries: number of retries of a fold that failed.
        parallel_folds: number of folds trained at once, each on its share of the GPUs.

    Raises:
        UsageError: a value is out of range.
    """

    folds: int = 0
    fold_timeout: float = 0.0
    retries: int = 0
    parallel_folds: int = 1

    def __post_init__(self) -> None:
        least = {"folds": 0, "fold_timeout": 0, "retries": 0, "parallel_folds": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            kinds = (int, float) if name == "fold_timeout" else (int,)
            if type(value) not in kinds or not bound <= value < inf:
                raise UsageError(flag(name), found=value, expected=f"{bound} or more")
        if self.folds == 1:
            raise UsageError("--folds", found=1, expected="2 or more, or 0 for a single training")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Settings of a search.

    Attributes:
        trials: number of trials, of all processes together.
        metric: validation metric to optimize.
        sampler: "tpe" or "random".
        pruner: "median" stops trials that are worse than the median at the same epoch; "none".
        seed: of the sampler.
        storage: see `open_storage`; None for a file in the folder of the search.
        name: of the study in that storage; None for the name of the folder.

    Raises:
        UsageError: a value is out of range.
    """

    trials: int = 20
    metric: Metric = "auc"
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    seed: int = 1
    storage: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if type(self.trials) is not int or self.trials < 1:
            raise UsageError("--trials", found=self.trials, expected="1 or more")
        for name, kind in (("metric", Metric), ("sampler", Sampler), ("pruner", Pruner)):
            one_of(flag(name), getattr(self, name), get_args(kind))

    @property
    def direction(self) -> str:
        """Direction of the optimization, as Optuna names it."""
        return "minimize" if self.metric == "loss" else "maximize"
