"""The patches of one slide as files: copied, decoded or read through OpenSlide, from cells to the bytes that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Size
from histopipe.ingestion.chunks import Chunk, PatchPlace
from histopipe.ingestion.encode import encode, reduced
from histopipe.ingestion.route import RouteChoice
from histopipe.slides.slide import Slide
from histopipe.slides.tiles.native import NativeTiles
from histopipe.system.files import Closing
from histopipe.tiling.level import LevelChoice
from histopipe.tiling.spec import TilingSpec

PatchReader = Callable[[NativeTiles, PatchPlace], bytes | None]
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
        return [self._from_tiles(read, self._tiles, place) for place in chunk.places()]

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

    def _from_tiles(self, read: PatchReader, tiles: NativeTiles, place: PatchPlace) -> PatchFile:
        try:
            value = read(tiles, place)
        except SlideUnreadable as error:
            return error
        # Tiles never written are left to OpenSlide, which may show what a finer level has there.
        return self._one(place) if value is None else value

    def _copied(self, tiles: NativeTiles, place: PatchPlace) -> bytes | None:
        native = tiles.native
        row = (place.region.y - native.y_level) // native.tile.height
        column = (place.region.x - native.x_level) // native.tile.width
        return tiles.jpeg(row, column)

    def _decoded(self, tiles: NativeTiles, place: PatchPlace) -> bytes | None:
        pixels = tiles.pixels(place.region, self._route.reduction)
        return None if pixels is None else self._encoded(pixels)

    def _runs(self, chunk: Chunk) -> Iterator[list[PatchPlace]]:
        """Neighbours along a row, which can be read together.

        Only where a level's pixels lie on whole pixels of level 0: elsewhere OpenSlide interpolates, from where a region
        begins, and a patch's pixels would depend on its neighbours.
        """
        run: list[PatchPlace] = []
        joined = self._choice.level.downsample.is_integer()
        for place in chunk.places():
            if run and not (joined and self._continues(run, place)):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def _continues(self, run: list[PatchPlace], place: PatchPlace) -> bool:
        first, last = run[0].region, run[-1].region
        return (
            place.region.y == last.y
            and place.region.x == last.x + self._choice.stride
            and place.region.x + place.region.size.width - first.x <= _RUN
        )

    def _read(self, run: list[PatchPlace]) -> Iterator[PatchFile]:
        """Patches of a run through OpenSlide; where it is damaged, one by one."""
        first, last = run[0].region, run[-1].region
        side = first.size.height
        size = Size(last.x + side - first.x, side)
        try:
            pixels = self._open().read_bgrx(run[0].origin, self._choice.level.number, size)
        except SlideUnreadable as error:
            yield from (error,) if len(run) == 1 else map(self._one, run)
            return
        for place in run:
            left = place.region.x - first.x
            yield self._encoded(pixels[:, left : left + side])

    def _one(self, place: PatchPlace) -> PatchFile:
        return next(self._read([place]))

    def _encoded(self, pixels: NDArray[np.uint8]) -> bytes:
        return encode(reduced(pixels, self._spec.patch_size, self._choice.resampling), self._spec)
