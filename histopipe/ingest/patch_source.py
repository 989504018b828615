"""The patches of one slide as files: copied, decoded or read through OpenSlide, from cells to the bytes that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Size
from histopipe.ingest.chunks import Cell, Chunk
from histopipe.ingest.encode import encode, reduced
from histopipe.ingest.route import RouteChoice
from histopipe.slides.slide import Slide
from histopipe.slides.tiles.native import NativeTiles
from histopipe.system.files import Closing
from histopipe.tiling.level import LevelChoice
from histopipe.tiling.spec import TilingSpec

PatchReader = Callable[[NativeTiles, Cell], bytes | None]
PatchFile = bytes | SlideUnreadable
"""A patch as it is stored, or why it cannot be read."""

_RUN = 1024
"""Width, in pixels, of what is read at once along a row. Wider reads leave the processor's cache and are no faster."""


@dataclass(frozen=True, slots=True)
class PatchRecipe:
    """How the patches of a slide are made; picklable.

    Attributes:
        path: the slide.
        choice: the level, and how it is read.
        route: the route, with the slide's native tiles.
        spec: size and encoding of patches.
    """

    path: Path
    choice: LevelChoice
    route: RouteChoice
    spec: TilingSpec


class PatchSource(Closing):
    """Makes a slide's patches, with files and decoders kept open between chunks."""

    def __init__(self, recipe: PatchRecipe) -> None:
        self._path, self._choice = recipe.path, recipe.choice
        self._route, self._spec = recipe.route, recipe.spec
        native = recipe.route.native
        self._tiles = None if native is None else NativeTiles(native)
        self._slide: Slide | None = None

    def values(self, chunk: Chunk) -> list[PatchFile]:
        """Return the patches of a chunk, in its order, or for each that cannot be read the reason."""
        if self._tiles is None:
            return [value for run in self._runs(chunk) for value in self._read(run)]
        read = self._copied if self._route.name == "copy" else self._decoded
        return [self._from_tiles(read, self._tiles, cell) for cell in chunk.cells()]

    def close(self) -> None:
        """Close files and free decoded tiles."""
        if self._tiles is not None:
            self._tiles.close()
        if self._slide is not None:
            self._slide.close()

    def _open(self) -> Slide:
        if self._slide is None:
            self._slide = Slide(self._path)  # late: copying needs none
        return self._slide

    def _from_tiles(self, read: PatchReader, tiles: NativeTiles, cell: Cell) -> PatchFile:
        try:
            value = read(tiles, cell)
        except SlideUnreadable as error:
            return error
        # Tiles never written are left to OpenSlide, which may show what a finer level has there.
        return self._one(cell) if value is None else value

    def _copied(self, tiles: NativeTiles, cell: Cell) -> bytes | None:
        native = tiles.native
        row = (cell.region.y - native.y_level) // native.tile.height
        column = (cell.region.x - native.x_level) // native.tile.width
        return tiles.jpeg(row, column)

    def _decoded(self, tiles: NativeTiles, cell: Cell) -> bytes | None:
        pixels = tiles.pixels(cell.region, self._route.reduction)
        return None if pixels is None else self._encoded(pixels)

    def _runs(self, chunk: Chunk) -> Iterator[list[Cell]]:
        """Neighbours along a row, which can be read together.

        Only where a level's pixels lie on whole pixels of level 0: elsewhere OpenSlide interpolates, from where a region
        begins, and a patch's pixels would depend on its neighbours.
        """
        run: list[Cell] = []
        joined = self._choice.level.downsample.is_integer()
        for cell in chunk.cells():
            if run and not (joined and self._continues(run, cell)):
                yield run
                run = []
            run.append(cell)
        if run:
            yield run

    def _continues(self, run: list[Cell], cell: Cell) -> bool:
        first, last = run[0].region, run[-1].region
        return (
            cell.region.y == last.y
            and cell.region.x == last.x + self._choice.stride
            and cell.region.x + cell.region.size.width - first.x <= _RUN
        )

    def _read(self, run: list[Cell]) -> Iterator[PatchFile]:
        """Patches of a run through OpenSlide; where it is damaged, cell by cell."""
        first, last = run[0].region, run[-1].region
        side = first.size.height
        size = Size(last.x + side - first.x, side)
        try:
            pixels = self._open().read_bgrx(run[0].origin, self._choice.level.number, size)
        except SlideUnreadable as error:
            yield from (error,) if len(run) == 1 else map(self._one, run)
            return
        for cell in run:
            left = cell.region.x - first.x
            yield self._encoded(pixels[:, left : left + side])

    def _one(self, cell: Cell) -> PatchFile:
        return next(self._read([cell]))

    def _encoded(self, pixels: NDArray[np.uint8]) -> bytes:
        return encode(reduced(pixels, self._spec.patch_size, self._choice.resampling), self._spec)
