"""The slides that the viewer has open, and the values of their patches: labels, quality, splits, predictions, attention.

Patches are on grids: that of the store, and others for predictions of slides that were tiled otherwise. Geometry, layers
and pictures come from caches or from worker processes. If a worker dies at a slide, its request gets a tile with the
reason, and the server goes on.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.predictions.prediction_tables import ranks_of
from histopipe.predictions.sources import PredictionSource
from histopipe.store.store import Store
from histopipe.system.arrays import neighbour_distance
from histopipe.system.worker_pool import WorkerDied, WorkerPool, silence
from histopipe.tasks.choices import SUBSETS
from histopipe.viewer import pictures
from histopipe.viewer.collection import Collection, Entry
from histopipe.viewer.guard import NotFound

QUALITY = {
    "tissue": "Tissue (share of the patch)",
    "focus": "Focus (variance of the Laplacian)",
    "pen": "Pen marks (share)",
    "dark": "Dark or folded (share)",
    "covered": "Covered by its class (share)",
    "haematoxylin": "Haematoxylin (optical density)",
    "eosin": "Eosin (optical density)",
    "dab": "DAB (optical density)",
    "positive": "Positive for DAB (share of stained pixels)",
}


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Positions of patches: (N,) int32 top left corners, side and distance of neighbours; all in level-0 pixels."""

    source: str
    x: NDArray[np.int32]
    y: NDArray[np.int32]
    size: float
    stride: float

    def rows_at(self, x: NDArray[np.integer], y: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the row of the patch at each corner, (M,); -1 where there is none."""
        if not len(self.x):
            return np.full(len(x), -1)
        keys, asked = ((u.astype(np.int64) << 32) + v for u, v in ((self.x, self.y), (x, y)))
        order = np.argsort(keys)
        rows = order[np.minimum(np.searchsorted(keys[order], asked), len(order) - 1)]
        return np.where(keys[rows] == asked, rows, -1)


@dataclass(frozen=True, slots=True)
class Layer:
    """A value per patch of a grid, (N,) float32, NaN for none: a number, or the number of a class.

    Attributes:
        key: unique name in the slide's layers, also for other slides.
        title: name that is shown.
        group: "labels", "quality", "split", or the name of the predictions.
        classes: names of the classes; empty if the values are numbers.
        low, high: ends of the colour bar.
    """

    key: str
    title: str
    group: str
    grid: int
    values: NDArray[np.float32]
    classes: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0


@dataclass(slots=True)
class SlideLayers:
    """All grids and layers of a slide."""

    grids: list[PatchGrid] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    index: dict[str, NDArray[Any]] = field(default_factory=dict)

    def add(
        self,
        key: str,
        title: str,
        group: str,
        grid: int,
        values: NDArray[Any],
        *,
        rows: NDArray[np.int64] | slice = slice(None),
        **options: Any,
    ) -> None:
        """Add a layer with values of the patches `rows` of a grid, and NaN for the others, if any value is known."""
        numbers = np.full(len(self.grids[grid].x), np.nan, np.float32)
        numbers[rows] = values
        if np.isfinite(numbers).any():
            self.layers.append(Layer(key, title, group, grid, numbers, **options))

    def at(
        self, source: str, x: NDArray[np.int64], y: NDArray[np.int64], size: float, stride: float
    ) -> tuple[int, NDArray[np.int64]]:
        """Return the grid of patches with these corners, and their rows in it; a new grid if none has them all."""
        for number, grid in enumerate(self.grids):
            rows = grid.rows_at(x, y)
            if (rows >= 0).all() and abs(grid.size - size) < 0.01 * size:
                return number, rows
        self.grids.append(PatchGrid(source, x.astype(np.int32), y.astype(np.int32), size, stride))
        return len(self.grids) - 1, np.arange(len(x))


def slide_layers(entry: Entry, predictions: Iterable[PredictionSource]) -> SlideLayers:
    """Return the grids and layers of a slide.

    Raises:
        DamagedStore: the index of the slide, or predictions of it, cannot be read.
    """
    layers, record, size = SlideLayers(), entry.record, entry.side_l0
    stride = entry.predicted.stride_l0 if entry.predicted else 0.0
    if entry.store is not None and record is not None and entry.complete:
        layers.index = index = entry.store.index(entry.number)
        stride = (record.stride or 0) * (record.downsample or 0.0)
        layers.grids.append(PatchGrid("store", index["x_l0"], index["y_l0"], size, stride or size))
        _add_columns(layers, entry.store.classes)
    for source in predictions:
        if entry.store is not None and layers.grids:
            subsets = source.split(entry.store, entry.number)
            if subsets is not None:
                layers.add(
                    f"split:{source.name}",
                    f"Split of {source.name}",
                    "split",
                    0,
                    _numbers_or_nan(subsets),
                    classes=SUBSETS,
                )
        _add_predictions(layers, source, entry.id, size, stride or size)
    return layers


def _add_columns(layers: SlideLayers, classes: Sequence[str]) -> None:
    index = layers.index
    layers.add(
        "label",
        "Patch labels",
        "labels",
        0,
        _numbers_or_nan(index["label"]),
        classes=tuple(classes),
    )
    layers.add(
        "unreadable",
        "Unreadable patches",
        "labels",
        0,
        np.where(index["length"] == 0, 0.0, np.nan),
        classes=("unreadable",),
    )
    for name, title in QUALITY.items():
        values = index.get(name)
        if values is not None and np.isfinite(values).any():
            high = 1.0 if name != "focus" else float(np.nanpercentile(values, 98)) or 1.0
            layers.add(f"quality:{name}", title, "quality", 0, values, high=high)


def _numbers_or_nan(numbers: NDArray[np.integer]) -> NDArray[np.floating]:
    """Return class numbers with NaN in place of negative ones."""
    return np.where(numbers >= 0, numbers, np.nan)


def _spacing(grid: PatchGrid, x: NDArray[np.int64], y: NDArray[np.int64]) -> tuple[float, float]:
    """Return side and distance of patches with these corners: those of a grid that has them all, else their distance."""
    if (grid.rows_at(x, y) >= 0).all():
        return grid.size, grid.stride
    return (neighbour_distance(np.stack([x, y], axis=1)) or grid.size,) * 2


def _add_predictions(
    layers: SlideLayers, source: PredictionSource, slide: str, size: float, stride: float
) -> None:
    name = source.name
    predicted_slide = source.predicted_slides.get(slide)
    if predicted_slide is not None and predicted_slide.size_l0:
        size, stride = predicted_slide.size_l0, predicted_slide.stride_l0 or predicted_slide.size_l0
    scores = source.of_slide(slide)
    if scores is not None and predicted_slide is None and layers.grids:
        size, stride = _spacing(layers.grids[0], scores.x_l0, scores.y_l0)
    if scores is not None and size:
        grid, rows = layers.at(name, scores.x_l0, scores.y_l0, size, stride)
        task, output = scores.task, scores.output

        def add(key: str, title: str, values: NDArray[Any], **options: Any) -> None:
            layers.add(f"{name}:{key}", title, name, grid, values, rows=rows, **options)

        best = output.argmax(axis=1)
        if task.of_classes:
            decided = np.where(np.isnan(output[:, 0]), np.nan, best)
            add("predicted", "Predicted class", decided, classes=task.classes)
        for title, values in zip(task.names, task.patch_values(output).T, strict=True):
            if task.probabilities:
                add(f"p:{title}", f"p {title}", values)
            else:
                low, high = float(np.nanmin(values)), float(np.nanmax(values))
                add(f"predicted:{title}", f"Predicted {title}", values, low=low, high=high)
        if task.of_classes:
            wrong = np.where(scores.label >= 0, scores.label != best, np.nan)
            add("errors", "Errors", wrong, classes=("correct", "wrong"))
    of_pixels = source.class_cells(slide)
    if of_pixels is not None:
        cells, classes = of_pixels
        side, (x, y) = float(cells[0, 3]), np.rint(cells[:, :2]).astype(np.int64).T
        grid, rows = layers.at(name, x, y, side, side)
        layers.add(
            f"{name}:pixels", "Predicted class", name, grid, cells[:, 2], rows=rows, classes=classes
        )
    tables: dict[str, tuple[str, Any, Callable[[Any], Any], float]] = {
        "attention": ("Attention (rank)", source.attention(slide), ranks_of, 1.0),
        "unusual": ("Unusual (1: limit)", source.unusual(slide), np.asarray, 2.0),
    }
    for key, (title, table, values_of, high) in tables.items():
        if table is not None and len(table) and (table[0, 3] or size):
            side = float(table[0, 3]) or size
            x, y = table[:, :2].astype(np.int64).T
            grid, rows = layers.at(name, x, y, side, stride or side)
            values = values_of(table[:, 2])
            layers.add(f"{name}:{key}", title, name, grid, values, rows=rows, high=high)


T = TypeVar("T")

_SECONDS = 120.0
"""Time limit of one picture. A slide without levels is read as a whole for its first tile."""
_CACHE_BYTES = 192 << 20
"""Most bytes of pictures in memory: a thousand tiles or more, so that panning back needs no reading."""
_OPEN_SLIDES = 8
"""Number of slides whose layers are kept in memory."""


class OpenSlides:
    """Answers for the slides of a collection.

    Args:
        collection: what is shown.
        workers: number of processes that read slides.
        message: shows a line in the terminal.
        prepare: prepares the workers; see `WorkerPool`.
    """

    def __init__(
        self,
        collection: Collection,
        workers: int,
        message: Callable[[str], None],
        prepare: Callable[[], None] = silence,
    ) -> None:
        self.collection, self._message = collection, message
        self._pool = WorkerPool(workers, prepare)
        self._free = asyncio.Semaphore(2 * workers)
        self._pictures: dict[tuple[Any, ...], bytes] = {}  # sorted by their last use
        self._layers = functools.lru_cache(_OPEN_SLIDES)(
            functools.partial(slide_layers, predictions=collection.predictions)
        )
        self._geometries: dict[Entry, dict[str, Any]] = {}
        self._loading = asyncio.Lock()
        self._written = {store.path: _written(store) for store in collection.stores}

    def close(self) -> None:
        """End the worker processes."""
        self._pool.shutdown(cancel_futures=True)

    async def in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function in a worker process.

        Raises:
            WorkerDied: the process died, or took too long.
            MachineShort: the viewer is ending.
        """
        async with self._free:
            try:
                future = self._pool.submit_within(_SECONDS, function, *arguments)
            except RuntimeError as error:  # the pool has been shut down
                raise MachineShort("the viewer is ending") from error
            return await asyncio.wrap_future(future)

    async def picture(
        self,
        request: Request,
        key: tuple[Any, ...],
        function: Callable[..., bytes],
        *arguments: Any,
    ) -> Response:
        """Return a picture from the cache, or make it in a worker process. If that fails, return a tile with the reason.

        The first part of the key is the slide.
        """
        content = self._pictures.pop(key, None)
        if content is None:
            async with self._free:  # wait for a turn: meanwhile the client may go away
                if await request.is_disconnected():
                    return Response(status_code=499)
            try:
                content = await self.in_worker(function, *arguments)
            except UsageError as error:
                raise NotFound(str(error)) from error
            except (HistopipeError, WorkerDied) as error:
                text = f"{key[0].name}: {error}"
                self._message(text)
                return as_picture(pictures.message_tile(text))
        self._pictures[key] = content
        while sum(map(len, self._pictures.values())) > _CACHE_BYTES:
            del self._pictures[next(iter(self._pictures))]
        return as_picture(content)

    async def geometry(self, entry: Entry) -> dict[str, Any]:
        """Return size, scanned area, scale and notes of a slide: of its file, else as recorded.

        `pixels` is true if tiles come from the slide's file.
        """
        store = entry.store
        changed = store is not None and _written(store) != self._written[store.path]
        if entry in self._geometries and not changed:
            return self._geometries[entry]
        record = entry.record
        geometry, notes = _recorded_geometry(entry)
        try:
            if entry.file is not None:
                of_file = await self.in_worker(
                    pictures.read_geometry, str(entry.file), record if entry.complete else None
                )
                geometry, notes = {**of_file, "pixels": True}, [of_file["warning"]]
            self._geometries[entry] = geometry
        except (HistopipeError, WorkerDied) as error:  # the next request tries again
            reason = getattr(record, "error", None)  # of the ingest: it is the same
            notes = [] if reason else [f"the slide cannot be opened: {error}"]
        if record is not None and record.mpp:
            geometry["mpp"] = record.mpp
        elif geometry.get("unscaled"):
            notes.append(f"no scale bar: {geometry['unscaled']}")
        if record is not None:
            notes += [record.error, *record.notes]
        if changed:
            notes.append(
                "the store has changed since the viewer was started: start it again to see the changes"
            )
        geometry["notes"] = [note for note in notes if note]
        return geometry

    async def layers_of(self, entry: Entry) -> SlideLayers:
        """Return the grids and layers of a slide."""
        async with self._loading:  # two requests of a new slide must not read its layers twice
            return await run_in_threadpool(self._layers, entry)


def _written(store: Store) -> int:
    with suppress(OSError):
        return (store.path / "data.mdb").stat().st_mtime_ns
    return 0


def _recorded_geometry(entry: Entry) -> tuple[dict[str, Any], list[str | None]]:
    """Return size, scanned area and scale of a slide as its store or its predictions record them, and notes."""
    for record in (entry.record, entry.predicted):
        if record is not None and record.width:
            return {
                "width": record.width,
                "height": record.height,
                "bounds": list(record.bounds) or [0, 0, record.width, record.height],
                "scan": record.scan or record.bounds or [0, 0, record.width, record.height],
                "mpp": record.mpp,
                "orientation": record.orientation or 1,
                "pixels": False,
            }, [
                "the slide's file was not found: pictures are those of the store"
                if entry.store is not None
                else "there is no picture of the slide: pass its file, or the store of its patches"
            ]
    # A tile with the reason is all there is to show.
    return {
        "width": pictures.TILE,
        "height": pictures.TILE,
        "bounds": [0, 0, pictures.TILE, pictures.TILE],
        "scan": [0, 0, pictures.TILE, pictures.TILE],
        "mpp": None,
        "orientation": 1,
        "pixels": True,
    }, [f"the slide is {entry.state}"]


def lattice(layers: SlideLayers, geometry: dict[str, Any]) -> dict[str, Any]:
    """Return place and size of a store's tiles: the first begins at the patch that is nearest to the corner."""
    grid = layers.grids[0]
    size, stride = grid.size, grid.stride
    left, top, width, height = geometry["bounds"]
    x, y = (float(at.min()) for at in (grid.x, grid.y))
    if abs(stride - size) < 1e-6 * size:
        x -= np.ceil((x - left) / size) * size
        y -= np.ceil((y - top) / size) * size
    return {
        "x": float(x),
        "y": float(y),
        "size": size,
        "columns": int(np.ceil((left + width - x) / size)),
        "rows": int(np.ceil((top + height - y) / size)),
    }


def as_picture(content: bytes) -> Response:
    """Return the answer with a JPEG or PNG file."""
    return Response(content, media_type="image/png" if content[:4] == b"\x89PNG" else "image/jpeg")


def item(items: list[T], number: int) -> T:
    """Return an item by number. Raise NotFound if there is none."""
    if number >= len(items):
        raise NotFound(f"there is no number {number}, only {len(items)}")
    return items[number]
