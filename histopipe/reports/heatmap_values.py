"""One value per patch of a slide, as heatmaps show them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.geometry import Mpp
from histopipe.predictions.prediction_tables import (
    ATTENTION,
    CONTRIBUTION,
    FOLDER,
    PREDICTIONS,
    patch_value_files,
    ranks_of,
    read_contributions,
    read_patch_values,
)
from histopipe.predictions.sources import (
    PredictedSlide,
    PredictionsFolder,
    PredictionSource,
    RunSource,
)
from histopipe.slides.readers import open_slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store


@dataclass(frozen=True, slots=True)
class NamedPatchValues:
    """One value per patch of a slide.

    Attributes:
        slide: the slide, with the scanned area, and the side of the patches.
        name: name of the value, such as "probability of tumour".
        x_l0, y_l0: (N,) top left corners of the patches, level-0 pixels.
        values: (N,) float32, 0 to 1.
        predicted: (N,) most probable class of each patch; None if the values are not probabilities of a class.
        scale: for values with a sign, the one that is shown as 1; the value 0 is shown as 0.5. None for others.
    """

    slide: PredictedSlide
    name: str
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    values: NDArray[np.float32]
    predicted: NDArray[np.object_] | None = None
    scale: float | None = None

    def raster(self, pixel_l0: float) -> NDArray[np.float32]:
        """Return (H, W) float32: the mean of the patches that cover the centre of a pixel, NaN without patches.

        The raster covers the scanned area. `pixel_l0` is the side of its pixels in level-0 pixels.
        """
        left, top, width, height = self.slide.bounds
        shape = max(1, round(height / pixel_l0)), max(1, round(width / pixel_l0))
        sums, counts = np.zeros(shape, np.float32), np.zeros(shape, np.uint16)
        # The first pixel with its centre in the patch, and the first pixel after the patch, down and across.
        edges = [
            np.clip(np.ceil(edge / pixel_l0 - 0.5), 0, count).astype(np.int64).tolist()
            for start, count in ((self.y_l0 - top, shape[0]), (self.x_l0 - left, shape[1]))
            for edge in (start, start + self.slide.size_l0)
        ]
        for y0, y1, x0, x1, value in zip(*edges, self.values.tolist(), strict=True):
            sums[y0:y1, x0:x1] += value
            counts[y0:y1, x0:x1] += 1
        with np.errstate(invalid="ignore"):
            sums /= counts  # NaN without patches
        return sums


ReadValues = Callable[[str], NamedPatchValues | None]
"""Reads the values of a slide. Returns None if the slide has no patches."""


def check_geometry(slide: PredictedSlide) -> PredictedSlide:
    """Return a slide, or raise DamagedStore if its scanned area or its patches have no size."""
    _, _, width, height = slide.bounds
    if min(width, height, slide.size_l0) <= 0:
        raise DamagedStore(
            f"slide {slide.slide}: the size of the slide or of its patches is not positive",
            found=f"{width}×{height}, {slide.size_l0}",
        )
    return slide


_IMAGE_SIDE = 1600
"""Approximate longer side of an image read from a slide file, or drawn from patches, in pixels."""
_SMALL_SIDE, _SMALL_PATCHES = 512, 400
"""Patches are drawn over a thumbnail with a shorter longer side, if the slide has at most so many."""


Show = Literal["attention", "contribution"]


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
    if (folder / FOLDER).is_dir():
        names, read = _open_bag_values(folder, stores, class_name, show)
    elif show is not None:
        raise UsageError(
            f"--show {show}",
            found=f"{folder}, predictions of patches",
            expected="those of a slide model",
        )
    elif PredictionsFolder(folder).exists:
        names, read = _open_predictions(PredictionsFolder(folder), stores, class_name)
    elif (folder / PREDICTIONS).exists():
        run = RunSource(folder)
        if not run.all.task.of_classes:
            raise UsageError(
                f"{folder}",
                found=f"predictions of {run.all.task.name}",
                expected="predictions of classes",
            )
        if not run.of_patches:
            raise UsageError(
                f"{folder} has no attention, and no predictions of patches, only of {run.all.level}s",
                todo="train with --pooling gated or attention; of vectors, predict features of patches",
            )
        names, read = _open_predictions(run, stores, class_name)
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


def _open_bag_values(
    folder: Path, stores: Sequence[Store], class_name: str | None, show: Show | None
) -> tuple[Collection[str], ReadValues]:
    """Return the ids of slides with patch tables in a folder, and a function that reads the values of one slide.

    A class name selects the contribution to it.

    Raises:
        UsageError: the folder has no such values.
        DamagedStore: a table cannot be read.
    """
    paths = patch_value_files(folder)
    if not paths:
        raise UsageError(f"{folder} has no attention", expected="a finished slide model")
    if show == ATTENTION and class_name is not None:
        raise UsageError("--class", found="--show attention", expected="--show contribution")
    column = ATTENTION
    if show == "contribution" or class_name is not None:
        names = read_contributions(paths[0])
        prediction = class_name if class_name is not None else "".join(names[-1:])
        if prediction not in names:
            raise UsageError(
                "--class" if class_name is not None else "--show contribution",
                found=repr(class_name)
                if class_name is not None
                else f"{folder} of an earlier version",
                expected=" or ".join(names) or "predictions that record contributions",
            )
        column = CONTRIBUTION + prediction
    tables = read_patch_values(paths, column)
    if not tables and show is None and column == ATTENTION:
        return _open_bag_values(folder, stores, class_name, "contribution")

    def read(name: str) -> NamedPatchValues:
        x, y, value, side = tables[name].T
        slide = check_geometry(PredictionsFolder(folder).find(name) or _stored(stores, name))
        if column == ATTENTION:
            title, values, scale = (
                "attention, rank among the slide's patches",
                ranks_of(value),
                None,
            )
        else:
            title, scale = f"contribution to {prediction}", float(np.abs(value).max()) or 1.0
            values = 0.5 + value / (2 * scale)
        return NamedPatchValues(
            replace(slide, slide=name, size_l0=float(side[0]) or slide.size_l0),
            title,
            x.astype(np.int64),
            y.astype(np.int64),
            values.astype(np.float32),
            scale=scale,
        )

    return tables, read


def _open_predictions(
    source: PredictionSource, stores: Sequence[Store], class_name: str | None
) -> tuple[Collection[str], ReadValues]:
    def read(name: str) -> NamedPatchValues | None:
        scores = source.predictions(name)
        if scores is None:
            return None
        slide = source.find(name) or _stored(stores, name)
        classes, output = scores.task.classes, scores.output
        chosen = classes[-1] if class_name is None else class_name
        if chosen not in classes:
            raise UsageError("--class", found=repr(chosen), expected=" or ".join(classes))
        return NamedPatchValues(
            check_geometry(slide),
            f"probability of {chosen}",
            scores.x_l0,
            scores.y_l0,
            output[:, classes.index(chosen)],
            np.array(classes, object)[output.argmax(axis=1)],
        )

    return source.slide_ids(), read


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
            with open_slide(self.files[slide]) as file:
                longer = max(file.info.bounds.size.width, file.info.bounds.size.height)
                # Only the ratio to the scale of level 0 matters, so an assumed scale is used.
                at = Mpp(max(1.0, longer / _IMAGE_SIDE) * ASSUMED_MPP)
                return read_thumbnail(file, None, at=at).pixels
        place, value = find_slide(self.stores, slide), None
        path = None if self.predictions is None else self.predictions.path_of(slide, ".jpg")
        if path is not None and path.exists():
            value = path.read_bytes()
        elif place is not None:
            value = place[0].thumbnail(place[1])
        if value is None:
            return None
        thumbnail = decode_picture(value, f"thumbnail of {slide}")
        if (
            place is None
            or max(thumbnail.shape) >= _SMALL_SIDE
            or place[0].records[place[1]].stored > _SMALL_PATCHES
        ):
            return thumbnail
        return _with_patches(*place, thumbnail)


def _with_patches(store: Store, number: int, thumbnail: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an enlarged thumbnail with the patches of its slide drawn over it, except damaged patches."""
    record = store.records[number]
    slide = check_geometry(PredictedSlide.of(record, source=""))
    left, top, width, height = slide.bounds
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
