"""Decoding pictures that a store holds. The size is checked before any pixel is decoded."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore

LARGEST_SIDE = 1 << 14
"""Pixels; thumbnails are of a few thousand, patches of at most 8,192."""


def decode_picture(
    value: bytes | memoryview,
    where: str,
    *,
    mode: str = "RGB",
    side: int | None = None,
    least: int = 0,
) -> NDArray[np.uint8]:
    """Decode a JPEG or PNG file to (H, W, 3) uint8, or (H, W) with mode L.

    Args:
        value: the file.
        where: what it is, for messages.
        mode: RGB, or L for grey.
        side: width and height that it must have, pixels; None accepts any picture of at most 16,384.
        least: if not 0, the pixels that the longer side needs at least; a JPEG may be decoded at a smaller scale then.

    Raises:
        DamagedStore: it cannot be decoded, or has another size: a file of a few kB may claim gigapixels.
    """
    # Late: only looking at single pictures needs it.
    from PIL import Image

    try:
        with Image.open(io.BytesIO(value), formats=("JPEG", "PNG")) as image:
            if max(image.size) > LARGEST_SIDE if side is None else image.size != (side, side):
                raise DamagedStore(  # noqa: TRY301 - before the picture is decoded
                    f"{where}: its size",
                    found=f"{image.size[0]} × {image.size[1]} pixels",
                    expected=f"{side} × {side}" if side else f"at most {LARGEST_SIDE}",
                )
            if least:
                image.draft(mode, (least, least))
            return np.asarray(image.convert(mode), np.uint8)
    except DamagedStore:
        raise
    # Pillow raises all of these for a broken PNG.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedStore(f"{where} cannot be decoded", found=str(error)[:200]) from error
