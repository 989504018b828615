"""Predictions by slide, from a finished run or a folder of `histopipe predict`: for heatmaps and the viewer."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.predictions.patch_values import FOLDER, patch_value_files, read_patch_values
from histopipe.predictions.predictions_folder import SLIDES, PredictedSlide, PredictionsFolder
from histopipe.predictions.tables import PREDICTIONS, read_predictions
from histopipe.splits.splits import DROPPED, SPLITS, Splits, load_splits, patches_crc
from histopipe.splits.subsets import SUBSETS
from histopipe.store.store import Store
from histopipe.system.csv_files import read_columns, read_dicts
from histopipe.system.files import reading
from histopipe.tasks.predictions import Predictions, joined_predictions

_VALUES = ("p_", "sd_", "risk", "predicted_")
"""Beginnings of the columns of values in a table of slides."""


class PredictionSource:
    """The predictions of a folder. Threads may share it; files are read when they are needed.

    Attributes:
        folder: the folder.
        name: short name for readers.
        of_bags: whether a slide model made them, so that patches have attention instead of predictions.
        classes: class names; empty if there are no predictions of classes of patches.
    """

    classes: Sequence[str] = ()

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name
        self.of_bags = (folder / FOLDER).is_dir()
        self._lock = threading.Lock()

    def slides(self) -> Mapping[str, PredictedSlide]:
        """Return slides by id whose size and scale are recorded with the predictions."""
        return {}

    def described(self, slide: str) -> PredictedSlide | None:
        """Return size and scale of a slide; None if they are not recorded with the predictions."""
        return None

    def slide_ids(self) -> Collection[str]:
        """Return the slides that may have predictions of patches, sorted."""
        raise NotImplementedError

    def predictions(self, slide: str) -> Predictions | None:
        """Return the predictions of a slide's patches; None if there are none."""
        raise NotImplementedError

    def by_slide(self) -> dict[str, dict[str, float | str]]:
        """Return values of each slide: the mean of each output, the predicted class, and the share of correct patches."""
        raise NotImplementedError

    def attention(self, slide: str) -> NDArray[np.float64] | None:
        """Return (N, 4) x, y, attention and side of a slide's patches in level-0 pixels; None if there is none."""
        with self._lock:
            return self._attention.get(slide)

    @cached_property
    def _attention(self) -> dict[str, NDArray[np.float64]]:
        return read_patch_values(patch_value_files(self.folder))

    @cached_property
    def _splits(self) -> Splits | None:
        with suppress(UsageError, DamagedStore):
            return load_splits(self.folder / SPLITS)
        return None

    def split(self, store: Store, slide: int) -> NDArray[np.int8] | None:
        """Return the subset of each patch of a stored slide: 0, 1, 2 for train, validation, test, -1 for none."""
        splits = self._splits
        for entry in splits.slides if splits else ():
            if splits and entry.slide == slide and splits.uuids[entry.store] == store.uuid:
                return entry.subsets if entry.crc == patches_crc(store, slide) else None
        return None

    def split_by_slide(self) -> dict[str, str]:
        """Return the subset of each slide; "several" if its patches are in several subsets."""
        names = {}
        for slide in self._splits.slides if self._splits else ():
            subsets = set(slide.subsets.tolist()) - {DROPPED}
            names[slide.id] = SUBSETS[subsets.pop()] if len(subsets) == 1 else "several"
        return names


class RunSource(PredictionSource):
    """Validation and test patches of a finished run. Training patches have no predictions.

    Raises:
        UsageError: the run has no predictions, for example because it has not finished.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        super().__init__(folder, name)
        path = folder / PREDICTIONS
        if not path.exists():
            raise UsageError(
                f"{folder} has no predictions", expected="a finished run",
                todo="finish it: histopipe train --resume --out " + str(folder),
            )  # fmt: skip
        header = read_columns(path)
        self.of_patches = "x_l0" in header
        self.classes = [column[2:] for column in header if column.startswith("p_")]

    @property
    def all(self) -> Predictions:
        """All predictions of the run."""
        return self._read[0]

    @cached_property
    def _rows_read(self) -> tuple[Predictions, Mapping[str, NDArray[np.intp]]]:
        predictions = joined_predictions([*read_predictions(self.folder / PREDICTIONS).values()])
        order = np.argsort(predictions.slide, kind="stable")
        numbers, starts = np.unique(predictions.slide[order], return_index=True)
        names = [predictions.slides[number] for number in numbers.tolist()]
        rows = dict(zip(names, np.split(order, starts[1:]), strict=True))
        return predictions, rows if predictions.task.of_classes else {}

    @property
    def _read(self) -> tuple[Predictions, Mapping[str, NDArray[np.intp]]]:
        """All predictions, and the rows of each slide, sorted; no slide for other tasks than classification."""
        with self._lock:
            return self._rows_read

    def slide_ids(self) -> Collection[str]:  # noqa: D102
        return self._read[1].keys() if self.of_patches else ()

    def predictions(self, slide: str) -> Predictions | None:  # noqa: D102
        return self.all.rows(self._read[1][slide]) if slide in self.slide_ids() else None

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        predictions, by_slide = self._read
        values = {}
        for slide, rows in by_slide.items():
            label, output = predictions.label[rows], predictions.output[rows]
            mean = output.mean(axis=0, dtype=np.float64)
            of_slide: dict[str, float | str] = dict(zip(self.classes, mean.tolist(), strict=True))
            of_slide["predicted"] = self.classes[int(mean.argmax())]
            if (label >= 0).any():
                labelled = output[label >= 0].argmax(axis=1) == label[label >= 0]
                of_slide["correct"] = float(labelled.mean())
            values[slide] = of_slide
        return values


class FolderSource(PredictionSource):
    """A folder of `histopipe predict`: with the predictions of patches, or with the attention of a slide model."""

    def __init__(self, folder: Path, name: str = "") -> None:
        super().__init__(folder, name)
        self._folder = PredictionsFolder(folder)

    @cached_property
    def classes(self) -> Sequence[str]:  # type: ignore[override]
        """Class names, from the first slide with patches."""
        slides = {} if self.of_bags else self.slides()
        some = next((name for name, slide in slides.items() if slide.patches), None)
        return self._folder.read(some).task.classes if some else ()

    @cached_property
    def _slides(self) -> Mapping[str, PredictedSlide]:
        return self._folder.slides()

    def slides(self) -> Mapping[str, PredictedSlide]:  # noqa: D102
        return self._slides

    def described(self, slide: str) -> PredictedSlide | None:  # noqa: D102
        path = self._folder.json(slide)
        return PredictedSlide.read(path) if path.exists() else None

    def slide_ids(self) -> Collection[str]:  # noqa: D102
        return () if self.of_bags else self._folder.names()

    def predictions(self, slide: str) -> Predictions | None:  # noqa: D102
        described = None if self.of_bags else self.described(slide)
        return self._folder.read(slide) if described is not None and described.patches else None

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        path = self.folder / SLIDES
        values: dict[str, dict[str, float | str]] = {}
        with suppress(FileNotFoundError), reading(path):
            for row in read_dicts(path):
                values[row["slide"]] = {
                    name.removeprefix("p_"): cell if name == "predicted" else float(cell)
                    for name, cell in row.items()
                    if name == "predicted" or (cell and name.startswith(_VALUES))
                }
        return values

    def thumbnail(self, slide: str) -> Path:
        """Return the path of a slide's thumbnail, which may not exist."""
        return self._folder.thumbnail(slide)
