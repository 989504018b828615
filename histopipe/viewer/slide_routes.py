"""The viewer's answers about one slide: facts, pictures, values of patches, and similar patches.

Slides are addressed by number, so that no request can name a path.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from histopipe.errors import HistopipeError, UsageError
from histopipe.predictions.sources import FolderSource
from histopipe.system.worker_pool import WorkerDied
from histopipe.viewer import pictures
from histopipe.viewer.collection import Collection, Entry
from histopipe.viewer.guard import NotFound
from histopipe.viewer.open_slides import OpenSlides, as_picture, item, lattice
from histopipe.viewer.pictures import COARSEST_STEP, OVERLAP, TILE, message_tile

SLIDE = "/slides/{slide:int}"
_THUMBNAIL = 160
_SIMILAR = 12
_PATCH_PIXELS = 1024
"""Most pixels of a side of a patch that is read from the slide."""
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
        get = partial(Route, methods=["GET"])
        return [
            get(SLIDE, self._facts),
            get(SLIDE + "/thumbnail", self._thumbnail),
            get(SLIDE + "/overview", self._overview),
            get(SLIDE + "/mask", self._mask),
            get(SLIDE + "/tile/{step:int}/{column:int}/{row:int}", self._tile),
            get(SLIDE + "/patches/{step:int}/{column:int}/{row:int}", self._store_tile),
            get(SLIDE + "/grid/{grid:int}", self._grid),
            get(SLIDE + "/layer/{layer:int}", self._layer),
            get(SLIDE + "/patch/{grid:int}/{patch:int}", self._patch),
            get(SLIDE + "/picture/{x:int}/{y:int}", self._picture),
            get(SLIDE + "/similar/{grid:int}/{patch:int}", self._similar),
        ]

    async def _facts(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        facts = await self._slides.geometry(number, entry)
        layers = await self._slides.layers_of(number, entry)
        drawn = self._drawing
        patches = None
        if entry.complete and layers.grids and len(layers.grids[0].x):
            patches = lattice(layers, facts)
        return JSONResponse(
            {
                **facts,
                "name": entry.name,
                "tile": TILE,
                "overlap": OVERLAP,
                "patches": patches,
                "mask": entry.complete or facts["pixels"],
                "drawing": drawn,
                "similar": entry.id in self._slides.collection.features,
                "grids": [
                    {"source": grid.source, "size": grid.size, "stride": grid.stride, "count": len(grid.x)}
                    for grid in layers.grids
                ],
                "layers": [
                    {
                        "key": layer.key, "title": layer.title, "group": layer.group, "grid": layer.grid,
                        "classes": layer.classes, "low": layer.low, "high": layer.high,
                    }
                    for layer in layers.layers
                ],
            }
        )  # fmt: skip

    async def _thumbnail(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        stored = await run_in_threadpool(_stored_thumbnail, entry, self._slides.collection)
        if stored is not None:
            work = partial(self._slides.in_worker, pictures.small_thumbnail, stored, _THUMBNAIL)
        elif entry.file is not None:
            work = partial(
                self._slides.in_worker, pictures.slide_thumbnail, str(entry.file), _THUMBNAIL
            )
        else:
            return Response(_EMPTY, media_type="image/png")
        return await self._slides.picture(request, (number, "thumbnail"), work)

    async def _overview(self, request: Request) -> Response:
        """Return the stored thumbnail in full size: the ground under tiles of patches."""
        _, entry = self._slides.entry(request)
        thumbnail = await run_in_threadpool(_stored_thumbnail, entry, self._slides.collection)
        return as_picture(thumbnail or _EMPTY)

    async def _mask(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        if entry.store is not None and entry.complete:
            mask = await run_in_threadpool(entry.store.thumbnail, entry.number, "mask")
            if mask is not None:
                return as_picture(mask)
        if entry.file is None:
            return as_picture(_EMPTY)
        work = partial(self._slides.in_worker, pictures.slide_mask, str(entry.file))
        return await self._slides.picture(request, (number, "mask"), work)

    async def _tile(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        at = _numbers(request, "step", "column", "row")
        if at[0] > _MOST_STEPS:
            raise NotFound("there is no such tile")
        if entry.file is None:
            reason = (entry.record and entry.record.error) or "the slide's file was not found"
            return as_picture(message_tile(reason))
        work = partial(self._slides.in_worker, pictures.slide_tile, str(entry.file), *at)
        return await self._slides.picture(request, (number, "tile", *at), work)

    async def _store_tile(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        step, column, row = _numbers(request, "step", "column", "row")
        patches = entry.record.planned if entry.record and entry.complete else 0
        if entry.store is None or not patches or step > COARSEST_STEP:
            raise NotFound("there is no such tile")
        facts = await self._slides.geometry(number, entry)
        place = lattice(await self._slides.layers_of(number, entry), facts)
        origin = (place["x"], place["y"])
        path = str(entry.store.path.resolve())
        work = partial(
            self._slides.in_worker,
            pictures.store_tile,
            path,
            entry.number,
            step,
            (column, row),
            origin,
        )
        return await self._slides.picture(request, (number, "patches", step, column, row), work)

    async def _grid(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        grid = item(
            (await self._slides.layers_of(number, entry)).grids, request.path_params["grid"]
        )
        both = np.stack([grid.x, grid.y]).astype("<i4")
        return Response(both.tobytes(), media_type="application/octet-stream")

    async def _layer(self, request: Request) -> Response:
        number, entry = self._slides.entry(request)
        layer = item(
            (await self._slides.layers_of(number, entry)).layers, request.path_params["layer"]
        )
        return Response(layer.values.astype("<f4").tobytes(), media_type="application/octet-stream")

    async def _patch(self, request: Request) -> Response:
        """Return the index row of a patch, the state of its checksum, and its values in all layers."""
        number, entry = self._slides.entry(request)
        layers = await self._slides.layers_of(number, entry)
        at, row = _numbers(request, "grid", "patch")
        grid = item(layers.grids, at)
        if row >= len(grid.x):
            raise NotFound(f"there is no patch {row}")
        facts: dict[str, Any] = {
            "row": row,
            "x": int(grid.x[row]),
            "y": int(grid.y[row]),
            "size": grid.size,
        }
        if grid.source == "store" and entry.store is not None and entry.record is not None:
            names = [name for name in layers.index if name not in ("x_l0", "y_l0", "label")]
            facts["index"] = {name: _number(layers.index[name][row]) for name in names}
            facts["route"] = entry.record.route
            path = str(entry.store.path.resolve())
            try:
                await self._slides.in_worker(pictures.patch_file, path, entry.number, row)
                facts["checksum"] = "matches"
            except (HistopipeError, WorkerDied) as error:
                facts["checksum"] = str(error)
        facts["values"] = [
            {
                "title": layer.title, "group": layer.group, "key": layer.key,
                "value": layer.classes[int(value)] if layer.classes else value,
            }
            for layer in layers.layers
            if layer.grid == at and (value := _number(layer.values[row])) is not None
        ]  # fmt: skip
        return JSONResponse(facts)

    async def _picture(self, request: Request) -> Response:
        """Return the patch at a corner: as stored, else from the slide with the side `?size=` in level-0 pixels."""
        number, entry = self._slides.entry(request)
        x, y = _numbers(request, "x", "y")
        size = _size(request, entry)

        async def read() -> bytes:
            if entry.store is not None and entry.complete and abs(size - _recorded_size(entry)) < 1:
                path = str(entry.store.path.resolve())
                picture = await self._slides.in_worker(pictures.patch_at, path, entry.number, x, y)
                if picture is not None:
                    return picture
            if entry.file is None:
                return message_tile("neither the slide nor its store was found")
            slide = str(entry.file)
            return await self._slides.in_worker(
                pictures.slide_region, slide, x, y, size, _PATCH_PIXELS
            )

        return await self._slides.picture(request, (number, "patch", x, y, size), read)

    async def _similar(self, request: Request) -> Response:
        """Return the patches with the most similar features, of this slide or of all slides (`?all=1`)."""
        number, entry = self._slides.entry(request)
        at, row = _numbers(request, "grid", "patch")
        grid = item((await self._slides.layers_of(number, entry)).grids, at)
        features = self._slides.collection.features
        if entry.id not in features or row >= len(grid.x):
            raise NotFound(f"{entry.name} has no features of this patch")
        corner = int(grid.x[row]), int(grid.y[row])
        feature = await self._slides.in_worker(
            pictures.feature_of, str(features[entry.id]), *corner
        )
        names = {listed.id: listed.name for listed in self._slides.collection.entries}
        chosen = (
            features if request.query_params.get("all") == "1" else {entry.id: features[entry.id]}
        )
        matches: list[dict[str, Any]] = []
        for slide, path in chosen.items():
            if slide in names:
                best = await self._slides.in_worker(
                    pictures.most_similar, str(path), feature, _SIMILAR + 1
                )
                matches += [{"slide": names[slide], **match} for match in best]
        query = {"slide": entry.name, "x": corner[0], "y": corner[1]}
        other_matches = [match for match in matches if {k: match[k] for k in query} != query]
        return JSONResponse(sorted(other_matches, key=lambda match: -match["cosine"])[:_SIMILAR])


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
    try:
        size = float(text)
    except ValueError:
        size = 0.0
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
        if isinstance(source, FolderSource) and entry.id in source.slides():
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
