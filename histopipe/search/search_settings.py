"""Settings of a search, and its space: a TOML file of settings with a range, a list of choices, or one value.

`--help` imports this module, so it imports nothing slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from histopipe.errors import UsageError
from histopipe.runs.task_config import CONFIGS
from histopipe.system.settings import (
    ANY_PATH,
    check_settings,
    check_type,
    declared_settings,
    read_toml,
    setting,
)

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


if TYPE_CHECKING:
    import optuna

DECLARED = declared_settings(*CONFIGS)
"""Settings of trainings, by name."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Searched settings and fixed settings, by name.

    `searched` has dicts with `low` and `high`, both included, `log` and `step`; or with `values`, the choices. In a
    choice, a list is a str with commas. Equal spaces have equal fields.
    """

    searched: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Suggest settings to a trial: an integer if both bounds of a range are integers."""
        params: dict[str, Any] = {}
        for name, values in self.searched.items():
            if "values" in values:
                params[name] = trial.suggest_categorical(name, values["values"])
            elif isinstance(values["low"], int) and isinstance(values["high"], int):
                params[name] = trial.suggest_int(
                    name, **{**values, "step": int(values["step"] or 1)}
                )
            else:
                params[name] = trial.suggest_float(name, **values)
        return settings_of(params)


def settings_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parameters of a trial to settings: split a str at its commas if the setting is a list."""
    return {
        name: tuple(part.strip() for part in value.split(",")) if DECLARED[name].is_list else value
        for name, value in params.items()
    }


def read_space(path: Path) -> SearchSpace:
    """Read a search space from TOML: `{low, high}`, with `log` or `step`, is a range; a list is a choice; else fixed.

    Raises:
        UsageError: the file cannot be read, or has settings that are unknown or cannot be searched.
    """
    return space_of(read_toml(path), str(path))


def space_of(values: Mapping[str, Any], where: str = "the search space") -> SearchSpace:
    """Create a search space from a mapping, as `read_space` does."""
    searched: dict[str, Mapping[str, Any]] = {}
    fixed: dict[str, Any] = {}
    for name, value in values.items():
        what = f"{where}: {name}"
        if name not in DECLARED:
            raise UsageError(what, expected="a setting of `histopipe train`, as in config.toml")
        if isinstance(value, Mapping):
            searched[name] = _read_range(what, name, value)
        elif isinstance(value, list | tuple):
            if len(set(map(repr, value))) < max(2, len(value)):
                raise UsageError(what, found=list(value), expected="two different values or more")
            searched[name] = {"values": tuple(_check_value(what, name, choice) for choice in value)}
        else:
            fixed[name] = settings_of({name: _check_value(what, name, value)})[name]
    refused = sorted(name for name in searched if not DECLARED[name].search)
    if refused:
        raise UsageError(
            f"{where}: {', '.join(refused)} cannot be searched",
            expected="the same value for all trials",
            todo="set one value",
        )
    if not searched:
        raise UsageError(
            f"{where}: nothing to search",
            expected="a range such as learning_rate = { low = 1e-5, high = 1e-2, log = true }, or a list of values",
        )
    return SearchSpace(searched, fixed)


def _read_range(what: str, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if set(value) - {"low", "high", "log", "step"} or not {"low", "high"} <= set(value):
        raise UsageError(what, found=dict(value), expected="{ low = …, high = … }, log or step")
    for key in [key for key in ("low", "high", "step") if key in value]:
        if DECLARED[name].is_list or isinstance(value[key], str | bool):
            raise UsageError(f"{what}.{key}", found=repr(value[key]), expected="a number")
        _check_value(f"{what}.{key}", name, value[key])
    log, step = value.get("log", False), value.get("step")
    if not isinstance(log, bool) or (log and step is not None):
        raise UsageError(what, found=dict(value), expected="log = true, or a step, not both")
    low, high = value["low"], value["high"]
    fits = -math.inf < low < high < math.inf and 0 < (step or high - low) <= high - low
    if not fits or (log and low <= 0):
        expected = "low below high" + (", low above 0" if log else ", a step within the range")
        raise UsageError(what, found=dict(value), expected=expected)
    if DECLARED[name].item_type is float:
        low, high = float(low), float(high)
    return {"low": low, "high": high, "log": log, "step": step}


def _check_value(what: str, name: str, value: Any) -> Any:
    if not DECLARED[name].is_list:
        check_type(what, value, DECLARED[name].type)
    elif not isinstance(value, str):
        raise UsageError(what, found=repr(value), expected="strings such as 'flips,crop'")
    return value
