"""Observers of a training: callbacks, in the process of the caller, and tracking by MLflow, in the process that trains."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from histopipe.errors import (
    DamagedStore,
    Interrupted,
    UsageError,
    first_line,
    needs_extra,
    reported_as,
)
from histopipe.predictions.prediction_tables import PREDICTIONS
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import METRICS, TrainResult
from histopipe.splits.splits import SPLITS
from histopipe.system.files import read_record, write_json
from histopipe.system.folders import CONFIG
from histopipe.system.output import message
from histopipe.system.table_files import read_dicts
from histopipe.system.urls import MLFLOW_PLACES, check_track

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
        path = self._folder / run_folder.HISTORY
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


RECORD = "mlflow.json"
"""Where the run is tracked, and how many epochs are."""
_FOLDER = "mlruns"
_FILES = (
    CONFIG,
    run_folder.HISTORY,
    run_folder.SLIDES,
    run_folder.MODEL,
    SPLITS,
    METRICS,
    PREDICTIONS,
)
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing goes to anyone but the given place
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder needs no database
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Environment of MLflow, unless the user has set it. A lost server must not stop a training for minutes."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. ]")
"""Characters that MLflow's names of metrics do not have, or that separate their parts. They become numbers."""


def place_of(track: str) -> str:
    """Return the URI of a value of `--track`: of the environment, or of a folder, if it names none.

    A name without a scheme is a folder only in `--track`: in the environment, it may be meant as a server.

    Raises:
        UsageError: it has a password, or it is neither a URI, a word of MLflow, nor a folder.
    """
    name, uri = "--track mlflow", track.partition(":")[2]
    if not uri and (uri := os.environ.get("MLFLOW_TRACKING_URI", "")):
        name = "MLFLOW_TRACKING_URI"
        check_track(f"mlflow:{uri}", name)
    if uri in MLFLOW_PLACES or re.match(r"[a-z][a-z0-9+.-]*://|file:", uri, re.IGNORECASE):
        return uri
    is_path = re.match(r"~?/|\.\.?(/|$)", uri) or (
        name.startswith("--") and uri[:1] != "~" and ":" not in uri
    )
    if not is_path:
        raise UsageError(
            name,
            found=uri,
            expected=f"a URI such as http://{uri}, {' or '.join(MLFLOW_PLACES)}, or a folder such as ./{_FOLDER}",
        )
    return Path(uri or _FOLDER).expanduser().absolute().as_uri()


def how_to_open(uri: str) -> str:
    """Return how to open what was written to a URI: an address, or a command for a folder."""
    if not uri.startswith("file:"):
        return uri
    folder = shlex.quote(url2pathname(urlsplit(uri).path))
    return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"


def tracker_of(folder: Path, config: TrainConfig) -> Tracker | None:
    """Return the tracker of a run, before its folder is created; None without `--track`.

    If a resumed run cannot be tracked further where it was, there is a warning, and the training goes on.

    Raises:
        UsageError, MachineShort: as `Tracker`.
    """
    if not config.track:
        return None
    try:
        return Tracker(folder, config)
    except UsageError as error:
        if not _recorded(folder, config):
            raise
        message(f"warning: tracking failed: {error}")
        return None


def _recorded(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """Return where a run is tracked; empty for a new run, and for one that is to be tracked in another place."""
    record = read_record(folder / RECORD) or {}
    return record if record.get("track") == config.track else {}


class Tracker(EpochObserver):
    """A run of MLflow for the run in a folder, begun or continued. The experiment has the name of the folder above.

    As a context manager, it marks runs that do not end. If the server is lost, warnings are shown, and the training
    goes on. What is missing is sent after the next epoch.

    Raises:
        UsageError: the run cannot be created there.
        MachineShort: MLflow is not installed.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        os.environ.update({n: v for n, v in _QUIET.items() if n not in os.environ})
        with needs_extra("mlflow", "--track mlflow needs MLflow, which is not installed"):
            from mlflow import MlflowClient  # late: the extra [mlflow]
        self._folder = folder
        self._config = config
        above = folder.absolute().parent
        self._name = (above.parent if above.name == run_folder.TRIALS else above).name or "runs"
        self._record = _recorded(folder, config)
        uri = self._record["uri"] if self._record else place_of(str(config.track))
        with self._usable():
            self._client = MlflowClient(uri)
            if not self._record:
                self._client.get_experiment_by_name(self._name)
                self._record = {"track": config.track, "uri": uri, "run": None, "epochs": 0}
            elif self._client.get_run(self._record["run"]).info.lifecycle_stage != "active":
                raise ValueError("the run was deleted there")

    def _usable(self) -> AbstractContextManager[None, bool | None]:
        return reported_as(
            UsageError,
            f"--track {self._config.track}",
            Exception,
            reason=first_line,
            expected="a place where MLflow can write",
        )

    def _create(self) -> str:
        experiment = self._client.get_experiment_by_name(self._name)
        number = experiment.experiment_id if experiment else self._new_experiment()
        if experiment and experiment.lifecycle_stage != "active":
            raise ValueError(
                f"the experiment {self._name} was deleted there: restore it by `mlflow experiments restore "
                f"--experiment-id {number}`, or use another folder above --out"
            )
        run = self._client.create_run(number, run_name=self._folder.absolute().name).info.run_id
        for key, value in asdict(self._config).items():
            self._client.log_param(run, key, str(value)[:6000])
        return str(run)

    def _new_experiment(self) -> str:
        try:
            return str(self._client.create_experiment(self._name))
        except Exception:
            at_once = self._client.get_experiment_by_name(self._name)  # another worker was faster
            if at_once is None:
                raise
            return str(at_once.experiment_id)

    def on_epoch_end(self, epoch: Any) -> None:
        """Write the rows of epochs that are not written yet; see `EpochObserver`."""
        with _failures_shown():
            for row in epoch.state.history[self._record["epochs"] :]:
                for name, value in _numbers(row):
                    if name != "epoch":
                        self._client.log_metric(self._record["run"], name, value, step=row["epoch"])
                self._record["epochs"] = row["epoch"]
            write_json(self._folder / RECORD, self._record)

    def on_train_end(self, state: Any, result: TrainResult) -> None:
        """Write the metrics of a finished run, and its files."""
        metrics = result.to_json()
        of_subsets = {name: metrics.get(name) for name in ("validation", "test")}
        with _failures_shown():
            for name, value in _numbers(of_subsets):
                self._client.log_metric(self._record["run"], name, value)
            for file in _FILES:
                if (self._folder / file).exists():
                    self._client.log_artifact(self._record["run"], str(self._folder / file))
            self._client.set_terminated(self._record["run"])
            message(f"tracked: {how_to_open(self._record['uri'])}")

    def __enter__(self) -> Self:
        with self._usable():
            self._record["run"] = self._record["run"] or self._create()
            self._client.update_run(self._record["run"], status="RUNNING")
        write_json(self._folder / RECORD, self._record)
        message(f"tracked as {self._name}/{self._folder.name} in {self._record['uri']}")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            status = "KILLED" if issubclass(error, Interrupted) else "FAILED"
            with _failures_shown():
                self._client.set_terminated(self._record["run"], status)


@contextmanager
def _failures_shown() -> Iterator[None]:
    """Show a failure instead of raising it: a training is worth more than its tracking."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of MLflow, its client libraries and the network
        message(f"warning: tracking failed: {str(error).splitlines()[0][:200]}")


def _numbers(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a dict of dicts, with the names above them."""
    for name, value in values.items():
        path = before + _NOT_IN_NAMES.sub(lambda match: f"_{ord(match[0]):x}_", name)
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, float(value)
