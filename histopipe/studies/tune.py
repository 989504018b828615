"""A search for better settings: trials in processes of their own, judged on validation, never on test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histopipe.dataset.options import SIDES
from histopipe.dataset.splits import DROPPED, Splits, write_splits
from histopipe.errors import HistopipeError, Interrupted, NothingToDo, UsageError
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult, is_finished, read_result
from histopipe.runs.splits import new_splits, opened_sources
from histopipe.runs.task_config import changed_config, make_config
from histopipe.studies.attempts import Limits, Outcome, attempt, has_begun
from histopipe.studies.search_space import SearchSpace, read_space, space_of
from histopipe.studies.settings import Metric, Pruner, Sampler, StudySettings
from histopipe.studies.storage import load_optuna
from histopipe.studies.study import TRIALS, Study
from histopipe.studies.tune_result import TuneResult, result_of, write_tune_result
from histopipe.system.progress import message

if TYPE_CHECKING:
    import optuna

_LOCAL = ("devices", "communication", "worker_timeout", "save_minutes", "log_device_placement")
"""Settings that may differ between the processes of a search."""
_HOPELESS = 3
"""Trials that may fail for their settings before anything worked; then it is not the search space."""


def tune(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    trials: int = 20,
    metric: Metric = "auc",
    sampler: Sampler = "tpe",
    pruner: Pruner = "median",
    storage: str | None = None,
    name: str | None = None,
    trial_timeout: float = 0.0,
    retries: int = 0,
    **settings: Any,
) -> TuneResult:
    """Search for settings that do better on validation. The test patches are kept from every trial.

    Called once more it goes on; called by several processes with the same folder they share the trials.

    Args:
        stores: a store, or several; "patches.lmdb" if not given.
        space: what is searched, as `read_space`.
        out: the search's folder.
        trials: how many, of all processes together, those of earlier calls included.
        metric: of validation: "auc", "accuracy" or "loss".
        sampler: "tpe" or "random".
        pruner: "median" or "none".
        storage: an Optuna storage that machines without a common folder share; None for a file in `out`.
        name: of the study there; None for that of the folder.
        trial_timeout: seconds for an attempt at a trial; 0 for as long as it takes.
        retries: further attempts at a trial that failed.
        settings: by the names of `TrainConfig`; those of the space go before them.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: no store, or nothing to tell apart.
        MachineShort: Optuna is not installed.
        Interrupted: told to stop; the same call goes on.

    Example:
        >>> space = {"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
        >>> result = tune("patches.lmdb", space=space, out="runs/study")  # doctest: +SKIP
        >>> result.best.settings  # doctest: +SKIP
    """
    if stores is not None:
        paths = [stores] if isinstance(stores, str | Path) else stores
        settings["stores"] = tuple(map(str, paths))
    found = space_of(space) if isinstance(space, Mapping) else read_space(Path(space))
    base = make_config(settings | dict(found.fixed))
    own = StudySettings(
        trials=trials, metric=metric, sampler=sampler, pruner=pruner, seed=base.seed,
        storage=storage, name=name, trial_timeout=trial_timeout, retries=retries,
    )  # fmt: skip
    limits = Limits(seconds=own.trial_timeout, retries=own.retries)
    return Search(base, found, own, Path(out)).run(limits)


class Search:
    """A search under way in this process.

    Args:
        base: settings of all trials.
        space: what differs.
        settings: how it is run.
        folder: of the search.
    """

    def __init__(
        self, base: TrainConfig, space: SearchSpace, settings: StudySettings, folder: Path
    ) -> None:
        self._base, self._space, self._settings, self._folder = base, space, settings, folder
        self._failed_at_once: list[HistopipeError] = []
        self._optuna = load_optuna()
        with run_folder.writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TRIALS).mkdir(exist_ok=True)
        facts = {k: v for k, v in base.values().items() if k not in _LOCAL}
        self._study = Study(folder, settings, space, facts)
        with self._study.locked():
            _write_splits(base, folder)

    def run(self, limits: Limits) -> TuneResult:
        """Work at trials until all have ended.

        Raises:
            HistopipeError: as `tune`.
        """
        while True:
            with self._study.claimed() as trial:
                if trial is not None:
                    self._work_at(trial, limits)
                    continue
            if not self._study.wait():
                break
        return self._summed_up()

    def _summed_up(self) -> TuneResult:
        result = result_of(
            self._folder, self._base, self._study.trials(), self._study.folder_of,
            direction=self._settings.direction,
        )  # fmt: skip
        with self._study.locked():
            write_tune_result(result)
        return result

    def _work_at(self, trial: optuna.trial.Trial, limits: Limits) -> None:
        params = self._space.suggest(trial)
        told = ", ".join(f"{name} {value}" for name, value in trial.params.items())
        folder = self._study.folder_of(trial.number)
        going_on = "goes on" if has_begun(folder) else "begins"
        message(f"trial {trial.number} of {self._settings.trials} {going_on}: {told}")
        try:
            outcome = self._train(trial, params, folder, limits)
        except self._optuna.TrialPruned:
            self._study.tell(trial, None, "PRUNED")
            message(f"trial {trial.number}: pruned")
            _forget_state(folder)
            self._summed_up()
            return
        if isinstance(outcome.error, Interrupted):
            self._summed_up()
            raise Interrupted(
                "interrupted", found=f"trial {trial.number} under way",
                todo="the same command goes on with it",
            ) from outcome.error  # fmt: skip
        value, reason = self._value_of(outcome)
        trial.set_user_attr("seconds", outcome.seconds)
        if value is None:
            trial.set_user_attr("reason", reason)
            self._study.tell(trial, None, "FAIL")
            message(f"trial {trial.number}: failed: {reason}")
            self._give_up_if_hopeless(outcome, folder)
        else:
            self._study.tell(trial, value, "COMPLETE")
            message(f"trial {trial.number}: validation {self._settings.metric} {value:.4f}")
        _forget_state(folder)
        self._summed_up()

    def _train(
        self, trial: optuna.trial.Trial, params: Mapping[str, Any], folder: Path, limits: Limits
    ) -> Outcome:
        if is_finished(folder):  # by a process that died before it could say so
            return Outcome(read_result(folder), None, 0, 0.0, 0)
        splits = str(self._folder / TRIALS / run_folder.SPLITS)
        try:
            config = changed_config(self._base, splits=splits, **params)
        except UsageError as error:
            return Outcome(None, error, 0, 0.0, 0)
        known_steps = set(self._study.trials()[trial.number].intermediate_values)

        def report(row: dict[str, Any]) -> None:
            value = row[f"val_{self._settings.metric}"]
            if value is not None and row["epoch"] not in known_steps:
                trial.report(value, row["epoch"])
                if trial.should_prune():
                    raise self._optuna.TrialPruned

        return attempt(config, folder, limits, epoch=report)

    def _value_of(self, outcome: Outcome) -> tuple[float | None, str | None]:
        """What a trial is judged by, or why it cannot be."""
        if outcome.result is None:
            return None, str(outcome.error)
        value = validation_value(outcome.result, self._settings.metric)
        return value, None if value is not None else "validation has one class only"

    def _give_up_if_hopeless(self, outcome: Outcome, folder: Path) -> None:
        """End a search whose first trials all fail for their settings, before they begin."""
        error = outcome.error
        if isinstance(error, UsageError | NothingToDo) and not has_begun(folder):
            self._failed_at_once.append(error)
        ended = [t for t in self._study.trials() if t.state.name in ("COMPLETE", "PRUNED")]
        if not ended and len(self._failed_at_once) >= _HOPELESS:
            raise self._failed_at_once[0]


def validation_value(result: TrainResult, metric: str) -> float | None:
    """The best model's figure on the validation patches, or bags."""
    found = result.metrics["validation"].finest
    return {"auc": found.auc, "accuracy": found.accuracy, "loss": found.log_loss}[metric]


def _forget_state(folder: Path) -> None:
    """A trial that has ended does not go on: its resume state, larger than its model, is removed."""
    for path in folder.glob("resume*.npz"):
        path.unlink()


def _write_splits(base: TrainConfig, folder: Path) -> None:
    """The search's splits, and the same without test patches for the trials; as they are if they are there."""
    whole, without_test = folder / run_folder.SPLITS, folder / TRIALS / run_folder.SPLITS
    if whole.exists() and without_test.exists():
        return
    with opened_sources(base, base.splits) as sources:
        splits = new_splits(base, sources)
    write_splits(_without_test(splits), without_test)
    write_splits(splits, whole)


def _without_test(splits: Splits) -> Splits:
    test = SIDES.index("test")
    slides = [
        replace(slide, sides=np.where(slide.sides == test, DROPPED, slide.sides).astype(np.int8))
        for slide in splits.slides
    ]
    return replace(splits, slides=tuple(slides))
