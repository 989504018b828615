"""Pictures of slides and patches, and patches with the most similar features. These functions run in worker processes."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from histopipe.errors import DamagedStore, ScaleError, SlideUnreadable, UsageError
from histopipe.features.feature_file import features_at, read_coords, read_features, read_header
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.slides.discovery import discover
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import SlideFile, fingerprint, open_slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail, usual_mpp
from histopipe.store.format import patch_key, value_crc
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.arrays import PixelArray
from histopipe.tiling.algorithms import find_on_thumbnail
from histopipe.tiling.mask import Grid
from histopipe.tiling.mask_edits import read_mask_features
from histopipe.tiling.mask_files import (
    PNG,
    encode_png,
    read_mask_file,
    read_png_grid,
    tissue_features,
)

_BLOCK_BYTES = 64 << 20
"""Bytes of features that are read at once."""


def feature_of(path: str, x: int, y: int) -> NDArray[np.float32]:
    """Return the features (D,) of the patch at a corner in level-0 pixels.

    Raises:
        UsageError: the file has no such patch.
        DamagedStore: the file cannot be read.
    """
    feature: NDArray[np.float32] = features_at(Path(path), np.array([[x, y]]))[0]
    if np.isnan(feature).all():
        raise UsageError(
            f"{path} has no features of the patch at x {x}, y {y}",
            todo="embed this store: the features are those of other patches",
        )
    return feature


def most_similar(path: str, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
    """Return corner and cosine similarity of the patches in a file with the most similar features, best first.

    Raises:
        UsageError: the features have another length.
        DamagedStore: the file cannot be read.
    """
    header = read_header(Path(path))
    if header.dimension != len(feature):
        raise UsageError(
            f"{path}: the length of its features", found=header.dimension, expected=len(feature)
        )
    coords = read_coords(header)
    if coords is None or not header.rows:
        return []
    if not np.isfinite(feature).all():
        raise UsageError("the features of this patch are not finite", todo="embed the slide again")
    direction = feature / max(float(np.linalg.norm(feature)), 1e-12)
    # A file that is not contiguous is read at once.
    block = header.rows if header.offset is None else max(1, _BLOCK_BYTES // (4 * header.dimension))
    cosine = np.empty(header.rows, np.float32)
    for rows in np.split(np.arange(header.rows), range(block, header.rows, block)):
        part = np.asarray(read_features(header, rows), np.float32)
        cosine[rows] = part @ direction / np.maximum(np.linalg.norm(part, axis=1), 1e-12)
    cosine[~np.isfinite(cosine)] = -1  # features that are not finite
    return [
        {"x": int(coords[row, 0]), "y": int(coords[row, 1]), "cosine": round(float(cosine[row]), 4)}
        for row in np.argsort(-cosine, kind="stable")[:count].tolist()
    ]


TILE = 512
"""Side of a tile without overlap."""
OVERLAP = 8
"""Pixels by which a tile of a slide reaches into each neighbour: so many that JPEG blocks of slide and tile coincide,
which halves the loss of a second compression."""
COARSEST_STEP = 3
"""Highest step of a store's tiles. The thumbnail is fine enough for coarser ones."""
_STRIPES = np.array([[196, 60, 52], [88, 88, 92]], np.uint8)
_QUALITY = 90
"""Quality of JPEG files: high, since the tiles of most slides were compressed before."""


def cut(image: Image.Image, source: Grid, area: Grid) -> PixelArray:
    """Return the pixels of an area from an image with the grid `source`. Outside of the image, they are white."""
    reduction = max(1, int(area.side / source.side))
    if reduction > 1:
        image = image.reduce(reduction)
    left, top, step = (
        length / source.side / reduction
        for length in (area.x - source.x, area.y - source.y, area.side)
    )
    part = image.transform(
        (area.size.width, area.size.height),
        Image.Transform.AFFINE,
        (step, 0.0, left, 0.0, step, top),
        Image.Resampling.BILINEAR,
        fillcolor=(255, 255, 255),
    )
    return np.asarray(part)


def hatched(height: int, width: int) -> PixelArray:
    """Return (H, W, 3) stripes, which mark what cannot be read."""
    y, x = np.ogrid[:height, :width]
    return np.asarray(_STRIPES[((x + y) // 6) % 2], np.uint8)


def message_tile(text: str) -> bytes:
    """Return a tile with stripes and a text, the reason why there is no picture."""
    image = Image.fromarray(hatched(TILE, TILE))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(18)
    written = "\n".join(textwrap.wrap(text, 46)[:16])
    box = draw.multiline_textbbox((16, 16), written, font)
    draw.rectangle((box[0] - 8, box[1] - 8, box[2] + 8, box[3] + 8), fill=(255, 255, 255))
    draw.multiline_text((16, 16), written, fill=(140, 20, 20), font=font)
    return jpeg(np.asarray(image))


def jpeg(pixels: PixelArray) -> bytes:
    """Return (H, W, 3) pixels as JPEG, with full colour resolution."""
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels),
            quality=_QUALITY,
            colorspace="RGB",
            colorsubsampling="444",
        )
    )


_MOST_REDUCTION = 8
"""Largest factor by which a level is reduced for a tile; coarser tiles are cut from an overview of the whole slide."""
_OVERVIEW_SIDE = 2400
"""Longer side of the overview in pixels: more than a screen has."""
_PATCH_PIXELS = 1024
"""Most pixels per side of a patch that is read from a slide."""
_SMALLEST_BLOCK = 64
"""Side of the smallest part of a tile that is tried after an error of reading, in pixels of the tile."""


def read_geometry(path: str, recorded: SlideRecord | None) -> dict[str, Any]:
    """Return size, scanned area, scale and format of a slide; and a warning if its files differ from those `recorded`.

    Without a scale, `mpp` is None, and `unscaled` has the reason.

    Raises:
        SlideUnreadable: the slide cannot be opened.
    """
    slide = _slide(path)
    info, warning = slide.info, None
    mpp, unscaled = _scale(slide)
    if recorded is not None and recorded.size_bytes:
        files = replace(_files(Path(path)), core=recorded.core)
        current, change = fingerprint(files), ""
        if current.size_bytes != recorded.size_bytes:
            change = f"{current.size_bytes:,} bytes, then {recorded.size_bytes:,}"
        elif current.mtime_ns != recorded.mtime_ns and not recorded.hashes.match_file(files, info):
            change = "its tiles differ"  # a new time alone is no change
        if change:
            warning = (
                f"{path} has changed since it was ingested ({change}); patches, labels and predictions may belong to "
                "another scan"
            )
    scan = info.bounds.to_list()
    return {
        "width": info.size.width,
        "height": info.size.height,
        "bounds": recorded.bounds if recorded is not None and recorded.scan else scan,
        "scan": scan,
        "mpp": mpp,
        # Files about slides of earlier versions are in the turned frame.
        "orientation": info.orientation if recorded is None else recorded.orientation or 1,
        "objective": info.objective_power,
        "vendor": info.vendor,
        "levels": [level.downsample for level in info.levels],
        "unscaled": unscaled,
        "warning": warning,
    }


def _scale(slide: Slide) -> tuple[Mpp | None, str | None]:
    """Return the scale of a slide; or None, and the reason."""
    try:
        return resolve_mpp(str(slide.path), slide.info).mpp, None
    except ScaleError as error:
        return None, str(error)


def _files(path: Path) -> SlideFile:
    """Return a slide with all of its files; a DICOM series has several in one folder."""
    slides = discover([path.parent if path.suffix.lower() == ".dcm" else path])
    return next((slide for slide in slides if path in slide.files), slides[0])


@functools.lru_cache(maxsize=4)
def _opened(path: str, _mtime_ns: int) -> Slide:
    return open_slide(Path(path))


def _slide(path: str) -> Slide:
    """Return a slide from the cache of open slides; it is opened again when its file changes."""
    file = Path(path)
    return _opened(path, file.stat().st_mtime_ns if file.exists() else 0)


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
    return jpeg(_read(slide, Grid(left * scale, top * scale, scale, Size(width, height), size)))


def _extent(number: int, whole: int) -> tuple[int, int]:
    """Return the begin and length of a row or column of tiles, in an image of `whole` pixels."""
    begin = number * TILE
    first, end = max(0, begin - OVERLAP), min(begin + TILE + OVERLAP, whole)
    return first, end - first if begin < whole else 0


def _read(slide: Slide, area: Grid) -> PixelArray:
    """Return (H, W, 3) pixels of a part of a slide. The parts that cannot be read are hatched."""
    try:
        return _read_level(slide, area)
    except SlideUnreadable:
        height, width = area.size.height, area.size.width
        if max(height, width) <= _SMALLEST_BLOCK:
            return hatched(height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        for top, rows in ((0, height // 2), (height // 2, height - height // 2)):
            for left, columns in ((0, width // 2), (width // 2, width - width // 2)):
                if rows and columns:
                    x, y = area.x + left * area.side, area.y + top * area.side
                    pixels[top : top + rows, left : left + columns] = _read(
                        slide, replace(area, x=x, y=y, size=Size(columns, rows))
                    )
        return pixels


def _read_level(slide: Slide, area: Grid) -> PixelArray:
    fine = [level for level in slide.info.levels if level.downsample <= area.side * 1.01]
    level = max(fine, key=lambda level: level.downsample) if fine else slide.info.levels[0]
    reduction, width, height = area.side / level.downsample, area.size.width, area.size.height
    if reduction > _MOST_REDUCTION:
        grid, overview = _overview(slide)
        return cut(overview, grid, area)
    size = Size(max(1, round(width * reduction)), max(1, round(height * reduction)))
    pixels = slide.read_region(PointL0(round(area.x), round(area.y)), level.number, size)
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))


@functools.lru_cache(maxsize=4)
def _overview(slide: Slide) -> tuple[Grid, Image.Image]:
    """Return a thumbnail of a slide, with its grid, for tiles that no level is coarse enough for."""
    bounds = slide.info.bounds.size
    # Only the ratio to the scale of level 0 matters, so an assumed scale is used.
    reduction = max(1.0, max(bounds.width, bounds.height) / _OVERVIEW_SIDE)
    thumbnail = read_thumbnail(slide, None, at=Mpp(reduction * ASSUMED_MPP))
    pixels = thumbnail.pixels
    if thumbnail.lost is not None:
        pixels = np.where(thumbnail.lost[..., None], hatched(*pixels.shape[:2]), pixels)
    return Grid.of(thumbnail, slide.info.size), Image.fromarray(pixels)


def slide_thumbnail(path: str, side: int) -> bytes:
    """Return a thumbnail of a slide's scanned area as JPEG; its longer side has `side` pixels."""
    slide = _slide(path)
    origin, size = slide.info.bounds.origin, slide.info.bounds.size
    scale = max(1.0, max(size.width, size.height) / side)
    width, height = max(1, round(size.width / scale)), max(1, round(size.height / scale))
    return jpeg(_read(slide, Grid(origin.x, origin.y, scale, Size(width, height), slide.info.size)))


def slide_mask(path: str) -> bytes:
    """Return the tissue mask that an ingest would find, as a PNG file of the scanned area."""
    slide = _slide(path)
    mpp, _ = _scale(slide)
    thumbnail = read_thumbnail(slide, mpp, at=usual_mpp(slide, mpp))
    return encode_png(find_on_thumbnail(thumbnail).pixels, Grid.of(thumbnail, slide.info.size))


def mask_outlines(
    path: Path | None, mask: bytes, slide: str, bounds: RegionL0, size: Size
) -> list[dict[str, Any]]:
    """Return the features of a tissue mask, to correct it.

    Args:
        path: GeoJSON or PNG file of the mask; None if there is none.
        mask: without a GeoJSON file, the content of a PNG file: a mask of the store or of `slide_mask`. A PNG file is
            read on its grid, as an ingest reads it.
        slide, bounds, size: id of the slide, its scanned part, and the size of level 0.

    Raises:
        MaskUnfit: the file cannot be used.
        DamagedStore: the stored mask cannot be read.
    """
    if path is not None and path.suffix.lower() != PNG:
        return read_mask_features(path, slide, bounds)
    pixels = decode_picture(mask, f"{slide}: tissue mask", mode="L") > 0
    grid = read_png_grid(mask) or Grid.estimated(pixels, bounds, size)
    if path is not None:
        (pixels,) = read_mask_file(path, slide, grid, bounds).by_frame.values()
    return tissue_features(grid.outlines(pixels), (bounds.origin.x, bounds.origin.y))


_store = functools.lru_cache(maxsize=64)(Store)
"""Returns a store by path, from the cache of open stores."""


def patch_file(store: str, slide: int, row: int) -> bytes:
    """Return the stored file of a patch, JPEG or PNG.

    Raises:
        DamagedStore: it does not match its checksum, or the ingest could not read it.
    """
    opened = _store(store)
    value = opened.value(slide, row)
    if not value:
        raise DamagedStore(f"patch {row} could not be read from the slide at ingest")
    if value_crc(patch_key(slide, row), value) != opened.index(slide)["crc"][row]:
        raise DamagedStore(f"patch {row} does not match its checksum", todo="run histopipe repair")
    return value


def patch_or_region(
    store: str | None, number: int, slide: str | None, corner: tuple[int, int], side_l0: float
) -> bytes:
    """Return the patch at a corner: as stored, else from the slide as JPEG with at most 1,024 pixels per side.

    `store` and `slide` are paths, `number` is that of the slide in the store. `corner` and `side_l0` are level-0 pixels.

    Raises:
        DamagedStore: the patch does not match its checksum, or the ingest could not read it.
    """
    x, y = corner
    if store is not None:
        index = _store(store).index(number)
        rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
        if len(rows):
            return patch_file(store, number, int(rows[0]))
    if slide is None:
        return message_tile("neither the slide nor its store was found")
    scale = max(1.0, side_l0 / _PATCH_PIXELS)
    count = max(1, round(side_l0 / scale))
    opened = _slide(slide)
    return jpeg(_read(opened, Grid(x, y, scale, Size(count, count), opened.info.size)))


def small_thumbnail(thumbnail: bytes, side: int) -> bytes:
    """Return a stored thumbnail reduced to `side` pixels, as JPEG."""
    image = Image.fromarray(decode_picture(thumbnail, "the thumbnail", least=side))
    image.thumbnail((side, side))
    return jpeg(np.asarray(image))


def store_tile(
    store: str, slide: int, step: int, place: tuple[int, int], origin: tuple[float, float]
) -> bytes:
    """Return a tile of the stored patches of a slide. A tile that is exactly one patch is the stored file.

    Other tiles are composed over the thumbnail.

    Args:
        store: the store's folder.
        slide: number of the slide.
        step: the tile's pixels are 2**step times as wide as those of patches.
        place: column and row of the tile.
        origin: top left corner of the first tile, level-0 pixels.

    Raises:
        DamagedStore: the index or the thumbnail cannot be read.
    """
    opened = _store(store)
    record, index, side = opened.records[slide], opened.index(slide), opened.patch_size
    patch_l0 = record.side_l0
    pixel = patch_l0 / side * 2**step
    left, top = (at + number * side * pixel for at, number in zip(origin, place, strict=True))
    x, y = index["x_l0"] - left, index["y_l0"] - top
    end = side * pixel
    rows = np.flatnonzero((x > -patch_l0) & (x < end) & (y > -patch_l0) & (y < end)).tolist()
    places = {at: (round(float(x[at]) / pixel), round(float(y[at]) / pixel)) for at in rows}
    exact = [at for at in rows if places[at] == (0, 0)]
    if step == 0 and exact:
        try:
            return patch_file(store, slide, exact[0])
        except DamagedStore:
            return jpeg(hatched(side, side))
    left_bound, top_bound, width, _ = record.bounds or (0, 0, record.width, record.height)
    thumbnail = opened.thumbnail(slide)
    canvas = Image.new("RGB", (side, side), (236, 236, 236))
    if thumbnail is not None:
        image = Image.fromarray(decode_picture(thumbnail, f"thumbnail of {record.id}"))
        whole, size = Size(record.width, record.height), Size(*image.size)
        source = Grid(left_bound, top_bound, width / image.width, size, whole)
        area = Grid(left, top, pixel, Size(side, side), whole)
        canvas = Image.fromarray(cut(image, source, area))
    small = max(1, side >> step)
    for at, place_in_tile in places.items():
        try:
            pixels = decode_picture(
                patch_file(store, slide, at), f"patch {at}", side=side, least=small
            )
        except DamagedStore:
            pixels = hatched(small, small)
        canvas.paste(
            Image.fromarray(pixels).resize((small, small), Image.Resampling.BOX), place_in_tile
        )
    return jpeg(np.asarray(canvas))
