"""Search for better settings. Each trial is a training in a separate process, evaluated on validation data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histopipe.errors import DamagedStore, HistopipeError, Interrupted, NothingToDo, UsageError
from histopipe.evaluation.evaluate import number
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import Run, TrainResult
from histopipe.runs.supervision import Supervision, train_with_retries
from histopipe.runs.task_config import CONFIGS, changed_config, make_config
from histopipe.runs.train import with_recipe, with_stores, within_budget
from histopipe.runs.training_data import new_splits, opened_sources, read_labelling
from histopipe.search.search_settings import (
    Pruner,
    Sampler,
    SearchMetric,
    SearchSettings,
    SearchSpace,
    read_space,
    settings_of,
    space_of,
)
from histopipe.search.shared_search import SharedSearch, load_optuna
from histopipe.splits.splits import DROPPED, SPLITS, write_splits
from histopipe.system.files import write_atomically
from histopipe.system.output import Progress, aligned, default_progress
from histopipe.system.settings import declared_settings, takes, to_toml
from histopipe.system.table_files import read_dicts, write_dicts
from histopipe.tasks.choices import TEST
from histopipe.tasks.registry import TASKS

if TYPE_CHECKING:
    import optuna


_BEST, TRIALS_CSV = "best.toml", "trials.csv"
_STATES = {
    "COMPLETE": "done",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "waiting",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Attributes:
        number: from 0.
        folder: folder of its run.
        state: "done", "pruned", "failed", "running" or "waiting".
        value: its validation metric.
        settings: settings from the search space.
        seconds: duration of all attempts.
        reason: reason why it failed.
    """

    number: int
    folder: Path
    state: str
    value: float | None
    settings: Mapping[str, Any]
    epochs: int | None
    seconds: float | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, with the settings as columns."""
        return {
            "trial": self.number,
            "state": self.state,
            "value": self.value,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "reason": self.reason,
            **{name: _as_text(value) for name, value in self.settings.items()},
        }


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult:
    """Result of `tune`.

    Attributes:
        folder: folder of the search.
        trials: all trials by number.
        best: the best trial; None if no trial is done.
        config: settings for a training: those of the best trial, and splits with test patches.
    """

    folder: Path
    trials: tuple[Trial, ...]
    best: Trial | None
    config: TrainConfig | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "folder": str(self.folder),
            "best": self.best.number if self.best else None,
            "trials": [trial.to_json() for trial in self.trials],
        }

    def __repr__(self) -> str:
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.settings))
        rows = [["trial", "state", "value", "epochs", "s", *names]]
        rows += [
            [
                str(trial.number),
                trial.state + (" *best" if trial is self.best else ""),
                number(trial.value, 4),
                str(trial.epochs or "-"),
                number(trial.seconds, 0),
                *(_short(trial.settings.get(name)) for name in names),
            ]
            for trial in self.trials
        ]
        lines = [
            *aligned(rows),
            *(f"trial {trial.number}: {trial.reason}" for trial in self.trials if trial.reason),
        ]
        if self.best is not None:
            lines.append(
                f"train with the best settings: histopipe train --config {self.folder / _BEST}"
            )
        return "\n".join(lines)


def summarize(search: SharedSearch, base: TrainConfig) -> TuneResult:
    """Summarize the trials so far. Write `trials.csv`, and `best.toml` for `histopipe train --config`."""
    trials = tuple(_trial(trial, search.folder_of(trial.number)) for trial in search.trials())
    done = [(trial.value, trial) for trial in trials if trial.value is not None]
    sign = -1 if search.settings.direction == "minimize" else 1
    # If trials are equal, the first one is the best.
    _, best = max(done, key=lambda pair: sign * pair[0], default=(0.0, None))
    config = (
        None
        if best is None
        else _with_absolute_paths(changed_config(base, **best.settings), search.folder)
    )
    result = TuneResult(search.folder, trials, best, config)
    with search.locked():
        write_dicts(search.folder / TRIALS_CSV, [trial.to_json() for trial in result.trials])
        if config is not None:
            write_atomically(search.folder / _BEST, to_toml(config))
    return result


def _with_absolute_paths(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return settings with absolute paths and the splits of the search, so that `best.toml` works in any folder."""
    values = config.values() | {"splits": str(folder / SPLITS), "time_budget": 0.0, "more_time": ""}
    declared = declared_settings(type(config))
    return make_config(
        {name: declared[name].with_absolute_paths(value) for name, value in values.items()}
    )


def _trial(trial: optuna.trial.FrozenTrial, folder: Path) -> Trial:
    epochs = max(trial.intermediate_values, default=None)
    if Run(folder).is_finished:
        try:
            epochs = Run(folder).result.epochs
        except DamagedStore:
            epochs = None
    return Trial(
        trial.number,
        folder,
        _STATES[trial.state.name],
        trial.value if trial.state.name == "COMPLETE" else None,
        settings_of(trial.params),
        epochs,
        trial.user_attrs.get("seconds"),
        trial.user_attrs.get("reason"),
    )


def _as_text(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = "-" if value is None else str(_as_text(value))
    return f"{value:.3g}" if isinstance(value, float) else text


_LOCAL = ("devices", "communication", "worker_timeout", "save_minutes", "log_device_placement")
"""Settings that may differ between the processes of a search."""
_MAX_WRONG_SETTINGS = 3
"""Number of trials with failing settings, and none that worked, after which the search ends."""


@takes(declared_settings(*CONFIGS))
def tune(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    trials: int = 20,
    metric: SearchMetric = "auc",
    sampler: Sampler = "tpe",
    pruner: Pruner = "median",
    storage: str | None = None,
    name: str | None = None,
    trial_timeout: float = 0.0,
    retries: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> TuneResult:
    """Search for settings with a better validation metric. Trials do not use the test patches.

    The same call continues the search. Several processes with the same folder share the trials.

    Args:
        stores: one store or several; "patches.lmdb" if None.
        space: search space, as for `read_space`.
        out: folder of the search.
        trials: total number of trials, including those of other processes and earlier calls.
        metric: validation metric: "auc" (for regression R², for survival the concordance index), "accuracy" or "loss".
        sampler: "tpe" or "random".
        pruner: "median" stops trials that are worse than the median at the same epoch; "none".
        storage: Optuna storage, for machines without a common folder; a file in `out` if None.
        name: name of the search in `storage`; the name of the folder if None.
        trial_timeout: time limit in seconds for one attempt at a trial; 0 for none.
        retries: number of retries of a failed trial.
        progress: shows messages; `default_progress()` if None.
        settings: fields of `TrainConfig`; settings of the space take precedence.

    Returns:
        All trials, and the settings of the best one.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine; or version 0.2 began the search in `out`.
        NothingToDo: there is no store, or there are no labels.
        MachineShort: Optuna is not installed.
        Interrupted: by Ctrl-C or SIGTERM; the same call continues the search.

    Example:
        >>> space = {"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
        >>> result = tune("patches.lmdb", space=space, out="runs/search")  # doctest: +SKIP
        >>> result.best.settings  # doctest: +SKIP
    """
    settings = with_stores(settings, stores)
    search_space = space_of(space) if isinstance(space, Mapping) else read_space(Path(space))
    settings |= search_space.fixed
    base = make_config(settings)  # checks the settings before the folder is made
    if not base.fractions[1]:
        raise UsageError(
            "--fractions",
            found=base.fractions,
            expected="a share of validation, which the search uses",
        )
    if base.conformal:
        raise UsageError(
            "--conformal", found="a search", expected="a training with the best settings"
        )
    if metric == "accuracy" and not TASKS[base.task].of_classes:
        raise UsageError("--metric", found=metric, expected=f"auc or loss for --task {base.task}")
    search = SharedSearch(
        Path(out),
        SearchSettings(
            trials=trials,
            metric=metric,
            sampler=sampler,
            pruner=pruner,
            seed=base.seed,
            storage=storage,
            name=name,
            trial_timeout=trial_timeout,
            retries=retries,
        ),
    )
    base = make_config(with_recipe(settings, search.recorded_base))
    base = within_budget(base, {**settings, **search_space.searched}, runs=trials)
    search.agree(search_space, {k: v for k, v in base.values().items() if k not in _LOCAL})
    with search.locked():
        _write_splits(base, search.folder)
    progress = progress or default_progress()
    result = _Search(base, search_space, search, progress).run()
    if base.more_time:
        progress.message(base.more_time)
    return result


@dataclass(slots=True)
class _Search:
    """The part of a search that this process runs."""

    _base: TrainConfig
    _space: SearchSpace
    _search: SharedSearch
    _progress: Progress
    _wrong_settings: list[HistopipeError] = field(default_factory=list)

    def run(self) -> TuneResult:
        """Train trials until all have ended, including those of other processes."""
        running = True
        while running:
            with self._search.claimed() as trial:
                if trial is not None:
                    self._run_trial(trial)
            running = trial is not None or self._search.wait()
        return summarize(self._search, self._base)

    def _run_trial(self, trial: optuna.trial.Trial) -> None:
        params = self._space.suggest(trial)
        settings = ", ".join(f"{name} {value}" for name, value in trial.params.items())
        folder = self._search.folder_of(trial.number)
        verb, show = "resumes" if run_folder.has_begun(folder) else "starts", self._progress.message
        show(f"trial {trial.number} of {self._search.settings.trials} {verb}: {settings}")
        outcome: TrainResult | HistopipeError | None = None
        with suppress(load_optuna().TrialPruned):
            outcome, seconds = self._train(trial, params, folder)
        if isinstance(outcome, Interrupted):
            summarize(self._search, self._base)
            raise Interrupted(
                "interrupted",
                found=f"trial {trial.number} is running",
                todo="run the same command again to continue it",
            ) from outcome
        state, value, text = "PRUNED", None, "pruned"
        if outcome is not None:
            trial.set_user_attr("seconds", seconds)
            state, reason = "FAIL", str(outcome)
            if isinstance(outcome, TrainResult):
                value = self._value(outcome)
                reason = "the metric is undefined: the validation samples have only one class, or no event"
            if value is None:
                trial.set_user_attr("reason", reason)
                text = f"failed: {reason}"
            else:
                state, text = "COMPLETE", f"validation {self._metric} {value:.4f}"
        self._search.tell(trial, value, state)
        show(f"trial {trial.number}: {text}")
        if state == "FAIL":
            self._check_settings(outcome, folder)
        # The checkpoints are larger than the model.
        for path in folder.glob("resume*.npz"):
            path.unlink()
        summarize(self._search, self._base)

    def _value(self, result: TrainResult) -> float | None:
        """Return the metric of a trial on validation."""
        values = result.metrics["validation"].finest.values
        name = "log_loss" if self._metric == "loss" else self._metric
        if name != "log_loss" or name in values:
            return values[name]
        rows = {
            int(row["epoch"]): float(row["val_loss"])
            for row in read_dicts(result.folder / run_folder.HISTORY)
        }
        # Epoch 0, the covariates alone, has no row, and a loss that is lower than in all rows.
        return rows.get(result.best_epoch, min(rows.values()))

    @property
    def _metric(self) -> str:
        """The metric of the search; "auc" stands for the main metric of a task without it."""
        metric = self._search.settings.metric
        return next(iter(TASKS[self._base.task].main)) if metric == "auc" else metric

    def _train(
        self, trial: optuna.trial.Trial, params: Mapping[str, Any], folder: Path
    ) -> tuple[TrainResult | HistopipeError, float]:
        """Return the result or the error of a trial, and the duration of its attempts in seconds."""
        if Run(folder).is_finished:  # its process died before it recorded the result
            return Run(folder).result, 0.0
        try:
            config = changed_config(
                self._base, splits=str(self._search.folder / run_folder.TRIALS / SPLITS), **params
            )
        except UsageError as error:
            return error, 0.0
        reported = set(self._search.trials()[trial.number].intermediate_values)

        def report(row: dict[str, Any]) -> None:
            value = row[f"val_{self._metric}"]
            if value is not None and row["epoch"] not in reported:
                trial.report(value, row["epoch"])
                if trial.should_prune():
                    raise load_optuna().TrialPruned

        settings = self._search.settings
        watch = Supervision(seconds=settings.trial_timeout, epoch=report, alone=True)
        outcome, _, seconds = train_with_retries(
            config, folder, watch, retries=settings.retries, progress=self._progress
        )
        return outcome, seconds

    def _check_settings(self, error: object, folder: Path) -> None:
        """End the search if the first trials all fail because of their settings, before training."""
        if isinstance(error, UsageError | NothingToDo) and not run_folder.has_begun(folder):
            self._wrong_settings.append(error)
        worked = any(t.state.name in ("COMPLETE", "PRUNED") for t in self._search.trials())
        if not worked and len(self._wrong_settings) >= _MAX_WRONG_SETTINGS:
            raise self._wrong_settings[0]


def _write_splits(base: TrainConfig, folder: Path) -> None:
    """Write the splits of the search, and the splits without test patches for the trials, unless they exist."""
    whole, without_test = folder / SPLITS, folder / run_folder.TRIALS / SPLITS
    if whole.exists() and without_test.exists():
        return
    with opened_sources(base, base.splits) as sources:
        splits = new_splits(
            base, sources, read_labelling(base, sources, required=base.splits is None)
        )
    slides = tuple(
        replace(slide, subsets=np.where(slide.subsets == TEST, np.int8(DROPPED), slide.subsets))
        for slide in splits.slides
    )
    write_splits(replace(splits, slides=slides), without_test)
    write_splits(splits, whole)
