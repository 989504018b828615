"""A search's trials, shared by processes that may die: each trial is at one of them, and none is lost with it.

A process holds a lock file for the trial that it is at, which the kernel lets go of when it ends. A trial that is under way and that
nobody holds was left behind: the next process goes on with it, as the same trial, from its saved state. Who looks for one, or asks for a
new one, holds the search's own lock, so that two never take the same.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import UsageError
from histopipe.studies.search_space import SearchSpace
from histopipe.studies.settings import StudySettings
from histopipe.studies.storage import load_optuna, open_storage
from histopipe.system.hashing import combine
from histopipe.system.locks import lock_if_free

if TYPE_CHECKING:
    import optuna

TRIALS = "trials"
_HOME, _SETTINGS = "home", "settings"
_LOCK, _ID = "study.lock", "study.id"
_POLL_SECONDS = 1.0
_START_TRIALS = 5


class Study:
    """A search that several processes may be at.

    Args:
        folder: of the search, which all processes see; on other machines one of their own, with `settings.storage`.
        settings: how it is run.
        space: what is searched.
        base: what else decides what is measured: another base is another search.

    Raises:
        UsageError: the storage cannot be opened, or holds another search by this name.
    """

    def __init__(
        self, folder: Path, settings: StudySettings, space: SearchSpace, base: Mapping[str, Any]
    ) -> None:
        self._optuna = load_optuna()
        self._folder, self._settings, self._space = folder, settings, space
        self._check_locks()
        with self.locked():
            self._study = self._optuna.create_study(
                storage=open_storage(settings.storage, folder), load_if_exists=True,
                study_name=settings.name or folder.resolve().name, direction=settings.direction,
                pruner=self._pruner(),
            )  # fmt: skip
            self._home = self._identity()
            # By way of text, as the storage gives it back.
            wanted = json.dumps([space.to_json(), dict(base), settings.metric], sort_keys=True)
            found = self._study.user_attrs.get(_SETTINGS)
            if found is None:
                self._study.set_user_attr(_SETTINGS, wanted)
            elif found != wanted:
                raise UsageError(
                    f"{settings.storage or folder} holds a search with other settings",
                    expected="the same space, configuration, stores and metric",
                    todo="choose another --out (or --name, with --storage)",
                )

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All of them, by number."""
        trials: list[optuna.trial.FrozenTrial] = self._study.get_trials(deepcopy=False)
        return trials

    def folder_of(self, number: int) -> Path:
        """A trial's run folder."""
        return self._folder / TRIALS / f"trial-{number:04d}"

    @contextmanager
    def claimed(self) -> Iterator[optuna.trial.Trial | None]:
        """A trial to work at, one that was left behind or a new one; None if there is none to be had now."""
        with self.locked():
            trial, held = self._left_behind() or self._new() or (None, None)
        try:
            yield trial
        finally:
            if held is not None:
                os.close(held)

    def wait(self) -> bool:
        """Wait a moment for trials that others are at. False if there is none of which this process would hear."""
        under_way = [t for t in self.trials() if not t.state.is_finished() and self._is_ours(t)]
        if under_way:
            time.sleep(_POLL_SECONDS)
        return bool(under_way)

    def tell(self, trial: optuna.trial.Trial, value: float | None, state: str) -> None:
        """How a trial ended: "COMPLETE", "PRUNED" or "FAIL"."""
        state_of = self._optuna.trial.TrialState
        values = value if state == "COMPLETE" else None
        self._study.tell(trial.number, values, state=state_of[state])

    def _left_behind(self) -> tuple[optuna.trial.Trial, int] | None:
        for frozen in self.trials():
            if frozen.state.name == "RUNNING" and self._is_ours(frozen):
                held = self._hold(frozen.number)
                if held is not None:
                    # The constructor is Optuna's own way of going on with a trial; it is not documented.
                    trial = self._optuna.Trial(self._study, frozen._trial_id)
                    return trial, held
        return None

    def _new(self) -> tuple[optuna.trial.Trial, int] | None:
        trials = self.trials()
        waiting = [trial for trial in trials if trial.state.name == "WAITING"]
        if len(trials) >= self._settings.trials and not waiting:
            return None
        if not waiting:
            # Whose it is must be known from its first moment, in case this process ends in the next.
            self._study.enqueue_trial({}, user_attrs={_HOME: self._home})
        self._study.sampler = self._sampler(len(trials))
        trial = self._study.ask()
        if trial.user_attrs.get(_HOME) != self._home:
            trial.set_user_attr(_HOME, self._home)
        held = self._hold(trial.number)
        assert held is not None  # noqa: S101 - nobody else knows of it yet
        return trial, held

    def _is_ours(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether a trial's run is in this folder, and so are the locks of who is at it."""
        return trial.user_attrs.get(_HOME) == self._home

    def _hold(self, number: int) -> int | None:
        """Hold a trial; None if another process does."""
        folder = self._folder / TRIALS
        folder.mkdir(exist_ok=True)
        held = os.open(folder / f"{number:04d}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        if lock_if_free(held):
            return held
        os.close(held)
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """What one process at a time may do in the folder."""
        held = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while not lock_if_free(held):
                time.sleep(0.05)
            yield
        finally:
            os.close(held)

    def _check_locks(self) -> None:
        """Whether the folder's filesystem has locks: without, two processes would be at one trial."""
        path = self._folder / f"{_LOCK}.{uuid.uuid4().hex}"
        first = os.open(path, os.O_RDWR | os.O_CREAT)
        second = os.open(path, os.O_RDWR)
        try:
            if lock_if_free(first) and lock_if_free(second):
                raise UsageError(
                    f"{self._folder} is on a filesystem without locks",
                    todo="choose an --out that has them (a local disk, or NFS with its lock service)",
                )
        finally:
            os.close(first)
            os.close(second)
            path.unlink()

    def _identity(self) -> str:
        """What the folder is known by, on whichever machine and path."""
        path = self._folder / _ID
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def _pruner(self) -> optuna.pruners.BasePruner:
        pruners = self._optuna.pruners
        if self._settings.pruner == "none":
            return pruners.NopPruner()  # type: ignore[no-any-return]
        return pruners.MedianPruner(n_startup_trials=_START_TRIALS)  # type: ignore[no-any-return]

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """A sampler for one trial: of one seed for all, processes would draw the same."""
        samplers = self._optuna.samplers
        seed = int(combine(self._settings.seed, number)) & 0x7FFFFFFF
        if self._settings.sampler == "random":
            return samplers.RandomSampler(seed)  # type: ignore[no-any-return]
        # Trials under way count as bad, so that processes do not crowd together.
        return samplers.TPESampler(seed=seed, constant_liar=True)  # type: ignore[no-any-return]
