"""Planning a slide: its patches, their route, their labels, and the pictures that show where they come from."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from histopipe.annotations.patch_labels import PatchLabels, label_patches, roi_shares
from histopipe.annotations.regions import Regions, read_regions, source_text
from histopipe.errors import (
    AnnotationsUnfit,
    RouteUnfit,
    ScaleError,
    SlideError,
    SlideUnreadable,
    UsageError,
)
from histopipe.geometry import Mpp
from histopipe.ingest.chunks import chunk_of
from histopipe.ingest.coords import plan_imported, sticks_out
from histopipe.ingest.encode import encode_thumbnail, png
from histopipe.ingest.job import Estimate, PlannedSlide, Settings, SlideFailure, SlideJob
from histopipe.ingest.route import RouteChoice, choose_route
from histopipe.ingest.source import PatchSource, Value
from histopipe.slides.identity import fingerprint, tile_hash
from histopipe.slides.scale import ResolvedMpp, resolve_mpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.thumbnail import Thumbnail, read_thumbnail, thumbnail_level
from histopipe.slides.tiles.check import NativeLevels
from histopipe.slides.tiles.native import NotNative
from histopipe.store.format import stored_size
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.tiling.level import choose_level
from histopipe.tiling.mask import tissue_mask
from histopipe.tiling.plan import TilingPlan, cell_shares, plan_tiles
from histopipe.tiling.quality import pen_mask
from histopipe.tiling.spec import TilingSpec

_SAMPLED_PATCHES = 8


def plan_slide(settings: Settings, job: SlideJob) -> PlannedSlide | SlideFailure:
    """Open a slide and decide its patches, their route and their labels."""
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
            regions = _regions(settings, job, slide.info)
            with closing(NativeLevels(slide, job.slide.files)) as levels:
                thumbnail = _thumbnail(slide, mpp, levels)
                plan, pictures = _planned(job, slide.info, mpp, spec, thumbnail)
                plan = _within(plan, regions, spec)
                asked = settings.route
                if job.coords is not None and sticks_out(plan, slide.info):
                    asked = "openslide"
                route = choose_route(job.slide.id, plan, spec, asked, levels)
        estimate = _estimate(PatchSource(job.slide.path, plan.choice, route, spec), plan, route)
        labels = _labels(settings, plan, regions)
        columns = {"pen": cell_shares(plan, thumbnail, pen_mask(thumbnail.pixels))}
    except (ScaleError, RouteUnfit, AnnotationsUnfit) as error:
        return SlideFailure(str(error), FailureKind.OPTION, record)
    except SlideError as error:
        return SlideFailure(str(error), FailureKind.FILE, record)
    if record.annotations is not None and job.annotations is None:
        notes.append("the classes of its patches are gone: `histopipe annotate` gives them anew")
        record = dataclasses.replace(record, annotations=None)
    record = _with_plan(record, scale, plan, route, [*notes, *plan.notes])
    if regions is not None and labels is not None and job.annotations is not None:
        record = dataclasses.replace(
            record, annotations=source_text(job.annotations, settings.rules),
            annotation_notes=regions.told(job.annotations), patch_labels=labels.counts(),
        )  # fmt: skip
    seconds = time.monotonic() - started
    return PlannedSlide(record, plan, route, pictures, before, estimate, seconds, labels, columns)


def _regions(settings: Settings, job: SlideJob, info: SlideInfo) -> Regions | None:
    """What is drawn on a slide.

    Raises:
        AnnotationsUnfit: it cannot be read, or there is no file where a region of interest is wanted.
    """
    roi = settings.spec.roi
    if job.annotations is None:
        if roi is not None:
            raise AnnotationsUnfit(
                f"{job.slide.id} has no file of annotations", expected=f"one that draws {roi!r}, for --roi",
                todo="add it and run the same command again, or leave the slide out (--slide-list)",
            )  # fmt: skip
        return None
    try:
        regions = read_regions(job.annotations, settings.rules, size=info.size, bounds=info.bounds)
    except UsageError as error:
        raise AnnotationsUnfit(
            error.what, found=error.found, expected=error.expected, todo=error.todo
        ) from error
    if roi is not None and not regions.draws(roi):
        raise AnnotationsUnfit(
            f"{job.annotations} draws no region {roi!r}", found=", ".join(regions.classes) or "no class",
            todo="correct --roi or the file",
        )  # fmt: skip
    return regions


def _within(plan: TilingPlan, regions: Regions | None, spec: TilingSpec) -> TilingPlan:
    """A plan's cells that lie in the region of interest, if one is asked for."""
    if regions is None or spec.roi is None:
        return plan
    shares = roi_shares(regions, plan.x_l0, plan.y_l0, plan.side_l0)
    return plan.only(
        shares >= spec.roi_threshold, f"no patch has {spec.roi_threshold:.0%} in {spec.roi!r}"
    )


def _labels(settings: Settings, plan: TilingPlan, regions: Regions | None) -> PatchLabels | None:
    if regions is None:
        return None
    return label_patches(
        regions, plan.x_l0, plan.y_l0, plan.side_l0, threshold=settings.rules.threshold
    )


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
