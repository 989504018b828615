"""The viewer's answers about one slide: geometry, pictures, values of patches, and similar patches.

Slides are addressed by number, so that no request can name a path.
"""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from histopipe.errors import HistopipeError, UsageError
from histopipe.predictions.sources import PredictionsFolder
from histopipe.system.csv_files import cell_number
from histopipe.system.worker_pool import WorkerDied
from histopipe.viewer import pictures
from histopipe.viewer.collection import Collection, Entry
from histopipe.viewer.guard import NotFound
from histopipe.viewer.open_slides import OpenSlides, as_picture, item, lattice
from histopipe.viewer.pictures import COARSEST_STEP, OVERLAP, TILE, message_tile

SLIDE = "/slides/{slide:int}"
_THUMBNAIL = 160
_SIMILAR = 12
_MOST_SIDE = 65536
_MOST_STEPS = 32
_MOST_THUMBNAIL = 64 << 20
"""Most bytes of a thumbnail."""


class SlideRoutes:
    """Answers requests about one slide."""

    def __init__(self, slides: OpenSlides, *, drawing: bool) -> None:
        self._slides, self._drawing = slides, drawing

    def routes(self) -> list[Route]:
        """Return the routes below the token."""
        answers: dict[str, Callable[[Request, int, Entry], Awaitable[Response]]] = {
            "": self._slide,
            "/thumbnail": self._thumbnail,
            "/overview": self._overview,
            "/mask": self._mask,
            "/tile/{step:int}/{column:int}/{row:int}": self._tile,
            "/patches/{step:int}/{column:int}/{row:int}": self._store_tile,
            "/grid/{grid:int}": self._grid,
            "/layer/{layer:int}": self._layer,
            "/patch/{grid:int}/{patch:int}": self._patch,
            "/picture/{x:int}/{y:int}": self._picture,
            "/similar/{grid:int}/{patch:int}": self._similar,
        }
        return [
            Route(SLIDE + path, self._with_slide(answer), methods=["GET"])
            for path, answer in answers.items()
        ]

    def _with_slide(
        self, answer: Callable[[Request, int, Entry], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers with the slide that a request names, and its number."""

        async def endpoint(request: Request) -> Response:
            return await answer(request, *self._slides.entry(request))

        return endpoint

    async def _slide(self, _: Request, number: int, entry: Entry) -> Response:
        geometry = await self._slides.geometry(number, entry)
        layers = await self._slides.layers_of(number, entry)
        with_patches = entry.complete and layers.grids and len(layers.grids[0].x)
        return JSONResponse(
            {
                **geometry,
                "name": entry.name,
                "tile": TILE,
                "overlap": OVERLAP,
                "patches": lattice(layers, geometry) if with_patches else None,
                "mask": entry.complete or geometry["pixels"],
                "drawing": self._drawing,
                "similar": entry.id in self._slides.collection.features,
                "grids": [
                    {
                        "source": grid.source,
                        "size": grid.size,
                        "stride": grid.stride,
                        "count": len(grid.x),
                    }
                    for grid in layers.grids
                ],
                "layers": [
                    {
                        "key": layer.key,
                        "title": layer.title,
                        "group": layer.group,
                        "grid": layer.grid,
                        "classes": layer.classes,
                        "low": layer.low,
                        "high": layer.high,
                    }
                    for layer in layers.layers
                ],
            }
        )

    async def _thumbnail(self, request: Request, number: int, entry: Entry) -> Response:
        stored = await run_in_threadpool(_stored_thumbnail, entry, self._slides.collection)
        key = (number, "thumbnail")
        if stored is not None:
            return await self._slides.picture(
                request, key, pictures.small_thumbnail, stored, _THUMBNAIL
            )
        if entry.file is None:
            return as_picture(_EMPTY)
        path = str(entry.file)
        return await self._slides.picture(request, key, pictures.slide_thumbnail, path, _THUMBNAIL)

    async def _overview(self, _: Request, __: int, entry: Entry) -> Response:
        """Return the stored thumbnail in full size: the ground under tiles of patches."""
        thumbnail = await run_in_threadpool(_stored_thumbnail, entry, self._slides.collection)
        return as_picture(thumbnail or _EMPTY)

    async def _mask(self, request: Request, number: int, entry: Entry) -> Response:
        if entry.store is not None and entry.complete:
            mask = await run_in_threadpool(entry.store.thumbnail, entry.number, "mask")
            if mask is not None:
                return as_picture(mask)
        if entry.file is None:
            return as_picture(_EMPTY)
        path = str(entry.file)
        return await self._slides.picture(request, (number, "mask"), pictures.slide_mask, path)

    async def _tile(self, request: Request, number: int, entry: Entry) -> Response:
        at = _numbers(request, "step", "column", "row")
        if at[0] > _MOST_STEPS:
            raise NotFound("there is no such tile")
        if entry.file is None:
            reason = (entry.record and entry.record.error) or "the slide's file was not found"
            return as_picture(message_tile(reason))
        key, path = (number, "tile", *at), str(entry.file)
        return await self._slides.picture(request, key, pictures.slide_tile, path, *at)

    async def _store_tile(self, request: Request, number: int, entry: Entry) -> Response:
        step, column, row = _numbers(request, "step", "column", "row")
        patches = entry.record.planned if entry.record and entry.complete else 0
        if entry.store is None or not patches or step > COARSEST_STEP:
            raise NotFound("there is no such tile")
        geometry = await self._slides.geometry(number, entry)
        place = lattice(await self._slides.layers_of(number, entry), geometry)
        return await self._slides.picture(
            request,
            (number, "patches", step, column, row),
            pictures.store_tile,
            entry.store_path,
            entry.number,
            step,
            (column, row),
            (place["x"], place["y"]),
        )

    async def _grid(self, request: Request, number: int, entry: Entry) -> Response:
        grids = (await self._slides.layers_of(number, entry)).grids
        grid = item(grids, request.path_params["grid"])
        both = np.stack([grid.x, grid.y]).astype("<i4")
        return Response(both.tobytes(), media_type="application/octet-stream")

    async def _layer(self, request: Request, number: int, entry: Entry) -> Response:
        layers = (await self._slides.layers_of(number, entry)).layers
        layer = item(layers, request.path_params["layer"])
        return Response(layer.values.astype("<f4").tobytes(), media_type="application/octet-stream")

    async def _patch(self, request: Request, number: int, entry: Entry) -> Response:
        """Return the index row of a patch, the state of its checksum, and its values in all layers."""
        layers = await self._slides.layers_of(number, entry)
        at, row = _numbers(request, "grid", "patch")
        grid = item(layers.grids, at)
        if row >= len(grid.x):
            raise NotFound(f"there is no patch {row}")
        patch: dict[str, Any] = {
            "row": row,
            "x": int(grid.x[row]),
            "y": int(grid.y[row]),
            "size": grid.size,
        }
        if grid.source == "store" and entry.record is not None:
            names = [name for name in layers.index if name not in ("x_l0", "y_l0", "label")]
            patch["index"] = {name: _number(layers.index[name][row]) for name in names}
            patch["route"], patch["checksum"] = entry.record.route, "matches"
            try:
                await self._slides.in_worker(
                    pictures.patch_file, entry.store_path, entry.number, row
                )
            except (HistopipeError, WorkerDied) as error:
                patch["checksum"] = str(error)
        patch["values"] = [
            {
                "title": layer.title,
                "group": layer.group,
                "key": layer.key,
                "value": layer.classes[int(value)] if layer.classes else value,
            }
            for layer in layers.layers
            if layer.grid == at and (value := _number(layer.values[row])) is not None
        ]
        return JSONResponse(patch)

    async def _picture(self, request: Request, number: int, entry: Entry) -> Response:
        """Return the patch at a corner: as stored, else from the slide with the side `?size=` in level-0 pixels."""
        x, y = _numbers(request, "x", "y")
        size = _size(request, entry)
        stored = entry.complete and abs(size - _recorded_size(entry)) < 1
        return await self._slides.picture(
            request,
            (number, "patch", x, y, size),
            pictures.patch_or_region,
            entry.store_path if stored else None,
            entry.number,
            entry.file and str(entry.file),
            (x, y),
            size,
        )

    async def _similar(self, request: Request, number: int, entry: Entry) -> Response:
        """Return the patches with the most similar features, of this slide or of all slides (`?all=1`)."""
        at, row = _numbers(request, "grid", "patch")
        grid = item((await self._slides.layers_of(number, entry)).grids, at)
        features = self._slides.collection.features
        if entry.id not in features or row >= len(grid.x):
            raise NotFound(f"{entry.name} has no features of this patch")
        x, y = int(grid.x[row]), int(grid.y[row])
        feature = await self._slides.in_worker(pictures.feature_of, str(features[entry.id]), x, y)
        names = {listed.id: listed.name for listed in self._slides.collection.entries}
        if request.query_params.get("all") != "1":
            features = {entry.id: features[entry.id]}
        matches: list[dict[str, Any]] = []
        for slide, path in features.items():
            if slide in names:
                best = await self._slides.in_worker(
                    pictures.most_similar, str(path), feature, _SIMILAR + 1
                )
                matches += [{"slide": names[slide], **match} for match in best]
        query = (entry.name, x, y)
        matches = [match for match in matches if (match["slide"], match["x"], match["y"]) != query]
        return JSONResponse(sorted(matches, key=lambda match: -match["cosine"])[:_SIMILAR])


def _numbers(request: Request, *names: str) -> list[int]:
    numbers = [int(request.path_params[name]) for name in names]
    if max(numbers) >= 1 << 40:
        raise NotFound("the number is too large")
    return numbers


def _size(request: Request, entry: Entry) -> float:
    """Return the side of a patch in level-0 pixels: as requested, else as recorded."""
    text = request.query_params.get("size")
    if text is None:
        return _recorded_size(entry)
    size = cell_number(text)
    if not 1 <= size <= _MOST_SIDE:
        raise UsageError(
            "size", found=repr(text)[:50], expected=f"1 to {_MOST_SIDE} level-0 pixels"
        )
    return size


def _recorded_size(entry: Entry) -> float:
    record, predicted = entry.record, entry.predicted
    if record is not None and entry.complete:
        return (record.read_size or 0) * (record.downsample or 0.0)
    return predicted.size_l0 if predicted else float(TILE)


def _number(value: Any) -> float | int | None:
    """Return a number that JSON can represent; None for NaN."""
    if isinstance(value, np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else None


def _stored_thumbnail(entry: Entry, collection: Collection) -> bytes | None:
    if entry.store is not None and entry.complete:
        return entry.store.thumbnail(entry.number)
    for source in collection.predictions:
        if isinstance(source, PredictionsFolder) and entry.id in source.slides():
            return _plain_file(source.thumbnail(entry.id))
    return None


def _plain_file(path: Path) -> bytes | None:
    """Return the content of a file; None if it is too large, or not a plain file."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_THUMBNAIL:
            return path.read_bytes()
    return None


_EMPTY = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c02"
    "0000000b4944415478da6364f80f00010501012718e3660000000049454e44ae426082"
)
"""A transparent pixel as PNG."""
