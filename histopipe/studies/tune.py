"""Search for better settings. Each trial is a training in a separate process, evaluated on validation data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histopipe.errors import HistopipeError, Interrupted, NothingToDo, UsageError
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.recipe import with_recipe
from histopipe.runs.result import TrainResult, is_finished, read_result
from histopipe.runs.supervision import Supervision
from histopipe.runs.task_config import changed_config, make_config, with_stores
from histopipe.runs.training_data import new_splits, opened_sources, read_labelling
from histopipe.splits.splits import DROPPED, SPLITS, Splits, write_splits
from histopipe.splits.subsets import SUBSETS
from histopipe.studies.search_space import SearchSpace, read_space, space_of
from histopipe.studies.settings import Pruner, Sampler, SearchMetric, StudySettings
from histopipe.studies.study import TRIALS, Study, load_optuna
from histopipe.studies.trainings import TrainingOutcome, train_with_retries
from histopipe.studies.tune_result import TuneResult, summarize
from histopipe.system.csv_files import read_dicts
from histopipe.system.progress import Progress, default_progress
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.registry import TASKS

if TYPE_CHECKING:
    import optuna

_LOCAL = ("devices", "communication", "worker_timeout", "save_minutes", "log_device_placement")
"""Settings that may differ between the processes of a search."""
_MAX_WRONG_SETTINGS = 3
"""Number of trials with failing settings, and none that worked, after which the search ends."""


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
        name: name of the study in `storage`; the name of the folder if None.
        trial_timeout: time limit in seconds for one attempt at a trial; 0 for none.
        retries: number of retries of a failed trial.
        progress: shows messages; `default_progress()` if None.
        settings: fields of `TrainConfig`; settings of the space take precedence.

    Returns:
        All trials, and the settings of the best one.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: there is no store, or there are no labels.
        MachineShort: Optuna is not installed.
        Interrupted: by Ctrl-C or SIGTERM; the same call continues the search.

    Example:
        >>> space = {"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
        >>> result = tune("patches.lmdb", space=space, out="runs/study")  # doctest: +SKIP
        >>> result.best.settings  # doctest: +SKIP
    """
    settings = with_stores(settings, stores)
    search_space = space_of(space) if isinstance(space, Mapping) else read_space(Path(space))
    settings |= search_space.fixed
    base = make_config(settings)  # checks the settings before the folder is made
    if metric == "accuracy" and not TASKS[base.task].of_classes:
        raise UsageError("--metric", found=metric, expected=f"auc or loss for --task {base.task}")
    study_settings = StudySettings(
        trials=trials, metric=metric, sampler=sampler, pruner=pruner, seed=base.seed,
        storage=storage, name=name, trial_timeout=trial_timeout, retries=retries,
    )  # fmt: skip
    study = Study(Path(out), study_settings)
    base = make_config(with_recipe(settings, study.recorded_base))
    study.agree(search_space, {k: v for k, v in base.values().items() if k not in _LOCAL})
    with study.locked():
        _write_splits(base, study.folder)
    return _Search(base, search_space, study, progress or default_progress()).run()


@dataclass(slots=True)
class _Search:
    """The part of a search that this process runs."""

    _base: TrainConfig
    _space: SearchSpace
    _study: Study
    _progress: Progress
    _wrong_settings: list[HistopipeError] = field(default_factory=list)

    def run(self) -> TuneResult:
        """Train trials until all have ended, including those of other processes."""
        while True:
            with self._study.claimed() as trial:
                if trial is not None:
                    self._run_trial(trial)
                    continue
            if not self._study.wait():
                break
        return summarize(self._study, self._base)

    def _run_trial(self, trial: optuna.trial.Trial) -> None:
        params = self._space.suggest(trial)
        tried = ", ".join(f"{name} {value}" for name, value in trial.params.items())
        folder = self._study.folder_of(trial.number)
        verb, show = "resumes" if run_folder.has_begun(folder) else "starts", self._progress.message
        show(f"trial {trial.number} of {self._study.settings.trials} {verb}: {tried}")
        try:
            outcome = self._train(trial, params, folder)
        except load_optuna().TrialPruned:
            self._study.tell(trial, None, "PRUNED")
            show(f"trial {trial.number}: pruned")
            self._finish(folder)
            return
        if isinstance(outcome.error, Interrupted):
            summarize(self._study, self._base)
            raise Interrupted(
                "interrupted", found=f"trial {trial.number} is running",
                todo="run the same command again to continue it",
            ) from outcome.error  # fmt: skip
        value, reason = None, str(outcome.error)
        if outcome.result is not None:
            metrics = outcome.result.metrics["validation"].finest
            value = self._value(outcome.result, metrics)
            reason = (
                "the metric is undefined: the validation samples have only one class, or no event"
            )
        trial.set_user_attr("seconds", outcome.seconds)
        if value is None:
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, None, "FAIL")
            show(f"trial {trial.number}: failed: {reason}")
            self._check_settings(outcome.error, folder)
        else:
            self._study.tell(trial, value, "COMPLETE")
            show(f"trial {trial.number}: validation {self._metric} {value:.4f}")
        self._finish(folder)

    def _value(self, result: TrainResult, metrics: Metrics) -> float | None:
        """Return the metric of a trial on validation."""
        if self._metric == "loss":
            if "log_loss" in metrics.values:
                return metrics.values["log_loss"]
            history = read_dicts(result.folder / run_folder.HISTORY)
            rows = {int(row["epoch"]): float(row["val_loss"]) for row in history}
            # Epoch 0, the covariates alone, has no row, and a loss that is lower than in all rows.
            return rows.get(result.best_epoch, min(rows.values()))
        return metrics.values[self._metric]

    @property
    def _metric(self) -> str:
        """The metric of the search; "auc" stands for the main metric of a task without it."""
        metric = self._study.settings.metric
        return next(iter(TASKS[self._base.task].main)) if metric == "auc" else metric

    def _finish(self, folder: Path) -> None:
        """Remove the checkpoints of a trial, which are larger than the model, and summarize."""
        for path in folder.glob("resume*.npz"):
            path.unlink()
        summarize(self._study, self._base)

    def _train(
        self, trial: optuna.trial.Trial, params: Mapping[str, Any], folder: Path
    ) -> TrainingOutcome:
        if is_finished(folder):  # its process died before it recorded the result
            return TrainingOutcome(read_result(folder), None)
        settings = self._study.settings
        splits = str(self._study.folder / TRIALS / SPLITS)
        try:
            config = changed_config(self._base, splits=splits, **params)
        except UsageError as error:
            return TrainingOutcome(None, error)
        reported = set(self._study.trials()[trial.number].intermediate_values)

        def report(row: dict[str, Any]) -> None:
            value = row[f"val_{self._metric}"]
            if value is not None and row["epoch"] not in reported:
                trial.report(value, row["epoch"])
                if trial.should_prune():
                    raise load_optuna().TrialPruned

        watch = Supervision(seconds=settings.trial_timeout, epoch=report, alone=True)
        return train_with_retries(
            config, folder, watch, retries=settings.retries, progress=self._progress
        )

    def _check_settings(self, error: HistopipeError | None, folder: Path) -> None:
        """End the search if the first trials all fail because of their settings, before training."""
        if isinstance(error, UsageError | NothingToDo) and not run_folder.has_begun(folder):
            self._wrong_settings.append(error)
        ended = [t for t in self._study.trials() if t.state.name in ("COMPLETE", "PRUNED")]
        if not ended and len(self._wrong_settings) >= _MAX_WRONG_SETTINGS:
            raise self._wrong_settings[0]


def _write_splits(base: TrainConfig, folder: Path) -> None:
    """Write the splits of the search, and the splits without test patches for the trials, unless they exist."""
    whole, without_test = folder / SPLITS, folder / TRIALS / SPLITS
    if whole.exists() and without_test.exists():
        return
    with opened_sources(base, base.splits) as sources:
        labelling = read_labelling(base, sources, required=base.splits is None)
        splits = new_splits(base, sources, labelling)
    write_splits(_without_test(splits), without_test)
    write_splits(splits, whole)


def _without_test(splits: Splits) -> Splits:
    test = SUBSETS.index("test")
    slides = [
        replace(
            slide, subsets=np.where(slide.subsets == test, DROPPED, slide.subsets).astype(np.int8)
        )
        for slide in splits.slides
    ]
    return replace(splits, slides=tuple(slides))
