"""The openslide route: a patch read through OpenSlide, reduced to the wanted scale and encoded."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.geometry import PointL0, Size
from histopipe.slides.slide import Slide
from histopipe.tiling.level import LevelChoice
from histopipe.tiling.spec import TilingSpec


def read_patch(slide: Slide, choice: LevelChoice, origin: PointL0, size: int) -> NDArray[np.uint8]:
    """A patch's pixels at the wanted scale.

    Args:
        slide: an open slide.
        choice: the level and how it is read.
        origin: top left corner, level 0.
        size: side of the patch as stored.

    Returns:
        (size, size, 3) uint8 RGB.

    Raises:
        SlideUnreadable: the file is damaged there.
    """
    read = choice.read_size
    pixels = slide.read_region(origin, choice.level.number, Size(read, read))
    if choice.resampling == "none":
        return pixels
    image = Image.fromarray(pixels)
    if choice.resampling == "area":
        return np.asarray(image.reduce(read // size))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def encode(pixels: NDArray[np.uint8], spec: TilingSpec) -> bytes:
    """A plain JPEG or PNG file.

    Args:
        pixels: (H, W, 3) uint8 RGB.
        spec: codec, quality and subsampling.
    """
    if spec.codec == "png":
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels),
            quality=spec.quality,
            colorspace="RGB",
            colorsubsampling=spec.subsampling,
        )
    )
