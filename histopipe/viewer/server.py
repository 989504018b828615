"""The viewer's answers to requests: the page, the list of slides, one slide with its pictures and patches, and drawing.

Slides are addressed by number, so that no request can name a path.
"""

from __future__ import annotations

import heapq
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from histopipe.errors import HistopipeError, UsageError
from histopipe.predictions.sources import PredictionsFolder, PredictionSource
from histopipe.system.table_cells import cell_number
from histopipe.system.worker_pool import WorkerDied
from histopipe.viewer import pictures
from histopipe.viewer.collection import Entry, list_row
from histopipe.viewer.draw_page import DRAWING, TISSUE, DrawPage
from histopipe.viewer.guard import Guard, NotFound, answer_error
from histopipe.viewer.label_page import LabelPage
from histopipe.viewer.layers import OpenSlides, PatchGrid, as_picture, item, lattice
from histopipe.viewer.patch_map import PatchMap, PatchSample
from histopipe.viewer.pictures import COARSEST_STEP, OVERLAP, TILE, message_tile

Answer = Callable[..., Awaitable[Response]]
"""Answers a request about a slide. Its arguments are the request, the slide, and the other numbers of the path by name."""

_STATIC = Path(__file__).with_name("static")
_FILES = {path.name for path in _STATIC.iterdir() if path.suffix in (".html", ".css", ".js")}
"""Files of the page. Other names are refused, also those of the notes on the copy of OpenSeadragon."""
_ERRORS = 200
"""Number of wrong patches that are listed."""
_THUMBNAIL = 160
"""Longer side of a picture in the list of slides, in pixels."""
_SIMILAR = 12
"""Number of similar patches that are listed."""
_MOST_SIDE = 65536
"""Largest side of a patch that is read from a slide, in level-0 pixels."""
_MOST_STEPS = 32
"""Most reductions of tiles by 2: far more than the pyramid of any slide has."""
_MOST_NUMBER = 1 << 40
"""Numbers of a path are below this: larger ones do not fit into the arrays that they are compared with."""
_MOST_THUMBNAIL = 64 << 20
"""Most bytes of a thumbnail."""


class ViewServer:
    """Answers the requests of the page.

    Args:
        slides: the slides that are shown.
        labelling: the labels of a rater; None to forbid labelling.
        drawing: what is drawn.
        local: answer requests for this machine's loopback names only.
        token: first part of the path of every address.
        message: shows a line in the terminal.
    """

    def __init__(
        self,
        slides: OpenSlides,
        *,
        labelling: LabelPage | None,
        drawing: DrawPage,
        local: bool,
        token: str,
        message: Callable[[str], None],
    ) -> None:
        self._slides, self._collection, self._message = slides, slides.collection, message
        self._labelling, self._draw_page = labelling, drawing
        answers: dict[str, Answer] = {
            "": self._slide,
            "/thumbnail": self._thumbnail,
            "/overview": self._overview,
            "/mask": self._mask,
            "/tile/{step:int}/{column:int}/{row:int}": self._tile,
            "/patches/{step:int}/{column:int}/{row:int}": self._store_tile,
            "/grid/{grid:int}": self._grid,
            "/layer/{layer:int}": self._layer,
            "/patch/{grid:int}/{row:int}": self._patch,
            "/picture/{x:int}/{y:int}": self._picture,
            "/similar/{grid:int}/{row:int}": self._similar,
            **{f"/{kind}": answer for kind, answer in drawing.answers.items()},
        }
        if labelling is not None:
            answers |= {"/labels": labelling.of_slide, "/learned": labelling.learned}
        complete = {entry.id: entry for entry in self._collection.entries if entry.complete}
        sample = labelling.sample if labelling else PatchSample(slides, complete, message)
        patch_map = PatchMap(
            slides, complete, sample, labelling.on_map if labelling else lambda *_: None
        )
        slide = "/slides/{slide:int}"
        routes = [
            Route("/", self._file),
            Route("/static/{name}", self._file),
            Route("/slides", self._list),
            Route("/metrics", self._metrics),
            Route("/errors/{source:int}", self._errors),
            Route("/labels/{name:path}", self._label_errors),
            *(labelling.routes() if labelling is not None else ()),
            *patch_map.routes(),
            *(Route(slide + path, self._endpoint(answer)) for path, answer in answers.items()),
            *(
                Route(f"{slide}/{kind}", self._endpoint(save), methods=["PUT"])
                for kind in drawing.answers
                for save in [partial(drawing.save, kind)]
            ),
        ]
        app = Starlette(
            routes=[Mount(f"/{token}", routes=routes)],
            exception_handlers={
                HistopipeError: answer_error,
                OSError: answer_error,
                ClientDisconnect: _answer_nobody,
                Exception: self._answer_bug,
            },
        )
        self.app: ASGIApp = Guard(app, token, local=local)

    def _endpoint(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers with the slide that a request names, and the other numbers of its path."""

        async def endpoint(request: Request) -> Response:
            numbers = dict(request.path_params)
            if max(numbers.values()) >= _MOST_NUMBER:
                raise NotFound("the number is too large")
            entry = item(self._collection.entries, numbers.pop("slide"))
            return await answer(request, entry, **numbers)

        return endpoint

    async def _answer_bug(self, request: Request, error: Exception) -> Response:
        """Answer after an error of an unknown kind: a bug must not end the server."""
        path = request.scope["path"].split("/", 2)[-1]  # without the token
        self._message(f"internal error at {path}: {error!r}"[:300])
        return PlainTextResponse("internal error", 500)

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        is_ours = name in _FILES
        return FileResponse(_STATIC / name) if is_ours else PlainTextResponse("not found", 404)

    async def _list(self, _: Request) -> Response:
        collection = self._collection
        return JSONResponse(
            {
                "slides": [list_row(entry) for entry in collection.entries],
                "sources": [
                    {"name": source.name, "classes": source.classes}
                    for source in collection.predictions
                ],
                "labels": [*collection.label_errors],
                "notes": collection.notes,
                **{kind: kind in self._draw_page.answers for kind in (DRAWING, TISSUE)},
                "labelling": self._labelling is not None,
                "features": bool(collection.features),
            }
        )

    async def _metrics(self, _: Request) -> Response:
        """Metrics of all slides. They need the predictions of all patches, so the list does not wait for them."""
        metrics = await run_in_threadpool(
            lambda: {
                source.name: {"slides": source.by_slide(), "split": source.split_by_slide()}
                for source in self._collection.predictions
            }
        )
        return JSONResponse(metrics)

    async def _errors(self, request: Request) -> Response:
        source = item(self._collection.predictions, request.path_params["source"])
        names = self._collection.names
        rows = await run_in_threadpool(
            lambda: heapq.nsmallest(
                _ERRORS, find_errors(source, _ERRORS), key=lambda row: (row["p"], row["slide"])
            )
        )
        return JSONResponse(
            [{**row, "slide": names[row["slide"]]} for row in rows if row["slide"] in names]
        )

    async def _label_errors(self, request: Request) -> Response:
        """Slides and patches whose label models contradict; the first ones of each level."""
        names, by_study = self._collection.names, self._collection.label_errors
        rows = by_study.get(request.path_params["name"], [])
        by_level = {
            level: [row for row in rows if row["level"] == level] for level in ("slide", "patch")
        }
        return JSONResponse(
            [
                {**row, "slide": names[row["slide"]]}
                for of_level in by_level.values()
                for row in of_level[:_ERRORS]
                if row["slide"] in names
            ]
        )

    async def _slide(self, _: Request, entry: Entry) -> Response:
        geometry = await self._slides.geometry(entry)
        layers = await self._slides.layers_of(entry)
        with_patches = entry.complete and layers.grids and len(layers.grids[0].x)
        return JSONResponse(
            {
                **geometry,
                "name": entry.name,
                "tile": TILE,
                "overlap": OVERLAP,
                "patches": lattice(layers, geometry) if with_patches else None,
                "mask": entry.complete or geometry["pixels"],
                "drawing": DRAWING in self._draw_page.answers,
                "similar": entry.id in self._collection.features,
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

    async def _thumbnail(self, request: Request, entry: Entry) -> Response:
        stored = await run_in_threadpool(self._stored_picture, entry, "thumb")
        if stored is None and entry.file is None:
            return as_picture(_EMPTY)
        function, content = (
            (pictures.slide_thumbnail, str(entry.file))
            if stored is None
            else (pictures.small_thumbnail, stored)
        )
        return await self._slides.picture(
            request, (entry, "thumbnail"), function, content, _THUMBNAIL
        )

    async def _overview(self, _: Request, entry: Entry) -> Response:
        """Return the stored thumbnail in full size: the ground under tiles of patches."""
        thumbnail = await run_in_threadpool(self._stored_picture, entry, "thumb")
        return as_picture(thumbnail or _EMPTY)

    async def _mask(self, request: Request, entry: Entry) -> Response:
        mask = await run_in_threadpool(self._stored_picture, entry, "mask")
        if mask is not None or entry.file is None:
            return as_picture(mask or _EMPTY)
        return await self._slides.picture(
            request, (entry, "mask"), pictures.slide_mask, str(entry.file)
        )

    async def _tile(
        self, request: Request, entry: Entry, step: int, column: int, row: int
    ) -> Response:
        if step > _MOST_STEPS:
            raise NotFound("there is no such tile")
        if entry.file is None:
            reason = (entry.record and entry.record.error) or "the slide's file was not found"
            return as_picture(message_tile(reason))
        at = step, column, row
        return await self._slides.picture(
            request, (entry, "tile", *at), pictures.slide_tile, str(entry.file), *at
        )

    async def _store_tile(
        self, request: Request, entry: Entry, step: int, column: int, row: int
    ) -> Response:
        patches = entry.record.planned if entry.record and entry.complete else 0
        if entry.store is None or not patches or step > COARSEST_STEP:
            raise NotFound("there is no such tile")
        place = lattice(await self._slides.layers_of(entry), await self._slides.geometry(entry))
        return await self._slides.picture(
            request,
            (entry, "patches", step, column, row),
            pictures.store_tile,
            entry.store_path,
            entry.number,
            step,
            (column, row),
            (place["x"], place["y"]),
        )

    async def _grid(self, _: Request, entry: Entry, grid: int) -> Response:
        corners = item((await self._slides.layers_of(entry)).grids, grid)
        return _as_bytes(np.stack([corners.x, corners.y]).astype("<i4"))

    async def _layer(self, _: Request, entry: Entry, layer: int) -> Response:
        values = item((await self._slides.layers_of(entry)).layers, layer).values
        return _as_bytes(values.astype("<f4"))

    async def _patch(self, _: Request, entry: Entry, grid: int, row: int) -> Response:
        """Return the index row of a patch, the state of its checksum, and its values in all layers."""
        layers = await self._slides.layers_of(entry)
        corners = item(layers.grids, grid)
        x, y = _corner(corners, row)
        patch: dict[str, Any] = {"row": row, "x": x, "y": y, "size": corners.size}
        if corners.source == "store" and entry.record is not None:
            patch["index"] = {
                name: _number(column[row])
                for name, column in layers.index.items()
                if name not in ("x_l0", "y_l0", "label")
            }
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
            if layer.grid == grid and (value := _number(layer.values[row])) is not None
        ]
        return JSONResponse(patch)

    async def _picture(self, request: Request, entry: Entry, x: int, y: int) -> Response:
        """Return the patch at a corner: as stored, else from the slide with the side `?size=` in level-0 pixels."""
        size = side = entry.side_l0 or TILE
        text = request.query_params.get("size")
        if text is not None:
            size = cell_number(text)
            if not 1 <= size <= _MOST_SIDE:
                raise UsageError(
                    "size", found=repr(text)[:50], expected=f"1 to {_MOST_SIDE} level-0 pixels"
                )
        stored = entry.complete and abs(size - side) < 1
        return await self._slides.picture(
            request,
            (entry, "patch", x, y, size),
            pictures.patch_or_region,
            entry.store_path if stored else None,
            entry.number,
            entry.file and str(entry.file),
            (x, y),
            size,
        )

    async def _similar(self, request: Request, entry: Entry, grid: int, row: int) -> Response:
        """Return the patches with the most similar features, of this slide or of all slides (`?all=1`)."""
        features = self._collection.features
        if entry.id not in features:
            raise NotFound(f"{entry.name} has no features of this patch")
        x, y = _corner(item((await self._slides.layers_of(entry)).grids, grid), row)
        feature = await self._slides.in_worker(pictures.feature_of, str(features[entry.id]), x, y)
        of_all = request.query_params.get("all") == "1"
        names = self._collection.names if of_all else {entry.id: entry.name}
        matches: list[dict[str, Any]] = []
        for slide in [slide for slide in features if slide in names]:
            best = await self._slides.in_worker(
                pictures.most_similar, str(features[slide]), feature, _SIMILAR + 1
            )
            matches += [{"slide": names[slide], **match} for match in best]
        query = (entry.name, x, y)
        matches = [match for match in matches if (match["slide"], match["x"], match["y"]) != query]
        return JSONResponse(sorted(matches, key=lambda match: -match["cosine"])[:_SIMILAR])

    def _stored_picture(self, entry: Entry, kind: Literal["thumb", "mask"]) -> bytes | None:
        """Return the thumbnail or the mask of a slide in its store, else the thumbnail in predictions; None without one."""
        if entry.store is not None and entry.complete:
            return entry.store.thumbnail(entry.number, kind)
        for source in self._collection.predictions if kind == "thumb" else ():
            if isinstance(source, PredictionsFolder) and entry.id in source.predicted_slides:
                return _plain_file(source.path_of(entry.id, ".jpg"))
        return None


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _corner(grid: PatchGrid, row: int) -> tuple[int, int]:
    """Return the corner of a patch. Raise NotFound if there is none."""
    if row >= len(grid.x):
        raise NotFound(f"there is no patch {row}")
    return int(grid.x[row]), int(grid.y[row])


def _as_bytes(values: NDArray[Any]) -> Response:
    return Response(values.tobytes(), media_type="application/octet-stream")


def _number(value: Any) -> Any:
    """Return a number that JSON can represent; None for NaN, and for values that are no numbers."""
    return value.item() if isinstance(value, np.number) and np.isfinite(value) else None


def _plain_file(path: Path) -> bytes | None:
    """Return the content of a file; None if it is too large, or not a plain file."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_THUMBNAIL:
            return path.read_bytes()
    return None


def find_errors(source: PredictionSource, count: int) -> Iterator[dict[str, Any]]:
    """Yield the wrongly predicted patches of each slide with the lowest probability of the true class; none of other tasks."""
    for slide in source.slide_ids() if source.classes else ():
        predictions = source.of_slide(slide)
        if predictions is None:
            continue
        predictions = predictions.labelled()
        label = predictions.label
        p_true = predictions.output[np.arange(len(label)), label]
        predicted = predictions.output.argmax(axis=1)
        wrong = np.flatnonzero(predicted != label)
        for i in wrong[np.argsort(p_true[wrong], kind="stable")][:count].tolist():
            yield {
                "slide": slide,
                "x": int(predictions.x_l0[i]),
                "y": int(predictions.y_l0[i]),
                "p": float(p_true[i]),
                "label": source.classes[label[i]],
                "predicted": source.classes[predicted[i]],
            }


_EMPTY = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c63780d0000ed00ecdc056c5e0000000049454e44ae426082"
)
"""A pale grey pixel as PNG."""
