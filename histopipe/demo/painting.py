"""Draw synthetic slides: pieces of tissue with smooth outlines on glass, nodules of tumour, and textures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.geometry import Size
from histopipe.system.arrays import PixelArray

BANK = 2048
"""Side of a texture in pixels."""

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


def synthetic_texture(rng: np.random.Generator, kind: str, mpp: float) -> PixelArray:
    """Return H&E-like tissue, wavy pink stroma with purple nuclei, as (BANK, BANK, 3) uint8."""
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
        window = slice(24 - reach, 25 + reach)
        near = np.hypot(ys * rng.uniform(0.7, 1.3), xs)[window, window]
        alpha = np.clip(r - near, 0, 1)[..., None] * 0.85
        area = tissue[y - reach : y + reach + 1, x - reach : x + reach + 1]
        area += alpha * (NUCLEUS + rng.normal(0, 10) - area)
    return np.clip(tissue, 0, 255).astype(np.uint8)


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
    if max(size.width, size.height) + tile <= BANK:
        return texture
    return np.pad(texture, ((0, BANK + tile), (0, BANK + tile), (0, 0)), "symmetric")


@dataclass(frozen=True)
class Painter:
    """Draws level 0 of a slide."""

    size: Size
    tile: int
    areas: Sequence[TexturedArea]
    glass: PixelArray

    def tile_row(self, top: int) -> PixelArray:
        """Return a row of tiles, (tile, width rounded up to tiles, 3) uint8, with glass beyond the slide's edge."""
        tiles = []
        for left in range(0, self.size.width, self.tile):
            tile = self.glass
            for area in self.areas:
                tile = self._with_area(tile, area, left, top)
            tiles.append(tile)
        return np.hstack(tiles)

    def _with_area(self, below: PixelArray, area: TexturedArea, left: int, top: int) -> PixelArray:
        t = self.tile
        depths = [o.depth(left + t / 2, top + t / 2) for o in area.outlines]
        # Most tiles are far from every outline. Their pixels need not be tested.
        clear = 2.0 * t
        if max(depths, default=-np.inf) < -clear:
            return below
        y, x = top % (2 * BANK), left % (2 * BANK)
        tissue = area.texture[y : y + t, x : x + t]
        if max(depths) > clear:
            return tissue
        xs, ys = left + np.arange(t) + 0.5, top + np.arange(t) + 0.5
        mask = np.logical_or.reduce([o.inside(xs, ys) for o in area.outlines])
        return np.where(mask[..., None], tissue, below)
