"""Result of a search: its trials, and the settings of the best one for a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import DamagedStore
from histopipe.evaluation.table import aligned, number
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import is_finished, read_result
from histopipe.runs.task_config import changed_config
from histopipe.splits.splits import SPLITS
from histopipe.studies.search_space import settings_of
from histopipe.studies.study import Study
from histopipe.system.csv_files import write_dicts
from histopipe.system.files import write_atomically
from histopipe.system.settings import to_toml

if TYPE_CHECKING:
    import optuna

_BEST, TRIALS_CSV = "best.toml", "trials.csv"
_STATES = {
    "COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running",
    "WAITING": "waiting",
}  # fmt: skip


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
        for trial in self.trials:
            rows.append([
                str(trial.number), trial.state + (" *best" if trial is self.best else ""),
                number(trial.value, 4), str(trial.epochs or "-"), number(trial.seconds, 0),
                *(_short(trial.settings.get(name)) for name in names),
            ])  # fmt: skip
        lines = aligned(rows)
        lines += [f"trial {trial.number}: {trial.reason}" for trial in self.trials if trial.reason]
        if self.best is not None:
            lines.append(
                f"train with the best settings: histopipe train --config {self.folder / _BEST}"
            )
        return "\n".join(lines)


def summarize(study: Study, base: TrainConfig) -> TuneResult:
    """Summarize the trials so far. Write `trials.csv`, and `best.toml` for `histopipe train --config`."""
    result = _result(study, base)
    with study.locked():
        write_dicts(study.folder / TRIALS_CSV, [trial.to_json() for trial in result.trials])
        if result.config is not None:
            write_atomically(study.folder / _BEST, to_toml(result.config))
    return result


def _result(study: Study, base: TrainConfig) -> TuneResult:
    folder = study.folder
    trials = tuple(_trial(trial, study.folder_of(trial.number)) for trial in study.trials())
    done = [(trial.value, trial) for trial in trials if trial.value is not None]
    if not done:
        return TuneResult(folder, trials, None, None)
    sign = -1 if study.settings.direction == "minimize" else 1
    # If trials are equal, the first one is the best.
    _, best = max(done, key=lambda pair: (sign * pair[0], -pair[1].number))
    config = _with_absolute_paths(changed_config(base, **best.settings), folder)
    return TuneResult(folder, trials, best, config)


def _with_absolute_paths(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return settings with absolute paths and the splits of the search, so that `best.toml` works in any folder."""
    paths: dict[str, Any] = {"splits": str((folder / SPLITS).resolve())}
    values = config.values()
    for name in ("labels", "weights"):
        value = values.get(name)
        if value is not None and (name != "weights" or Path(value).is_file()):
            paths[name] = str(Path(value).resolve())
    for name in {"stores", "mil"} & values.keys():
        paths[name] = tuple(str(Path(path).resolve()) for path in values[name])
    return changed_config(config, **paths)


def _trial(trial: optuna.trial.FrozenTrial, folder: Path) -> Trial:
    epochs = max(trial.intermediate_values, default=None)
    if is_finished(folder):
        try:
            epochs = read_result(folder).epochs
        except DamagedStore:
            epochs = None
    return Trial(
        trial.number, folder, _STATES[trial.state.name],
        trial.value if trial.state.name == "COMPLETE" else None, settings_of(trial.params), epochs,
        trial.user_attrs.get("seconds"), trial.user_attrs.get("reason"),
    )  # fmt: skip


def _as_text(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(_as_text(value))
