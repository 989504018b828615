"""Plan a slide: its patches, their route and labels, and its thumbnails."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from histopipe.annotations.annotation_files import read_regions, source_text
from histopipe.annotations.regions import Regions, class_names
from histopipe.annotations.rules import Frame
from histopipe.errors import (
    OptionUnfit,
    SlideError,
    SlideUnreadable,
    UsageError,
)
from histopipe.geometry import Mpp
from histopipe.ingestion.coords import count_outside, plan_imported
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import (
    PatchRecipe,
    PatchSource,
    choose_route,
    pixel_notes,
)
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.measure.patch_labels import PatchLabels, annotation_notes, label_patches
from histopipe.measure.quality import pen_mask
from histopipe.slides.scale import ResolvedMpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.slide_files import (
    SlideFile,
    fingerprint,
    open_slide,
    pixel_hash,
    tile_hash,
)
from histopipe.slides.staging import StagingArea, staged
from histopipe.slides.thumbnail import Thumbnail, encode_thumbnail
from histopipe.slides.tile_check import NativeLevels
from histopipe.store.format import stored_size
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.system.output import counted, slide_failure
from histopipe.system.worker_pool import WorkerPool, run_tasks
from histopipe.tiling.finding import find_tissue, inside_core, read_tissue_thumbnail, resolve_scale
from histopipe.tiling.mask import Grid, TissueMask
from histopipe.tiling.mask_files import encode_png
from histopipe.tiling.plan import TilingPlan, cell_shares, choose_level, plan_tiles
from histopipe.tiling.spec import TilingSpec


def plan_slide(job: SlideJob, spec: TilingSpec, options: IngestOptions) -> SlidePlan | SlideRecord:
    """Open a slide and choose its patches, their route and their labels; a task for a worker process.

    Returns:
        The plan, or the record of the slide with its failure.
    """
    started, record, notes = time.monotonic(), job.record, list[str]()
    file = job.staged or job.file
    try:
        if file.problem is not None:
            # A grid of cores can be corrected, and the slide is then tried again.
            failure = SlideUnreadable if options.cores is None else OptionUnfit
            raise failure(f"{job.id}: {file.problem}")
        record = record.with_fingerprint(fingerprint(file))
        with _opened(file, options.reader) as (opened, levels):
            info = opened.info
            record = _described(record, opened, file, job.frame)
            scale, notes = resolve_scale(
                job.id, info, job.mpp, options.default_mpp, required=spec.level is None
            )
            mpp, regions = scale.mpp if scale else None, _regions(job, spec, options, info)
            plan, thumbnail, mask, origin = _choose_patches(
                job, spec, options, opened, mpp=mpp, levels=levels, regions=regions
            )
            record = replace(record, mask=origin)
            recipe, beyond = _choose_recipe(
                PatchRecipe(file.path, info.reader, spec), job, plan, options, info, levels=levels
            )
            notes += [*info.notes, *pixel_notes(levels, plan, thumbnail, mask), *beyond]
        stored_bytes, storing_seconds = _estimate(recipe, plan)
    except OptionUnfit as error:
        # The notes name the scale that was not used, for example.
        return record.with_failure("; ".join([str(error), *notes]), FailureKind.OPTION)
    except SlideError as error:
        return record.with_failure(str(error))
    record = _with_plan(record, scale, plan, recipe, [*notes, *plan.notes])
    record, labels = _with_labels(record, job, options, regions, plan)
    thumbnails = {"thumb": encode_thumbnail(thumbnail.pixels)}
    if mask is not None:
        thumbnails["mask"] = encode_png(mask.pixels, Grid.of(thumbnail, info.size))
    return SlidePlan(
        record,
        plan,
        recipe,
        thumbnails,
        {"pen": cell_shares(plan, thumbnail, pen_mask(thumbnail.pixels))},
        stored_bytes,
        storing_seconds,
        time.monotonic() - started,
        labels,
    )


_kept: dict[object, tuple[Slide, SlideInfo, NativeLevels]] = {}
"""The file that this process has opened last for a core: opening it, and comparing its tiles, takes longer than a core."""


@contextmanager
def _opened(file: SlideFile, reader: str) -> Iterator[tuple[Slide, NativeLevels]]:
    """Open a slide and its native tiles. The file of cores stays open for the next core."""
    if file.core is None:
        with open_slide(file.path, reader) as opened, NativeLevels(opened, file.files) as levels:
            yield opened, levels
        return
    key = file.path, fingerprint(file), reader
    if key not in _kept:
        for earlier, _, tiles in _kept.values():
            tiles.close()
            earlier.close()
        _kept.clear()
        opened = open_slide(file.path, reader)
        _kept[key] = opened, opened.info, NativeLevels(opened, file.files)
    opened, info, levels = _kept[key]
    opened.info = info.within(file.core)
    yield opened, levels


def plan_slides(
    jobs: Iterable[SlideJob],
    spec: TilingSpec,
    options: IngestOptions,
    pool: WorkerPool,
    stage: StagingArea | None,
    *,
    in_order: bool = False,
) -> Iterator[SlideJob | None]:
    """Plan slides in a pool while the next ones are copied, if there is a stage. Yield each with its plan or failure.

    None means that the next slide can be copied only when earlier ones are released.
    """

    def start(
        task: tuple[SlideJob, SlideFile | SlideError | None],
    ) -> Future[SlidePlan | SlideRecord]:
        job, copy = task
        if isinstance(copy, SlideError):
            failed = Future[SlidePlan | SlideRecord]()
            failed.set_exception(copy)
            return failed
        job.staged = copy
        job.begin(options)
        return pool.submit_within(job.seconds_left, plan_slide, job, spec, options)

    copies = staged(stage, jobs, lambda job: job.file)
    # One task waits, so that no worker does. More plans in advance would only take memory and staging space.
    for planned in run_tasks(start, copies, limit=options.worker_count + 1, in_order=in_order):
        if planned is None:
            yield None
            continue
        (job, _), future = planned
        try:
            job.planned(future.result())
        except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
            job.fail(slide_failure(error))
        yield job


def _choose_patches(
    job: SlideJob,
    spec: TilingSpec,
    options: IngestOptions,
    slide: Slide,
    *,
    mpp: Mpp | None,
    levels: NativeLevels,
    regions: Regions | None,
) -> tuple[TilingPlan, Thumbnail, TissueMask | None, str | None]:
    """Return the patches of a slide, its thumbnail, and its tissue mask with the file that it was read from, if any."""
    patch_um = None if spec.mpp is None else spec.patch_size * spec.mpp
    thumbnail = read_tissue_thumbnail(
        slide, mpp, levels, spec.tissue, spec.tissue_fallback, patch_um=patch_um
    )
    mask, origin = None, None
    if job.coords is not None:
        plan = plan_imported(job.id, slide.info, mpp, job.coords, frame=job.frame)
    else:
        choice = choose_level(job.id, slide.info.levels, mpp, spec)
        mask, origin = find_tissue(
            slide,
            job.id,
            mpp,
            thumbnail,
            spec.tissue,
            fallback=spec.tissue_fallback,
            exclude=spec.exclude,
            mask_file=job.mask,
            network=options.tissue_network,
            regions=regions,
            rules=options.masks,
            frame=job.frame,
        )
        if job.core is not None:
            mask = inside_core(mask, job.core, slide, thumbnail)
        plan = plan_tiles(slide.info, choice, spec, thumbnail, mask)
    if regions is not None and spec.roi is not None:
        threshold, places = spec.roi_threshold, (plan.x_l0, plan.y_l0, plan.side_l0)
        shares = label_patches(regions.roi or (), *places, threshold=threshold).covered
        plan = plan.only(
            shares >= threshold, f"no patch has {threshold:.0%} of its area in {spec.roi!r}"
        )
    return plan, thumbnail, mask, origin


def _choose_recipe(
    recipe: PatchRecipe,
    job: SlideJob,
    plan: TilingPlan,
    options: IngestOptions,
    info: SlideInfo,
    *,
    levels: NativeLevels,
) -> tuple[PatchRecipe, list[str]]:
    """Return the recipe with the route of the patches, and a note if patches extend beyond the edge of the slide.

    Native tiles do not have the pixels of such patches, so that only OpenSlide can read them.
    """
    padded = recipe.spec.edge == "pad"
    outside = count_outside(plan, info) if padded or job.coords is not None else 0
    note = f"{counted(outside, 'patch')} partly beyond the edge: blank there"
    route = "openslide" if outside else options.route
    return choose_route(recipe, job.id, plan, route, levels), [note] * bool(outside and padded)


def _regions(
    job: SlideJob, spec: TilingSpec, options: IngestOptions, info: SlideInfo
) -> Regions | None:
    """Return the annotations of a slide; None if it has no annotation file.

    Raises:
        OptionUnfit: the file cannot be read, or the region of interest is missing.
    """
    roi = spec.roi
    if job.annotations is None:
        if roi is not None:
            raise OptionUnfit(
                f"{job.id} has no annotation file",
                expected=f"one with the region {roi!r} (--roi)",
                todo="add it and run the same command again, or exclude the slide (--slide-list)",
            )
        return None
    try:
        regions = read_regions(
            job.annotations,
            replace(options.rules, frame=job.frame),
            size=info.size,
            bounds=info.frame,
            orientation=info.orientation,
        )
    except UsageError as error:
        raise OptionUnfit(
            error.what, found=error.found, expected=error.expected, todo=error.todo
        ) from error
    if roi is not None and all(outline.name != roi for outline in regions.roi or ()):
        raise OptionUnfit(
            f"{job.annotations} has no region {roi!r}",
            found=", ".join(class_names(regions.outlines)) or "no class",
            todo="correct --roi or the file",
        )
    return regions


def _estimate(recipe: PatchRecipe, plan: TilingPlan) -> tuple[int, float]:
    """Estimate from eight patches their bytes in the store, and the seconds of one worker to store them."""
    if not len(plan):
        return 0, 0.0
    rows = np.unique(np.linspace(0, len(plan) - 1, 8).astype(int))
    started = time.monotonic()
    with PatchSource(recipe) as source:
        values = source.values(plan.take(rows))
    seconds = (time.monotonic() - started) / len(rows) * len(plan)
    lengths = np.array([len(value) for value in values if isinstance(value, bytes)] or [0])
    if recipe.native is not None and recipe.route == "copy":
        tiles = recipe.native.lengths[recipe.native.tile_at(plan.x_level, plan.y_level)]
        lengths = tiles + max(0, int(lengths.max() - tiles.max()))
    return int(stored_size(lengths).mean() * len(plan)), seconds


def _described(record: SlideRecord, slide: Slide, file: SlideFile, frame: Frame) -> SlideRecord:
    info = slide.info
    is_turned = info.orientation > 1
    return replace(
        record,
        vendor=info.vendor,
        reader=info.reader,
        width=info.size.width,
        height=info.size.height,
        bounds=info.bounds.to_list(),
        scan=[] if info.scan is None else info.scan.to_list(),
        icc_profile=info.has_icc_profile,
        quickhash=info.quickhash,
        tile_hash=None if info.quickhash or info.scan else tile_hash(file.path),
        pixel_hash=slide.region_hash() if info.scan else pixel_hash(file, info.size),
        orientation=info.orientation if is_turned else None,
        frame=frame if is_turned else None,
    )


def _with_labels(
    record: SlideRecord,
    job: SlideJob,
    options: IngestOptions,
    regions: Regions | None,
    plan: TilingPlan,
) -> tuple[SlideRecord, PatchLabels | None]:
    """Return the record with the labels of patches, and the labels, if they were asked for."""
    if job.annotations is None or regions is None:
        if record.annotations is not None:
            record.notes.append(
                "patch labels were removed: run `histopipe annotate` to label the patches again"
            )
        return replace(record, annotations=None), None
    labels = label_patches(
        regions.outlines,
        plan.x_l0,
        plan.y_l0,
        plan.side_l0,
        threshold=options.rules.annotation_threshold,
    )
    record = replace(
        record,
        annotations=source_text(job.annotations, options.rules),
        annotation_notes=annotation_notes(job.annotations, regions, labels),
        patch_labels=labels.counts(),
    )
    return record, labels


def _with_plan(
    record: SlideRecord,
    scale: ResolvedMpp | None,
    plan: TilingPlan,
    recipe: PatchRecipe,
    notes: list[str],
) -> SlideRecord:
    choice = plan.choice
    return replace(
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
