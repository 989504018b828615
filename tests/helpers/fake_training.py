"""Replacement for `supervise` in tests of how several trainings are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from helpers.runs import write_run
from histopipe.errors import HistopipeError
from histopipe.predictions.prediction_tables import PREDICTIONS
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import METRICS, TrainResult
from histopipe.runs.supervision import Supervision

Failure = HistopipeError | Callable[[Supervision], HistopipeError]


class StagedTrainings:
    """Each training is written by `write_run`, unless a failure is planned, which leaves an unfinished run.

    Args:
        failures: errors of the first attempts, in order, by the name of a run's folder.

    Attributes:
        attempts: names of the folders of all attempts.
        resumed: names of the folders of resumed attempts.
    """

    def __init__(self, failures: dict[str, list[Failure]]) -> None:
        self._failures, self._lock = failures, Lock()
        self.attempts: list[str] = []
        self.resumed: list[str] = []

    def __call__(
        self, config: TrainConfig, folder: Path, *, watch: Supervision, resume: bool = False
    ) -> TrainResult:
        name = folder.name
        with self._lock:
            self.attempts.append(name)
            self.resumed += [name] * resume
            failure = self._failures[name].pop(0) if self._failures.get(name) else None
            result = write_run(config, folder, resume=resume)
        if failure is None:
            return result
        for file in (METRICS, PREDICTIONS):
            (folder / file).unlink()
        raise failure if isinstance(failure, HistopipeError) else failure(watch)
