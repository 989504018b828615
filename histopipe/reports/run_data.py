"""Read the data for the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.features.feature_file import paths_of_stores
from histopipe.predictions.tables import PREDICTIONS, read_predictions
from histopipe.reports.evaluation_blocks import EvaluatedPredictions
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, TrainResult, read_result, read_slides
from histopipe.runs.task_config import BagTrainConfig, load_config
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import SPLITS
from histopipe.splits.subsets import Subset
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.csv_files import read_dicts
from histopipe.system.files import read_json_object, reading
from histopipe.tasks.predictions import Predictions


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished run, with the contents of its files.

    `history` has one row per epoch. `stores` are the open stores that were found.
    `missing` lists the parts that could not be read, with the reasons. `slides` are the rows of `slides.csv`.
    """

    folder: Path
    config: TrainConfig
    result: TrainResult
    metrics_file: Mapping[str, Any]
    splits: Mapping[str, Any]
    history: Sequence[Mapping[str, float | None]]
    predictions: Mapping[Subset, Predictions]
    stores: Sequence[Store]
    missing: Sequence[str]
    slides: Sequence[SlideEntry] = ()

    @property
    def evaluated(self) -> EvaluatedPredictions:
        """Its evaluation."""
        result, config = self.result, self.config
        return EvaluatedPredictions(
            result.metrics, self.predictions, config.evaluation_settings, result.breakdown, result.flow,
            result.calibration,
        )  # fmt: skip

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return tuple(self.metrics_file["classes"])


def read_run(
    folder: Path, stores: Sequence[Path], stack: ExitStack, *, follow: bool = True
) -> RunData:
    """Read a finished run and open `stores`. If `stores` is empty and `follow` is true, open the stores of the run.

    Raises:
        UsageError: there is no finished run, or it is a cross-validation.
        DamagedStore: the run cannot be read.
    """
    run_folder.check_one_run(folder)
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    opened, missing = open_stores(config, stores, stack, follow=follow)
    return RunData(
        folder, config, result, read_json_object(folder / METRICS),
        read_json_object(folder / SPLITS),
        _history(folder / run_folder.HISTORY),
        read_predictions(folder / PREDICTIONS), opened, missing, read_slides(folder),
    )  # fmt: skip


def open_stores(
    config: TrainConfig, stores: Sequence[Path], stack: ExitStack, *, follow: bool
) -> tuple[list[Store], list[str]]:
    """Open `stores`, or else with `follow` those of the run or of its features. Return them, and what is missing for pictures."""
    opened: list[Store] = []
    if not follow and not stores:
        return [], ["No pictures of patches and slides: use --store to name the stores."]
    paths, missing, on_bags = list(stores), [], isinstance(config, BagTrainConfig)
    try:
        paths = paths or paths_of_stores(config.values())
    except HistopipeError as error:
        missing.append(f"No pictures of patches and slides: {error}.")
    for path in paths:
        try:
            opened += [stack.enter_context(Store(part)) for part in parts_of(path)]
        except HistopipeError as error:
            missing.append(f"No pictures of patches and slides: {error}.")
    if on_bags and not opened and not missing:
        missing.append("No heatmaps of attention: use --store to name the store of the patches.")
    return opened, missing


def _history(path: Path) -> list[dict[str, float | None]]:
    with reading(path):
        return [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in read_dicts(path)
        ]
