"""Tissue masks to look at and to correct: the function `tissue`, and the folder of masks that it writes."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ExitCode, NothingToDo, ScaleError, SlideError, SlideUnreadable
from histopipe.geometry import Mpp, RegionL0
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import encode_thumbnail
from histopipe.ingestion.planning import thumbnail_of
from histopipe.ingestion.request import PathLike, read_tissue
from histopipe.ingestion.storing import prepare
from histopipe.masks.finding import TissueSource, find_tissue
from histopipe.masks.grid import Grid, Mask
from histopipe.masks.mask_files import read_mask, write_mask
from histopipe.reports.html_page import (
    Cell,
    Column,
    Gallery,
    Notes,
    Page,
    Picture,
    Row,
    Table,
    fitted,
    number,
)
from histopipe.runs import folder as run_folder
from histopipe.slides.discovery import SlideFile, discover
from histopipe.slides.scale import check_mpp, resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.tables import SlideNames, read_mpps
from histopipe.slides.thumbnail import Thumbnail
from histopipe.slides.tiles.check import NativeLevels
from histopipe.system.files import appearing
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result, counted, exit_code_of
from histopipe.system.worker_pool import WorkerDied, WorkerPool, results_of
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import TilingSpec

TABLE, PAGE = "masks.csv", "index.html"
_SECONDS = 1800.0
"""Time limit per slide. A network at a fine scale takes minutes."""
_EDGE, _OUTSIDE = (0, 150, 80), 0.4
_SIDE = 300
"""Longer side of a picture on the page."""


@dataclass(frozen=True, slots=True)
class SlideTissue:
    """The tissue of one slide.

    Attributes:
        slide: slide id.
        tissue_mm2, scanned_mm2: areas; None if the scale is unknown.
        share: fraction of the scanned area, 0 to 1.
        pieces: number of connected parts.
        threshold: threshold of the algorithm, in its unit; None if there is none.
        mask_mpp: µm per pixel of the mask; None if the scale is unknown.
        source: algorithm, or where the mask comes from.
        notes: remarks.
    """

    slide: str
    tissue_mm2: float | None
    scanned_mm2: float | None
    share: float
    pieces: int
    threshold: float | None
    mask_mpp: float | None
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class TissueReport(Result):
    """Result of `tissue`, or of exporting the masks of a store: folder, slides, and reasons of failures by slide."""

    folder: Path
    slides: list[SlideTissue] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command."""
        return exit_code_of(len(self.failed), len(self.slides))

    def __str__(self) -> str:
        blank = sum(not slide.pieces for slide in self.slides)
        without = f", {blank} without tissue" if blank else ""
        lines = [f"masks of {counted(len(self.slides), 'slide')}{without}: {self.folder / PAGE}"]
        return "\n".join([*lines, *(f"failed {name}: {why}" for name, why in self.failed.items())])


def tissue(
    slides: PathLike | Sequence[PathLike],
    out: PathLike = "masks",
    *,
    tissue: PathLike = "otsu",
    mpp_csv: PathLike | None = None,
    default_mpp: float | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> TissueReport:
    """Write the tissue mask of each slide, to look at, to correct in QuPath, and to give to `ingest`.

    Writes `SLIDE.geojson` (QuPath), `SLIDE.png`, `SLIDE-overlay.jpg`, `masks.csv`, and the page `index.html` with the
    pictures of all slides. A mask that exists is kept, since it may have been corrected: its pictures and numbers are
    written again.

    Args:
        slides: slide files and folders.
        out: folder of the masks.
        tissue: how to find tissue, as for `ingest`: "otsu" (the newest algorithm), "otsu-1", "otsu-2", or a network.
        mpp_csv: CSV with the columns slide and mpp, for slides without a scale.
        default_mpp: level-0 scale of slides that have none.
        workers: number of processes; None starts one per core.
        force: replace masks that exist.
        progress: shows the progress; `default_progress()` if None.

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
    shown, folder = progress or default_progress(), Path(out)
    files = discover([Path(it) for it in ([slides] if isinstance(slides, str | Path) else slides)])
    ids = [file.id for file in files]
    fields, masks, network = read_tissue({"tissue": tissue}, None, ids, shown)
    spec = TilingSpec(mpp=Mpp(0.5), **fields)  # the scale of patches does not matter here
    mpps = {} if mpp_csv is None else read_mpps(Path(mpp_csv), SlideNames(ids))
    default = None if default_mpp is None else check_mpp("--default-mpp", default_mpp)
    with run_folder.writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tasks = [
        [
            _Task(
                file, mpps.get(file.id), default, spec,
                TissueSource(file.id, masks.get(file.id), network), folder, force,
            )
        ]
        for file in files
    ]  # fmt: skip
    result = TissueReport(folder)
    pictures: dict[str, NDArray[np.uint8]] = {}
    with (
        run_folder.roomy(folder),
        WorkerPool(IngestOptions(workers=workers).worker_count, prepare) as pool,
        shown.bar("finding tissue", unit="slides", total=len(tasks)) as bar,
    ):
        for (task,), found in results_of(pool, _SECONDS, _one_slide, tasks):
            if isinstance(found, WorkerDied | SlideError):
                result.failed[task.file.id] = str(found)
                bar.item(f"failed {task.file.id}: {found}", problem=True)
            else:
                result.slides.append(found[0])
                pictures[task.file.id] = found[1]
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
    except SlideError as error:
        return error


def _write_mask_of(task: _Task) -> tuple[SlideTissue, NDArray[np.uint8]]:
    if task.file.problem is not None:
        raise SlideUnreadable(f"{task.file.id}: {task.file.problem}")
    with Slide(task.file.path) as slide:
        info, notes = slide.info, []
        mpp = None
        try:
            mpp = resolve_mpp(task.file.id, info, from_csv=task.mpp, default=task.default_mpp).mpp
        except ScaleError as error:
            notes.append(f"scale unknown: {error.what}")
        with NativeLevels(slide, task.file.files) as levels:
            thumbnail = thumbnail_of(slide, mpp, levels)
        mask, origin, kept = _mask_of(task, slide, mpp, thumbnail)
        grid = Grid.of(thumbnail, info.size)
    source = origin or str(task.spec.tissue_model or task.spec.tissue)
    found = SlideMask(task.file.id, mask.pixels, grid, info.bounds, thumbnail.pixels)
    row = describe(found, mpp, source, [*notes, *mask.notes])
    picture = write_slide(task.folder, found, outlines=not kept)
    return dataclasses.replace(row, threshold=mask.threshold), picture


def _mask_of(
    task: _Task, slide: Slide, mpp: Mpp | None, thumbnail: Thumbnail
) -> tuple[TissueMask, str | None, bool]:
    """Return the mask of a slide, the file that it was read from, and whether that is a mask of the folder."""
    known = task.folder / f"{task.file.id}.geojson"
    if known.exists() and not task.force:
        grid = Grid.of(thumbnail, slide.info.size)
        return TissueMask(read_mask(known, task.file.id, grid, slide.info.bounds)), known.name, True
    mask, origin = find_tissue(slide, mpp, thumbnail, task.spec, task.source)
    return mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_)), origin, False


@dataclass(frozen=True, slots=True)
class SlideMask:
    """The mask of a slide, (H, W) bool, its place on the slide, and the (H, W, 3) uint8 thumbnail of the same grid."""

    slide: str
    pixels: Mask
    grid: Grid
    bounds: RegionL0
    thumbnail: NDArray[np.uint8]


def describe(mask: SlideMask, mpp: Mpp | None, source: str, notes: Sequence[str]) -> SlideTissue:
    """Return areas and pieces of a mask; `mpp` is that of level 0."""
    pixels, scale = mask.pixels, None if mpp is None else mpp * mask.grid.side
    pieces, _ = cv2.connectedComponents(pixels.view(np.uint8), connectivity=8)
    count = (int(pixels.sum()), pixels.size)
    tissue, scanned = (None if scale is None else n * scale**2 / 1e6 for n in count)
    share = float(pixels.mean()) if pixels.size else 0.0
    return SlideTissue(
        mask.slide, tissue, scanned, share, pieces - 1, None, scale, source, tuple(notes)
    )


def write_slide(folder: Path, mask: SlideMask, *, outlines: bool = True) -> NDArray[np.uint8]:
    """Write the mask of a slide and a picture of it, and return the picture, reduced for the page.

    Without `outlines`, the GeoJSON file is kept.
    """
    write_mask(folder, mask.slide, mask.pixels, mask.grid, mask.bounds, outlines=outlines)
    picture = overlay(mask.thumbnail, mask.pixels)
    with appearing(folder / f"{mask.slide}-overlay.jpg") as part:
        part.write_bytes(encode_thumbnail(picture))
    return fitted(picture, _SIDE)


def overlay(thumbnail: NDArray[np.uint8], mask: Mask) -> NDArray[np.uint8]:
    """Return a thumbnail, (H, W, 3) uint8, with the edge of a mask; areas outside are paler."""
    pale = (255 - _OUTSIDE * (255 - thumbnail.astype(np.float32))).astype(np.uint8)
    picture = np.where(mask[..., None], thumbnail, pale)
    kernel = np.ones((3, 3), np.uint8)
    edge = cv2.morphologyEx(mask.view(np.uint8), cv2.MORPH_GRADIENT, kernel)
    picture[edge.view(np.bool_)] = _EDGE
    return picture


def write_table_and_page(result: TissueReport, pictures: dict[str, NDArray[np.uint8]]) -> None:
    """Write `masks.csv` and `index.html`; `pictures` are by slide.

    Raises:
        NothingToDo: no slide has a mask.
    """
    if not result.slides:
        reasons = "; ".join(result.failed.values()) or None
        raise NothingToDo("no tissue mask was written", found=reasons)
    result.slides.sort(key=lambda slide: slide.slide)
    names = [it.name for it in dataclasses.fields(SlideTissue)]
    with (
        appearing(result.folder / TABLE) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(names)
        for slide in result.slides:
            values = dataclasses.asdict(slide) | {"notes": "; ".join(slide.notes)}
            writer.writerow([_rounded(values[name]) for name in names])
    _page(result, pictures).write(result.folder / PAGE)


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def _page(result: TissueReport, pictures: dict[str, NDArray[np.uint8]]) -> Page:
    page = Page(f"Tissue: {result.folder.name}", f"masks of {counted(len(result.slides), 'slide')}")
    page.add(
        "Failed", Notes([f"{k}: {v}" for k, v in result.failed.items()]) if result.failed else None
    )
    shown = [
        Picture.of(f"slide-{i}", _caption(slide), pictures[slide.slide])
        for i, slide in enumerate(result.slides)
        if slide.slide in pictures
    ]
    page.add("Slides", Gallery("", shown))
    columns = [
        Column("slide"), Column("tissue, mm²", number=True), Column("share", number=True),
        Column("pieces", number=True), Column("threshold", number=True), Column("source"), Column("notes"),
    ]  # fmt: skip
    rows = [
        Row([
            Cell(it.slide), number(it.tissue_mm2, 2), number(100 * it.share, 1, " %"), number(it.pieces),
            number(it.threshold, 3), Cell(it.source), Cell("; ".join(it.notes)),
        ])
        for it in result.slides
    ]  # fmt: skip
    page.add("Numbers", Table("Tissue by slide", columns, rows))
    return page


def _caption(slide: SlideTissue) -> str:
    area = f"{slide.share:.0%}" if slide.tissue_mm2 is None else f"{slide.tissue_mm2:,.1f} mm²"
    facts = [slide.slide, area, counted(slide.pieces, "piece") if slide.pieces else "no tissue"]
    return " · ".join([*facts, *slide.notes])
