"""Pictures of slides: tiles, regions, thumbnails and masks. These functions run in worker processes."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from histopipe.errors import ScaleError, SlideUnreadable, UsageError
from histopipe.geometry import Mpp, PointL0, Size
from histopipe.slides.discovery import discover
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import SlideFile, fingerprint
from histopipe.slides.slide_hashes import SlideHashes
from histopipe.slides.thumbnail import ASSUMED_MPP, Thumbnail, read_thumbnail, usual_mpp
from histopipe.system.arrays import PixelArray
from histopipe.system.worker_pool import silence
from histopipe.tissue_masks.algorithms import find_on_thumbnail
from histopipe.viewer.tiles import OVERLAP, TILE, PictureArea, cut, hatched, jpeg, png

_MOST_REDUCTION = 8
"""Largest factor by which a level is reduced for a tile; coarser tiles are cut from an overview of the whole slide."""
_OVERVIEW_SIDE = 2400
_SMALLEST_BLOCK = 64
"""Side of the smallest part of a tile that is tried after an error of reading, in pixels of the tile."""


def prepare() -> None:
    """Prepare a worker process."""
    silence()


def slide_facts(
    path: str, size_bytes: int, mtime_ns: int, hashes: SlideHashes | None
) -> dict[str, Any]:
    """Return size, scanned area, scale and format of a slide; and a warning if its files differ from those recorded.

    Without a scale, `mpp` is None, and `unscaled` has the reason.

    `size_bytes`, `mtime_ns` and `hashes` are those recorded; 0 and None without a record.

    Raises:
        SlideUnreadable: the slide cannot be opened.
    """
    slide = _slide(path)
    info = slide.info
    warning = mpp = unscaled = None
    try:
        mpp = float(resolve_mpp(path, info).mpp)
    except ScaleError as error:
        unscaled = str(error)
    if size_bytes:
        files = _files(Path(path))
        current = fingerprint(files)
        change = None
        if current.size_bytes != size_bytes:
            change = f"{current.size_bytes:,} bytes, then {size_bytes:,}"
        elif current.mtime_ns != mtime_ns and hashes and not hashes.match_file(files, info):
            change = "its tiles differ"
        if change:
            warning = (
                f"{path} has changed since it was ingested ({change}); patches, labels and predictions may belong to "
                "another scan"
            )
    left, top = info.bounds.origin.x, info.bounds.origin.y
    return {
        "width": info.size.width,
        "height": info.size.height,
        "bounds": [left, top, info.bounds.size.width, info.bounds.size.height],
        "mpp": mpp,
        "objective": info.objective_power,
        "vendor": info.vendor,
        "levels": [level.downsample for level in info.levels],
        "unscaled": unscaled,
        "warning": warning,
    }


def _files(path: Path) -> SlideFile:
    """Return a slide with all of its files; a DICOM series has several in one folder."""
    slides = discover([path.parent if path.suffix.lower() == ".dcm" else path])
    return next((slide for slide in slides if path in slide.files), slides[0])


@functools.lru_cache(maxsize=4)
def _opened(path: str, _mtime_ns: int) -> Slide:
    return open_slide(Path(path))


def _slide(path: str) -> Slide:
    """Return a slide from the cache of open slides; it is opened again when its file changes."""
    try:
        mtime_ns = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise SlideUnreadable(f"{path} cannot be read", found=str(error)) from error
    return _opened(path, mtime_ns)


def slide_tile(path: str, step: int, column: int, row: int) -> bytes:
    """Return a tile of a slide as JPEG.

    Raises:
        UsageError: there is no such tile.
        SlideUnreadable: the slide cannot be opened.
    """
    slide, scale = _slide(path), 2**step
    size = slide.info.size
    left, width = _extent(column, math.ceil(size.width / scale))
    top, height = _extent(row, math.ceil(size.height / scale))
    if width <= 0 or height <= 0 or scale > 2 * max(size.width, size.height):
        raise UsageError(f"tile {step}/{column}/{row} is outside the slide")
    return jpeg(_read(slide, PictureArea(left * scale, top * scale, scale, width, height)))


def _extent(number: int, whole: int) -> tuple[int, int]:
    """Return the begin and length of a row or column of tiles, in an image of `whole` pixels."""
    begin = number * TILE
    if begin >= whole:
        return begin, 0
    first = max(0, begin - OVERLAP)
    return first, min(begin + TILE + OVERLAP, whole) - first


def slide_region(path: str, x: int, y: int, side_l0: float, pixels: int) -> bytes:
    """Return a square of a slide as JPEG with at most `pixels` pixels. `x`, `y` and `side_l0` are level-0 pixels."""
    scale = max(1.0, side_l0 / pixels)
    count = max(1, round(side_l0 / scale))
    return jpeg(_read(_slide(path), PictureArea(x, y, scale, count, count)))


def _read(slide: Slide, area: PictureArea) -> PixelArray:
    """Return (H, W, 3) pixels of a part of a slide. The parts that cannot be read are hatched."""
    try:
        return _read_level(slide, area)
    except SlideUnreadable:
        height, width = area.height, area.width
        if max(height, width) <= _SMALLEST_BLOCK:
            return hatched(height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        for rows in (slice(0, height // 2), slice(height // 2, height)):
            for columns in (slice(0, width // 2), slice(width // 2, width)):
                if pixels[rows, columns].size:
                    pixels[rows, columns] = _read(slide, area.part(rows, columns))
        return pixels


def _read_level(slide: Slide, area: PictureArea) -> PixelArray:
    fine = [level for level in slide.info.levels if level.downsample <= area.pixel * 1.01]
    level = max(fine, key=lambda level: level.downsample) if fine else slide.info.levels[0]
    reduction = area.pixel / level.downsample
    if reduction > _MOST_REDUCTION:
        return _from_overview(str(slide.path), area)
    size = Size(max(1, round(area.width * reduction)), max(1, round(area.height * reduction)))
    corner = PointL0(round(area.left), round(area.top))
    pixels = slide.read_region(corner, level.number, size)
    if pixels.shape[:2] == (area.height, area.width):
        return pixels
    shape = (area.width, area.height)
    return np.asarray(Image.fromarray(pixels).resize(shape, Image.Resampling.BOX))


@functools.lru_cache(maxsize=4)
def _overview(path: str, _mtime_ns: int) -> tuple[Thumbnail, Image.Image]:
    """Return a thumbnail of a slide for tiles that no level is coarse enough for."""
    with open_slide(Path(path)) as slide:
        bounds = slide.info.bounds.size
        # Only the ratio to the scale of level 0 matters, so an assumed scale is used.
        reduction = max(1.0, max(bounds.width, bounds.height) / _OVERVIEW_SIDE)
        thumbnail = read_thumbnail(slide, None, at=Mpp(reduction * ASSUMED_MPP))
    pixels = thumbnail.pixels
    if thumbnail.lost is not None:
        pixels = np.where(thumbnail.lost[..., None], hatched(*pixels.shape[:2]), pixels)
    return thumbnail, Image.fromarray(pixels)


def _from_overview(path: str, area: PictureArea) -> PixelArray:
    thumbnail, image = _overview(path, Path(path).stat().st_mtime_ns)
    level = thumbnail.level.downsample
    pixel = thumbnail.reduction * level
    left, top = thumbnail.x_level * level, thumbnail.y_level * level
    corner = (area.left - left) / pixel, (area.top - top) / pixel
    return cut(image, PictureArea(*corner, area.pixel / pixel, area.width, area.height))


def slide_thumbnail(path: str, side: int) -> bytes:
    """Return a thumbnail of a slide's scanned area as JPEG; its longer side has `side` pixels."""
    slide = _slide(path)
    origin, size = slide.info.bounds.origin, slide.info.bounds.size
    scale = max(1.0, max(size.width, size.height) / side)
    width, height = max(1, round(size.width / scale)), max(1, round(size.height / scale))
    return jpeg(_read(slide, PictureArea(origin.x, origin.y, scale, width, height)))


def slide_mask(path: str) -> bytes:
    """Return the tissue mask that an ingest would find, as a PNG file of the scanned area."""
    slide = _slide(path)
    try:
        mpp: Mpp | None = resolve_mpp(path, slide.info).mpp
    except ScaleError:
        mpp = None
    thumbnail = read_thumbnail(slide, mpp, at=usual_mpp(slide, mpp))
    mask = find_on_thumbnail(thumbnail).pixels
    return png(mask.astype(np.uint8) * 255)
