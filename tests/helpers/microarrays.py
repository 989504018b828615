"""Synthetic tissue microarrays: masks with names, and slides with their maps."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.demo.synthetic_slides import (
    GLASS,
    PaintedOutline,
    SlideSettings,
    TexturedArea,
    endless,
    paint_row,
    synthetic_texture,
    texture_side,
    write_slide,
)
from histopipe.geometry import Size

Places = dict[str, tuple[float, float]]
"""Centre of each core that is there, by name."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """How cores are placed: rows and columns, rotation in degrees, bend and gap in spacings, and the share that is missing.

    `holes` are places without a core by design. Of `merged` cores, each touches its right neighbour.
    """

    rows: int = 8
    columns: int = 11
    radius: float = 30.0
    spacing: tuple[float, float] = (90.0, 80.0)
    rotation: float = 0.0
    bend: float = 0.0
    gap: float = 0.0
    missing: float = 0.0
    merged: float = 0.0
    holes: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (2, 0))
    lost: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    seed: int = 1

    @property
    def size(self) -> Size:
        """Size of a picture with all cores."""
        side = 1.3 * max(self.spacing) * (max(self.rows, self.columns) + 1 + self.gap)
        return Size(int(side), int(side))

    def names(self) -> NDArray[np.object_]:
        """Return the map."""
        names = np.array(
            [[f"{chr(65 + r)}-{c + 1}" for c in range(self.columns)] for r in range(self.rows)],
            object,
        )
        for hole in self.holes:
            names[hole] = ""
        return names

    def places(self) -> Places:
        """Return the centre of each core that is there."""
        rng, names, places = np.random.default_rng(self.seed), self.names(), Places()
        turn = np.deg2rad(self.rotation)
        for (row, column), name in np.ndenumerate(names):
            lost, merged = rng.random(2) < (self.missing, self.merged)
            jitter = rng.normal(0, 0.04, 2)
            if not name or lost or (row, column) in self.lost:
                continue
            x, y = column - (self.columns - 1) / 2, row - (self.rows - 1) / 2
            u, v = 2 * x / self.columns, 2 * y / self.rows
            x += self.gap * (x > 0) + self.bend * (v * v - 0.3) + jitter[0]
            y += self.bend * (u * u - 0.3) + jitter[1]
            x, y = x * self.spacing[0], y * self.spacing[1]
            x += merged * (self.spacing[0] - 2 * self.radius) * 0.9
            places[str(name)] = (
                self.size.width / 2 + x * np.cos(turn) - y * np.sin(turn),
                self.size.height / 2 + x * np.sin(turn) + y * np.cos(turn),
            )
        return places

    def mask(self) -> NDArray[np.bool_]:
        """Return a tissue mask with all cores, some of which have holes or are torn, and with debris."""
        rng = np.random.default_rng(self.seed + 1000)
        mask = np.zeros((self.size.height, self.size.width), np.bool_)

        def draw(x: float, y: float, radius: float, *, core: bool) -> None:
            reach = int(radius) + 2
            left, top = max(0, int(x) - reach), max(0, int(y) - reach)
            part = mask[top : int(y) + reach, left : int(x) + reach]
            down, across = np.ogrid[: part.shape[0], : part.shape[1]]
            across, down = across + left - x, down + top - y
            inside = np.hypot(across, down) < radius
            if core and rng.random() < 0.08:
                turn = rng.uniform(0, 2 * np.pi)
                inside &= across * np.cos(turn) + down * np.sin(turn) < 0.2 * radius
            for hole in rng.normal(0, 0.5 * radius, (rng.integers(0, 3) * core, 2)):
                inside &= np.hypot(across - hole[0], down - hole[1]) > 0.2 * radius
            part |= inside

        for x, y in self.places().values():
            draw(x, y, self.radius * rng.uniform(0.85, 1.1), core=True)
        for x, y in rng.uniform(0, self.size.width, (6, 2)):
            draw(x, y, rng.uniform(2, 0.25 * self.radius), core=False)
        return mask

    def write_map(self, path: Path) -> None:
        """Write the map as a table."""
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(self.names().tolist())

    def write(
        self,
        path: Path,
        *,
        mpp: float = 2.0,
        tumour: frozenset[str] = frozenset(),
        bounds: Sequence[int] | None = None,
    ) -> None:
        """Write a slide of this array. The cores in `tumour` have another texture; `bounds` are those of `SlideSettings`."""
        rng, tile = np.random.default_rng(self.seed), 256
        areas = []
        for kind in ("normal", "tumour"):
            texture = synthetic_texture(rng, kind, mpp, texture_side(self.size, tile))
            outlines = [
                PaintedOutline(x, y, self.radius, np.array([[0.03, x], [0.03, y]]))
                for name, (x, y) in self.places().items()
                if (name in tumour) == (kind == "tumour")
            ]
            areas.append(TexturedArea(kind, outlines, endless(texture, tile, self.size)))
        glass = np.clip(rng.normal(GLASS, 1.2, (tile, tile, 3)), 0, 255).astype(np.uint8)
        settings = SlideSettings(size=self.size, mpp=mpp, levels=(1, 4), tile=tile, bounds=bounds)
        write_slide(path, partial(paint_row, areas, glass, self.size.width), settings)
