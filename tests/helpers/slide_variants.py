"""Write small slides in every JPEG variant that scanners write."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.demo.synthetic_slides import (
    SlideSettings,
    leica_description,
    write_tiff_page,
)
from histopipe.geometry import Size

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Variant:
    """One way to write tiles into a TIFF file. `edit` changes the compressed tiles before they are written."""

    colour: str = "ycbcr"
    mode: str = "RGB"
    save: dict[str, Any] = field(default_factory=dict)
    shared_tables: bool = False
    edit: Callable[[list[bytes]], list[bytes]] = lambda tiles: tiles


def strip_application_segments(tiles: list[bytes]) -> list[bytes]:
    """Return tiles without JFIF and Adobe segments, as Aperio writes them."""
    out = []
    for tile in tiles:
        start, kept = 2, [tile[:2]]
        while tile[start + 1] != 0xDA:
            end = start + 2 + int.from_bytes(tile[start + 2 : start + 4])
            if not 0xE0 <= tile[start + 1] <= 0xEF:
                kept.append(tile[start:end])
            start = end
        out.append(b"".join([*kept, tile[start:]]))
    return out


def with_jfif(tiles: list[bytes]) -> list[bytes]:
    """Return tiles with a JFIF segment at the start, which declares YCbCr colours."""
    jfif = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    return [tile[:2] + jfif + tile[2:] for tile in tiles]


COPIED = {
    "ycbcr 4:4:4": Variant(save={"subsampling": 0}),
    "ycbcr 4:2:2": Variant(save={"subsampling": 1}),
    "ycbcr 4:2:0": Variant(save={"subsampling": 2}),
    "ycbcr without markers": Variant(edit=strip_application_segments),
    "ycbcr, shared tables": Variant(shared_tables=True),
    "ycbcr, own Huffman tables": Variant(save={"optimize": True}),
    "ycbcr, progressive": Variant(save={"progressive": True}),
    "ycbcr, comments": Variant(save={"comment": b"Patient X", "exif": b"Exif\0\0II*\0\x08\0\0\0"}),
    "ycbcr, restarts": Variant(save={"restart_marker_rows": 1}),
    "ycbcr, padded": Variant(edit=lambda tiles: [tile + b"\0" for tile in tiles]),
    "rgb with marker": Variant("rgb", save={"keep_rgb": True}),
    "rgb without marker": Variant("rgb", save={"keep_rgb": True}, edit=strip_application_segments),
    "rgb, shared tables": Variant(
        "rgb", save={"keep_rgb": True}, shared_tables=True, edit=strip_application_segments
    ),
    "rgb, called YCbCr by JFIF": Variant("rgb", save={"keep_rgb": True}, edit=with_jfif),
}
"""Variants whose tiles must be copied, with the same pixels in every decoder as in OpenSlide."""


def picture(size: Size, seed: int = 0) -> Pixels:
    """Return coloured clouds with some noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (size.height // 24 + 2, size.width // 24 + 2, 3), np.uint8)
    clouds = Image.fromarray(coarse).resize((size.width, size.height), Image.Resampling.BICUBIC)
    noise = rng.normal(0, 6, (size.height, size.width, 3))
    return np.clip(np.asarray(clouds) + noise, 0, 255).astype(np.uint8)


def aperio(size: Size, mpp: float = 0.5) -> str:
    """Return the description with which OpenSlide reads a TIFF file as an Aperio slide."""
    return (
        f"Aperio Image Library v11.2.1 \r\n{size.width}x{size.height} JPEG/RGB Q=80|MPP = {mpp:.5g}"
    )


def leica(size: Size, tile: Size, origin: tuple[int, int], mpp: float) -> str:
    """Return the description with which OpenSlide reads a TIFF file as a Leica slide, at an origin in a larger area."""
    whole = (origin[0] + size.width + 100, origin[1] + size.height + 100)
    return leica_description(
        [size], SlideSettings(mpp=mpp, tile=tile.width, bounds=(*origin, *whole))
    )


def write_slide(
    path: Path,
    levels: Sequence[Pixels],
    tile: Size,
    variant: Variant | None = None,
    mpp: float = 0.5,
    origin: tuple[int, int] = (0, 0),
) -> Path:
    """Write a slide with the given levels: Aperio if its suffix is .svs, Leica if .scn, else a generic TIFF.

    Only Leica slides can have an origin other than 0.
    """
    variant = variant or Variant()
    tables = _file(levels[0][:16, :16], variant, streamtype=1) if variant.shared_tables else b""
    first = Size(levels[0].shape[1], levels[0].shape[0])
    descriptions = {".svs": aperio(first, mpp), ".scn": leica(first, tile, origin, mpp)}
    with TiffWriter(path, bigtiff=True) as file:
        for pixels in levels:
            write_tiff_page(
                file,
                Size(pixels.shape[1], pixels.shape[0]),
                tile,
                variant.edit(list(_tiles(pixels, tile, variant))),
                mpp=mpp * first.width / pixels.shape[1],
                subsampling={0: "444", 1: "422"}.get(variant.save.get("subsampling", 2), "420"),
                colour=variant.colour,
                description=descriptions.get(path.suffix),
                tables=tables,
            )
    return path


def _tiles(pixels: Pixels, tile: Size, variant: Variant) -> list[bytes]:
    height, width = pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % tile.height), (0, -width % tile.width), (0, 0)), "edge")
    options = {"streamtype": 2} if variant.shared_tables else {}
    return [
        _file(padded[y : y + tile.height, x : x + tile.width], variant, **options)
        for y in range(0, height, tile.height)
        for x in range(0, width, tile.width)
    ]


def _file(pixels: Pixels, variant: Variant, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels).convert(variant.mode)
    image.save(buffer, "JPEG", **{"quality": 80, **variant.save, **options})
    return buffer.getvalue()
