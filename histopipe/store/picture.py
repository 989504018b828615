"""Decoding pictures that a store holds: its header is looked at before anything is made of it."""

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
    """A JPEG's or PNG's pixels.

    Args:
        value: the file.
        where: it stands, for messages.
        mode: RGB, or L for grey.
        side: both sides that it must have, pixels; None lets it be any picture of at most 16,384.
        least: if not 0, pixels that its longer side must keep: a JPEG is then decoded no larger than needed.

    Returns:
        (H, W, 3) uint8, or (H, W) for grey.

    Raises:
        DamagedStore: it is none, or of another size: a file of a few kB may claim gigapixels.
    """
    # Late: only looking at single pictures needs it.
    from PIL import Image

    try:
        with Image.open(io.BytesIO(value), formats=("JPEG", "PNG")) as image:
            _check_size(image.size, side, where)
            if least:
                image.draft(mode, (least, least))
            return np.asarray(image.convert(mode), np.uint8)
    # Pillow has all of these for a broken PNG.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, DamagedStore):
            raise
        raise DamagedStore(f"{where} cannot be decoded", found=str(error)[:200]) from error


def _check_size(size: tuple[int, int], side: int | None, where: str) -> None:
    if max(size) > LARGEST_SIDE if side is None else size != (side, side):
        raise DamagedStore(
            f"{where}: its size", found=f"{size[0]} × {size[1]} pixels",
            expected=f"{side} × {side}" if side else f"at most {LARGEST_SIDE}",
        )  # fmt: skip
