"""Plan a slide: its patches, their route and labels, and its thumbnails."""

from __future__ import annotations

import dataclasses
import importlib
import time

import cv2
import numpy as np

from histopipe.annotations.patch_labels import (
    PatchLabels,
    annotation_notes,
    label_patches,
    roi_shares,
)
from histopipe.annotations.regions import Regions, read_regions, source_text
from histopipe.errors import (
    OptionUnfit,
    SlideError,
    SlideUnreadable,
    UsageError,
)
from histopipe.ingestion.coords import count_outside, plan_imported
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import (
    PatchRecipe,
    PatchSource,
    choose_route,
    chunk_of,
    pixel_notes,
)
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.measure.patch_quality import pen_mask
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import ResolvedMpp
from histopipe.slides.slide import SlideInfo
from histopipe.slides.slide_files import SlideFile, fingerprint, pixel_hash, tile_hash
from histopipe.slides.thumbnail import encode_thumbnail
from histopipe.slides.tiles.check import NativeLevels
from histopipe.store.format import stored_size
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.system.output import counted
from histopipe.tiling.plan import TilingPlan, cell_shares, choose_level, plan_tiles
from histopipe.tiling.spec import TilingSpec
from histopipe.tissue_masks.finding import (
    TissueSource,
    find_tissue,
    read_tissue_thumbnail,
    resolve_scale,
)
from histopipe.tissue_masks.mask import Grid
from histopipe.tissue_masks.mask_files import encode_png


def prepare() -> None:
    """Prepare a worker process for its first tasks, while the main process finds the slides."""
    importlib.import_module("histopipe.slides.tiles.tiff")
    cv2.setNumThreads(1)  # each worker has one core


def plan_slide(
    slide: SlideJob, spec: TilingSpec, options: IngestOptions
) -> SlidePlan | SlideRecord:
    """Open a slide and choose its patches, their route and their labels; a task for a worker process.

    Returns:
        The plan, or the record of the slide with its failure.
    """
    started, record, notes = time.monotonic(), slide.record, list[str]()
    file = slide.staged.file if slide.staged else slide.file
    try:
        if file.problem is not None:
            raise SlideUnreadable(f"{slide.id}: {file.problem}")
        before = slide.staged.fingerprint if slide.staged else fingerprint(file)
        record = record.with_fingerprint(before)
        with open_slide(file.path, options.reader) as opened:
            info = opened.info
            record = _described(record, info, file)
            scale, notes = resolve_scale(
                slide.id, info, slide.mpp, options.default_mpp, required=spec.level is None
            )
            mpp = scale.mpp if scale else None
            regions = _regions(slide, spec, options, info)
            with NativeLevels(opened, file.files) as levels:
                source = TissueSource(
                    slide.id,
                    spec.tissue,
                    spec.tissue_fallback,
                    spec.exclude,
                    slide.mask,
                    options.tissue_network,
                    regions,
                )
                patch_um = None if spec.mpp is None else spec.patch_size * spec.mpp
                thumbnail = read_tissue_thumbnail(opened, mpp, levels, source, patch_um)
                pictures, mask = {"thumb": encode_thumbnail(thumbnail.pixels)}, None
                if slide.coords is not None:
                    plan = plan_imported(slide.id, info, mpp, slide.coords)
                else:
                    choice = choose_level(slide.id, info.levels, mpp, spec)
                    mask, origin = find_tissue(opened, mpp, thumbnail, source)
                    plan = plan_tiles(info, choice, spec, thumbnail, mask)
                    record = dataclasses.replace(record, mask=origin)
                if mask is not None:
                    pictures["mask"] = encode_png(mask.pixels, Grid.of(thumbnail, info.size))
                plan = _within(plan, regions, spec)
                may_extend = slide.coords is not None or spec.edge == "pad"
                outside = count_outside(plan, info) if may_extend else 0
                recipe = choose_route(
                    PatchRecipe(file.path, info.reader, spec),
                    slide.id,
                    plan,
                    "openslide" if outside else options.route,
                    levels,
                )
                tissue = np.ones(thumbnail.pixels.shape[:2], bool) if mask is None else mask.pixels
                notes += [*info.notes, *pixel_notes(levels, plan, thumbnail, tissue)]
                if outside and spec.edge == "pad":
                    notes.append(f"{counted(outside, 'patch')} partly beyond the edge: blank there")
        stored_bytes, storing_seconds = _estimate(recipe, plan)
        labels = (
            None
            if regions is None
            else label_patches(
                regions,
                plan.x_l0,
                plan.y_l0,
                plan.side_l0,
                threshold=options.rules.annotation_threshold,
            )
        )
        columns = {"pen": cell_shares(plan, thumbnail, pen_mask(thumbnail.pixels))}
    except OptionUnfit as error:
        # The notes name the scale that was not used, for example.
        return record.with_failure("; ".join([str(error), *notes]), FailureKind.OPTION)
    except SlideError as error:
        return record.with_failure(str(error))
    record = _with_plan(record, scale, plan, recipe, [*notes, *plan.notes])
    record = _with_labels(record, slide, options, regions, labels)
    return SlidePlan(
        record,
        plan,
        recipe,
        pictures,
        before,
        stored_bytes,
        storing_seconds,
        time.monotonic() - started,
        labels,
        columns,
    )


def _regions(
    slide: SlideJob, spec: TilingSpec, options: IngestOptions, info: SlideInfo
) -> Regions | None:
    """Return the annotations of a slide; None if it has no annotation file.

    Raises:
        OptionUnfit: the file cannot be read, or the region of interest is missing.
    """
    roi = spec.roi
    if slide.annotations is None:
        if roi is not None:
            raise OptionUnfit(
                f"{slide.id} has no annotation file",
                expected=f"one with the region {roi!r} (--roi)",
                todo="add it and run the same command again, or exclude the slide (--slide-list)",
            )
        return None
    try:
        regions = read_regions(slide.annotations, options.rules, size=info.size, bounds=info.bounds)
    except UsageError as error:
        raise OptionUnfit(
            error.what, found=error.found, expected=error.expected, todo=error.todo
        ) from error
    if roi is not None and all(outline.name != roi for outline in regions.roi or ()):
        raise OptionUnfit(
            f"{slide.annotations} has no region {roi!r}",
            found=", ".join(regions.classes) or "no class",
            todo="correct --roi or the file",
        )
    return regions


def _within(plan: TilingPlan, regions: Regions | None, spec: TilingSpec) -> TilingPlan:
    """Return the plan with only the cells in the region of interest, if there is one."""
    if regions is None or spec.roi is None:
        return plan
    shares = roi_shares(regions, plan.x_l0, plan.y_l0, plan.side_l0)
    note = f"no patch has {spec.roi_threshold:.0%} of its area in {spec.roi!r}"
    return plan.only(shares >= spec.roi_threshold, note)


def _estimate(recipe: PatchRecipe, plan: TilingPlan) -> tuple[int, float]:
    """Estimate from eight patches their bytes in the store, and the seconds of one worker to store them."""
    if not len(plan):
        return 0, 0.0
    rows = np.unique(np.linspace(0, len(plan) - 1, 8).astype(int))
    started = time.monotonic()
    with PatchSource(recipe) as source:
        values = source.values(chunk_of(plan, rows))
    seconds = (time.monotonic() - started) / len(rows) * len(plan)
    lengths = np.array([len(value) for value in values if isinstance(value, bytes)] or [0])
    if recipe.native is not None and recipe.route == "copy":
        tiles = recipe.native.lengths[recipe.native.tile_at(plan.x_level, plan.y_level)]
        lengths = tiles + max(0, int(lengths.max() - tiles.max()))
    return int(stored_size(lengths).mean() * len(plan)), seconds


def _described(record: SlideRecord, info: SlideInfo, file: SlideFile) -> SlideRecord:
    return dataclasses.replace(
        record,
        vendor=info.vendor,
        reader=info.reader,
        width=info.size.width,
        height=info.size.height,
        bounds=[
            info.bounds.origin.x,
            info.bounds.origin.y,
            info.bounds.size.width,
            info.bounds.size.height,
        ],
        icc_profile=info.has_icc_profile,
        quickhash=info.quickhash,
        tile_hash=None if info.quickhash else tile_hash(file.path),
        pixel_hash=pixel_hash(file, info.size),
    )


def _with_labels(
    record: SlideRecord,
    slide: SlideJob,
    options: IngestOptions,
    regions: Regions | None,
    labels: PatchLabels | None,
) -> SlideRecord:
    """Return the record with the labels of patches, if they were asked for: regions may only cut out artefacts."""
    if slide.annotations is None:
        if record.annotations is not None:
            record.notes.append(
                "patch labels were removed: run `histopipe annotate` to label the patches again"
            )
        return dataclasses.replace(record, annotations=None)
    if regions is None or labels is None:
        return record
    return dataclasses.replace(
        record,
        annotations=source_text(slide.annotations, options.rules),
        annotation_notes=annotation_notes(slide.annotations, regions, labels),
        patch_labels=labels.counts(),
    )


def _with_plan(
    record: SlideRecord,
    scale: ResolvedMpp | None,
    plan: TilingPlan,
    recipe: PatchRecipe,
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
        resampling=choice.resampling if recipe.reduction == 1 else "dct",
        route=recipe.route,
        route_reason=recipe.reason,
        planned=len(plan),
        notes=notes,
    )
