"""Draw synthetic slides: pieces of tissue with smooth outlines on glass, nodules of tumour, and textures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.geometry import Size
from histopipe.system.arrays import PixelArray
from histopipe.system.files import atomic_write

BANK = 2048
"""Side of the largest texture in pixels. Larger slides repeat it."""
_SHAPES = 64
"""Different shapes of nuclei in a texture."""
_REACH = 24
"""Largest distance of a pixel of a nucleus from its centre, along each axis."""

GLASS = (243, 242, 244)
STROMA = np.array([222, 160, 196], np.float32)
NUCLEUS = np.array([96, 62, 138], np.float32)

NUCLEI = {"normal": (60.0, 5.5), "tumour": (220.0, 8.0)}
"""Number of nuclei per 256² pixels at 0.5 mpp, and their radius in pixels, by class."""


@dataclass(frozen=True)
class PaintedOutline:
    """A smooth closed curve: radius as a function of the angle."""

    x: float
    y: float
    radius: float
    waves: NDArray[np.float64]  # (K, 2) amplitude and phase

    def radii(self, angles: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the radius at each angle, in pixels."""
        total = np.ones_like(angles)
        for k, (amplitude, phase) in enumerate(self.waves, start=2):
            total += amplitude * np.cos(k * angles + phase)
        return self.radius * total

    def depth(self, x: float, y: float) -> float:
        """Return the distance of a point from the curve, along its ray from the centre; negative outside."""
        dx, dy = x - self.x, y - self.y
        return float(self.radii(np.array([np.arctan2(dy, dx)]))[0] - np.hypot(dx, dy))

    def inside(self, xs: NDArray[np.floating], ys: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which points are inside, (len(ys), len(xs)) bool."""
        dx, dy = xs[None, :] - self.x, ys[:, None] - self.y
        return np.asarray(np.hypot(dx, dy) < self.radii(np.arctan2(dy, dx)))

    def polygon(self, points: int = 180) -> list[list[float]]:
        """Return a closed ring of level-0 points."""
        angles = np.linspace(0, 2 * np.pi, points + 1)
        radii = self.radii(angles)
        xs, ys = self.x + radii * np.cos(angles), self.y + radii * np.sin(angles)
        return [[float(x), float(y)] for x, y in zip(xs, ys, strict=True)]


def _waves(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.stack([rng.uniform(0, 0.09, 5), rng.uniform(0, 2 * np.pi, 5)], axis=1)


def random_outlines(rng: np.random.Generator, size: Size, count: int) -> list[PaintedOutline]:
    """Return pieces of tissue that cover about 40 % of a slide."""
    radius = np.sqrt(0.4 * size.width * size.height / (count * np.pi))
    radius = min(radius, 0.42 * min(size.width, size.height))
    return [
        PaintedOutline(
            x=float(size.width * (i + 0.5) / count + rng.uniform(-0.03, 0.03) * size.width),
            y=float(size.height * rng.uniform(0.45, 0.55)),
            radius=float(radius * rng.uniform(0.85, 1.0)),
            waves=_waves(rng),
        )
        for i in range(count)
    ]


def random_nodules(
    rng: np.random.Generator, tissue: PaintedOutline, count: int
) -> list[PaintedOutline]:
    """Return round areas in a piece of tissue, each about a third of its width."""
    return [
        PaintedOutline(
            x=float(tissue.x + 0.45 * tissue.radius * np.cos(turn)),
            y=float(tissue.y + 0.45 * tissue.radius * np.sin(turn)),
            radius=float(tissue.radius * rng.uniform(0.28, 0.38)),
            waves=_waves(rng),
        )
        for turn in rng.uniform(0, 2 * np.pi) + np.arange(count) * 2 * np.pi / max(1, count)
    ]


def texture_side(size: Size, tile: int) -> int:
    """Return the side of a texture for slides of a size, in pixels."""
    return min(BANK, max(size.width, size.height, 2 * _REACH) + tile)


def synthetic_texture(
    rng: np.random.Generator, kind: str, mpp: float, side: int = BANK
) -> PixelArray:
    """Return H&E-like tissue, wavy pink stroma with purple nuclei, as (side, side, 3) uint8."""
    density, radius = NUCLEI[kind]
    scale = 0.5 / mpp
    coarse = Image.fromarray(rng.integers(0, 255, (-(-side // 16), -(-side // 16)), np.uint8))
    waves = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
    tissue = STROMA + (waves[..., None] - 0.5) * np.array([30, 60, 30], np.float32)
    tissue += 5 * rng.standard_normal(tissue.shape, np.float32)
    shapes = [_nucleus(rng, radius * scale) for _ in range(_SHAPES)]
    count = int(density * side * side / (256 * scale) ** 2)
    places = rng.integers(_REACH, side - _REACH, (count, 2)).tolist()
    colours = NUCLEUS + rng.normal(0, 10, (count, 1)).astype(np.float32)
    for (y, x), colour, shape in zip(
        places, colours, rng.integers(_SHAPES, size=count), strict=True
    ):
        alpha = shapes[shape]
        reach = len(alpha) // 2
        area = tissue[y - reach : y + reach + 1, x - reach : x + reach + 1]
        area += alpha * (colour - area)
    return np.clip(tissue, 0, 255).astype(np.uint8)


def _nucleus(rng: np.random.Generator, radius: float) -> NDArray[np.float32]:
    """Return the opacity of an elliptic nucleus of about this radius, (2 * reach + 1, 2 * reach + 1, 1) from 0 to 1."""
    radius *= rng.uniform(0.7, 1.3)
    reach = min(_REACH, int(radius * 1.5) + 1)
    ys, xs = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(np.float32)
    distance = np.hypot(ys * rng.uniform(0.7, 1.3), xs)
    return np.asarray(np.clip(radius - distance, 0, 1)[..., None] * 0.85, np.float32)


def shifted_textures(textures: Mapping[str, PixelArray], number: int) -> dict[str, PixelArray]:
    """Return textures for the slide with this number, shifted so that no patch equals one of another slide.

    Drawing a texture takes longer than drawing a slide, so several slides share them.
    """
    shift = tuple(np.random.default_rng(number).integers(0, BANK, 2).tolist())
    return {name: np.roll(texture, shift, axis=(0, 1)) for name, texture in textures.items()}


@dataclass(frozen=True)
class TexturedArea:
    """Outlines of one class, and their texture from `endless`."""

    kind: str
    outlines: Sequence[PaintedOutline]
    texture: PixelArray


def endless(texture: PixelArray, tile: int, size: Size) -> PixelArray:
    """Return a texture that is mirrored, to repeat without a seam, and larger by a tile, so that no tile is wrapped.

    A slide that is smaller than the texture needs none of this.
    """
    side = len(texture)
    if max(size.width, size.height) + tile <= side:
        return texture
    return np.pad(texture, ((0, side + tile), (0, side + tile), (0, 0)), "symmetric")


def paint_row(areas: Sequence[TexturedArea], glass: PixelArray, width: int, top: int) -> PixelArray:
    """Return a row of tiles of a slide, (tile, width rounded up to tiles, 3) uint8, with glass beyond the slide's edge.

    `glass` is a tile; the row begins at pixel row `top` of level 0.
    """
    tiles = []
    for left in range(0, width, len(glass)):
        tile = glass
        for area in areas:
            tile = _with_area(tile, area, left, top)
        tiles.append(tile)
    return np.hstack(tiles)


def _with_area(below: PixelArray, area: TexturedArea, left: int, top: int) -> PixelArray:
    """Return a tile with the parts of an area that are in it."""
    t = len(below)
    depths = [o.depth(left + t / 2, top + t / 2) for o in area.outlines]
    # Most tiles are far from every outline. Their pixels need not be tested.
    clear = 2.0 * t
    if max(depths, default=-np.inf) < -clear:
        return below
    period = len(area.texture) - t  # a texture that is not mirrored is larger than the slide
    y, x = top % period, left % period
    tissue = area.texture[y : y + t, x : x + t]
    if max(depths) > clear:
        return tissue
    xs, ys = left + np.arange(t) + 0.5, top + np.arange(t) + 0.5
    mask = np.logical_or.reduce([o.inside(xs, ys) for o in area.outlines])
    return np.where(mask[..., None], tissue, below)


_PHOTOMETRIC = {"grey": "minisblack", "rgb": "rgb", "ycbcr": "ycbcr"}
_FACTORS = {"444": (1, 1), "422": (2, 1), "420": (2, 2)}


def write_tiff_page(
    file: TiffWriter,
    size: Size,
    tile: Size,
    tiles: Iterable[bytes],
    *,
    mpp: float,
    subsampling: str,
    colour: str = "ycbcr",
    description: str | None = None,
    tables: bytes = b"",
) -> None:
    """Write an image of a pyramid.

    Args:
        file: the slide.
        size, tile: sizes of the image and of a tile.
        tiles: JPEG files in row order. Empty bytes are a missing tile.
        mpp: scale of the image.
        subsampling, colour: values for the header, such as "420", and `ycbcr`, `rgb` or `grey`.
        description: text of the header.
        tables: JPEG tables that are missing in the tiles.
    """
    shape = (size.height, size.width)
    file.write(
        iter(tiles),
        shape=shape if colour == "grey" else (*shape, 3),
        dtype=np.uint8,
        tile=(tile.height, tile.width),
        compression="jpeg",
        # Without this, RGB tiles would be recorded as YCbCr.
        compressionargs={"outcolorspace": "rgb"} if colour == "rgb" else None,
        photometric=_PHOTOMETRIC[colour],
        subsampling=_FACTORS[subsampling] if colour == "ycbcr" else None,
        jpegtables=tables or None,
        description=description,
        resolution=(1e4 / mpp, 1e4 / mpp),
        resolutionunit="CENTIMETER",
        metadata=None,
        software=False,
    )


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
    rng, tile = np.random.default_rng((settings.seed, number)), settings.tile
    texture, tumour = settings.texture, settings.tumour
    side = texture_side(settings.size, tile)
    if texture is None:
        texture = synthetic_texture(rng, kind, settings.mpp, side)
    outlines = random_outlines(rng, settings.size, settings.pieces)
    glass = np.clip(rng.normal(GLASS, 1.2, (tile, tile, 3)), 0, 255).astype(np.uint8)
    areas = [TexturedArea(kind, outlines, endless(texture, tile, settings.size))]
    if settings.nodules:
        within = [n for piece in outlines for n in random_nodules(rng, piece, settings.nodules)]
        if tumour is None:
            tumour = synthetic_texture(rng, "tumour", settings.mpp, side)
        areas.append(TexturedArea("tumour", within, endless(tumour, tile, settings.size)))
    write_slide(path, partial(paint_row, areas, glass, settings.size.width), settings)
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [outline.polygon()]},
            "properties": {"classification": {"name": area.kind}},
        }
        for area in areas
        for outline in area.outlines
    ]
    path.with_suffix(".geojson").write_text(
        json.dumps({"type": "FeatureCollection", "features": features})
    )


DrawRow = Callable[[int], PixelArray]
"""Draws the row of tiles that begins at a pixel row of level 0, (tile, width rounded up to tiles, 3) uint8."""


def _pyramid(draw_row: DrawRow, options: SlideSettings) -> Iterator[Iterator[bytes]]:
    """Yield the compressed tiles of every level.

    Level 0 is drawn while its tiles are read, and never in memory. Coarser levels are averaged from it.
    """
    tile = options.tile
    coarse: dict[int, list[PixelArray]] = {d: [] for d in options.levels[1:]}

    def encoded(row: PixelArray) -> Iterator[bytes]:
        for left in range(0, row.shape[1], tile):
            yield simplejpeg.encode_jpeg(
                np.ascontiguousarray(row[:, left : left + tile]),
                quality=options.quality,
                colorspace="RGB",
                colorsubsampling=options.subsampling,
            )

    def level_0() -> Iterator[bytes]:
        for top in range(0, options.size.height, tile):
            row = draw_row(top)
            seen = row[: options.size.height - top, : options.size.width]
            for d, parts in coarse.items():
                rows, columns = seen.shape[0] // d * d, seen.shape[1] // d * d
                if rows and columns:
                    parts.append(np.asarray(Image.fromarray(seen[:rows, :columns]).reduce(d)))
            # Last, since the writer does not resume this function after the last tile.
            yield from encoded(row)

    yield level_0()
    for parts in coarse.values():
        level = np.concatenate(parts)
        margins = ((0, -level.shape[0] % tile), (0, -level.shape[1] % tile), (0, 0))
        padded = np.pad(level, margins, mode="edge")
        yield chain.from_iterable(map(encoded, np.split(padded, len(padded) // tile)))


def write_slide(path: Path, draw_row: DrawRow, options: SlideSettings) -> None:
    """Write a pyramidal slide as BigTIFF. The file becomes visible by one rename."""
    levels = [Size(options.size.width // d, options.size.height // d) for d in options.levels]
    tile = Size(options.tile, options.tile)
    texts: list[str | None] = [None] * len(levels)
    if path.suffix == ".svs":
        width, height = levels[0].width, levels[0].height
        texts = [
            f"Aperio Image Library v11.2.1 \r\n{width}x{height} [0,0 {width}x{height}] "
            f"({options.tile}x{options.tile}) JPEG/RGB Q={options.quality}"
            f"|AppMag = {round(10 / options.mpp)}|MPP = {options.mpp:.4f}"
        ] * len(levels)
    elif path.suffix == ".scn":
        texts[0] = leica_description(levels, options)
    pyramid = zip(levels, options.levels, _pyramid(draw_row, options), texts, strict=True)
    with atomic_write(path) as part, TiffWriter(part, bigtiff=True) as file:
        for size, scale, tiles, description in pyramid:
            write_tiff_page(
                file,
                size,
                tile,
                tiles,
                mpp=options.mpp * scale,
                subsampling=options.subsampling,
                description=description,
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
