"""Patch values for heatmaps: predictions, validation and test patches of a run, or attention; and images of slides."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.predictions import (
    PatchScores,
    joined_scores,
    of_classes,
    read_predictions,
)
from histopipe.geometry import Mpp
from histopipe.inference.predictions_folder import PredictedSlide, PredictionsFolder
from histopipe.runs import folder as run_folder
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store

_IMAGE_SIDE = 1600
"""Approximate longer side of an image read from a slide file, in pixels."""


@dataclass(frozen=True, slots=True)
class PatchValues:
    """One value per patch of a slide.

    Attributes:
        slide: slide id.
        name: name of the value, such as "probability of tumour".
        x_l0, y_l0: (N,) top left corners of the patches, level-0 pixels.
        side_l0: side of the patches, level-0 pixels.
        values: (N,) float32, 0 to 1.
        predicted: (N,) most probable class of each patch; None if the values are not probabilities of a class.
        bounds: x, y, width and height of the scanned area, level-0 pixels.
        mpp: µm per pixel of level 0; None if unknown.
    """

    slide: str
    name: str
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    side_l0: float
    values: NDArray[np.float32]
    predicted: NDArray[np.object_] | None
    bounds: tuple[float, float, float, float]
    mpp: float | None

    def raster(self, pixel_l0: float) -> NDArray[np.float32]:
        """Return (H, W) float32: the mean of the patches that cover the centre of a pixel, NaN without patches.

        The raster covers `bounds`. `pixel_l0` is the side of its pixels in level-0 pixels.
        """
        left, top, width, height = self.bounds
        shape = max(1, round(height / pixel_l0)), max(1, round(width / pixel_l0))
        sums, counts = np.zeros(shape, np.float32), np.zeros(shape, np.uint16)
        edges = []
        for start, count in ((self.y_l0 - top, shape[0]), (self.x_l0 - left, shape[1])):
            # The first pixel with its centre in the patch, and the first pixel after the patch.
            for edge in (start, start + self.side_l0):
                centre = np.ceil(edge / pixel_l0 - 0.5)
                edges.append(np.clip(centre, 0, count).astype(np.int64).tolist())
        for y0, y1, x0, x1, value in zip(*edges, self.values.tolist(), strict=True):
            sums[y0:y1, x0:x1] += value
            counts[y0:y1, x0:x1] += 1
        with np.errstate(invalid="ignore"):
            sums /= counts  # NaN without patches
        return sums


def ranks(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return (N,) ranks: the share of other values below each. Attention weights differ by orders of magnitude."""
    if len(values) < 2:
        return np.ones(len(values), np.float32)
    below = np.searchsorted(np.sort(values), values)
    return np.asarray(below / (len(values) - 1), np.float32)


ReadValues = Callable[[str], PatchValues | None]
"""Reads the values of a slide. Returns None if the slide has no patches."""


def open_values(
    folder: Path, stores: Sequence[Store], class_name: str | None, only: Sequence[str] = ()
) -> tuple[list[str], ReadValues]:
    """Return the ids of the slides with values in a folder, and a function that reads the values of one slide.

    The values are probabilities of the class, or of the last class if None. `only` restricts the slides if it is not
    empty. The function raises DamagedStore, or NothingToDo if no store holds the slide.

    Raises:
        UsageError: the folder has no values, or no values of these slides or of this class.
        DamagedStore: the folder cannot be read.
    """
    names: Collection[str]
    if PredictionsFolder(folder).exists:
        names, read = _of_predictions(folder, class_name)
    elif (folder / run_folder.ATTENTION).is_dir():
        if class_name is not None:
            raise UsageError("--class", found="attention", expected="no class")
        names, read = _of_attention(folder, stores)
    elif (folder / run_folder.PREDICTIONS).exists():
        names, read = _of_run(folder, stores, class_name)
    else:
        raise UsageError(
            f"{folder} holds no predictions",
            expected="a folder of `histopipe predict`, or of a finished run",
        )
    missing = [name for name in only if name not in names]
    if missing:
        some = ", ".join(list(names)[:3])
        raise UsageError(
            f"{folder} has no predictions of slide {missing[0]!r}", expected=f"such as {some}"
        )
    return list(only) or list(names), read


def _of_predictions(folder: Path, class_name: str | None) -> tuple[Collection[str], ReadValues]:
    predictions = PredictionsFolder(folder)
    slides = predictions.slides()

    def read(name: str) -> PatchValues | None:
        if not slides[name].patches:
            return None
        scores = predictions.read(name)
        return _probabilities(scores, np.arange(len(scores.label)), slides[name], class_name)

    return slides, read


def _of_run(
    folder: Path, stores: Sequence[Store], class_name: str | None
) -> tuple[Collection[str], ReadValues]:
    """Read validation and test patches. Training patches have no predictions."""
    found = read_predictions(folder / run_folder.PREDICTIONS).values()
    sides = [of_classes(scores, folder) for scores in found]
    if sides and sides[0].level != "patch":
        raise UsageError(
            f"{folder} has no attention, and no predictions of patches, only of {sides[0].level}s",
            todo="train with --pooling gated or attention",
        )

    def read(name: str) -> PatchValues:
        # A slide may have patches in both splits.
        scores = joined_scores([side for side in sides if name in side.slides])
        rows = np.flatnonzero(scores.slide == scores.slides.index(name))
        return _probabilities(scores, rows, _stored(stores, name), class_name)

    return sorted({name for side in sides for name in side.slides}), read


def _of_attention(folder: Path, stores: Sequence[Store]) -> tuple[Collection[str], ReadValues]:
    found: dict[str, NDArray[np.float64]] = {}
    for path in sorted((folder / run_folder.ATTENTION).rglob("*.csv")):
        found |= read_attention(path)

    def read(name: str) -> PatchValues:
        x, y, attention, side = found[name].T
        slide = _stored(stores, name)
        return PatchValues(
            name, "attention, rank among the slide's patches", x.astype(np.int64),
            y.astype(np.int64), float(side[0]) or slide.size_l0,
            ranks(attention.astype(np.float32)), None, _bounds(slide), slide.mpp,
        )  # fmt: skip

    return found, read


def read_attention(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return (N, 4) x, y, attention and side of patches by slide, without patches with unknown positions."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["x_l0"]:
                    corner = int(row["x_l0"]), int(row["y_l0"])
                    values = float(row["attention"]), float(row["size_l0"] or 0)
                    rows.setdefault(row["slide"], []).append((*corner, *values))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{path} is damaged", found=repr(error)[:200]) from error
    return {slide: np.array(values, np.float64) for slide, values in rows.items()}


def _probabilities(
    scores: PatchScores, rows: NDArray[np.intp], slide: PredictedSlide, class_name: str | None
) -> PatchValues:
    name = scores.classes[-1] if class_name is None else class_name
    if name not in scores.classes:
        raise UsageError("--class", found=repr(name), expected=" or ".join(scores.classes))
    probability = scores.probability[rows]
    return PatchValues(
        slide.slide, f"probability of {name}", scores.x_l0[rows], scores.y_l0[rows],
        slide.size_l0, probability[:, scores.classes.index(name)],
        np.array(scores.classes, object)[probability.argmax(axis=1)], _bounds(slide), slide.mpp,
    )  # fmt: skip


def _bounds(slide: PredictedSlide) -> tuple[float, float, float, float]:
    left, top, width, height = slide.bounds
    if min(width, height, slide.size_l0) <= 0:
        raise DamagedStore(
            f"slide {slide.slide}: the size of the slide or of its patches is not positive",
            found=f"{width}×{height}, {slide.size_l0}",
        )
    return left, top, width, height


def find_slide(stores: Sequence[Store], slide: str) -> tuple[Store, int] | None:
    """Return the store of a slide, given as `ID` or `ID@START-OF-UUID`, and the number of the slide in it."""
    name, _, uuid = slide.partition("@")
    for store in stores:
        for number, record in store.complete.items():
            if record.id == name and store.uuid.startswith(uuid):
                return store, number
    return None


def _stored(stores: Sequence[Store], slide: str) -> PredictedSlide:
    """Return the size and scale of a slide and its patches from its store."""
    found = find_slide(stores, slide)
    if found is None:
        raise NothingToDo(
            f"no store holds slide {slide}",
            found=", ".join(str(store.path) for store in stores) or "no store",
            todo="name the store of its patches with --store",
        )
    store, number = found
    return PredictedSlide.of(store.records[number], source="")


@dataclass(frozen=True, slots=True)
class SlideImages:
    """Images of slides as backgrounds of heatmaps: from slide files by id if given, else thumbnails."""

    files: Mapping[str, Path]
    stores: Sequence[Store]
    predictions: PredictionsFolder | None = None

    def of(self, slide: str) -> NDArray[np.uint8] | None:
        """Return the scanned area of a slide as (H, W, 3) uint8 RGB, or None if there is no image.

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
        found = find_slide(self.stores, slide)
        return found[0].thumbnail(found[1]) if found else None


def _read_image(path: Path) -> NDArray[np.uint8]:
    with Slide(path) as slide:
        bounds = slide.info.bounds.size
        # Only the ratio to the scale of level 0 matters, so an assumed scale is used.
        wanted = Mpp(max(1.0, max(bounds.width, bounds.height) / _IMAGE_SIDE) * ASSUMED_MPP)
        return read_thumbnail(slide, None, at=wanted).pixels
