"""Make synthetic slides: pyramids in the TIFF formats of scanners, with only one row of tiles in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import simplejpeg
from PIL import Image

from histopipe.demo.painting import (
    GLASS,
    Painter,
    TexturedArea,
    endless,
    random_nodules,
    random_outlines,
    synthetic_texture,
)
from histopipe.demo.pyramid_tiff import TiffPage, write_pyramid
from histopipe.geometry import Size
from histopipe.system.arrays import PixelArray


@dataclass(frozen=True, kw_only=True)
class SlideSettings:
    """Settings of a synthetic slide.

    Attributes:
        size, mpp: size and scale of level 0.
        levels: downsamples, starting with 1.
        tile: side of the native tiles in pixels.
        quality, subsampling: quality and chroma subsampling of the JPEG tiles.
        bounds: for scn only, x, y, width and height of the area around the slide.
        pieces, nodules: number of pieces of tissue, and number of nodules of tumour in each piece.
        texture, tumour: textures of the tissue and of the nodules, as returned by `synthetic_texture`; None draws one.
        seed: random seed.
    """

    size: Size = field(default_factory=lambda: Size(4096, 4096))
    mpp: float = 0.499
    levels: Sequence[int] = (1, 4, 16)
    tile: int = 256
    quality: int = 90
    subsampling: str = "420"
    bounds: Sequence[int] | None = None
    pieces: int = 1
    nodules: int = 0
    texture: PixelArray | None = None
    tumour: PixelArray | None = None
    seed: int = 1


def make_slide(path: Path, kind: str, number: int, settings: SlideSettings) -> None:
    """Write a slide in the format of its suffix, and `NAME.geojson` with its outlines in level-0 pixels.

    `kind` is the class of its tissue. Each `number` yields a different slide.
    """
    rng = np.random.default_rng((settings.seed, number))
    texture = settings.texture
    if texture is None:
        texture = synthetic_texture(rng, kind, settings.mpp)
    outlines = random_outlines(rng, settings.size, settings.pieces)
    glass = np.clip(rng.normal(GLASS, 1.2, (settings.tile, settings.tile, 3)), 0, 255)
    areas = [TexturedArea(kind, outlines, endless(texture, settings.tile, settings.size))]
    if settings.nodules:
        within = [n for piece in outlines for n in random_nodules(rng, piece, settings.nodules)]
        tumour = settings.tumour
        if tumour is None:
            tumour = synthetic_texture(rng, "tumour", settings.mpp)
        areas.append(TexturedArea("tumour", within, endless(tumour, settings.tile, settings.size)))
    painter = Painter(settings.size, settings.tile, areas, glass.astype(np.uint8))
    write_slide(path, painter, settings)
    _write_outlines(path.with_suffix(".geojson"), areas)


def _pyramid(painter: RowPainter, options: SlideSettings) -> Iterator[Iterable[bytes]]:
    """Yield the compressed tiles of every level.

    Level 0 is drawn while its tiles are read. Coarser levels are averaged from it, and kept as compressed tiles.
    """
    tile = options.tile
    coarse: dict[int, list[bytes]] = {d: [] for d in options.levels[1:]}
    parts: dict[int, list[PixelArray]] = {d: [] for d in coarse}

    def encoded(row: PixelArray) -> Iterator[bytes]:
        for left in range(0, row.shape[1], tile):
            yield simplejpeg.encode_jpeg(
                np.ascontiguousarray(row[:, left : left + tile]),
                quality=options.quality, colorspace="RGB", colorsubsampling=options.subsampling,
            )  # fmt: skip

    def flush(downsample: int) -> None:
        if parts[downsample]:
            row = np.concatenate(parts[downsample])
            width = -(-row.shape[1] // tile) * tile
            square = ((0, tile - row.shape[0]), (0, width - row.shape[1]), (0, 0))
            coarse[downsample] += encoded(np.pad(row, square, mode="edge"))
            parts[downsample] = []

    def level_0() -> Iterator[bytes]:
        for top in range(0, painter.size.height, tile):
            row = painter.tile_row(top)
            yield from encoded(row)
            seen = row[: painter.size.height - top, : painter.size.width]
            for d in coarse:
                rows, columns = seen.shape[0] // d * d, seen.shape[1] // d * d
                if rows and columns:
                    parts[d].append(np.asarray(Image.fromarray(seen[:rows, :columns]).reduce(d)))
                if sum(map(len, parts[d])) >= tile:
                    flush(d)
        for d in coarse:
            flush(d)

    yield level_0()
    yield from coarse.values()


class RowPainter(Protocol):
    """Draws level 0 of a slide in rows of tiles."""

    @property
    def size(self) -> Size:
        """Size of level 0."""

    def tile_row(self, top: int) -> PixelArray:
        """Return the row of tiles that begins at pixel row `top`, (tile, W, 3) uint8."""


def write_slide(path: Path, painter: RowPainter, options: SlideSettings) -> None:
    """Write a pyramidal slide of what a painter draws."""
    levels = [Size(options.size.width // d, options.size.height // d) for d in options.levels]
    tile = Size(options.tile, options.tile)
    texts: list[str | None] = [None] * len(levels)
    if path.suffix == ".svs":
        texts = [_aperio_description(levels, options)] * len(levels)
    elif path.suffix == ".scn":
        texts[0] = leica_description(levels, options)
    pages = (
        TiffPage(size, tile, tiles, options.subsampling, text, options.mpp * scale)
        for size, scale, tiles, text in zip(
            levels, options.levels, _pyramid(painter, options), texts, strict=True
        )
    )
    write_pyramid(path, pages)


def _aperio_description(levels: list[Size], options: SlideSettings) -> str:
    width, height = levels[0].width, levels[0].height
    scale = f"|AppMag = {round(10 / options.mpp)}|MPP = {options.mpp:.4f}"
    return (
        f"Aperio Image Library v11.2.1 \r\n{width}x{height} [0,0 {width}x{height}] "
        f"({options.tile}x{options.tile}) JPEG/RGB Q={options.quality}" + scale
    )


def leica_description(levels: list[Size], options: SlideSettings) -> str:
    """Return Leica's XML description, which can place the slide in a larger area."""
    nm = options.mpp * 1000
    # OpenSlide treats an image that fills its whole area as the macro image, so the area is larger by a tile.
    whole = levels[0].width + options.tile, levels[0].height + options.tile
    x, y, width, height = options.bounds or (0, 0, *whole)
    dimensions = "".join(
        f'<dimension sizeX="{s.width}" sizeY="{s.height}" r="{i}" ifd="{i}"/>'
        for i, s in enumerate(levels)
    )
    size = f'sizeX="{levels[0].width * nm:.0f}" sizeY="{levels[0].height * nm:.0f}"'
    return (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01">'
        f'<collection name="made" sizeX="{width * nm:.0f}" sizeY="{height * nm:.0f}"><image name="main">'
        '<creationDate>2020-01-01T00:00:00Z</creationDate><device model="made" version="1"/>'
        f'<pixels sizeX="{levels[0].width}" sizeY="{levels[0].height}">{dimensions}</pixels>'
        f'<view {size} offsetX="{x * nm:.0f}" offsetY="{y * nm:.0f}" spacingZ="0"/>'
        "<scanSettings><objectiveSettings>"
        f"<objective>{round(10 / options.mpp)}</objective></objectiveSettings><illuminationSettings>"
        "<illuminationSource>brightfield</illuminationSource><numericalAperture>0.5</numericalAperture>"
        "</illuminationSettings></scanSettings></image></collection></scn>"
    )


def _write_outlines(path: Path, areas: Sequence[TexturedArea]) -> None:
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [outline.polygon()]},
            "properties": {"classification": {"name": area.kind}},
        }
        for area in areas
        for outline in area.outlines
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
