"""Settings of a search. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from histopipe.system.settings import ANY_PATH, check_settings, setting

SearchMetric = Literal["auc", "accuracy", "loss"]
Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "none"]
_SEARCH = "Search"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings of a search. `seed` is the seed of the sampler."""

    trials: int = setting(20, "Total number of trials of all processes.", group=_SEARCH, at_least=1)
    metric: SearchMetric = setting(
        "auc",
        "Validation metric to optimize; auc: R² for regression, the concordance index for survival.",
        group=_SEARCH,
    )
    sampler: Sampler = setting(
        "tpe", "Sampler: tpe (tree-structured Parzen estimator) or random.", group=_SEARCH
    )
    pruner: Pruner = setting(
        "median",
        "Pruner; median stops trials that are worse than the median at the same epoch.",
        group=_SEARCH,
    )
    trial_timeout: float = setting(
        0.0,
        "Time limit for an attempt at a trial, such as 2h; 0: none.",
        group=_SEARCH,
        at_least=0,
        format="duration",
    )
    retries: int = setting(0, "Number of retries of a failed trial.", group=_SEARCH, at_least=0)
    storage: str | None = setting(
        None,
        "Optuna storage: postgresql://, mysql://, redis://, sqlite:/// or a journal file.",
        group=_SEARCH,
        path=ANY_PATH,
        default_text="a file in --out",
    )
    name: str | None = setting(
        None, "Name of the search in --storage.", group=_SEARCH, default_text="that of --out"
    )
    seed: int = 1

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def direction(self) -> str:
        """Direction of the optimization: "minimize" or "maximize"."""
        return "minimize" if self.metric == "loss" else "maximize"
