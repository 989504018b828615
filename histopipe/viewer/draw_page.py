"""Drawing in the viewer: annotations, and corrections of tissue masks, each in a folder with one file per slide.

A mask without a file starts with the mask of the store, else with the tissue that an ingest would find. Nothing is written
before the user saves. What is saved is merged to the area that the page shows, since `ingest` reads no order.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

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
from histopipe.viewer.guard import NotFound, read_json_body
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
        folders: folder of what may be drawn: annotations, `DRAWING`, and tissue masks, `TISSUE`.

    Attributes:
        answers: answers with the outlines of a slide, by what may be drawn.
    """

    def __init__(self, slides: OpenSlides, folders: dict[str, Path]) -> None:
        self._slides, self._folders, self._saving = slides, folders, asyncio.Lock()
        self._names = SlideNames(entry.id for entry in slides.collection.entries)
        answers = {DRAWING: self._drawing, TISSUE: self._tissue}
        self.answers = {kind: answers[kind] for kind in folders}

    async def _drawing(self, _: Request, entry: Entry) -> Response:
        """Return the annotations of a slide."""
        folder, bounds, _size = await self._place(entry, DRAWING)
        corner = bounds.origin.x, bounds.origin.y
        return JSONResponse(
            await run_in_threadpool(read_drawing, folder, entry.id, self._names, corner)
        )

    async def _tissue(self, _: Request, entry: Entry) -> Response:
        """Return the outlines of the tissue mask of a slide, as `read_drawing`, and in `start` where they are from."""
        folder, bounds, size = await self._place(entry, TISSUE)
        path, _exact = await run_in_threadpool(
            existing_file, folder, entry.id, self._names, _SUFFIXES[TISSUE]
        )
        # Before the content: if the file changes meanwhile, it is not overwritten.
        version = version_of(await run_in_threadpool(file_bytes, path)) if path else ""
        mask, start = await self._first_mask(entry, path)
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

    async def _first_mask(self, entry: Entry, path: Path | None) -> tuple[bytes, str]:
        """Return the mask of the store, else that of an ingest, as PNG, and what it is; nothing if GeoJSON replaces it."""
        if path is not None and path.suffix.lower() in GEOJSON:
            return b"", ""
        if entry.store is not None and entry.complete:
            mask = await run_in_threadpool(entry.store.thumbnail, entry.number, "mask")
            if mask is not None:
                return mask, "the mask of the store"
        if entry.file is None:
            raise NotFound(f"{entry.name} has no mask in a store, and its file was not found")
        return (
            await self._slides.in_worker(pictures.slide_mask, str(entry.file)),
            "the tissue that an ingest finds",
        )

    async def save(self, kind: str, request: Request, entry: Entry) -> Response:
        """Write the outlines of a request."""
        folder, bounds, size = await self._place(entry, kind)
        body = await read_json_body(request, MOST_BYTES)
        async with self._saving:
            return JSONResponse(
                await run_in_threadpool(
                    save_drawing,
                    folder,
                    entry.id,
                    self._names,
                    body,
                    _SUFFIXES[kind],
                    partial(merge_edits, slide=entry.id, bounds=bounds, size=size)
                    if kind == TISSUE
                    else None,
                )
            )

    async def _place(self, entry: Entry, kind: str) -> tuple[Path, RegionL0, Size]:
        """Return the folder, and the scanned part and the size of a slide. Raise NotFound if the image is turned."""
        geometry = await self._slides.geometry(entry)
        if geometry["orientation"] > 1:
            raise NotFound("drawing is off: the image is turned, and other tools do not turn it")
        left, top, width, height = geometry["scan"]
        return (
            self._folders[kind],
            RegionL0(PointL0(left, top), Size(width, height)),
            Size(geometry["width"], geometry["height"]),
        )
