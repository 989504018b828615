"""One value per patch of a slide, as heatmaps show them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.dataset.selection import store_paths
from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, UsageError
from histopipe.geometry import Mpp, PointL0, Size
from histopipe.predictions.prediction_tables import (
    ATTENTION,
    CONTRIBUTION,
    patch_value_files,
    ranks_of,
    read_contributions,
    read_patch_values,
    slides_in_tables,
)
from histopipe.predictions.sources import (
    MAPS,
    PredictedSlide,
    PredictionsFolder,
    PredictionSource,
)
from histopipe.slides.slide import Turn
from histopipe.slides.slide_files import open_slide
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
        values: (N,) float32.
        low, high: values at the ends of the colour bar; of values with a sign, `low` is `-high`.
        predicted: (N,) most probable class of each patch; None if the values are not probabilities of a class.
        measures: all values that are known of the patches, (N,) each, by name: of each class, and attention.
    """

    slide: PredictedSlide
    name: str
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    values: NDArray[np.float32]
    low: float = 0.0
    high: float = 1.0
    predicted: NDArray[np.object_] | None = None
    measures: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)

    @property
    def has_sign(self) -> bool:
        """Whether 0 is the middle of the colour bar."""
        return self.low < 0 and self.low == -self.high

    @property
    def scaled(self) -> NDArray[np.float32]:
        """(N,) float32, the values from 0 to 1 on the colour bar."""
        return np.asarray((self.values - self.low) / (self.high - self.low), np.float32)

    def in_stored_frame(self) -> NamedPatchValues:
        """Return the values in the frame of the file's pixels: QuPath does not turn them."""
        slide, (_, _, *size) = self.slide, self.slide.bounds
        if not slide.orientation:
            return self
        places = np.stack([self.x_l0, self.y_l0], axis=1)
        turn = Turn(slide.orientation, Size(*size))
        x, y = np.rint(turn.stored(places, slide.size_l0)).astype(np.int64).T
        bounds = [0, 0, *(size[::-1] if slide.orientation > 4 else size)]
        return replace(self, slide=replace(slide, bounds=bounds, orientation=None), x_l0=x, y_l0=y)

    def raster(self, pixel_l0: float) -> NDArray[np.float32]:
        """Return (H, W) float32: the mean of the `scaled` patches that cover the centre of a pixel, NaN without patches.

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
        for y0, y1, x0, x1, value in zip(*edges, self.scaled.tolist(), strict=True):
            sums[y0:y1, x0:x1] += value
            counts[y0:y1, x0:x1] += 1
        with np.errstate(invalid="ignore"):
            sums /= counts  # NaN without patches
        return sums


def open_stores(
    source: PredictionSource, stores: Sequence[str | Path], stack: ExitStack
) -> tuple[list[Store], list[str]]:
    """Open `stores`, or else those that the source names. Return them, and why named ones cannot be opened.

    Raises:
        UsageError, DamagedStore: one of `stores` cannot be opened.
    """
    if stores:
        return [stack.enter_context(Store(path)) for path in store_paths(stores)], []
    opened, missing = list[Store](), list[str]()
    try:
        paths = source.store_paths
    except HistopipeError as error:
        return [], [str(error)]
    for path in paths:
        try:
            opened.append(stack.enter_context(Store(path)))
        except HistopipeError as error:
            missing.append(str(error))
    return opened, missing


ReadValues = Callable[[str], NamedPatchValues | None]
"""Reads the values of a slide. Returns None if the slide has no patches."""


def check_geometry(slide: PredictedSlide) -> PredictedSlide:
    """Return a slide, or raise DamagedStore if its scanned area or its patches have no size, NothingToDo if it is unknown."""
    _, _, width, height = slide.bounds
    if slide.size_l0 == 0:
        raise NothingToDo(
            f"slide {slide.slide}: the side of its patches is unknown",
            todo="name the store of its patches with --store",
        )
    if min(width, height, slide.size_l0) <= 0:
        raise DamagedStore(
            f"slide {slide.slide}: the size of the slide or of its patches is not positive",
            found=f"{width}×{height}, {slide.size_l0}",
        )
    return slide


_IMAGE_SIDE = 1600
"""Approximate longer side of an image read from a slide file, or drawn from patches, in pixels."""
_PATCH_SIDE = 224
"""Fewest pixels of the side of a patch that is read from a slide file, if a level has so many."""
_SMALL_SIDE, _SMALL_PATCHES = 512, 400
"""Patches are drawn over a thumbnail with a shorter longer side, if the slide has at most so many."""


Show = Literal["attention", "contribution", "haematoxylin", "eosin", "dab", "positive"]


def open_values(
    source: PredictionSource,
    stores: Sequence[Store],
    class_name: str | None,
    only: Sequence[str] = (),
    *,
    show: Show | None = None,
) -> tuple[list[str], ReadValues]:
    """Return the ids of the slides with values, and a function that reads the values of one slide.

    The values are probabilities of the class, or the label or number of this name, or the last one if None; for slide
    models attention, or by `show` or with a class, contributions. `only` restricts the slides if it is not empty. The
    function raises DamagedStore, or NothingToDo if no store holds the slide.

    Raises:
        UsageError: the folder has no values, or no values of these slides or of this class.
        DamagedStore: the folder cannot be read.
    """
    folder = source.folder
    if source.of_pixels:
        raise UsageError(
            f"{folder} has no values of patches",
            found="maps of pixels",
            todo=f"use `histopipe view {folder} SLIDES`, or open the files in {MAPS} with QuPath",
        )
    if source.of_bags:
        names, read = _open_bag_values(source, stores, class_name, show)
    elif show is not None:
        raise UsageError(
            f"--show {show}",
            found=f"{folder}, predictions of patches",
            expected="those of a slide model",
        )
    elif not source.of_patches:
        raise UsageError(
            f"{folder} has no attention, and no predictions of patches",
            todo="train with --pooling gated or attention; of vectors, predict features of patches; the model of epoch 0 "
            "predicts from covariates alone",
        )
    else:
        names, read = _open_predictions(source, stores, class_name)
    missing = [name for name in only if name not in names]
    if missing:
        some = ", ".join(list(names)[:3])
        raise UsageError(
            f"{folder} has no predictions of slide {missing[0]!r}", expected=f"such as {some}"
        )
    return list(only) or list(names), read


def open_columns(
    store: Store, column: str, only: Sequence[str] = ()
) -> tuple[list[str], ReadValues]:
    """Return the ids of the slides of a store, and a function that reads a measured column of one slide, as `open_values`.

    The function raises NothingToDo if it has no value.
    """

    def read(name: str) -> NamedPatchValues:
        slide = store.number(name)
        index = store.index(slide)
        kept = np.isfinite(index.get(column, np.full(len(index["crc"]), np.nan)))
        if not kept.any():
            raise NothingToDo(
                f"{name} has no values of {column}", todo="histopipe stains --amounts"
            )
        high = max(1.0, float(index[column][kept].max(initial=0)))
        geometry = check_geometry(PredictedSlide.of(store.records[slide], source=""))
        x, y, values = (index[name][kept] for name in ("x_l0", "y_l0", column))
        return NamedPatchValues(geometry, column, x, y, values, 0.0, high)

    return [*only] or [record.id for record in store.complete.values()], read


def _open_bag_values(
    source: PredictionSource, stores: Sequence[Store], class_name: str | None, show: Show | None
) -> tuple[Collection[str], ReadValues]:
    """Return the ids of slides with patch tables in a folder, and a function that reads the values of one slide.

    A class name selects the contribution to it.

    Raises:
        UsageError: the folder has no such values.
        DamagedStore: a table cannot be read.
    """
    folder = source.folder
    paths = patch_value_files(folder)
    if not paths:
        raise UsageError(
            f"{folder} has no attention",
            expected="a finished slide model, in whose predictions slides have a part",
        )
    if show == ATTENTION and class_name is not None:
        raise UsageError("--class", found="--show attention", expected="--show contribution")
    names = next(filter(None, map(read_contributions, paths)), ())
    if show is None and (class_name is not None or not read_patch_values(paths[:1])):
        show = "contribution"
    column = ATTENTION
    if show == "contribution":
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
    places = slides_in_tables(paths)
    titles = {ATTENTION: ATTENTION, **{CONTRIBUTION + n: f"contribution to {n}" for n in names}}

    def read(name: str) -> NamedPatchValues | None:
        table = read_patch_values([places[name]], column, [*titles]).get(name)
        if table is None:
            return None  # positions are unknown
        x, y, value, side, *further = table.T
        slide = check_geometry(source.find(name) or _stored(stores, name))
        if column == ATTENTION:
            title, low, high = "attention, rank among the slide's patches", 0.0, 1.0
            value = ranks_of(value)
        else:
            title, high = titles[column], float(np.abs(value).max()) or 1.0
            low = -high
        measures = {
            t: v for t, v in zip(titles.values(), further, strict=True) if np.isfinite(v).all()
        }
        return NamedPatchValues(
            replace(slide, slide=name, size_l0=float(side[0]) or slide.size_l0),
            title,
            x.astype(np.int64),
            y.astype(np.int64),
            value.astype(np.float32),
            low,
            high,
            measures=measures,
        )

    return places, read


def _open_predictions(
    source: PredictionSource, stores: Sequence[Store], class_name: str | None
) -> tuple[Collection[str], ReadValues]:
    def read(name: str) -> NamedPatchValues | None:
        scores = source.of_slide(name)
        if scores is None:
            return None
        slide = source.find(name) or _stored(stores, name)
        task, output = scores.task, scores.output
        chosen = task.names[-1] if class_name is None else class_name
        if chosen not in task.names:
            raise UsageError("--class", found=repr(chosen), expected=" or ".join(task.names))
        kind, values = task.value_text, task.patch_values(output)
        value, low, high = values[:, task.names.index(chosen)], 0.0, 1.0
        if not task.probabilities:
            low, high = float(value.min()), float(value.max())
            high = high if high > low else low + 1
        return NamedPatchValues(
            check_geometry(slide),
            f"{kind} {chosen}",
            scores.x_l0,
            scores.y_l0,
            value,
            low,
            high,
            np.array(task.classes, object)[output.argmax(axis=1)] if task.of_classes else None,
            {f"{kind} {name}": part for name, part in zip(task.names, values.T, strict=True)},
        )

    return source.slide_ids(), read


def find_slide(stores: Sequence[Store], slide: str) -> tuple[Store, int] | None:
    """Return the store of a slide, given as `ID` or `ID@START-OF-UUID`, and the number of the slide in it."""
    name, _, uuid = slide.rpartition("@")
    places = (
        (store, number)
        for slide_id, start in ((slide, ""), (name, uuid))  # an id may have an @
        for store in stores
        if store.uuid.startswith(start)
        for number in store.numbers.get(slide_id, ())
    )
    return next(places, None)


def stored_patch(
    stores: Sequence[Store], slide: str, x: int, y: int, side: float | None = None
) -> NDArray[np.uint8] | None:
    """Return the patch of a stored slide at a corner in level-0 pixels; None if it cannot be read.

    If `side` is given, only patches of this side are, to a level-0 pixel.
    """
    for store, number in filter(None, (find_slide([store], slide) for store in stores)):
        record = store.records[number]
        with suppress(DamagedStore, UsageError):
            index = store.index(number)
            rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
            if len(rows) and (side is None or abs(record.side_l0 - side) < 1):
                return store.read(record.id, int(rows[0]))
    return None


def _stored(stores: Sequence[Store], slide: str) -> PredictedSlide:
    """Return the size and scale of a slide and its patches from its store."""
    place = find_slide(stores, slide)
    if place is None:
        raise NothingToDo(
            f"no store holds slide {slide}",
            found=", ".join(str(store.path) for store in stores) or "no store",
            todo="name the store of its patches with --store (heatmap), or work in the folder of the training",
        )
    return PredictedSlide.of(place[0].records[place[1]], source="")


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

    def patch(self, slide: str, x: int, y: int, side: float) -> NDArray[np.uint8] | None:
        """Return a patch with this corner and side in level-0 pixels, from a store or a slide file; None if there is neither.

        Raises:
            SlideError: the file cannot be read.
        """
        stored = stored_patch(self.stores, slide, x, y, side)
        if stored is not None or slide not in self.files:
            return stored
        with open_slide(self.files[slide]) as file:
            levels = file.info.levels
            fine = [level for level in levels if side / level.downsample >= _PATCH_SIDE]
            level = (fine or levels)[-1 if fine else 0]
            size = max(1, round(side / level.downsample))
            return file.read_region(PointL0(x, y), level.number, Size(size, size))


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
