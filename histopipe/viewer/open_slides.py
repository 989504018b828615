"""Slides that the viewer has open: their geometry, layers and pictures, from caches or from worker processes.

If a worker dies at a slide, its request gets a tile with the reason, and the server goes on.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.store.store import Store
from histopipe.system.worker_pool import WorkerDied, WorkerPool, silence
from histopipe.viewer import pictures
from histopipe.viewer.collection import Collection, Entry
from histopipe.viewer.guard import NotFound
from histopipe.viewer.layers import SlideLayers, slide_layers
from histopipe.viewer.pictures import TILE, message_tile

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
    """

    def __init__(
        self, collection: Collection, workers: int, message: Callable[[str], None]
    ) -> None:
        self.collection, self._message = collection, message
        self._pool = WorkerPool(workers, silence)
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
                return as_picture(message_tile(text))
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
        "width": TILE,
        "height": TILE,
        "bounds": [0, 0, TILE, TILE],
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
