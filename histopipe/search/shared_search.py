"""The trials of a search, shared by several processes. No trial is lost if a process dies.

A process locks a file for each trial that it trains. The kernel releases the lock when the process ends. A running
trial without a lock belongs to a process that died: the next process continues it from its last checkpoint. A second
lock, for the whole search, is held while a process takes a trial, so that no two processes take the same one.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from histopipe.errors import (
    UsageError,
    needs_extra,
)
from histopipe.runs import folder as run_folder
from histopipe.search.search_settings import DECLARED, SearchSettings, SearchSpace
from histopipe.system.files import make_folder, network_filesystem
from histopipe.system.folders import STUDY_ID
from histopipe.system.hashing import combine
from histopipe.system.locks import locked

if TYPE_CHECKING:
    import optuna


JOURNAL = "study.journal"
_HOME, _SETTINGS = "home", "settings"
_LOCK = "study.lock"
_POLL_SECONDS = 1.0


def _are_same(recorded: str, requested: str) -> bool:
    """Return whether two searches have the same settings, given as JSON.

    Settings that earlier versions did not have count as their defaults.
    """
    old_space, old_base, old_metric = json.loads(recorded)
    space, base, metric = json.loads(requested)
    added = {name: DECLARED[name].default for name in base.keys() - old_base.keys()}
    added = json.loads(json.dumps(added, default=str))
    return (old_space, old_base | added, old_metric) == (space, base, metric)


class SharedSearch:
    """A search that several processes may share.

    Processes share its folder; with `settings.storage`, other machines may use separate folders.

    Raises:
        UsageError: the storage cannot be opened.
    """

    def __init__(self, folder: Path, settings: SearchSettings) -> None:
        self._optuna = load_optuna()
        self.folder, self.settings = folder, settings
        make_folder(folder / run_folder.TRIALS, of=folder)
        self._check_locks()
        pruners, home = self._optuna.pruners, folder / STUDY_ID
        with self.locked():
            self._study = self._optuna.create_study(
                storage=open_storage(settings.storage, folder),
                load_if_exists=True,
                direction=settings.direction,
                study_name=settings.name or folder.resolve().name,
                pruner=pruners.NopPruner()
                if settings.pruner == "none"
                else pruners.MedianPruner(n_startup_trials=5),
            )
            if not home.exists():
                home.write_text(uuid.uuid4().hex)
            self._home = home.read_text()
            """Id of the folder, which does not depend on the machine or path."""

    @property
    def recorded_base(self) -> dict[str, Any] | None:
        """Settings that the search began with, by name; None for a new search."""
        recorded = self._study.user_attrs.get(_SETTINGS)
        return None if recorded is None else json.loads(recorded)[1]

    def agree(self, space: SearchSpace, base: Mapping[str, Any]) -> None:
        """Record the space and all other settings that affect results, or compare them with those recorded.

        Raises:
            UsageError: the storage holds another search with this name.
        """
        settings = self.settings
        requested = json.dumps([asdict(space), dict(base), settings.metric], sort_keys=True)
        with self.locked():
            recorded = self._study.user_attrs.get(_SETTINGS)
            if recorded is None:
                self._study.set_user_attr(_SETTINGS, requested)
            elif not _are_same(recorded, requested):
                raise UsageError(
                    f"{settings.storage or self.folder} holds a search with other settings",
                    expected="the same space, configuration, stores and metric",
                    todo="choose another --out (or --name, with --storage)",
                )

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return all trials by number."""
        return cast("list[optuna.trial.FrozenTrial]", self._study.get_trials(deepcopy=False))

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial's run."""
        return self.folder / run_folder.TRIALS / f"trial-{number:04d}"

    @contextmanager
    def claimed(self) -> Iterator[optuna.trial.Trial | None]:
        """Take a trial of a process that died, or a new trial. Yield None if no trial is available now."""
        with ExitStack() as held:
            with self.locked():
                trial = self._abandoned(held) or self._new(held)
            yield trial

    def wait(self) -> bool:
        """Wait a short time for the trials of other processes. Return False if none is running in this folder."""
        running = any(not t.state.is_finished() and self._is_here(t) for t in self.trials())
        if running:
            time.sleep(_POLL_SECONDS)
        return running

    def tell(self, trial: optuna.trial.Trial, value: float | None, state: str) -> None:
        """Record the final state of a trial: "COMPLETE", "PRUNED" or "FAIL"."""
        self._study.tell(trial.number, value, state=self._optuna.trial.TrialState[state])

    def locked(self) -> AbstractContextManager[bool]:
        """Return a lock of the search for this process, to be used in a `with` block."""
        return locked(self.folder / _LOCK, wait_seconds=math.inf)

    def _abandoned(self, held: ExitStack) -> optuna.trial.Trial | None:
        """Lock and return a running trial whose process has died."""
        for frozen in self.trials():
            is_here = frozen.state.name == "RUNNING" and self._is_here(frozen)
            if is_here and self._lock_trial(frozen.number, held):
                return cast("optuna.trial.Trial", self._optuna.Trial(self._study, frozen._trial_id))
        return None

    def _new(self, held: ExitStack) -> optuna.trial.Trial | None:
        """Create and lock a trial, unless the number of trials is reached."""
        trials = self.trials()
        if not any(trial.state.name == "WAITING" for trial in trials):
            if len(trials) >= self.settings.trials:
                return None
            # The trial is created with its folder, in case this process dies immediately afterwards.
            self._study.enqueue_trial({}, user_attrs={_HOME: self._home})
        # Each trial has another seed, so that processes do not draw equal settings. The constant liar treats running
        # trials as bad, so that processes do not try similar settings.
        seed, samplers = int(combine(self.settings.seed, len(trials))), self._optuna.samplers
        self._study.sampler = (
            samplers.RandomSampler(seed & 0x7FFFFFFF)
            if self.settings.sampler == "random"
            else samplers.TPESampler(seed=seed & 0x7FFFFFFF, constant_liar=True)
        )
        trial: optuna.trial.Trial = self._study.ask()
        if trial.user_attrs.get(_HOME) != self._home:
            trial.set_user_attr(_HOME, self._home)
        self._lock_trial(trial.number, held)
        return trial

    def _is_here(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Return whether the run and the lock of a trial are in this folder."""
        return trial.user_attrs.get(_HOME) == self._home

    def _lock_trial(self, number: int, held: ExitStack) -> bool:
        """Lock a trial until `held` is closed. Return False if another process has the lock."""
        return held.enter_context(locked(self.folder / run_folder.TRIALS / f"{number:04d}.lock"))

    def _check_locks(self) -> None:
        """Check that the filesystem of the folder supports locks. Without, two processes could train the same trial."""
        path = self.folder / f"{_LOCK}.{uuid.uuid4().hex}"
        try:
            with locked(path) as first, locked(path) as second:
                if first and second:
                    raise UsageError(
                        f"{self.folder} is on a filesystem without locks",
                        todo="choose --out on a local disk, or on NFS with a lock service",
                    )
        finally:
            path.unlink(missing_ok=True)


def load_optuna() -> Any:
    """Import Optuna, and set it to log warnings only.

    Raises:
        MachineShort: Optuna is not installed.
    """
    with needs_extra("tune", "`histopipe tune` needs Optuna, which is not installed"):
        module = importlib.import_module("optuna")
    module.logging.set_verbosity(module.logging.WARNING)
    return module


def open_storage(url: str | None, folder: Path) -> optuna.storages.BaseStorage:
    """Open a storage: `postgresql://`, `mysql://`, `sqlite:///`, `redis://` or a journal file; in `folder` if None.

    Raises:
        UsageError: the storage is SQLite on a network filesystem, or cannot be opened.
    """
    storages, is_url = load_optuna().storages, url is not None and "://" in url
    path = folder / JOURNAL if url is None or is_url else Path(url)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--storage {url}", found="a folder, or a file in a missing folder", expected="a file"
        )
    if url is not None and url.startswith("sqlite"):
        database = Path(url.partition(":///")[2].partition("?")[0])
        kind = network_filesystem(database.parent)
        if kind is not None:
            raise UsageError(
                "--storage: SQLite cannot be shared over a network",
                found=f"{database} on {kind}, where its locks fail and the file becomes damaged",
                expected="the default journal file, or a database server",
            )
    try:
        storage: optuna.storages.BaseStorage
        if url is not None and url.startswith("redis"):
            storage = storages.JournalStorage(storages.journal.JournalRedisBackend(url))
        elif is_url:
            storage = storages.RDBStorage(url)
        else:
            lock_path = path.with_name(f"{path.name}.flock")
            _remove_partial_line(path, lock_path)
            storage = storages.JournalStorage(
                storages.journal.JournalFileBackend(str(path), lock_obj=_JournalLock(lock_path))
            )
    except Exception as error:  # each driver of a database has its error classes, or is missing
        raise UsageError(
            "--storage cannot be opened",
            found=str(error).split("\n")[0],
            expected="a running database server, and its driver installed",
        ) from error
    return storage


class _JournalLock:
    """Lock of the journal that the kernel releases when its process ends.

    Optuna's own lock remains if its process is killed: the others wait 30 seconds, or forever if the path of the
    journal is relative. Then two processes may break the lock at the same time.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._held.enter_context(locked(self._path, wait_seconds=math.inf))
        return True

    def release(self) -> None:
        """Release the lock."""
        self._held.close()


def _remove_partial_line(path: Path, lock_path: Path) -> None:
    """Remove an incomplete last line, for example after a full disk. Optuna would append to it."""
    if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n"):
        return
    with locked(lock_path, wait_seconds=math.inf):  # another process may be writing the line now
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
