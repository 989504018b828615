"""What a worker process does: plan a slide, and encode a chunk of its patches into the store.

Plain functions of picklable values, so that any `concurrent.futures.Executor` can run them. Pixels never travel between
processes: a chunk is encoded in memory, then put under LMDB's own lock for the milliseconds that takes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import ScaleError, SlideError, SlideUnreadable
from histopipe.geometry import Mpp, PointL0
from histopipe.ingest.encode import encode, read_patch
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import Fingerprint, fingerprint, tile_hash
from histopipe.slides.scale import ResolvedMpp, resolve_mpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.thumbnail import read_thumbnail
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.tiling.level import LevelChoice, choose_level
from histopipe.tiling.mask import tissue_mask
from histopipe.tiling.plan import TilingPlan, plan_tiles
from histopipe.tiling.spec import TilingSpec

_THUMBNAIL_QUALITY = 85


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for every slide of a run."""

    store: Path
    spec: TilingSpec
    default_mpp: Mpp | None = None


@dataclass(frozen=True, slots=True)
class SlideJob:
    """One slide to ingest: its number in the store, its files, its record so far.

    `again` says that it is complete already and is meant to be done once more.
    """

    number: int
    slide: SlideFile
    record: SlideRecord
    mpp_from_csv: Mpp | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class PlannedSlide:
    """A slide ready to be encoded."""

    record: SlideRecord
    plan: TilingPlan
    thumbnails: dict[str, bytes]
    before: Fingerprint


@dataclass(frozen=True, slots=True)
class SlideFailure:
    """Why a slide cannot be ingested."""

    reason: str
    kind: FailureKind
    record: SlideRecord


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive patches of a plan.

    Attributes:
        first: number of the first.
        x_l0, y_l0: (N,) int64 top left corners, level 0.
    """

    first: int
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What was stored of a chunk.

    Attributes:
        first: number of its first patch.
        length: (N,) uint32 bytes of each value, 0 where unreadable.
        crc: (N,) uint32.
        problem: what the first unreadable patch said; None where all could be read.
    """

    first: int
    length: NDArray[np.uint32]
    crc: NDArray[np.uint32]
    problem: str | None


def plan_slide(settings: Settings, job: SlideJob) -> PlannedSlide | SlideFailure:
    """Open a slide and decide its patches."""
    record = job.record
    try:
        if job.slide.problem is not None:
            raise SlideUnreadable(f"{job.slide.id}: {job.slide.problem}")
        before = fingerprint(job.slide)
        record = dataclasses.replace(record, size_bytes=before.size_bytes, mtime_ns=before.mtime_ns)
        slide = _open(job.slide.path)
        record = _described(record, slide.info, job.slide.path)
        scale, notes = _scale(settings, job, slide.info)
        mpp = scale.mpp if scale else None
        choice = choose_level(job.slide.id, slide.info.levels, mpp, settings.spec)
        thumbnail = read_thumbnail(slide, mpp)
    except ScaleError as error:
        return SlideFailure(str(error), FailureKind.OPTION, record)
    except SlideError as error:
        return SlideFailure(str(error), FailureKind.FILE, record)
    mask = None
    pictures = {"thumb": encode_thumbnail(thumbnail.pixels)}
    if settings.spec.tissue == "otsu":
        mask = tissue_mask(thumbnail.pixels, thumbnail.mpp)
        pictures["mask"] = _png(mask.pixels)
    plan = plan_tiles(slide.info, choice, settings.spec, thumbnail, mask)
    record = _with_plan(record, scale, plan, [*notes, *plan.notes])
    return PlannedSlide(record, plan, pictures, before)


def encode_chunk(
    settings: Settings, job: SlideJob, choice: LevelChoice, chunk: Chunk
) -> ChunkResult:
    """Read, encode and store some patches of a slide, whatever cells of it cannot be read."""
    slide = _open(job.slide.path)
    spec = settings.spec
    values: list[bytes | None] = []
    problem: str | None = None
    for x, y in zip(chunk.x_l0.tolist(), chunk.y_l0.tolist(), strict=True):
        try:
            values.append(encode(read_patch(slide, choice, PointL0(x, y), spec.patch_size), spec))
        except SlideUnreadable as error:
            values.append(None)
            problem = problem or str(error)
    crc = _writer(settings.store, spec).put_patches(job.number, chunk.first, values)
    length = np.array([len(value or b"") for value in values], np.uint32)
    return ChunkResult(chunk.first, length, crc, problem)


def encode_thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """A JPEG of a thumbnail, (H, W, 3) uint8 RGB."""
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=_THUMBNAIL_QUALITY, colorspace="RGB"
        )
    )


# A worker handles a slide's chunks one after another, so two open slides are enough: the one it works on, and the one it
# planned in between. Each handle has a cache of its own inside OpenSlide.
@functools.lru_cache(maxsize=2)
def _open(path: Path) -> Slide:
    return Slide(path)


@functools.lru_cache(maxsize=1)
def _writer(store: Path, spec: TilingSpec) -> StoreWriter:
    return StoreWriter(store, spec)


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
    record: SlideRecord, scale: ResolvedMpp | None, plan: TilingPlan, notes: list[str]
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
        resampling=choice.resampling,
        route="openslide",
        route_reason="the only route of this version",
        planned=len(plan),
        notes=notes,
    )


def _png(mask: NDArray[np.bool_]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    return buffer.getvalue()
