"""Drawing in the viewer: annotations, and corrections of tissue masks, each in a folder with one file per slide.

A mask without a file starts with the mask of the store, else with the tissue that an ingest would find. Nothing is written
before the user saves. What is saved is merged to the area that the page shows, since `ingest` reads no order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from histopipe.annotations.annotation_files import GEOJSON, MOST_BYTES, SUFFIXES, file_bytes
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.slides.slide_files import SlideNames
from histopipe.tiling.mask_edits import merge_edits
from histopipe.tiling.mask_files import PNG
from histopipe.viewer import pictures
from histopipe.viewer.collection import (
    Entry,
    existing_file,
    read_drawing,
    save_drawing,
    version_of,
)
from histopipe.viewer.guard import NotFound
from histopipe.viewer.layers import OpenSlides

DRAWING, TISSUE = "drawing", "tissue"
_SUFFIXES: dict[str, tuple[tuple[str, ...], ...]] = {
    DRAWING: (SUFFIXES,),
    TISSUE: (GEOJSON, (PNG,)),  # as `find_masks`
}


class DrawPage:
    """Answers what the page asks to draw.

    Args:
        slides: the open slides.
        folders: folder of the annotations, `DRAWING`, and of the tissue masks, `TISSUE`; None to forbid drawing there.

    Attributes:
        allowed: what may be drawn.
    """

    def __init__(self, slides: OpenSlides, folders: Mapping[str, Path | None]) -> None:
        self._slides, self._folders, self._saving = slides, folders, asyncio.Lock()
        self._names = SlideNames(entry.id for entry in slides.collection.entries)
        self.allowed = {kind: folder is not None for kind, folder in folders.items()}

    async def annotations(self, _: Request, entry: Entry) -> Response:
        """Return the annotations of a slide."""
        folder, bounds, _size = await self._place(entry, DRAWING)
        corner = bounds.origin.x, bounds.origin.y
        return JSONResponse(
            await run_in_threadpool(read_drawing, folder, entry.id, self._names, corner)
        )

    async def tissue(self, _: Request, entry: Entry) -> Response:
        """Return the outlines of the tissue mask of a slide, as `read_drawing`, and in `start` where they are from."""
        folder, bounds, size = await self._place(entry, TISSUE)
        path, version = await run_in_threadpool(self._mask_file, folder, entry)
        is_geojson = path is not None and path.suffix.lower() in GEOJSON
        mask, start = (b"", "") if is_geojson else await self._first_mask(entry)
        features = await self._slides.in_worker(
            pictures.mask_outlines, path, mask, entry.id, bounds, size
        )
        return JSONResponse(
            {
                "features": features,
                "version": version,
                "file": path.relative_to(folder).as_posix() if path else "",
                "origin": [bounds.origin.x, bounds.origin.y],
                "start": start,
                "target": f"{entry.id}{GEOJSON[0]}",
            }
        )

    async def _first_mask(self, entry: Entry) -> tuple[bytes, str]:
        """Return the mask of the store, else that of an ingest, as PNG, and what it is."""
        if entry.store is not None and entry.complete:
            mask = await run_in_threadpool(entry.store.thumbnail, entry.number, "mask")
            if mask is not None:
                return mask, "the mask of the store"
        if entry.file is None:
            raise NotFound(f"{entry.name} has no mask in a store, and its file was not found")
        mask = await self._slides.in_worker(pictures.slide_mask, str(entry.file))
        return mask, "the tissue that an ingest finds"

    def _mask_file(self, folder: Path, entry: Entry) -> tuple[Path | None, str]:
        """Return the file of a slide's mask, and its version, which is read before its content."""
        path, _ = existing_file(folder, entry.id, self._names, _SUFFIXES[TISSUE])
        return path, version_of(file_bytes(path)) if path is not None else ""

    async def save(self, kind: str, request: Request, entry: Entry) -> Response:
        """Write the outlines of a request."""
        folder, bounds, size = await self._place(entry, kind)
        if request.headers.get("content-type") != "application/json":
            return JSONResponse({"error": "content-type: expected application/json"}, 415)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return JSONResponse({"error": "the drawing is too large"}, 413)
        merge = partial(merge_edits, slide=entry.id, bounds=bounds, size=size)
        options = _SUFFIXES[kind], merge if kind == TISSUE else None
        async with self._saving:
            return JSONResponse(
                await run_in_threadpool(save_drawing, folder, entry.id, self._names, body, *options)
            )

    async def _place(self, entry: Entry, kind: str) -> tuple[Path, RegionL0, Size]:
        """Return the folder, and the scanned part and the size of a slide. Raise NotFound if drawing is off."""
        folder = self._folders[kind]
        if folder is None:
            option = TISSUE if kind == TISSUE else "annotations"
            raise NotFound(f"drawing is off: start the viewer with --{option} FOLDER")
        geometry: dict[str, Any] = await self._slides.geometry(entry)
        if geometry["orientation"] > 1:
            raise NotFound("drawing is off: the image is turned, and other tools do not turn it")
        left, top, width, height = geometry["bounds"]
        bounds = RegionL0(PointL0(left, top), Size(width, height))
        return folder, bounds, Size(geometry["width"], geometry["height"])
