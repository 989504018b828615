"""Read everything that the report of a run shows."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import Side
from histopipe.errors import DamagedStore, HistopipeError
from histopipe.evaluation.evaluate import JudgeSettings
from histopipe.evaluation.predictions_file import read_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import check_one_run
from histopipe.runs.result import METRICS, TrainResult, read_result
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.files import read_json


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished run.

    Attributes:
        folder: folder of the run.
        config: its settings.
        result: its result.
        metrics_file: content of `metrics.json`, with more than the result.
        splits: content of `splits.json`.
        history: one row per epoch, numbers by column.
        predictions: of validation and test patches, or bags.
        stores: its stores, as far as they were found; open.
        missing: what could not be read, and why.
    """

    folder: Path
    config: TrainConfig
    result: TrainResult
    metrics_file: Mapping[str, Any]
    splits: Mapping[str, Any]
    history: Sequence[Mapping[str, float | None]]
    predictions: Mapping[Side, PatchScores]
    stores: Sequence[Store]
    missing: Sequence[str]

    @property
    def judging(self) -> JudgeSettings:
        """Evaluation settings."""
        return self.config.judging

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return tuple(self.metrics_file["classes"])

    def store_of(self, slide: str) -> tuple[Store, int] | None:
        """Return the store that holds a slide, and its number there."""
        name, _, uuid = slide.partition("@")
        for store in self.stores:
            for number, record in store.complete.items():
                if record.id == name and store.uuid.startswith(uuid):
                    return store, number
        return None


def read_run(
    folder: Path, stores: Sequence[Path], stack: ExitStack, *, follow: bool = True
) -> RunData:
    """Read a finished run and open its stores.

    Args:
        folder: folder of the run.
        stores: its stores, if they have moved.
        stack: closes the stores.
        follow: if `stores` is empty, open those that the run names.

    Raises:
        UsageError: there is no finished run, or it is a cross-validation.
        DamagedStore: it cannot be read.
    """
    check_one_run(folder)
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    opened, missing = [], []
    of_patches = isinstance(config, PatchTrainConfig)
    named = map(Path, config.stores) if follow and isinstance(config, PatchTrainConfig) else ()
    for path in stores or named:
        try:
            opened += [stack.enter_context(Store(part)) for part in parts_of(path)]
        except HistopipeError as error:
            missing.append(f"Pictures of patches and slides: {error}.")
    if not follow and not stores:
        missing.append("Pictures of patches and slides: use --store to name the stores.")
    elif not of_patches and not opened:
        missing.append("Heatmaps of attention: use --store to name the store of the patches.")
    return RunData(
        folder, config, result, _json(folder / METRICS), _json(folder / run_folder.SPLITS),
        _history(folder / run_folder.HISTORY), read_predictions(folder / run_folder.PREDICTIONS),
        opened, missing,
    )  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise TypeError(type(value).__name__)  # noqa: TRY301 - reported with the others
    except (OSError, ValueError, TypeError) as error:
        raise DamagedStore(f"{path} cannot be read", found=repr(error)[:200]) from error
    return value


def _history(path: Path) -> list[dict[str, float | None]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                {name: float(cell) if cell else None for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]
    except (OSError, ValueError, TypeError) as error:
        raise DamagedStore(f"{path} cannot be read", found=repr(error)[:200]) from error
