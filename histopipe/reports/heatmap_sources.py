"""Patch values for heatmaps: predictions, validation and test patches of a run, or attention; and images of slides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.predictions import read_predictions
from histopipe.geometry import Mpp
from histopipe.inference.predictions_folder import PredictedSlide, PredictionsFolder
from histopipe.reports.bag_values import Show, open_bag_values
from histopipe.reports.heatmap_values import PatchValues, ReadValues, bounds_of
from histopipe.runs import folder as run_folder
from histopipe.slides.readers import open_slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.tasks.predictions import Predictions, joined_predictions

_IMAGE_SIDE = 1600
"""Approximate longer side of an image read from a slide file, or drawn from patches, in pixels."""
_SMALL_SIDE, _SMALL_PATCHES = 512, 400
"""Patches are drawn over a thumbnail with a shorter longer side, if the slide has at most so many."""


def open_values(
    folder: Path,
    stores: Sequence[Store],
    class_name: str | None,
    only: Sequence[str] = (),
    *,
    show: Show | None = None,
) -> tuple[list[str], ReadValues]:
    """Return the ids of the slides with values in a folder, and a function that reads the values of one slide.

    The values are probabilities of the class, or of the last class if None; for slide models attention, or by `show` or
    with a class, contributions. `only` restricts the slides if it is not
    empty. The function raises DamagedStore, or NothingToDo if no store holds the slide.

    Raises:
        UsageError: the folder has no values, or no values of these slides or of this class.
        DamagedStore: the folder cannot be read.
    """
    names: Collection[str]
    if (folder / run_folder.ATTENTION).is_dir():
        names, read = open_bag_values(
            folder, lambda slide: _described(folder, stores, slide), class_name, show
        )
    elif show is not None:
        raise UsageError(
            f"--show {show}",
            found=f"{folder}, predictions of patches",
            expected="those of a slide model",
        )
    elif PredictionsFolder(folder).exists:
        names, read = _of_predictions(folder, class_name)
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

    def read(name: str) -> PatchValues | None:
        slide = PredictedSlide.read(predictions.json(name))
        if not slide.patches:
            return None
        scores = predictions.read(name)
        return _probabilities(scores, np.arange(len(scores)), slide, class_name)

    return predictions.names(), read


def _of_run(
    folder: Path, stores: Sequence[Store], class_name: str | None
) -> tuple[Collection[str], ReadValues]:
    """Read validation and test patches. Training patches have no predictions."""
    sides = [*read_predictions(folder / run_folder.PREDICTIONS).values()]
    if sides and not sides[0].task.of_classes:
        raise UsageError(
            f"{folder}",
            found=f"predictions of {sides[0].task.name}",
            expected="predictions of classes",
        )
    if sides and sides[0].level != "patch":
        raise UsageError(
            f"{folder} has no attention, and no predictions of patches, only of {sides[0].level}s",
            todo="train with --pooling gated or attention",
        )

    def read(name: str) -> PatchValues:
        # A slide may have patches in both splits.
        scores = joined_predictions([side for side in sides if name in side.slides])
        rows = np.flatnonzero(scores.slide == scores.slides.index(name))
        return _probabilities(scores, rows, _stored(stores, name), class_name)

    return sorted({name for side in sides for name in side.slides}), read


def _probabilities(
    scores: Predictions, rows: NDArray[np.intp], slide: PredictedSlide, class_name: str | None
) -> PatchValues:
    classes = scores.task.classes
    name = classes[-1] if class_name is None else class_name
    if name not in classes:
        raise UsageError("--class", found=repr(name), expected=" or ".join(classes))
    probability = scores.output[rows]
    return PatchValues(
        slide.slide, f"probability of {name}", scores.x_l0[rows], scores.y_l0[rows],
        slide.size_l0, probability[:, classes.index(name)],
        np.array(classes, object)[probability.argmax(axis=1)], bounds_of(slide), slide.mpp,
    )  # fmt: skip


def find_slide(stores: Sequence[Store], slide: str) -> tuple[Store, int] | None:
    """Return the store of a slide, given as `ID` or `ID@START-OF-UUID`, and the number of the slide in it."""
    name, _, uuid = slide.rpartition("@")
    places = (
        (store, number)
        for slide_id, start in ((slide, ""), (name, uuid))  # an id may have an @
        for store in stores
        for number, record in store.complete.items()
        if record.id == slide_id and store.uuid.startswith(start)
    )
    return next(places, None)


def _described(folder: Path, stores: Sequence[Store], slide: str) -> PredictedSlide:
    """Return the size and scale of a slide, from predictions or else from its store."""
    path = PredictionsFolder(folder).json(slide)
    return PredictedSlide.read(path) if path.exists() else _stored(stores, slide)


def _stored(stores: Sequence[Store], slide: str) -> PredictedSlide:
    """Return the size and scale of a slide and its patches from its store."""
    place = find_slide(stores, slide)
    if place is None:
        raise NothingToDo(
            f"no store holds slide {slide}",
            found=", ".join(str(store.path) for store in stores) or "no store",
            todo="name the store of its patches with --store",
        )
    store, number = place
    return PredictedSlide.of(store.records[number], source="")


@dataclass(frozen=True, slots=True)
class SlideImages:
    """Images of slides as backgrounds of heatmaps: from slide files by id if given, else thumbnails, with patches if small."""

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
        value = self._thumbnail(slide)
        thumbnail = None if value is None else decode_picture(value, f"thumbnail of {slide}")
        place = find_slide(self.stores, slide)
        if place is None or thumbnail is None or max(thumbnail.shape) >= _SMALL_SIDE:
            return thumbnail
        store, number = place
        if store.records[number].stored > _SMALL_PATCHES:
            return thumbnail
        return _with_patches(store, number, thumbnail)

    def _thumbnail(self, slide: str) -> bytes | None:
        if self.predictions is not None:
            path = self.predictions.thumbnail(slide)
            if path.exists():
                return path.read_bytes()
        place = find_slide(self.stores, slide)
        return place[0].thumbnail(place[1]) if place else None


def _with_patches(store: Store, number: int, thumbnail: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an enlarged thumbnail with the patches of its slide drawn over it, except damaged patches."""
    record = store.records[number]
    slide = PredictedSlide.of(record, source="")
    left, top, width, height = bounds_of(slide)
    scale = _IMAGE_SIDE / max(width, height)
    picture = Image.fromarray(thumbnail).resize((round(width * scale), round(height * scale)))
    index = store.index(number)
    for row, (x, y) in enumerate(zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)):
        first, last = (
            (round((x - left + side) * scale), round((y - top + side) * scale))
            for side in (0, slide.size_l0)
        )
        with suppress(DamagedStore, UsageError):
            patch = Image.fromarray(store.read(record.id, row))
            picture.paste(patch.resize((last[0] - first[0], last[1] - first[1])), first)
    return np.asarray(picture)


def _read_image(path: Path) -> NDArray[np.uint8]:
    with open_slide(path) as slide:
        bounds = slide.info.bounds.size
        # Only the ratio to the scale of level 0 matters, so an assumed scale is used.
        scale = Mpp(max(1.0, max(bounds.width, bounds.height) / _IMAGE_SIDE) * ASSUMED_MPP)
        return read_thumbnail(slide, None, at=scale).pixels
