"""What a worker process does: plan a slide, and make a chunk of its patches and store them.

Plain functions of picklable values, so that any executor can run them. Pixels never travel between processes: a chunk is
made in memory, then put under LMDB's own lock for the milliseconds that takes.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import RouteUnfit, ScaleError, SlideError, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.ingest.chunks import Chunk, chunk_of
from histopipe.ingest.coords import CoordsFile, plan_imported, sticks_out
from histopipe.ingest.encode import encode_thumbnail, png
from histopipe.ingest.route import AskedRoute, RouteChoice, choose_route
from histopipe.ingest.source import PatchSource, Value
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import Fingerprint, fingerprint, tile_hash
from histopipe.slides.native import NotNative
from histopipe.slides.native_check import NativeLevels
from histopipe.slides.scale import ResolvedMpp, resolve_mpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.thumbnail import Thumbnail, read_thumbnail, thumbnail_level
from histopipe.store.format import stored_size
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.tiling.level import LevelChoice, choose_level
from histopipe.tiling.mask import load_algorithms, tissue_mask
from histopipe.tiling.plan import TilingPlan, plan_tiles
from histopipe.tiling.spec import TilingSpec

_SAMPLED_PATCHES = 8
_SOURCES_KEPT = 2
"""A worker makes a slide's chunks one after another; a second source spares opening where two slides take turns. Each
holds at most one OpenSlide handle, whose cache is 32 MB, and 48 MB of decoded tiles."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for every slide of a run."""

    store: Path
    spec: TilingSpec
    default_mpp: Mpp | None = None
    route: AskedRoute = "auto"


@dataclass(frozen=True, slots=True)
class SlideJob:
    """One slide to ingest: its number in the store, its files, its record so far.

    `again` says that it is complete already and is meant to be done once more. `coords` are its patches, if another tool has
    chosen them.
    """

    number: int
    slide: SlideFile
    record: SlideRecord
    mpp_from_csv: Mpp | None = None
    again: bool = False
    coords: CoordsFile | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a slide will take: bytes in the store, and seconds of one worker. From a few of its patches."""

    stored_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedSlide:
    """A slide ready to be stored."""

    record: SlideRecord
    plan: TilingPlan
    route: RouteChoice
    thumbnails: dict[str, bytes]
    before: Fingerprint
    estimate: Estimate
    seconds: float


@dataclass(frozen=True, slots=True)
class SlideFailure:
    """Why a slide cannot be ingested; `option` is what it might be due to: another one is a reason to try again."""

    reason: str
    kind: FailureKind
    record: SlideRecord
    option: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What was stored of a chunk.

    Attributes:
        rows: (N,) int64 numbers of its patches.
        length: (N,) uint32 bytes of each value, 0 where unreadable.
        crc: (N,) uint32.
        problem: what the first unreadable patch said; None where all could be read.
        seconds: the time it took.
    """

    rows: NDArray[np.int64]
    length: NDArray[np.uint32]
    crc: NDArray[np.uint32]
    problem: str | None
    seconds: float


def prepare() -> None:
    """Import, while the first slides are looked up, what planning would import late."""
    from histopipe.slides import tiff_tiles  # noqa: F401

    load_algorithms()


def plan_slide(settings: Settings, job: SlideJob) -> PlannedSlide | SlideFailure:
    """Open a slide and decide its patches and their route."""
    started, record, spec = time.monotonic(), job.record, settings.spec
    try:
        if job.slide.problem is not None:
            raise SlideUnreadable(f"{job.slide.id}: {job.slide.problem}")
        before = fingerprint(job.slide)
        record = dataclasses.replace(record, size_bytes=before.size_bytes, mtime_ns=before.mtime_ns)
        with Slide(job.slide.path) as slide:
            record = _described(record, slide.info, job.slide.path)
            scale, notes = _scale(settings, job, slide.info)
            mpp = scale.mpp if scale else None
            with closing(NativeLevels(slide, job.slide.files)) as levels:
                thumbnail = _thumbnail(slide, mpp, levels)
                plan, pictures = _planned(job, slide.info, mpp, spec, thumbnail)
                asked = settings.route
                if job.coords is not None and sticks_out(plan, slide.info):
                    asked = "openslide"
                route = choose_route(job.slide.id, plan, spec, asked, levels)
        estimate = _estimate(PatchSource(job.slide.path, plan.choice, route, spec), plan, route)
    except (ScaleError, RouteUnfit) as error:
        return SlideFailure(str(error), FailureKind.OPTION, record)
    except SlideError as error:
        return SlideFailure(str(error), FailureKind.FILE, record)
    record = _with_plan(record, scale, plan, route, [*notes, *plan.notes])
    seconds = time.monotonic() - started
    return PlannedSlide(record, plan, route, pictures, before, estimate, seconds)


def store_chunk(
    settings: Settings, job: SlideJob, choice: LevelChoice, route: RouteChoice, chunk: Chunk
) -> ChunkResult:
    """Make and store some patches of a slide, whatever cells of it cannot be read."""
    started = time.monotonic()
    writer = _writer(settings.store, settings.spec)
    values = _source(settings, job, choice, route).values(chunk)
    order = np.argsort(chunk.rows)  # in the order of keys, LMDB fills its pages
    rows, values = chunk.rows[order], [values[place] for place in order.tolist()]
    stored = [value if isinstance(value, bytes) else None for value in values]
    crc = writer.put_patches(job.number, rows.tolist(), stored)
    problems = [str(value) for value in values if not isinstance(value, bytes)]
    return ChunkResult(
        rows=rows,
        length=np.array([len(value or b"") for value in stored], np.uint32),
        crc=crc,
        problem=problems[0] if problems else None,
        seconds=time.monotonic() - started,
    )


def close_all() -> None:
    """Close what this process keeps open between chunks: for workers that outlive a run, as threads do."""
    while _sources:
        _sources.popitem()[1].close()
    while _writers:
        _writers.popitem()[1].close()


_sources: dict[tuple[Path, int], PatchSource] = {}


def _source(
    settings: Settings, job: SlideJob, choice: LevelChoice, route: RouteChoice
) -> PatchSource:
    key = settings.store, job.number
    if key not in _sources:
        while len(_sources) >= _SOURCES_KEPT:
            _sources.pop(next(iter(_sources))).close()
        _sources[key] = PatchSource(job.slide.path, choice, route, settings.spec)
    return _sources[key]


_writers: dict[tuple[Path, TilingSpec], StoreWriter] = {}


def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    if (store, spec) not in _writers:
        close_all()
        _writers[store, spec] = StoreWriter(store, spec)
    return _writers[store, spec]


def _scale(
    settings: Settings, job: SlideJob, info: SlideInfo
) -> tuple[ResolvedMpp | None, list[str]]:
    """The slide's scale; with `--level` it may be unknown, which is then noted."""
    try:
        scale = resolve_mpp(
            job.slide.id, info, from_csv=job.mpp_from_csv, default=settings.default_mpp
        )
    except ScaleError as error:
        if settings.spec.level is None:
            raise
        return None, [f"scale unknown: {error.what}"]
    return scale, [scale.note] if scale.note else []


def _thumbnail(slide: Slide, mpp: Mpp | None, levels: NativeLevels) -> Thumbnail:
    """The slide's picture, by the same way whatever route its patches take: they must not depend on that."""
    try:
        tiles, _ = levels.get(thumbnail_level(slide.info.levels, mpp))
    except NotNative:
        return read_thumbnail(slide, mpp)
    return read_thumbnail(slide, mpp, tiles)


def _planned(
    job: SlideJob, info: SlideInfo, mpp: Mpp | None, spec: TilingSpec, thumbnail: Thumbnail
) -> tuple[TilingPlan, dict[str, bytes]]:
    """A slide's patches, and the pictures that show where they come from."""
    mask, pictures = None, {"thumb": encode_thumbnail(thumbnail.pixels)}
    if job.coords is not None:
        return plan_imported(job.slide.id, info, mpp, job.coords), pictures
    choice = choose_level(job.slide.id, info.levels, mpp, spec)
    if spec.tissue == "otsu":
        mask = tissue_mask(thumbnail.pixels, thumbnail.mpp)
        pictures["mask"] = png(mask.pixels)
    return plan_tiles(info, choice, spec, thumbnail, mask), pictures


def _estimate(source: PatchSource, plan: TilingPlan, route: RouteChoice) -> Estimate:
    """What storing a plan will take, from patches spread over it."""
    if not len(plan):
        return Estimate()
    rows = np.unique(np.linspace(0, len(plan) - 1, _SAMPLED_PATCHES).astype(np.int64))
    started = time.monotonic()
    values: list[Value] = source.values(chunk_of(plan, rows))
    seconds = (time.monotonic() - started) / len(rows) * len(plan)
    source.close()
    lengths = np.array([len(value) for value in values if isinstance(value, bytes)] or [0])
    if route.native is not None and route.name == "copy":
        native = route.native
        tiles = native.lengths[
            (plan.y_level - native.y_level) // native.tile.height,
            (plan.x_level - native.x_level) // native.tile.width,
        ]
        lengths = tiles + max(0, int(lengths.max() - tiles.max()))
    return Estimate(int(stored_size(lengths).mean() * len(plan)), seconds)


def _described(record: SlideRecord, info: SlideInfo, path: Path) -> SlideRecord:
    bounds = info.bounds
    return dataclasses.replace(
        record,
        vendor=info.vendor,
        width=info.size.width,
        height=info.size.height,
        bounds=[bounds.origin.x, bounds.origin.y, bounds.size.width, bounds.size.height],
        icc_profile=info.has_icc_profile,
        quickhash=info.quickhash,
        tile_hash=None if info.quickhash else tile_hash(path),
    )


def _with_plan(
    record: SlideRecord,
    scale: ResolvedMpp | None,
    plan: TilingPlan,
    route: RouteChoice,
    notes: list[str],
) -> SlideRecord:
    choice = plan.choice
    return dataclasses.replace(
        record,
        mpp=scale.mpp if scale else None,
        mpp_source=scale.source.value if scale else None,
        patch_mpp=choice.mpp,
        level=choice.level.number,
        downsample=choice.level.downsample,
        read_size=choice.read_size,
        stride=choice.stride,
        resampling=choice.resampling if route.reduction == 1 else "dct",
        route=route.name,
        route_reason=route.reason,
        planned=len(plan),
        notes=notes,
    )
