"""Tissue masks to check and to correct: the function `tissue`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ScaleError, SlideError, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.ingestion.options import MaskOptions
from histopipe.ingestion.planning import thumbnail_of
from histopipe.ingestion.request import read_tissue
from histopipe.ingestion.storing import prepare
from histopipe.masks.finding import TissueSource, find_tissue
from histopipe.masks.grid import Grid
from histopipe.masks.mask_files import read_mask
from histopipe.reports.mask_folder import (
    SlideMask,
    SlideTissue,
    TissueReport,
    describe,
    write_slide,
    write_table_and_page,
)
from histopipe.runs import folder as run_folder
from histopipe.slides.discovery import discover, show_links
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import SlideNames, read_mpps
from histopipe.slides.thumbnail import Thumbnail, colour_note
from histopipe.slides.tiles.check import NativeLevels
from histopipe.system.files import PathLike
from histopipe.system.filesystems import roomy
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import slide_failure
from histopipe.system.settings import make_settings
from histopipe.system.worker_pool import WorkerDied, WorkerPool, results_of
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import TilingSpec

_SECONDS = 1800.0
"""Time limit per slide. A network at a fine scale takes minutes."""


def tissue(
    slides: PathLike | Sequence[PathLike],
    out: PathLike = "masks",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> TissueReport:
    """Write the tissue mask of each slide, to check, to correct in QuPath, and to give to `ingest`.

    Writes `SLIDE.geojson` (QuPath), `SLIDE.png`, `SLIDE-overlay.jpg`, `masks.csv`, and the page `index.html` with the
    pictures of all slides. A mask that exists is kept, since it may have been corrected: its pictures and numbers are
    written again.

    Args:
        slides: slide files and folders.
        out: folder of the masks.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe tissue`.

    Returns:
        Areas and pieces of each slide, and the failures.

    Raises:
        UsageError: an option is wrong, or `out` is a file.
        NothingToDo: no slide was found.
        MachineShort: the disk is full.

    Example:
        >>> tissue("slides", "masks")  # doctest: +SKIP
        masks of 12 slides: masks/index.html
    """
    options = make_settings(MaskOptions, settings)
    display, folder = progress or default_progress(), Path(out)
    files = discover(
        [Path(path) for path in ([slides] if isinstance(slides, str | Path) else slides)]
    )
    show_links(files, display)
    ids = [file.id for file in files]
    fields, masks, network = read_tissue({"tissue": options.tissue}, None, ids, display)
    spec = TilingSpec(mpp=Mpp(0.5), **fields)  # the scale of patches does not matter here
    mpps = {} if options.mpp_csv is None else read_mpps(Path(options.mpp_csv), SlideNames(ids))
    with run_folder.writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        [
            _Task(
                file, mpps.get(file.id), options.default_mpp, spec,
                TissueSource(file.id, masks.get(file.id), network), folder, options.force,
            )
        ]
        for file in files
    ]  # fmt: skip
    result = TissueReport(folder)
    pictures: dict[str, NDArray[np.uint8]] = {}
    with (
        roomy(folder),
        WorkerPool(options.worker_count, prepare) as pool,
        display.bar("finding tissue", unit="slides", total=len(tasks)) as bar,
    ):
        for (task,), outcome in results_of(pool, _SECONDS, _one_slide, tasks):
            if isinstance(outcome, WorkerDied | SlideError):
                result.failed[task.file.id] = str(outcome)
                bar.item(f"failed {task.file.id}: {outcome}", problem=True)
            else:
                result.slides.append(outcome[0])
                pictures[task.file.id] = outcome[1]
            bar.advance()
        write_table_and_page(result, pictures)
    return result


@dataclass(frozen=True, slots=True)
class _Task:
    """A slide whose mask is wanted; pickled for a worker process."""

    file: SlideFile
    mpp: Mpp | None
    default_mpp: Mpp | None
    spec: TilingSpec
    source: TissueSource
    folder: Path
    force: bool


def _one_slide(tasks: list[_Task]) -> tuple[SlideTissue, NDArray[np.uint8]] | SlideError:
    """Write the mask of a slide, and return its numbers and a small picture, or why it failed."""
    try:
        return _write_mask_of(tasks[0])
    except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
        return SlideError(slide_failure(error))


def _write_mask_of(task: _Task) -> tuple[SlideTissue, NDArray[np.uint8]]:
    if task.file.problem is not None:
        raise SlideUnreadable(f"{task.file.id}: {task.file.problem}")
    with open_slide(task.file.path) as slide:
        info, notes, mpp = slide.info, [], None
        try:
            scale = resolve_mpp(task.file.id, info, from_csv=task.mpp, default=task.default_mpp)
            mpp, notes = scale.mpp, [scale.note] if scale.note else []
        except ScaleError as error:
            notes.append(f"scale unknown: {error.what}")
        with NativeLevels(slide, task.file.files) as levels:
            thumbnail = thumbnail_of(slide, mpp, levels, task.spec)
        notes += [*info.notes, *filter(None, [colour_note(thumbnail.pixels)])]
        mask, origin, kept = _mask_of(task, slide, mpp, thumbnail)
        grid = Grid.of(thumbnail, info.size)
    source = origin or str(task.spec.tissue_model or task.spec.tissue)
    slide_mask = SlideMask(task.file.id, mask.pixels, grid, info.bounds, thumbnail.pixels)
    row = describe(slide_mask, mpp, source, [*notes, *mask.notes])
    picture = write_slide(task.folder, slide_mask, outlines=not kept)
    return dataclasses.replace(row, threshold=mask.threshold), picture


def _mask_of(
    task: _Task, slide: Slide, mpp: Mpp | None, thumbnail: Thumbnail
) -> tuple[TissueMask, str | None, bool]:
    """Return the mask of a slide, the file that it was read from, and whether that is a mask of the folder."""
    mask_path = task.folder / f"{task.file.id}.geojson"
    if mask_path.exists() and not task.force:
        grid = Grid.of(thumbnail, slide.info.size)
        return (
            TissueMask(read_mask(mask_path, task.file.id, grid, slide.info.bounds)),
            mask_path.name,
            True,
        )
    mask, origin = find_tissue(slide, mpp, thumbnail, task.spec, task.source)
    return mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_)), origin, False
