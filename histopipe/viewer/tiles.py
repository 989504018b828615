"""Tiles: parts of pictures, marks for what cannot be read, and the formats in which they are sent.

A tile is a square of `TILE` pixels (of the patch size for a store). At step k, each of its pixels is 2**k pixels wide in
level 0 (or in patches). What cannot be read is hatched, never white.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, ImageDraw, ImageFont

from histopipe.system.arrays import PixelArray

TILE = 512
"""Side of a tile without overlap."""
OVERLAP = 8
"""Pixels by which a tile of a slide reaches into each neighbour: so many that JPEG blocks of slide and tile coincide,
which halves the loss of a second compression."""
COARSEST_STEP = 3
"""Highest step of a store's tiles. The thumbnail is fine enough for coarser ones."""
_STRIPE = 6
_STRIPES = np.array([[196, 60, 52], [88, 88, 92]], np.uint8)
_QUALITY = 90


@dataclass(frozen=True, slots=True)
class PictureArea:
    """A part of an image: its corner and the side of its pixels, in pixels of the image; and its size in its own pixels."""

    left: float
    top: float
    pixel: float
    width: int
    height: int

    def part(self, rows: slice, columns: slice) -> PictureArea:
        """Return the part with these rows and columns."""
        left, top = self.left + columns.start * self.pixel, self.top + rows.start * self.pixel
        return PictureArea(
            left, top, self.pixel, columns.stop - columns.start, rows.stop - rows.start
        )


def cut(image: Image.Image, area: PictureArea) -> PixelArray:
    """Return a part of an image. Outside, it is white."""
    reduction = max(1, int(area.pixel))
    if reduction > 1:
        image = image.reduce(reduction)
    left, top, step = (value / reduction for value in (area.left, area.top, area.pixel))
    part = image.transform(
        (area.width, area.height), Image.Transform.AFFINE, (step, 0.0, left, 0.0, step, top),
        Image.Resampling.BILINEAR, fillcolor=(255, 255, 255),
    )  # fmt: skip
    return np.asarray(part)


def hatched(height: int, width: int) -> PixelArray:
    """Return (H, W, 3) stripes, which mark what cannot be read."""
    y, x = np.ogrid[:height, :width]
    return np.asarray(_STRIPES[((x + y) // _STRIPE) % 2], np.uint8)


def message_tile(text: str) -> bytes:
    """Return a tile with stripes and a text, the reason why there is no picture."""
    image = Image.fromarray(hatched(TILE, TILE))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(18)
    lines: list[str] = []
    line = ""
    for word in text.split():
        parts = [word[i : i + 40] for i in range(0, len(word), 40)]
        for part in parts:
            if len(line) + len(part) >= 46:
                lines, line = [*lines, line], ""
            line = f"{line} {part}".strip()
    written = "\n".join([*lines, line][:16])
    box = draw.multiline_textbbox((16, 16), written, font)
    draw.rectangle((box[0] - 8, box[1] - 8, box[2] + 8, box[3] + 8), fill=(255, 255, 255))
    draw.multiline_text((16, 16), written, fill=(140, 20, 20), font=font)
    return jpeg(np.asarray(image))


def jpeg(pixels: PixelArray) -> bytes:
    """Return (H, W, 3) pixels as JPEG, with full colour resolution."""
    contiguous = np.ascontiguousarray(pixels)
    return bytes(
        simplejpeg.encode_jpeg(
            contiguous, quality=_QUALITY, colorspace="RGB", colorsubsampling="444"
        )
    )


def png(pixels: PixelArray) -> bytes:
    """Return pixels as PNG, little compressed."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
