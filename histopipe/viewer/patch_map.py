"""A sample of the patches of all slides with their features, and its map in two dimensions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from histopipe.errors import HistopipeError
from histopipe.features.projection import Projection, project
from histopipe.labels.journal import PatchPlace
from histopipe.labels.learner import MOST_CANDIDATES, sample_features
from histopipe.system.worker_pool import WorkerDied
from histopipe.viewer.collection import Entry
from histopipe.viewer.guard import NotFound
from histopipe.viewer.layers import OpenSlides

_MOST_POINTS = 6_000
"""Most patches of the map."""
OfRater = Callable[[str, "PatchSample", NDArray[np.integer]], NDArray[np.floating] | None]
"""Returns (M,) values of rows of a sample in a layer of the rater; None for other layers."""


class PatchSample:
    """Random patches of all slides with features, at most `MOST_CANDIDATES`, of each slide in proportion to its patches.

    Attributes:
        patches: the patches that are loaded.
        features: (M, D) float16; the first rows are those of the patches.
        loaded: whether all are loaded.
        width: length of the features; 0 while unknown.
    """

    def __init__(
        self, slides: OpenSlides, entries: Mapping[str, Entry], message: Callable[[str], None]
    ) -> None:
        self._slides, self._entries, self._message = slides, entries, message
        self.patches: list[PatchPlace] = []
        self.features = np.empty((0, 1), np.float16)
        self.loaded, self.width = False, 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to load them, at the first call. There must be an event loop."""
        self._task = self._task or asyncio.create_task(self._load())

    async def _load(self) -> None:
        files = self._slides.collection.features
        entries = [entry for slide, entry in self._entries.items() if slide in files]
        total = max(1, sum(entry.record.planned for entry in entries if entry.record))
        # Slides in random order, so that patches are random also while only some slides are loaded.
        for number in np.random.default_rng(1).permutation(len(entries)).tolist():
            entry = entries[number]
            planned = entry.record.planned if entry.record else 0
            count = max(1, planned * min(total, MOST_CANDIDATES) // total)
            try:
                corners, values = await self._slides.in_worker(
                    sample_features, files[entry.id], count, number
                )
                is_stored = await run_in_threadpool(_are_stored, entry, corners)
            except (HistopipeError, WorkerDied, OSError) as error:
                self._message(f"{entry.name}: no candidates: {error}")
                continue
            self.width = self.width or values.shape[1]
            if not self.patches:  # once, with room for all: more would need a copy
                room = min(total, MOST_CANDIDATES) + len(entries)
                self.features = np.empty((room, self.width), np.float16)
            if not is_stored.all() or values.shape[1] != self.width:
                self._message(f"{entry.name}: no candidates: its features are of other patches")
                continue
            self.features[len(self.patches) : len(self.patches) + len(values)] = values
            self.patches += [(entry.id, x, y) for x, y in corners.tolist()]
        self.loaded = True


def _are_stored(entry: Entry, corners: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return whether the store has patches at (N, 2) corners."""
    if entry.store is None:
        return np.zeros(len(corners), bool)
    index = entry.store.index(entry.number)
    stored = (index["x_l0"].astype(np.int64) << 32) + index["y_l0"]
    return np.isin((corners[:, 0].astype(np.int64) << 32) + corners[:, 1], stored)


class PatchMap:
    """Answers what the page asks to draw the map.

    Args:
        slides: the open slides.
        entries: the slides that can be on the map, by id.
        sample: the sample of their patches.
        of_rater: the values of layers of the rater.
    """

    def __init__(
        self,
        slides: OpenSlides,
        entries: Mapping[str, Entry],
        sample: PatchSample,
        of_rater: OfRater,
    ) -> None:
        self._slides, self._entries, self._sample = slides, entries, sample
        self._of_rater = of_rater
        numbers = {entry: n for n, entry in enumerate(slides.collection.entries)}
        self._numbers = {slide: numbers[entry] for slide, entry in entries.items()}
        self._rows: NDArray[np.integer] = np.empty(0, np.int64)
        self._places: dict[str, asyncio.Task[NDArray[np.float32]]] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("/map/{method}", self._map), Route("/map", self._values)]

    async def _map(self, request: Request) -> Response:
        """Return (5, N) float32: number of the slide, corner, and place on the map; while it is made, how far it is."""
        method, sample = request.path_params["method"], self._sample
        if method not in ("pca", "umap") or not self._slides.collection.features:
            raise NotFound("there is no such map, or there are no features")
        sample.start()
        if sample.loaded and not sample.patches:
            raise NotFound("no slide has features of the patches of its store")
        if sample.loaded and not len(self._rows):
            order = np.random.default_rng(1).permutation(len(sample.patches))
            self._rows = np.sort(order[:_MOST_POINTS])
        if sample.loaded and method not in self._places:
            values = sample.features[self._rows]
            work = self._slides.in_worker(project, values, cast(Projection, method))
            self._places[method] = asyncio.create_task(work)
        if not sample.loaded or not self._places[method].done():
            return JSONResponse({"patches": len(sample.patches)}, 202)
        try:
            u, v = self._places[method].result().T
        except (HistopipeError, WorkerDied):
            del self._places[method]  # the next request tries again
            raise
        patches = [sample.patches[row] for row in self._rows.tolist()]
        slides = [self._numbers[slide] for slide, *_ in patches]
        x, y = np.array([patch[1:] for patch in patches], np.int64).reshape(-1, 2).T
        return _floats(np.stack([slides, x, y, u, v]))

    async def _values(self, request: Request) -> Response:
        """Return (N,) float32 values of the patches on the map in a layer of their slides, `?layer=KEY`; NaN for none."""
        key, sample = request.query_params.get("layer", ""), self._sample
        of_rater = await run_in_threadpool(self._of_rater, key, sample, self._rows)
        if of_rater is not None:
            return _floats(of_rater)
        values = np.full(len(self._rows), np.nan, np.float32)
        places: dict[str, list[tuple[int, int, int]]] = {}
        for at, row in enumerate(self._rows.tolist()):
            slide, x, y = sample.patches[row]
            places.setdefault(slide, []).append((at, x, y))
        for slide, of_slide in places.items():
            layers = await self._slides.layers_of(self._entries[slide])
            at, x, y = np.array(of_slide, np.int64).T
            for layer in layers.layers:
                if layer.key == key:
                    rows = layers.grids[layer.grid].rows_at(x, y)
                    values[at[rows >= 0]] = layer.values[rows[rows >= 0]]
        return _floats(values)


def _floats(values: NDArray[Any]) -> Response:
    return Response(values.astype("<f4").tobytes(), media_type="application/octet-stream")
