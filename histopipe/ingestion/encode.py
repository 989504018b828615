"""Pixels into the bytes of a patch: reduced to the wanted scale, and encoded."""

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
    """A patch's pixels at the wanted scale.

    Args:
        pixels: (side, side, 3 or 4) uint8 RGB or BGRX as read.
        size: side of the patch as stored.
        resampling: how the one becomes the other.
    """
    side = len(pixels)
    if side == size:
        return pixels
    image = _image(pixels)
    if resampling == "area":
        return np.asarray(image.reduce(side // size))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def encode(pixels: NDArray[np.uint8], spec: TilingSpec) -> bytes:
    """A plain JPEG or PNG file.

    Args:
        pixels: (H, W, 3 or 4) uint8 RGB or BGRX.
        spec: codec, quality and subsampling.
    """
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


def _image(pixels: NDArray[np.uint8]) -> Image.Image:
    height, width, channels = pixels.shape
    mode = "RGB" if channels == 3 else "RGBX"  # four bytes: which is which does not matter here
    return Image.frombuffer(mode, (width, height), np.ascontiguousarray(pixels))


def encode_thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """A JPEG of a thumbnail, (H, W, 3) uint8 RGB."""
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=_THUMBNAIL_QUALITY, colorspace="RGB"
        )
    )


def png(pixels: NDArray[np.uint8] | NDArray[np.bool_]) -> bytes:
    """A PNG of a picture or a mask."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
