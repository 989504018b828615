"""What is called by a training: in its process, and callbacks in the process of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.runs.folder import HISTORY
from histopipe.runs.run import TrainResult
from histopipe.system.table_files import read_dicts

_OBSERVED = ("on_train_begin", "on_epoch_end", "on_train_end")
_TODO = "train(in_process=True) calls all methods of Keras callbacks, with the model"


class EpochObserver:
    """Is called in the process that trains, after each epoch and after the training."""

    def on_epoch_end(self, epoch: Any) -> None:
        """Handle the end of an epoch, see `EndedEpoch`. Its row is the last one of the history."""

    def on_train_end(self, state: Any, result: TrainResult) -> None:
        """Handle the end of a training."""


class _NoModel:
    """In the place of `self.model` of a callback."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"a callback uses self.model.{name}",
            found="a training in a separate process, which has the model",
            expected="a callback that only observes",
            todo=_TODO,
        )


class Observation:
    """Calls `on_train_begin(logs)`, `on_epoch_end(epoch, logs)` and `on_train_end(logs)` of callbacks.

    Each epoch is reported once, also if it is trained again after a restart, or ended while the process died: then its
    row is read from the history in the folder. As in Keras, epochs count from 0, and `logs` are metrics by name.

    Raises:
        UsageError: a callback has none of these methods, or others that only a training in this process calls.
    """

    def __init__(self, callbacks: Sequence[Any], folder: Path, *, resume: bool) -> None:
        for callback in callbacks:
            _check(callback)
        self._callbacks, self._folder = callbacks, folder
        self._epochs = len(self._history()) if resume and callbacks else 0
        self._logs: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Report the start of the training."""
        self._call("on_train_begin", {})

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Report an epoch, from its row of the history, and those before it that were not reported."""
        rows = [*self._history()[: row["epoch"] - 1], row] if self._callbacks else []
        for ended in rows[self._epochs :]:
            self._logs = {name: value for name, value in ended.items() if name != "epoch"}
            self._call("on_epoch_end", self._epochs, self._logs)
            self._epochs += 1

    def end(self) -> None:
        """Report the end of the training, and epochs that were not reported."""
        if self._callbacks and len(history := self._history()) > self._epochs:
            self.epoch(history[-1])
        self._call("on_train_end", self._logs)

    def _history(self) -> list[dict[str, Any]]:
        path = self._folder / HISTORY
        try:
            return [
                {name: float(text) if text else None for name, text in row.items()} | {"epoch": n}
                for n, row in enumerate(read_dicts(path), 1)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise DamagedStore(f"{path} cannot be read", found=str(error)) from error

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method, lambda *_: None)(*arguments)


def _check(callback: Any) -> None:
    """Check the methods of a callback, and replace its model."""
    classes = [kind for kind in type(callback).__mro__ if not kind.__module__.startswith("keras.")]
    methods = {name for kind in classes for name in vars(kind) if name.startswith("on_")}
    if not methods or methods - {*_OBSERVED}:
        raise UsageError(
            "callbacks",
            found=f"{type(callback).__name__} with {', '.join(sorted(methods)) or 'no method'}",
            expected=", ".join(_OBSERVED),
            todo=_TODO,
        )
    if hasattr(callback, "set_model"):
        callback.set_model(_NoModel())
    elif not hasattr(callback, "model"):
        callback.model = _NoModel()
