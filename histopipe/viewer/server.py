"""The viewer's server: the page, the list of slides, and drawing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from histopipe.annotations.annotation_files import MOST_BYTES
from histopipe.errors import HistopipeError
from histopipe.predictions.sources import PredictionSource
from histopipe.slides.tables import SlideNames
from histopipe.viewer.collection import Collection, Entry, list_row
from histopipe.viewer.drawings import read_drawing, save_drawing
from histopipe.viewer.guard import Guard, NotFound, known_error
from histopipe.viewer.open_slides import OpenSlides, item
from histopipe.viewer.slide_routes import SLIDE, SlideRoutes

_STATIC = {
    "view.css": "text/css",
    "openseadragon.min.js": "text/javascript",
    **dict.fromkeys(
        ("main.js", "pane.js", "layers.js", "panel.js", "drawing.js"), "text/javascript"
    ),
}
_ERRORS = 200


class ViewServer:
    """Answers the requests of the page.

    Args:
        collection: what is shown.
        workers: number of processes that read slides.
        annotations: folder for drawing; None to forbid it.
        local: answer requests for this machine's loopback names only.
        token: first part of the path of every address.
        message: shows a line in the terminal.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        workers: int,
        annotations: Path | None,
        local: bool,
        token: str,
        message: Callable[[str], None],
    ) -> None:
        self._collection, self._annotations = collection, annotations
        self._slides = OpenSlides(collection, workers, message)
        self._saving = asyncio.Lock()
        self._names = SlideNames(entry.id for entry in collection.entries)
        get = partial(Route, methods=["GET"])
        routes = [
            get("/", self._page),
            get("/static/{name}", self._static),
            get("/slides", self._list),
            get("/metrics", self._metrics),
            get("/errors/{source:int}", self._errors),
            get(SLIDE + "/drawing", self._drawing),
            Route(SLIDE + "/drawing", self._save_drawing, methods=["PUT"]),
            *SlideRoutes(self._slides, drawing=annotations is not None).routes(),
        ]
        app = Starlette(
            routes=[Mount(f"/{token}", routes=routes)],
            exception_handlers={
                HistopipeError: known_error,
                ClientDisconnect: _gone,
                OSError: known_error,
            },
        )
        self.app: ASGIApp = Guard(app, token, local=local, message=message)

    def close(self) -> None:
        """End the worker processes."""
        self._slides.close()

    async def _page(self, request: Request) -> Response:
        if not request.scope["path"].endswith("/"):
            return PlainTextResponse("not found", 404)
        return Response(_file("index.html"), media_type="text/html")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            return PlainTextResponse("not found", 404)
        return Response(_file(name), media_type=_STATIC[name])

    async def _list(self, _: Request) -> Response:
        collection = self._collection
        return JSONResponse(
            {
                "slides": [list_row(entry) for entry in collection.entries],
                "sources": [
                    {"name": source.name, "classes": source.classes}
                    for source in collection.predictions
                ],
                "notes": collection.notes,
                "drawing": self._annotations is not None,
                "features": bool(collection.features),
            }
        )

    async def _metrics(self, _: Request) -> Response:
        """Metrics of all slides. They need the predictions of all patches, so the list does not wait for them."""

        def read() -> dict[str, Any]:
            return {
                source.name: {"slides": source.by_slide(), "split": source.split_by_slide()}
                for source in self._collection.predictions
            }

        return JSONResponse(await run_in_threadpool(read))

    async def _errors(self, request: Request) -> Response:
        source = item(self._collection.predictions, request.path_params["source"])
        errors = await run_in_threadpool(find_errors, source, _ERRORS)
        names = self._collection.names
        return JSONResponse(
            [
                {**error, "slide": names[error["slide"]]}
                for error in errors
                if error["slide"] in names
            ]
        )

    async def _drawing(self, request: Request) -> Response:
        folder, entry, bounds = await self._drawn(request)
        return JSONResponse(
            await run_in_threadpool(read_drawing, folder, entry.id, self._names, bounds)
        )

    async def _save_drawing(self, request: Request) -> Response:
        folder, entry, _ = await self._drawn(request)
        if request.headers.get("content-type") != "application/json":
            return JSONResponse({"error": "content-type: expected application/json"}, 415)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return JSONResponse({"error": "the drawing is too large"}, 413)
        async with self._saving:
            saved = await run_in_threadpool(save_drawing, folder, entry.id, self._names, body)
        return JSONResponse(saved)

    async def _drawn(self, request: Request) -> tuple[Path, Entry, list[int]]:
        number, entry = self._slides.entry(request)
        if self._annotations is None:
            raise NotFound("drawing is off: start the viewer with --annotations FOLDER")
        return self._annotations, entry, (await self._slides.geometry(number, entry))["bounds"]


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _file(name: str) -> bytes:
    return (resources.files("histopipe.viewer") / "static" / name).read_bytes()


def find_errors(source: PredictionSource, count: int) -> list[dict[str, Any]]:
    """Return the wrongly predicted patches with the lowest probability of the true class, the lowest first."""
    return heapq.nsmallest(count, _errors(source, count), key=lambda row: (row["p"], row["slide"]))


def _errors(source: PredictionSource, count: int) -> Iterator[dict[str, Any]]:
    for slide in source.slide_ids():
        predictions = source.predictions(slide)
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
