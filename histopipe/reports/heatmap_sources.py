"""Sources of heatmaps: predictions, the validation and test patches of a run, or attention; and images of the slides."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.predictions_file import read_predictions
from histopipe.evaluation.scores import PatchScores, joined_scores
from histopipe.geometry import Mpp
from histopipe.inference.predictions_folder import PredictedSlide, PredictionsFolder
from histopipe.reports.patch_values import PatchValues, ranks
from histopipe.runs import folder as run_folder
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail
from histopipe.store.picture import decode_picture
from histopipe.store.store import Store

ReadValues = Callable[[], PatchValues | None]
"""Reads the values of a slide; None if it has no patch."""


@dataclass(frozen=True, slots=True)
class HeatmapSource:
    """A folder with values of slides' patches.

    Attributes:
        folder: folder of predictions, or of a run.
        stores: open stores of the patches, for the size of slides and patches if the folder does not record it.
        class_name: class whose probability is used; the last one if None.
    """

    folder: Path
    stores: Sequence[Store]
    class_name: str | None = None

    def slides(self, only: Sequence[str] = ()) -> Iterator[tuple[str, ReadValues]]:
        """Yield the id of each slide with a function that reads its values.

        That function raises NothingToDo if a store is needed for the size of patches, and DamagedStore.

        Args:
            only: ids of the slides; all if empty.

        Raises:
            UsageError: the folder holds no values, or not of these slides or this class.
            DamagedStore: it cannot be read.
        """
        if PredictionsFolder(self.folder).exists:
            yield from self._predicted(only)
        elif (self.folder / run_folder.ATTENTION).is_dir():
            yield from self._attention(only)
        elif (self.folder / run_folder.PREDICTIONS).exists():
            yield from self._judged(only)
        else:
            raise UsageError(
                f"{self.folder} holds no predictions",
                expected="a folder of `histopipe predict`, or of a finished run",
            )

    def _predicted(self, only: Sequence[str]) -> Iterator[tuple[str, ReadValues]]:
        predictions = PredictionsFolder(self.folder)
        slides = predictions.slides()

        def read(name: str) -> PatchValues | None:
            if not slides[name].patches:
                return None
            scores = predictions.read(name)
            return self._values(scores, np.arange(len(scores.label)), slides[name])

        for name in _chosen(only, slides, self.folder):
            yield name, partial(read, name)

    def _judged(self, only: Sequence[str]) -> Iterator[tuple[str, ReadValues]]:
        """Of a run on patches, only validation and test patches: the others were trained on."""
        sides = list(read_predictions(self.folder / run_folder.PREDICTIONS).values())
        if sides and sides[0].level != "patch":
            raise UsageError(
                f"{self.folder} predicts whole {sides[0].level}s, and has no attention",
                todo="train with --pooling gated or attention",
            )
        names = sorted({name for side in sides for name in side.slides})

        def read(name: str) -> PatchValues:
            # A slide may have patches in both splits.
            scores = joined_scores([side for side in sides if name in side.slides])
            rows = np.flatnonzero(scores.slide == scores.slides.index(name))
            return self._values(scores, rows, self._stored(name))

        for name in _chosen(only, names, self.folder):
            yield name, partial(read, name)

    def _attention(self, only: Sequence[str]) -> Iterator[tuple[str, ReadValues]]:
        if self.class_name is not None:
            raise UsageError("--class", found="attention", expected="no class")
        found = {
            slide: values
            for path in sorted((self.folder / run_folder.ATTENTION).rglob("*.csv"))
            for slide, values in _read_attention(path).items()
        }

        def read(name: str) -> PatchValues:
            x, y, attention, side = found[name]
            slide = self._stored(name)
            return PatchValues(
                name, "attention, rank among the slide's patches", x, y, side or slide.size_l0,
                ranks(attention), None, _bounds(slide), slide.mpp,
            )  # fmt: skip

        for name in _chosen(only, found, self.folder):
            yield name, partial(read, name)

    def _values(
        self, scores: PatchScores, rows: NDArray[np.intp], slide: PredictedSlide
    ) -> PatchValues:
        name = scores.classes[-1] if self.class_name is None else self.class_name
        if name not in scores.classes:
            raise UsageError("--class", found=repr(name), expected=" or ".join(scores.classes))
        probability = scores.probability[rows]
        return PatchValues(
            slide.slide, f"probability of {name}", scores.x_l0[rows], scores.y_l0[rows],
            slide.size_l0, probability[:, scores.classes.index(name)],
            np.array(scores.classes, object)[probability.argmax(axis=1)], _bounds(slide), slide.mpp,
        )  # fmt: skip

    def _stored(self, slide: str) -> PredictedSlide:
        """Return size and scale of a slide and its patches from the store that holds it."""
        name, _, store_uuid = slide.partition("@")
        for store in self.stores:
            for record in store.complete.values():
                if record.id == name and store.uuid.startswith(store_uuid):
                    return PredictedSlide.of(record, source="")
        raise NothingToDo(
            f"no store holds slide {slide}", found=", ".join(str(s.path) for s in self.stores) or "no store",
            todo="give the store of its patches with --store",
        )  # fmt: skip


def _bounds(slide: PredictedSlide) -> tuple[float, float, float, float]:
    left, top, width, height = slide.bounds
    if min(width, height, slide.size_l0) <= 0:
        raise DamagedStore(
            f"slide {slide.slide}: its size, or that of its patches", found=f"{width}×{height}, {slide.size_l0}"
        )  # fmt: skip
    return left, top, width, height


def _chosen(only: Sequence[str], names: Collection[str], folder: Path) -> list[str]:
    missing = [name for name in only if name not in names]
    if missing:
        some = ", ".join(list(names)[:3])
        raise UsageError(
            f"{folder} has no predictions of slide {missing[0]!r}", expected=f"such as {some}"
        )
    return list(only) or list(names)


_Attention = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], float]


def _read_attention(path: Path) -> dict[str, _Attention]:
    """Return x, y, attention and side of patches by slide, without patches of unknown position."""
    rows: dict[str, list[tuple[int, int, float, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["x_l0"]:
                    value = float(row["attention"]), float(row["size_l0"] or 0)
                    rows.setdefault(row["slide"], []).append(
                        (int(row["x_l0"]), int(row["y_l0"]), *value)
                    )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error
    found = {}
    for slide, values in rows.items():
        table = np.array(values)
        x, y = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        found[slide] = (x, y, table[:, 2].astype(np.float32), float(table[0, 3]))
    return found


_IMAGE_SIDE = 1600
"""Approximate longer side of an image that is read from a slide file, in pixels."""


@dataclass(frozen=True, slots=True)
class SlideImages:
    """Images of slides, to draw heatmaps on.

    Attributes:
        files: slide files by id; preferred, since their images are finer.
        stores: open stores with thumbnails.
        predictions: folder of predictions with thumbnails.
    """

    files: Mapping[str, Path]
    stores: Sequence[Store]
    predictions: PredictionsFolder | None = None

    def of(self, slide: str) -> NDArray[np.uint8] | None:
        """Return (H, W, 3) uint8 RGB of a slide's scanned area; None if there is no image.

        Raises:
            SlideError, DamagedStore: the image cannot be read.
        """
        if slide in self.files:
            return _read_image(self.files[slide])
        thumbnail = self._thumbnail(slide)
        return None if thumbnail is None else decode_picture(thumbnail, f"thumbnail of {slide}")

    def _thumbnail(self, slide: str) -> bytes | None:
        if self.predictions is not None:
            path = self.predictions.thumbnail(slide)
            if path.exists():
                return path.read_bytes()
        for store in self.stores:
            for number, record in store.complete.items():
                if record.id == slide.partition("@")[0]:
                    return store.thumbnail(number)
        return None


def _read_image(path: Path) -> NDArray[np.uint8]:
    with Slide(path) as slide:
        bounds = slide.info.bounds.size
        # Relative to the assumed scale of level 0: only the ratio matters.
        wanted = Mpp(max(1.0, max(bounds.width, bounds.height) / _IMAGE_SIDE) * ASSUMED_MPP)
        return read_thumbnail(slide, None, at=wanted).pixels
