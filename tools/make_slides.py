"""Make whole-slide images to try things on: any size, real or synthetic texture, without holding a slide in memory.

    python tools/make_slides.py OUT --count 12 --size 4096x4096          a small labelled cohort
    python tools/make_slides.py OUT --size 35520x35604 --levels 1,4,16   a 1.2-gigapixel Aperio SVS

Synthetic tissue is drawn inside smooth random outlines on glass; `NAME.geojson` beside each slide holds these outlines in
level-0 pixels. With `--classes` the slides take turns in a class, which decides how dense and large their nuclei are, and
`labels.csv` names it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from pyramid_tiff import JpegTiles, Page, write_pyramid

from histopipe.geometry import PointL0, Size
from histopipe.slides.slide import Slide

Pixels = NDArray[np.uint8]

BANK = 2048
"""Side of the picture that texture is cut from."""

GLASS = (243, 242, 244)
STROMA = np.array([222, 160, 196], np.float32)
NUCLEUS = np.array([96, 62, 138], np.float32)

NUCLEI = {"normal": (60.0, 5.5), "tumour": (220.0, 8.0)}
"""Nuclei per 256² pixels at 0.5 mpp, and their radius in pixels, by class."""


@dataclass(frozen=True)
class Outline:
    """A smooth closed curve: radius as a function of the angle."""

    x: float
    y: float
    radius: float
    waves: NDArray[np.float64]  # (K, 2) amplitude and phase

    def radii(self, angles: NDArray[np.floating]) -> NDArray[np.floating]:
        """Radius at each angle, pixels."""
        total = np.ones_like(angles)
        for k, (amplitude, phase) in enumerate(self.waves, start=2):
            total += amplitude * np.cos(k * angles + phase)
        return self.radius * total

    def depth(self, x: float, y: float) -> float:
        """How far towards the centre a point lies from the curve, along its ray; negative outside."""
        dx, dy = x - self.x, y - self.y
        return float(self.radii(np.array([np.arctan2(dy, dx)]))[0] - np.hypot(dx, dy))

    def inside(self, xs: NDArray[np.floating], ys: NDArray[np.floating]) -> NDArray[np.bool_]:
        """(len(ys), len(xs)) bool: which pixel centres lie within."""
        dx, dy = xs[None, :] - self.x, ys[:, None] - self.y
        return np.asarray(np.hypot(dx, dy) < self.radii(np.arctan2(dy, dx)))

    def polygon(self, points: int = 180) -> list[list[float]]:
        """A closed ring of level-0 points."""
        angles = np.linspace(0, 2 * np.pi, points + 1)
        radii = self.radii(angles)
        xs, ys = self.x + radii * np.cos(angles), self.y + radii * np.sin(angles)
        return [[float(x), float(y)] for x, y in zip(xs, ys, strict=True)]


def random_outlines(rng: np.random.Generator, size: Size, count: int) -> list[Outline]:
    """Pieces of tissue that cover about 40 % of a slide."""
    radius = np.sqrt(0.4 * size.width * size.height / (count * np.pi))
    radius = min(radius, 0.42 * min(size.width, size.height))
    return [
        Outline(
            x=float(size.width * (i + 0.5) / count + rng.uniform(-0.03, 0.03) * size.width),
            y=float(size.height * rng.uniform(0.45, 0.55)),
            radius=float(radius * rng.uniform(0.85, 1.0)),
            waves=np.stack([rng.uniform(0, 0.09, 5), rng.uniform(0, 2 * np.pi, 5)], axis=1),
        )
        for i in range(count)
    ]


def synthetic_texture(rng: np.random.Generator, kind: str, mpp: float) -> Pixels:
    """H&E-like tissue: wavy pink stroma with purple nuclei. (BANK, BANK, 3) uint8."""
    density, radius = NUCLEI[kind]
    scale = 0.5 / mpp
    coarse = Image.fromarray(rng.integers(0, 255, (BANK // 16, BANK // 16), np.uint8))
    waves = np.asarray(coarse.resize((BANK, BANK), Image.Resampling.BICUBIC), np.float32) / 255
    tissue = STROMA + (waves[..., None] - 0.5) * np.array([30, 60, 30], np.float32)
    tissue += rng.normal(0, 5, tissue.shape).astype(np.float32)
    ys, xs = np.mgrid[-24:25, -24:25]
    for _ in range(int(density * BANK * BANK / (256 * scale) ** 2)):
        r = radius * scale * rng.uniform(0.7, 1.3)
        reach = min(24, int(r * 1.5) + 1)
        y, x = rng.integers(24, BANK - 25, 2)
        near = np.hypot(ys * rng.uniform(0.7, 1.3), xs)[
            24 - reach : 25 + reach, 24 - reach : 25 + reach
        ]
        alpha = np.clip(r - near, 0, 1)[..., None] * 0.85
        area = tissue[y - reach : y + reach + 1, x - reach : x + reach + 1]
        area += alpha * (NUCLEUS + rng.normal(0, 10) - area)
    return np.clip(tissue, 0, 255).astype(np.uint8)


def slide_texture(path: Path) -> Pixels:
    """The most colourful square of a real slide, mirrored up to the bank's size if it is small."""
    with Slide(path) as slide:
        size = slide.info.size
        side = min(BANK, size.width, size.height)
        best: Pixels | None = None
        for y in range(0, size.height - side + 1, max(1, (size.height - side) // 4)):
            for x in range(0, size.width - side + 1, max(1, (size.width - side) // 4)):
                area = slide.read_region(PointL0(x, y), 0, Size(side, side))
                if best is None or np.ptp(area, axis=2).mean() > np.ptp(best, axis=2).mean():
                    best = area
    if best is None:
        raise ValueError(f"{path} is empty")
    pad = BANK - side
    return np.pad(best, ((0, pad), (0, pad), (0, 0)), mode="symmetric")


@dataclass(frozen=True)
class Painter:
    """Draws any part of one slide's level 0, always the same."""

    size: Size
    tile: int
    outlines: list[Outline]
    texture: Pixels
    glass: Pixels

    def tile_row(self, top: int) -> Pixels:
        """A row of tiles, (tile, width rounded up to tiles, 3) uint8, glass beyond the slide's edge."""
        columns = -(-self.size.width // self.tile)
        row = np.empty((self.tile, columns * self.tile, 3), np.uint8)
        for column in range(columns):
            left = column * self.tile
            row[:, left : left + self.tile] = self._tile(left, top)
        return row

    def _tile(self, left: int, top: int) -> Pixels:
        t = self.tile
        depths = [o.depth(left + t / 2, top + t / 2) for o in self.outlines]
        # Far from every edge, as nearly all tiles are, no pixel has to be asked.
        clear = 2.0 * t
        if max(depths) < -clear:
            return self.glass
        y, x = top % (2 * BANK), left % (2 * BANK)
        tissue = self.texture[y : y + t, x : x + t]
        if max(depths) > clear:
            return tissue
        xs, ys = left + np.arange(t) + 0.5, top + np.arange(t) + 0.5
        mask = np.logical_or.reduce([o.inside(xs, ys) for o in self.outlines])
        return np.where(mask[..., None], tissue, self.glass)


def pyramid(
    painter: Painter, downsamples: list[int], quality: int, subsampling: str
) -> Iterator[JpegTiles]:
    """The compressed tiles of every level. Level 0 is drawn as it is consumed; coarser levels are averaged from it on
    the way, and only their compressed tiles are kept.
    """
    tile = painter.tile
    coarse: dict[int, list[bytes]] = {d: [] for d in downsamples[1:]}
    parts: dict[int, list[Pixels]] = {d: [] for d in downsamples[1:]}

    def encoded(row: Pixels) -> Iterator[bytes]:
        for left in range(0, row.shape[1], tile):
            yield simplejpeg.encode_jpeg(
                np.ascontiguousarray(row[:, left : left + tile]),
                quality=quality, colorspace="RGB", colorsubsampling=subsampling,
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
    for d in downsamples[1:]:
        yield coarse[d]


def write_slide(path: Path, painter: Painter, options: argparse.Namespace) -> None:
    """One slide, in the format that the path's suffix asks for."""
    levels = [Size(painter.size.width // d, painter.size.height // d) for d in options.levels]
    describe = {".svs": _aperio_description, ".scn": leica_description}.get(path.suffix)
    description = describe(levels, options) if describe else None
    tiles = pyramid(painter, options.levels, options.quality, options.subsampling)
    pages = (
        Page(
            size=size,
            tile=Size(painter.tile, painter.tile),
            tiles=compressed,
            subsampling=options.subsampling,
            description=description if number == 0 or path.suffix == ".svs" else None,
            mpp=options.mpp * options.levels[number],
        )
        for number, (size, compressed) in enumerate(zip(levels, tiles, strict=True))
    )
    write_pyramid(path, pages)


def _aperio_description(levels: list[Size], options: argparse.Namespace) -> str:
    width, height = levels[0].width, levels[0].height
    scale = f"|AppMag = {round(10 / options.mpp)}|MPP = {options.mpp:.4f}"
    return (
        f"Aperio Image Library v11.2.1 \r\n{width}x{height} [0,0 {width}x{height}] "
        f"({options.tile}x{options.tile}) JPEG/RGB Q={options.quality}" + scale
    )


def leica_description(levels: list[Size], options: argparse.Namespace) -> str:
    """Leica's XML, the TIFF dialect in which a slide can say where on a larger area it lies."""
    nm = options.mpp * 1000
    # OpenSlide takes an image that fills its whole area for the macro, so the area is a tile larger.
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


def write_outlines(path: Path, outlines: list[Outline], kind: str) -> None:
    """The tissue's outlines as GeoJSON in level-0 pixels."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [outline.polygon()]},
            "properties": {"classification": {"name": kind}},
        }
        for outline in outlines
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def main(arguments: list[str] | None = None) -> None:
    """Parse, and make the slides one after another."""
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(options.count):
        kind = options.classes[number % len(options.classes)]
        rng = np.random.default_rng((options.seed, number))
        texture = (
            slide_texture(options.texture)
            if options.texture
            else synthetic_texture(rng, kind, options.mpp)
        )
        outlines = random_outlines(rng, options.size, options.pieces)
        glass = np.clip(rng.normal(GLASS, 1.2, (options.tile, options.tile, 3)), 0, 255)
        painter = Painter(
            options.size,
            options.tile,
            outlines,
            # Mirrored twice over, so that it goes on without a seam; and a tile more, so that none must be wrapped.
            np.pad(
                texture, ((0, BANK + options.tile), (0, BANK + options.tile), (0, 0)), "symmetric"
            ),
            glass.astype(np.uint8),
        )
        path = options.out / f"{options.name}{number:03d}.{options.format}"
        write_slide(path, painter, options)
        write_outlines(path.with_suffix(".geojson"), outlines, kind)
        rows.append((path.stem, kind))
        print(f"{path}: {options.size}, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    with (options.out / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label"), *rows])


def _size(text: str) -> Size:
    width, _, height = text.partition("x")
    return Size(int(width), int(height))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=1, help="slides to make (1)")
    parser.add_argument("--name", default="slide-", help="file names begin so (slide-)")
    parser.add_argument("--format", choices=["svs", "tiff", "scn"], default="svs")
    parser.add_argument("--size", type=_size, default=Size(4096, 4096), help="level 0 (4096x4096)")
    parser.add_argument("--mpp", type=float, default=0.499, help="level 0 (0.499)")
    parser.add_argument("--levels", type=_numbers, default=[1, 4, 16], help="downsamples (1,4,16)")
    parser.add_argument("--tile", type=int, default=256, help="native tile (256)")
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--subsampling", choices=["444", "422", "420"], default="420")
    parser.add_argument(
        "--bounds", type=_numbers, help="scn only: x,y,width,height of the area it lies on"
    )
    parser.add_argument("--pieces", type=int, default=1, help="pieces of tissue (1)")
    parser.add_argument(
        "--classes", type=lambda t: t.split(","), default=["tumour"], help="normal,tumour"
    )
    parser.add_argument("--texture", type=Path, help="take the texture from this real slide")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    wrong = _wrong(options)
    if wrong:
        parser.error(wrong)
    return options


def _wrong(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, if anything."""
    size, coarsest = options.size, max(options.levels)
    checks = {
        "--tile: a multiple of 16": options.tile > 0 and options.tile % 16 == 0,
        "--mpp: more than 0": options.mpp > 0,
        "--levels: 1 first, then rising powers of 2 that divide the tile": options.levels[0] == 1
        and options.levels == sorted(set(options.levels))
        and all(d > 0 and d & (d - 1) == 0 and options.tile % d == 0 for d in options.levels),
        "--size: at least one pixel of the coarsest level": min(size.width, size.height)
        >= coarsest,
        f"--classes: of {', '.join(NUCLEI)}": set(options.classes) <= set(NUCLEI),
        "--bounds: x,y,width,height for --format scn": options.bounds is None
        or (options.format == "scn" and len(options.bounds) == 4),
        "--count and --pieces: 1 or more": options.count > 0 and options.pieces > 0,
    }
    return next((text for text, right in checks.items() if not right), None)


if __name__ == "__main__":
    main()
