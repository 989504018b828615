"""Pictures of stores: patches, and tiles of patches. These functions run in worker processes."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image

from histopipe.errors import DamagedStore
from histopipe.store.format import patch_key, value_crc
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.viewer.tiles import PictureArea, cut, hatched, jpeg

_GREY = (236, 236, 236)


@functools.lru_cache(maxsize=64)
def _store(path: str) -> Store:
    return Store(Path(path))


def patch_file(store: str, slide: int, row: int) -> bytes:
    """Return the stored file of a patch, JPEG or PNG.

    Raises:
        DamagedStore: it does not match its checksum, or the ingest could not read it.
    """
    opened = _store(store)
    crc = int(opened.index(slide)["crc"][row])
    value = opened.value(slide, row)
    if not value:
        raise DamagedStore(f"patch {row} could not be read from the slide at ingest")
    if value_crc(patch_key(slide, row), value) != crc:
        raise DamagedStore(f"patch {row} does not match its checksum", todo="run histopipe repair")
    return value


def patch_at(store: str, slide: int, x: int, y: int) -> bytes | None:
    """Return the stored file of the patch at a corner in level-0 pixels; None if there is none. Raise as `patch_file`."""
    index = _store(store).index(slide)
    rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
    return patch_file(store, slide, int(rows[0])) if len(rows) else None


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
    patch_l0 = (record.read_size or 0) * (record.downsample or 0.0)
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
    canvas = Image.new("RGB", (side, side), _GREY)
    if thumbnail is not None:
        image = Image.fromarray(decode_picture(thumbnail, f"thumbnail of {record.id}"))
        scale = width / image.width
        corner = (left - left_bound) / scale, (top - top_bound) / scale
        canvas = Image.fromarray(cut(image, PictureArea(*corner, pixel / scale, side, side)))
    small = max(1, side >> step)
    for at in rows:
        canvas.paste(_small_patch(store, slide, at, side, small), places[at])
    return jpeg(np.asarray(canvas))


def _small_patch(store: str, slide: int, row: int, side: int, small: int) -> Image.Image:
    try:
        value = patch_file(store, slide, row)
        pixels = decode_picture(value, f"patch {row}", side=side, least=small)
    except DamagedStore:
        return Image.fromarray(hatched(small, small))
    image = Image.fromarray(pixels)
    return image if image.width == small else image.resize((small, small), Image.Resampling.BOX)
