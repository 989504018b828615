"""Predictions, attention and splits of runs and prediction folders, by slide."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.predictions import read_predictions
from histopipe.features.feature_file import paths_of_stores
from histopipe.inference.predictions_folder import SLIDES, PredictedSlide, PredictionsFolder
from histopipe.reports.bag_values import ranks, read_patch_table
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import load_config
from histopipe.splits.splits import DROPPED, Splits, load_splits, patches_crc
from histopipe.splits.subsets import SUBSETS
from histopipe.store.store import Store
from histopipe.system.csv_files import read_columns, read_dicts
from histopipe.system.files import reading
from histopipe.tasks import predictions as tasks

_SHOWN = ("p_", "sd_", "risk", "predicted_")
"""Beginnings of the columns of `slides.csv` that are shown."""


@dataclass(frozen=True, slots=True)
class SlideScores:
    """Predictions of a slide's patches: (N,) corners and true labels (-1 for none), (N, C) probabilities."""

    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlideAttention:
    """Attention of a slide's patches: (N,) corners and ranks from 0 to 1; the patches' side, 0 if unknown."""

    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    rank: NDArray[np.float32]
    side_l0: float


class Predictions:
    """Predictions of one folder. Subclasses read a run, or a folder of `histopipe predict`.

    Attributes:
        name: name that is shown, unique among all folders.
        folder: the folder.
        classes: class names; empty if there are only attention values.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._lock = threading.Lock()

    def scores(self, slide: str) -> SlideScores | None:
        """Return the predictions of a slide's patches; None if there are none."""
        raise NotImplementedError

    @cached_property
    def _attention(self) -> dict[str, NDArray[np.float64]]:
        attention: dict[str, NDArray[np.float64]] = {}
        for path in sorted((self.folder / run_folder.ATTENTION).rglob("*.csv")):
            attention |= read_patch_table(path)
        return attention

    def attention(self, slide: str) -> SlideAttention | None:
        """Return the attention of a slide's patches; None if there is none."""
        with self._lock:  # several requests may come at once
            table = self._attention.get(slide)
        if table is None:
            return None
        x, y, attention, side = table.T
        corners = x.astype(np.int64), y.astype(np.int64)
        return SlideAttention(*corners, ranks(attention), float(side[0]))

    def split(self, store: Store, slide: int) -> NDArray[np.int8] | None:
        """Return the side of each patch of a stored slide: 0, 1, 2 for train, validation, test, -1 for none."""
        return None

    def split_by_slide(self) -> dict[str, str]:
        """Return the subset of each slide; "several" if its patches are in several subsets."""
        return {}

    def slides(self) -> Mapping[str, PredictedSlide]:
        """Return slides by id whose geometry is known without a store."""
        return {}

    def by_slide(self) -> dict[str, dict[str, float | str]]:
        """Return the metrics of each slide: mean probability of each class, and the share of correct patches."""
        raise NotImplementedError

    def _labelled(self) -> Iterator[tuple[str, SlideScores]]:
        """Yield slides with labelled patches, and their predictions."""
        raise NotImplementedError

    def errors(self, count: int) -> list[dict[str, Any]]:
        """Return the wrongly predicted patches with the lowest probability of the true class, the lowest first."""
        return heapq.nsmallest(count, self._errors(count), key=lambda row: (row["p"], row["slide"]))

    def _errors(self, count: int) -> Iterator[dict[str, Any]]:
        for slide, scores in self._labelled():
            labelled = np.flatnonzero(scores.label >= 0)
            if not len(labelled):
                continue
            label = scores.label[labelled]
            p_true = scores.probability[labelled, label]
            predicted = scores.probability[labelled].argmax(axis=1)
            wrong = np.flatnonzero(predicted != label)
            for i in wrong[np.argsort(p_true[wrong], kind="stable")][:count].tolist():
                yield {
                    "slide": slide, "x": int(scores.x_l0[labelled[i]]), "y": int(scores.y_l0[labelled[i]]),
                    "p": float(p_true[i]), "label": self.classes[label[i]],
                    "predicted": self.classes[predicted[i]],
                }  # fmt: skip


class RunPredictions(Predictions):
    """Validation and test patches of a finished run, or the attention of a run on bags. Files are read when needed.

    Raises:
        UsageError: the run has no predictions, for example because it has not finished.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        if not (folder / run_folder.PREDICTIONS).exists():
            raise UsageError(
                f"{folder} has no predictions", expected="a finished run",
                todo="finish it: histopipe train --resume --out " + str(folder),
            )  # fmt: skip
        header = read_columns(folder / run_folder.PREDICTIONS)
        self.of_patches = "x_l0" in header
        self.classes = tuple(column[2:] for column in header if column.startswith("p_"))

    @property
    def stores(self) -> list[Path]:
        """Stores of the run, as in its configuration, or of the features that it was trained on."""
        return paths_of_stores(load_config(self.folder / run_folder.CONFIG).values())

    @cached_property
    def _all(self) -> tasks.Predictions | None:
        predictions = [*read_predictions(self.folder / run_folder.PREDICTIONS).values()]
        return tasks.joined_predictions(predictions) if predictions[0].task.of_classes else None

    @cached_property
    def _rows(self) -> dict[str, NDArray[np.intp]]:
        """Rows of each slide."""
        if self._all is None:
            return {}
        order = np.argsort(self._all.slide, kind="stable")
        numbers, starts = np.unique(self._all.slide[order], return_index=True)
        parts = np.split(order, starts[1:])
        return {self._all.slides[n]: rows for n, rows in zip(numbers.tolist(), parts, strict=True)}

    def _read(self) -> tasks.Predictions | None:
        with self._lock:
            self._rows  # noqa: B018 - read once
            return self._all

    def scores(self, slide: str) -> SlideScores | None:  # noqa: D102
        predictions = self._read() if self.of_patches else None
        if predictions is None or slide not in self._rows:
            return None
        rows = self._rows[slide]
        return SlideScores(
            predictions.x_l0[rows],
            predictions.y_l0[rows],
            predictions.label[rows],
            predictions.output[rows],
        )

    @cached_property
    def _splits(self) -> Splits | None:
        try:
            return load_splits(self.folder / run_folder.SPLITS)
        except (UsageError, DamagedStore):
            return None

    def split(self, store: Store, slide: int) -> NDArray[np.int8] | None:  # noqa: D102
        splits = self._splits
        for slide_split in splits.slides if splits else ():
            if (
                splits
                and slide_split.slide == slide
                and splits.uuids[slide_split.store] == store.uuid
            ):
                return slide_split.subsets if slide_split.crc == patches_crc(store, slide) else None
        return None

    def split_by_slide(self) -> dict[str, str]:  # noqa: D102
        subset_names = {}
        for slide in self._splits.slides if self._splits else ():
            subsets = set(slide.subsets.tolist()) - {DROPPED}
            subset_names[slide.id] = SUBSETS[subsets.pop()] if len(subsets) == 1 else "several"
        return subset_names

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        predictions = self._read()
        if predictions is None:
            return {}
        return {
            slide: _metrics(self.classes, predictions.label[rows], predictions.output[rows])
            for slide, rows in self._rows.items()
        }

    def _labelled(self) -> Iterator[tuple[str, SlideScores]]:
        for slide in sorted(self._rows) if self.of_patches and self._read() else ():
            scores = self.scores(slide)
            if scores is not None:
                yield slide, scores


class FolderPredictions(Predictions):
    """A folder of `histopipe predict`: with the predictions of patches, or with the attention of a slide model."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self._folder = PredictionsFolder(folder)
        self._slides = self._folder.slides()
        if not self._slides:
            raise NothingToDo(
                f"{folder} has no predicted slides", todo="run histopipe predict again"
            )
        self._on_bags = (folder / run_folder.ATTENTION).is_dir()
        some = next((slide for slide, predicted in self._slides.items() if predicted.patches), None)
        if self._on_bags:
            return
        self.classes = self._folder.read(some).task.classes if some else ()

    def scores(self, slide: str) -> SlideScores | None:  # noqa: D102
        if self._on_bags or slide not in self._slides or not self._slides[slide].patches:
            return None
        predictions = self._folder.read(slide)
        return SlideScores(
            predictions.x_l0, predictions.y_l0, predictions.label, predictions.output
        )

    def slides(self) -> Mapping[str, PredictedSlide]:  # noqa: D102
        return self._slides

    def thumbnail(self, slide: str) -> Path:
        """Return the path of a slide's thumbnail, which may not exist."""
        return self._folder.thumbnail(slide)

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        path = self.folder / SLIDES
        with suppress(FileNotFoundError), reading(path):
            return {row["slide"]: _numbers(row) for row in read_dicts(path)}
        return {}

    def _labelled(self) -> Iterator[tuple[str, SlideScores]]:
        for slide in self._slides:
            scores = self.scores(slide)
            if scores is not None:
                yield slide, scores


def _numbers(row: Mapping[str, str]) -> dict[str, float | str]:
    """Return the predictions in a row of `slides.csv`: the class, and all numbers."""
    values: dict[str, float | str] = {"predicted": row["predicted"]} if "predicted" in row else {}
    for name, cell in row.items():
        if cell and name.startswith(_SHOWN):
            values[name.removeprefix("p_")] = float(cell)
    return values


def _metrics(
    classes: Sequence[str], label: NDArray[np.int32], probability: NDArray[np.float32]
) -> dict[str, float | str]:
    mean = probability.mean(axis=0, dtype=np.float64)
    metrics: dict[str, float | str] = dict(zip(classes, mean.tolist(), strict=True))
    metrics["predicted"] = classes[int(mean.argmax())]
    labelled = label >= 0
    if labelled.any():
        metrics["correct"] = float((probability[labelled].argmax(axis=1) == label[labelled]).mean())
    return metrics
