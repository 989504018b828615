"""Make the patches of a slide as image files, chunk by chunk, and store them: copied, decoded or read through OpenSlide.

Pixels are never sent between processes: a worker makes a chunk in memory, then writes it in one short LMDB transaction.
The tasks of worker processes are functions with picklable arguments.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import OptionUnfit, SlideUnreadable
from histopipe.geometry import PointL0, RegionLevel, Size
from histopipe.ingestion.options import AskedRoute, RouteName
from histopipe.slides.readers import open_slide
from histopipe.slides.slide import Slide, rgb_image
from histopipe.slides.thumbnail import Thumbnail, colour_note
from histopipe.slides.tiles.check import LEAST_PSNR, NativeLevels, scaled_psnr
from histopipe.slides.tiles.native import NativeLevel, NativeTiles, NotNative, reduction_of
from histopipe.store.writer import StoreWriter
from histopipe.system.files import Closing
from histopipe.system.output import counted
from histopipe.tiling.plan import LevelChoice, Resampling, TilingPlan, cell_shares
from histopipe.tiling.spec import TilingSpec
from histopipe.tissue_masks.mask import Mask

_MISSING = 0.2
"""Share of a patch in missing tiles above which it is counted: masks may extend a little beyond the tissue."""
_LARGEST_TILE = 4096
"""Maximum side in pixels of a native tile that is decoded for a few patches. Such a tile takes 50 MB."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Route of a slide's patches, and the reason for it.

    `native` is None for the route openslide. Tiles are decoded at 1/`reduction` of their size.
    """

    name: RouteName
    reason: str
    native: NativeLevel | None = None
    reduction: int = 1


def choose_route(
    name: str, plan: TilingPlan, spec: TilingSpec, requested: AskedRoute, levels: NativeLevels
) -> RouteChoice:
    """Choose the fastest route that yields the same pixels as OpenSlide, or the route that the user requested.

    Raises:
        OptionUnfit: the requested route cannot be used.
    """
    if requested == "openslide":
        return RouteChoice("openslide", "requested")
    try:
        tiles, check = levels.get(plan.choice.level)
        native = tiles.native
        if max(native.tile.width, native.tile.height) > _LARGEST_TILE:
            raise NotNative(f"its tiles are {native.tile}, too large to decode for a few patches")  # noqa: TRY301
    except NotNative as error:
        if requested == "auto":
            return RouteChoice("openslide", str(error))
        raise _unfit(name, requested, str(error)) from error
    obstacle = _not_copied(plan, spec, native)
    if obstacle is None and requested != "decode":
        return RouteChoice("copy", f"patches are native tiles; {check}", native)
    if obstacle is not None and requested == "copy":
        raise _unfit(name, requested, obstacle)
    reduction, scaling = _scaling(plan, spec, tiles)
    reason = "; ".join(filter(None, [obstacle or "requested", scaling, check]))
    return RouteChoice("decode", reason, native, reduction)


def pixel_notes(
    levels: NativeLevels, plan: TilingPlan, thumbnail: Thumbnail, chosen: Mask
) -> list[str]:
    """Return notes about pixels that are probably wrong: their colours, and missing tiles where there is tissue.

    Scanners leave out tiles of glass. `chosen` is the mask of the thumbnail by which cells were chosen, or all of it.
    """
    native = levels.located(plan.choice.level)
    notes = [colour_note(thumbnail.pixels), native.conflict if native else None]
    if native is not None and not native.lengths.all():
        missing = chosen & _missing(native, plan, thumbnail)
        count = int((cell_shares(plan, thumbnail, missing) > _MISSING).sum())
        text = "partly in tiles that the file does not contain: they are blank there"
        notes += [f"{counted(count, 'patch')} {text}"] if count else []
    return [note for note in notes if note]


def _missing(native: NativeLevel, plan: TilingPlan, thumbnail: Thumbnail) -> Mask:
    """Return which pixels of a thumbnail have their centre in a tile that was never written, (H, W) bool."""
    step = thumbnail.level.downsample / plan.choice.level.downsample
    y, x = (
        ((start + (np.arange(count) + 0.5) * thumbnail.reduction) * step).astype(np.int64)
        for start, count in zip(
            (thumbnail.y_level, thumbnail.x_level), thumbnail.pixels.shape[:2], strict=True
        )
    )
    absent = np.pad(native.lengths == 0, 1)  # outside of the tiles, nothing is missing
    inside = (
        np.clip(places + 1, 0, side - 1)
        for places, side in zip(native.tile_at(x=x, y=y), absent.shape, strict=True)
    )
    return absent[np.ix_(*inside)]


def _unfit(name: str, requested: str, why: str) -> OptionUnfit:
    return OptionUnfit(
        f"{name} cannot use --route {requested}", found=why, todo="use --route auto for such slides"
    )


def _not_copied(plan: TilingPlan, spec: TilingSpec, native: NativeLevel) -> str | None:
    """Return the reason why patches cannot be copies of native tiles; None if they can."""
    choice, tile = plan.choice, native.tile
    if spec.codec != "auto":
        return f"--codec {spec.codec} re-encodes patches"
    if choice.resampling != "none":
        return f"patches are reduced from {choice.read_size} to {spec.patch_size} pixels"
    if (tile.width, tile.height) != (spec.patch_size, spec.patch_size):
        return f"patches are {spec.patch_size} pixels, native tiles {tile}"
    if native.colour == "grey":
        return "native tiles are grey, patches RGB"
    x, y = plan.x_level - native.x_level, plan.y_level - native.y_level
    if (x % tile.width).any() or (y % tile.height).any():
        return "patches are not aligned with native tiles"
    return None


def _scaling(plan: TilingPlan, spec: TilingSpec, tiles: NativeTiles) -> tuple[int, str]:
    """Return the reduction at which tiles are decoded, and a text for the route's reason."""
    choice, native = plan.choice, tiles.native
    # An error of 40 dB is small compared with that of JPEG encoding, but PNG is lossless.
    if choice.resampling != "area" or spec.resample == "exact" or spec.codec == "png":
        return 1, ""
    corners = (plan.x_level - native.x_level, plan.y_level - native.y_level)
    largest = reduction_of(native, choice.read_size // spec.patch_size)
    reduction = math.gcd(largest, *(int(v) for axis in corners for v in set(axis.tolist())))
    if reduction == 1:
        return 1, ""
    psnr = scaled_psnr(tiles, reduction)
    if psnr < LEAST_PSNR:
        return 1, f"decoded at full size: at 1/{reduction} the PSNR would be only {psnr:.0f} dB"
    return reduction, f"decoded at 1/{reduction}, {psnr:.0f} dB"


PatchFile = bytes | SlideUnreadable
"""Image file of a patch as stored in the store, or the error if the patch cannot be read."""

_STRIP = 8192
"""Width, in pixels of the level, of the strips along which patches are made. Tiles that two rows of patches share stay
decoded: two rows of tiles of such a strip take 12 MB."""
_CHUNK_PIXELS = 1 << 25
"""Pixels of the level per chunk: 512 patches of 256². With half as many, copying takes 10 % longer, and tiles at the
edge of a chunk are decoded more often."""
_MOST_PATCHES = 4096
_RUN = 1024
"""Maximum width, in pixels, of one read along a row. Wider reads exceed the processor's cache and are not faster."""


_SOURCES_KEPT = 2
"""Number of sources that a worker keeps open, since chunks of two slides may alternate. Each has at most one OpenSlide
handle with a cache of 32 MB, and 48 MB of decoded tiles."""


@dataclass(frozen=True, slots=True)
class PatchRecipe:
    """Settings for making the patches of a slide; picklable."""

    path: Path
    choice: LevelChoice
    route: RouteChoice
    spec: TilingSpec
    reader: str = "auto"


@dataclass(frozen=True, slots=True)
class PatchPlace:
    """Position of one patch."""

    region: RegionLevel
    origin: PointL0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Patches of a plan that are made in one task and stored in one transaction, in this order.

    `rows` are their numbers, (N,) int64. `plan` has only these patches.
    """

    rows: NDArray[np.int64]
    plan: TilingPlan

    def place(self, number: int) -> PatchPlace:
        """Return the position of a patch, counted within the chunk."""
        plan, side = self.plan, self.plan.choice.read_size
        x, y = int(plan.x_level[number]), int(plan.y_level[number])
        origin = PointL0(int(plan.x_l0[number]), int(plan.y_l0[number]))
        return PatchPlace(RegionLevel(x, y, Size(side, side)), origin)

    def places(self) -> Iterator[PatchPlace]:
        """Yield the position of each patch."""
        return map(self.place, range(len(self.plan)))


def chunk_of(plan: TilingPlan, rows: NDArray[np.int64]) -> Chunk:
    """Return the chunk with the given patch numbers of a plan."""
    return Chunk(rows, plan.take(rows))


def chunks(plan: TilingPlan, route: RouteName, patch_size: int) -> Iterator[Chunk]:
    """Yield all patches of a plan in chunks.

    Copied patches are in row order, like the tiles in a file. Others are ordered along strips, so that tiles shared by
    neighbours are decoded once.
    """
    rows = np.arange(len(plan))
    side = max(patch_size, plan.choice.read_size)
    if route != "copy":
        rows = np.lexsort((plan.x_level, plan.y_level, plan.x_level // max(side, _STRIP)))
    size = max(1, min(_MOST_PATCHES, _CHUNK_PIXELS // side**2))
    count = -(-len(rows) // size)
    # Equal lengths, and a multiple of 4 chunks, so that two or four workers end at the same time.
    for part in np.array_split(rows, max(1, count if count == 1 else -(-count // 4) * 4)):
        if len(part):
            yield chunk_of(plan, part)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Numbers, lengths in bytes and checksums of the patches of a chunk, (N,) each, and the worker time in seconds.

    The length of an unreadable patch is 0. `problem` is the reason for the first unreadable patch.
    """

    rows: NDArray[np.int64]
    length: NDArray[np.uint32]
    crc: NDArray[np.uint32]
    problem: str | None
    seconds: float


class PatchSource(Closing):
    """Makes a slide's patches, with files and decoders kept open between chunks."""

    def __init__(self, recipe: PatchRecipe) -> None:
        self._recipe, native = recipe, recipe.route.native
        self._tiles = None if native is None else NativeTiles(native)
        self._slide: Slide | None = None

    def values(self, chunk: Chunk) -> list[PatchFile]:
        """Return the patches of a chunk, in its order, with an error for each patch that cannot be read."""
        if self._tiles is None:
            return [value for run in self._runs(chunk) for value in self._read(run)]
        if self._recipe.route.name != "copy":
            return [self._decoded(self._tiles, place) for place in chunk.places()]
        tiles = self._tiles.native.tile_at(chunk.plan.x_level, chunk.plan.y_level)
        jpegs = enumerate(self._tiles.jpegs(*tiles))
        return [self._one(chunk.place(i)) if tile is None else tile for i, tile in jpegs]

    def close(self) -> None:
        """Close files and free decoded tiles."""
        if self._tiles is not None:
            self._tiles.close()
        if self._slide is not None:
            self._slide.close()

    def _decoded(self, tiles: NativeTiles, place: PatchPlace) -> PatchFile:
        try:
            pixels = tiles.pixels(place.region, self._recipe.route.reduction)
        except SlideUnreadable as error:
            return error
        return self._one(place) if pixels is None else self._encoded(pixels)

    def _runs(self, chunk: Chunk) -> Iterator[list[PatchPlace]]:
        """Yield neighbours along a row, which can be read together.

        Patches are joined only if the level's pixels coincide with whole pixels of level 0. Otherwise OpenSlide
        interpolates from the corner of the region, and a patch's pixels would depend on its neighbours.
        """
        run: list[PatchPlace] = []
        for place in chunk.places():
            if run and not self._continues(run, place):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def _continues(self, run: list[PatchPlace], place: PatchPlace) -> bool:
        first, last, choice = run[0].region, run[-1].region, self._recipe.choice
        return (
            choice.level.downsample.is_integer()
            and place.region.y == last.y
            and place.region.x == last.x + choice.stride
            and place.region.x + place.region.size.width - first.x <= _RUN
        )

    def _read(self, run: list[PatchPlace]) -> Iterator[PatchFile]:
        """Read the patches of a run through OpenSlide. If the run is damaged, read each patch separately."""
        first, last = run[0].region, run[-1].region
        side = first.size.height
        size = Size(last.x + side - first.x, side)
        try:
            self._slide = self._slide or open_slide(
                self._recipe.path, self._recipe.reader
            )  # late: copying needs none
            pixels = self._slide.read_bgrx(run[0].origin, self._recipe.choice.level.number, size)
        except SlideUnreadable as error:
            yield from (error,) if len(run) == 1 else map(self._one, run)
            return
        for place in run:
            left = place.region.x - first.x
            yield self._encoded(pixels[:, left : left + side])

    def _one(self, place: PatchPlace) -> PatchFile:
        """Read a patch through OpenSlide, which may use the pixels of a finer level where tiles are missing."""
        return next(self._read([place]))

    def _encoded(self, pixels: NDArray[np.uint8]) -> bytes:
        spec, resampling = self._recipe.spec, self._recipe.choice.resampling
        return encode(reduced(pixels, spec.patch_size, resampling), spec)


def reduced(pixels: NDArray[np.uint8], size: int, resampling: Resampling) -> NDArray[np.uint8]:
    """Return a patch, (side, side, 3 or 4) uint8 RGB or BGRX, resampled to a side of `size` pixels."""
    side = len(pixels)
    if side == size:
        return pixels
    mode = "RGB" if pixels.shape[2] == 3 else "RGBX"  # the order of the channels is kept
    image = Image.frombuffer(mode, (side, side), np.ascontiguousarray(pixels))
    if resampling == "area":
        return np.asarray(image.reduce(side // size))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def encode(pixels: NDArray[np.uint8], spec: TilingSpec) -> bytes:
    """Return a patch, (H, W, 3 or 4) uint8 RGB or BGRX, as a plain JPEG or PNG file."""
    if spec.codec == "png":
        return png(pixels if pixels.shape[2] == 3 else np.asarray(rgb_image(pixels)))
    jpeg = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=spec.quality,
        colorspace="RGB" if pixels.shape[2] == 3 else "BGRX",
        colorsubsampling=spec.subsampling,
    )
    return bytes(jpeg)


def png(pixels: NDArray[np.uint8] | NDArray[np.bool_]) -> bytes:
    """Return an image or a mask as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def store_chunk(store: Path, number: int, recipe: PatchRecipe, chunk: Chunk) -> ChunkResult:
    """Make and store the readable patches of a chunk; `number` is the number of the slide in the store."""
    started = time.monotonic()
    writer = _writer(store, recipe.spec)
    values = _source(store, number, recipe).values(chunk)
    order = np.argsort(chunk.rows)  # LMDB fills its pages if keys are written in order
    rows, values = chunk.rows[order], [values[position] for position in order.tolist()]
    stored = [value if isinstance(value, bytes) else None for value in values]
    crc = writer.put_patches(number, rows.tolist(), stored)
    problems = [str(value) for value in values if not isinstance(value, bytes)]
    return ChunkResult(
        rows=rows,
        length=np.array([len(value or b"") for value in stored], np.uint32),
        crc=crc,
        problem=problems[0] if problems else None,
        seconds=time.monotonic() - started,
    )


def make_patches(number: int, recipe: PatchRecipe, chunk: Chunk) -> list[bytes | str]:
    """Return the image files of a chunk's patches, or the reason if unreadable; `number` is any number of the slide."""
    values = _source(None, number, recipe).values(chunk)
    return [value if isinstance(value, bytes) else str(value) for value in values]


def close_all() -> None:
    """Close all sources and writers that this process keeps open. Needed if tasks run in the caller's process."""
    while _sources:
        _sources.popitem()[1].close()
    while _writers:
        _writers.popitem()[1].close()


_sources: dict[tuple[Path | None, int], PatchSource] = {}


def _source(store: Path | None, number: int, recipe: PatchRecipe) -> PatchSource:
    key = store, number
    if key not in _sources:
        while len(_sources) >= _SOURCES_KEPT:
            _sources.pop(next(iter(_sources))).close()
        _sources[key] = PatchSource(recipe)
    return _sources[key]


_writers: dict[tuple[Path, TilingSpec], StoreWriter] = {}


def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    if (store, spec) not in _writers:
        close_all()
        _writers[store, spec] = StoreWriter(store, spec)
    return _writers[store, spec]
