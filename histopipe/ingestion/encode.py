"""Reduce the pixels of a patch to the wanted scale, and encode them."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.slides.slide import rgb_image
from histopipe.tiling.level import Resampling
from histopipe.tiling.spec import TilingSpec

_THUMBNAIL_QUALITY = 85


def reduced(pixels: NDArray[np.uint8], size: int, resampling: Resampling) -> NDArray[np.uint8]:
    """Return a patch with a side of `size` pixels; (side, side, 3 or 4) uint8 RGB or BGRX."""
    side = len(pixels)
    if side == size:
        return pixels
    mode = "RGB" if pixels.shape[2] == 3 else "RGBX"  # the order of the channels is kept
    image = Image.frombuffer(mode, (side, side), np.ascontiguousarray(pixels))
    if resampling == "area":
        return np.asarray(image.reduce(side // size))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def encode(pixels: NDArray[np.uint8], spec: TilingSpec) -> bytes:
    """Return a patch, (H, W, 3 or 4) uint8 RGB or BGRX, as a plain JPEG or PNG file."""
    if spec.codec == "png":
        return png(pixels if pixels.shape[2] == 3 else np.asarray(rgb_image(pixels)))
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels),
            quality=spec.quality,
            colorspace="RGB" if pixels.shape[2] == 3 else "BGRX",
            colorsubsampling=spec.subsampling,
        )
    )


def encode_thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """Return a thumbnail, (H, W, 3) uint8 RGB, as a JPEG file."""
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=_THUMBNAIL_QUALITY, colorspace="RGB"
        )
    )


def png(pixels: NDArray[np.uint8] | NDArray[np.bool_]) -> bytes:
    """Return a picture or a mask as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
