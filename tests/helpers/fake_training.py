"""Replacement for `supervise` in tests of how several trainings are run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock

from histopipe.errors import HistopipeError
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult, read_result
from histopipe.runs.supervision import Supervision
from histopipe.runs.task_config import load_config
from histopipe.splits.splits import SPLITS

Failure = HistopipeError | Callable[[Supervision], HistopipeError]


class RecordedTrainings:
    """Each training copies the files of a recorded run, unless a failure is planned.

    Args:
        recorded: folder with the folders of real runs, with the same names.
        failures: errors of the first attempts, in order, by the name of a run's folder.

    Attributes:
        attempts: names of the folders of all attempts.
        resumed: names of the folders of resumed attempts.
    """

    def __init__(self, recorded: Path, failures: dict[str, list[Failure]] | None = None) -> None:
        self._recorded, self._failures = recorded, failures or {}
        self._lock = Lock()
        self.attempts: list[str] = []
        self.resumed: list[str] = []

    def __call__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        watch: Supervision,
        resume: bool = False,
    ) -> TrainResult:
        name, before = folder.name, self._recorded / folder.name
        with self._lock:
            self.attempts.append(name)
            self.resumed += [name] * resume
            failure = self._failures[name].pop(0) if self._failures.get(name) else None
        real = load_config(before / run_folder.CONFIG)
        assert replace(config, splits=None, devices="cpu") == replace(
            real, splits=None, devices="cpu"
        )
        run_folder.check(folder, resume=resume)
        folder.mkdir(exist_ok=True)
        for file in (SPLITS, run_folder.CONFIG):
            shutil.copy(before / file, folder / file)
        assert config.splits is not None
        assert Path(config.splits).read_bytes() == (before / SPLITS).read_bytes()
        if failure is not None:
            raise failure if isinstance(failure, HistopipeError) else failure(watch)
        shutil.copytree(before, folder, dirs_exist_ok=True)
        return replace(read_result(folder), folder=folder)
