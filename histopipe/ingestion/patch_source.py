"""Make the patches of a slide as image files, chunk by chunk, and store them: copied, decoded or read through OpenSlide.

Pixels are never sent between processes: a worker makes a chunk in memory, then writes it in one short LMDB transaction.
The tasks of worker processes are functions with picklable arguments.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import OptionUnfit, SlideUnreadable
from histopipe.geometry import PointL0, RegionLevel, Size
from histopipe.ingestion.options import AskedRoute, RouteName
from histopipe.slides.native_tiles import NativeLevel, NativeTiles, NotNative, reduction_of
from histopipe.slides.slide import Slide, rgb_image
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import Thumbnail, colour_note
from histopipe.slides.tile_check import LEAST_PSNR, NativeLevels, scaled_psnr
from histopipe.store.writer import StoreWriter
from histopipe.system.files import Closing
from histopipe.system.forecast import Stages
from histopipe.system.output import counted
from histopipe.tiling.mask import Mask, TissueMask
from histopipe.tiling.plan import Resampling, TilingPlan, cell_shares
from histopipe.tiling.spec import TilingSpec

_MISSING = 0.2
"""Share of a patch in missing tiles above which it is counted: masks may extend a little beyond the tissue."""
_LARGEST_TILE = 4096
"""Maximum side in pixels of a native tile that is decoded for a few patches. Such a tile takes 50 MB."""


@dataclass(frozen=True, slots=True)
class PatchRecipe:
    """How the patches of a slide are made; picklable. `reason` is the reason for the route.

    `native` is None for the route openslide. Tiles are decoded at 1/`reduction` of their size.
    """

    path: Path
    reader: str
    spec: TilingSpec
    route: RouteName = "openslide"
    reason: str = "requested"
    native: NativeLevel | None = None
    reduction: int = 1


def choose_route(
    recipe: PatchRecipe, name: str, plan: TilingPlan, requested: AskedRoute, levels: NativeLevels
) -> PatchRecipe:
    """Return the recipe with the fastest route that yields the same pixels as OpenSlide, or with the requested route.

    `recipe` is one for OpenSlide; `name` is for messages.

    Raises:
        OptionUnfit: the requested route cannot be used.
    """
    if requested == "openslide":
        return recipe
    try:
        tiles = levels.get(plan.choice.level)
        if isinstance(tiles, NotNative):
            raise tiles
        native = tiles.native
        if max(native.tile.width, native.tile.height) > _LARGEST_TILE:
            raise NotNative(f"its tiles are {native.tile}, too large to decode for a few patches")  # noqa: TRY301
        obstacle = _not_copied(plan, recipe.spec, native)
        if obstacle is not None and requested == "copy":
            raise NotNative(obstacle)  # noqa: TRY301
    except NotNative as error:
        if requested == "auto":
            return replace(recipe, reason=str(error))
        raise OptionUnfit(
            f"{name} cannot use --route {requested}",
            found=str(error),
            todo="use --route auto for such slides",
        ) from error
    if obstacle is None and requested != "decode":
        return replace(
            recipe,
            route="copy",
            reason=f"patches are native tiles; {tiles.comparison}",
            native=native,
        )
    reduction, scaling = _scaling(plan, recipe.spec, tiles)
    reason = "; ".join(filter(None, [obstacle or "requested", scaling, tiles.comparison]))
    return replace(recipe, route="decode", reason=reason, native=native, reduction=reduction)


def pixel_notes(
    levels: NativeLevels, plan: TilingPlan, thumbnail: Thumbnail, mask: TissueMask | None
) -> list[str]:
    """Return notes about pixels that are probably wrong: their colours, and missing tiles where there is tissue.

    Scanners leave out tiles of glass. `mask` is the tissue on the thumbnail; None if all cells were chosen.
    """
    native = levels.get(plan.choice.level).native
    notes = [colour_note(thumbnail.pixels), native.conflict if native else None]
    if native is not None and not native.lengths.all():
        missing = _missing(native, plan, thumbnail) & (True if mask is None else mask.pixels)
        count = int((cell_shares(plan, thumbnail, missing) > _MISSING).sum())
        notes += [
            f"{counted(count, 'patch')} partly in tiles that the file does not contain: they are blank there"
        ] * bool(count)
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


def _not_copied(plan: TilingPlan, spec: TilingSpec, native: NativeLevel) -> str | None:
    """Return the reason why patches cannot be copies of native tiles; None if they can."""
    choice, tile, side = plan.choice, native.tile, spec.patch_size
    x, y = plan.x_level - native.x_level, plan.y_level - native.y_level
    obstacles = {
        f"--codec {spec.codec} re-encodes patches": spec.codec != "auto",
        f"patches are reduced from {choice.read_size} to {side} pixels": choice.resampling
        != "none",
        f"patches are {side} pixels, native tiles {tile}": (tile.width, tile.height)
        != (side, side),
        "native tiles are grey, patches RGB": native.colour == "grey",
        "patches are not aligned with native tiles": (x % tile.width).any()
        or (y % tile.height).any(),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def _scaling(plan: TilingPlan, spec: TilingSpec, tiles: NativeTiles) -> tuple[int, str]:
    """Return the reduction at which tiles are decoded, and a text for the route's reason."""
    choice, native = plan.choice, tiles.native
    # An error of 40 dB is small compared with that of JPEG encoding, but PNG is lossless.
    if choice.resampling != "area" or spec.resample == "exact" or spec.codec == "png":
        return 1, ""
    corners = np.concatenate([plan.x_level - native.x_level, plan.y_level - native.y_level])
    reduction = math.gcd(
        reduction_of(native, choice.read_size // spec.patch_size), *np.unique(corners).tolist()
    )
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
"""Maximum number of patches per chunk: what a killed or failed worker loses, and holds in memory, stays small."""
_RUN = 1024
"""Maximum width, in pixels, of one read along a row. Wider reads exceed the processor's cache and are not faster."""
_SOURCES_KEPT = 2
"""Number of sources that a worker keeps open, since chunks of two slides may alternate. Each has at most one OpenSlide
handle with a cache of 32 MB, and 48 MB of decoded tiles."""


def chunks(plan: TilingPlan, route: RouteName, patch_size: int) -> list[NDArray[np.int64]]:
    """Return the numbers of all patches of a plan in chunks: each is made in one task, and stored in one transaction.

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
    parts = np.array_split(rows, max(1, count if count == 1 else -(-count // 4) * 4))
    return [part for part in parts if len(part)]


class PatchSource(Closing):
    """Makes a slide's patches, with files and decoders kept open between chunks."""

    def __init__(self, recipe: PatchRecipe) -> None:
        self._recipe = recipe
        self._tiles = None if recipe.native is None else NativeTiles(recipe.native)
        self._slide: Slide | None = None

    def values(self, plan: TilingPlan) -> list[PatchFile]:
        """Return all patches of a plan, in its order, with an error for each patch that cannot be read."""
        if self._tiles is None:
            return [value for run in _runs(plan) for value in self._read(plan, run)]
        if self._recipe.route != "copy":
            return [self._decoded(self._tiles, plan, number) for number in range(len(plan))]
        places = self._tiles.native.tile_at(plan.x_level, plan.y_level)
        return [
            self._one(plan, number) if tile is None else tile
            for number, tile in enumerate(self._tiles.jpegs(*places))
        ]

    def close(self) -> None:
        """Close files and free decoded tiles."""
        for opened in filter(None, (self._tiles, self._slide)):
            opened.close()

    def _decoded(self, tiles: NativeTiles, plan: TilingPlan, number: int) -> PatchFile:
        side = plan.choice.read_size
        x, y = int(plan.x_level[number]), int(plan.y_level[number])
        try:
            pixels = tiles.pixels(RegionLevel(x, y, Size(side, side)), self._recipe.reduction)
        except SlideUnreadable as error:
            return error
        return self._one(plan, number) if pixels is None else self._encoded(pixels, plan)

    def _read(self, plan: TilingPlan, run: range) -> Iterator[PatchFile]:
        """Read the patches of a run through OpenSlide. If the run is damaged, read each patch separately."""
        choice = plan.choice
        offsets = plan.x_level[run.start : run.stop] - plan.x_level[run.start]
        size = Size(int(offsets[-1]) + choice.read_size, choice.read_size)
        origin = PointL0(int(plan.x_l0[run.start]), int(plan.y_l0[run.start]))
        try:
            # Opened here, since copying needs no slide.
            self._slide = self._slide or open_slide(self._recipe.path, self._recipe.reader)
            pixels = self._slide.read_bgrx(origin, choice.level.number, size)
        except SlideUnreadable as error:
            yield from (error,) if len(run) == 1 else (self._one(plan, number) for number in run)
            return
        for left in offsets.tolist():
            yield self._encoded(pixels[:, left : left + choice.read_size], plan)

    def _one(self, plan: TilingPlan, number: int) -> PatchFile:
        """Read a patch through OpenSlide, which may use the pixels of a finer level where tiles are missing."""
        return next(self._read(plan, range(number, number + 1)))

    def _encoded(self, pixels: NDArray[np.uint8], plan: TilingPlan) -> bytes:
        spec = self._recipe.spec
        return encode(reduced(pixels, spec.patch_size, plan.choice.resampling), spec)


def _runs(plan: TilingPlan) -> Iterator[range]:
    """Yield the numbers of neighbours along a row, which can be read together.

    Patches are joined only if the level's pixels coincide with whole pixels of level 0. Otherwise OpenSlide
    interpolates from the corner of the region, and a patch's pixels would depend on its neighbours.
    """
    choice, joined = plan.choice, plan.choice.level.downsample.is_integer()
    most = max(1, (_RUN - choice.read_size) // choice.stride + 1) if joined else 1
    apart = (np.diff(plan.x_level) != choice.stride) | (np.diff(plan.y_level) != 0)
    for start, end in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(plan)]):
        for first in range(start, end, most):
            yield range(first, min(first + most, end))


def reduced(pixels: NDArray[np.uint8], size: int, resampling: Resampling) -> NDArray[np.uint8]:
    """Return a patch, (side, side, 3 or 4) uint8 RGB or BGRX, resampled to a side of `size` pixels."""
    side = len(pixels)
    if side == size:
        return pixels
    mode = "RGB" if pixels.shape[2] == 3 else "RGBX"  # the order of the channels is kept
    image = Image.frombuffer(mode, (side, side), np.ascontiguousarray(pixels))
    return np.asarray(
        image.reduce(side // size)
        if resampling == "area"
        else image.resize((size, size), Image.Resampling.LANCZOS)
    )


def encode(pixels: NDArray[np.uint8], spec: TilingSpec) -> bytes:
    """Return a patch, (H, W, 3 or 4) uint8 RGB or BGRX, as a plain JPEG or PNG file."""
    if spec.codec == "png":
        buffer = io.BytesIO()
        image = Image.fromarray(pixels) if pixels.shape[2] == 3 else rgb_image(pixels)
        image.save(buffer, "PNG")
        return buffer.getvalue()
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels),
            quality=spec.quality,
            colorspace="RGB" if pixels.shape[2] == 3 else "BGRX",
            colorsubsampling=spec.subsampling,
        )
    )


def store_chunk(
    store: Path, number: int, recipe: PatchRecipe, rows: NDArray[np.int64], plan: TilingPlan
) -> tuple[NDArray[np.int64], NDArray[np.uint32], str | None, Mapping[str, float]]:
    """Make and store the readable patches of a chunk; a task for a worker process.

    `number` is the number of the slide in the store. `rows` are the numbers of the patches in its plan, (N,), and `plan`
    has only these patches, in the same order.

    Returns:
        The patch numbers, sorted, their lengths in bytes and CRCs, (2, N), the reason for the first unreadable patch, and
        the worker time in seconds by stage. The length of an unreadable patch is 0.
    """
    stages = Stages()
    with stages.reading():
        writer = _writer(store, recipe.spec)
        values = _source(store, number, recipe).values(plan)
    order = np.argsort(rows)  # LMDB fills its pages if keys are written in order
    rows, values = rows[order], [values[position] for position in order.tolist()]
    stored = [value if isinstance(value, bytes) else None for value in values]
    with stages.of("writing"):
        crc = writer.put_patches(number, rows.tolist(), stored)
    lengths = np.array([len(value or b"") for value in stored], np.uint32)
    problem = next((str(value) for value in values if not isinstance(value, bytes)), None)
    return rows, np.stack([lengths, crc]), problem, stages.seconds


def make_patches(number: int, recipe: PatchRecipe, plan: TilingPlan) -> list[PatchFile]:
    """Return the patches of a plan; a task for a worker process. `number` is any number of the slide."""
    return _source(None, number, recipe).values(plan)


_sources: dict[tuple[Path | None, int], PatchSource] = {}
_writers: dict[tuple[Path, TilingSpec], StoreWriter] = {}
"""What a worker keeps open between its tasks, since opening a slide or a store takes long. There is only one writer: a
worker of a cluster fills one part after the other, and the file of a part that was moved away must not stay open."""


def close_all() -> None:
    """Close all sources and writers that this process keeps open. Needed if tasks run in the caller's process."""
    for opened in (*_sources.values(), *_writers.values()):
        opened.close()
    _sources.clear()
    _writers.clear()


def _source(store: Path | None, number: int, recipe: PatchRecipe) -> PatchSource:
    key = store, number
    if key not in _sources:
        if len(_sources) == _SOURCES_KEPT:
            _sources.pop(next(iter(_sources))).close()
        _sources[key] = PatchSource(recipe)
    return _sources[key]


def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    if (store, spec) not in _writers:
        close_all()
        _writers[store, spec] = StoreWriter(store, spec)
    return _writers[store, spec]
