"""Find the tissue of a slide: by an algorithm, from a file, or by a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.regions import Regions
from histopipe.errors import (
    ExitCode,
    MaskUnfit,
    NothingToDo,
    ScaleError,
    SlideError,
    SlideUnreadable,
)
from histopipe.geometry import Mpp, RegionL0
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.thumbnail import (
    THUMBNAIL_MPP,
    Thumbnail,
    colour_note,
    encode_thumbnail,
    read_thumbnail,
    resize_image,
    thumbnail_level,
    usual_mpp,
)
from histopipe.slides.tiles.check import NativeLevels
from histopipe.slides.tiles.native import NotNative
from histopipe.system.csv_files import write_table
from histopipe.system.files import write_atomically
from histopipe.system.output import Result, counted, exit_code_of, slide_failure
from histopipe.tissue_masks import NEWEST, Tissue
from histopipe.tissue_masks.algorithms import find_on_thumbnail
from histopipe.tissue_masks.mask import Grid, Mask, TissueMask
from histopipe.tissue_masks.mask_files import identify_mask_file, read_mask, write_mask
from histopipe.tissue_masks.network import find_by_network

_USUAL_PATCH_UM = 64.0
"""Side, in µm, of patches for which masks of 16 µm are fine enough: four pixels."""


@dataclass(frozen=True, slots=True)
class TissueSource:
    """How the tissue of a slide is found: its id, and the settings `tissue`, `tissue_fallback` and `exclude` of a spec.

    `mask` and `network` are the files of its mask and of the network, and `regions` its outlines.
    """

    slide: str
    method: Tissue = NEWEST
    fallback: str | None = None
    exclude: tuple[str, ...] = ()
    mask: Path | None = None
    network: Path | None = None
    regions: Regions | None = None


def read_tissue_thumbnail(
    slide: Slide,
    mpp: Mpp | None,
    levels: NativeLevels,
    source: TissueSource,
    patch_um: float | None = None,
) -> Thumbnail:
    """Read the thumbnail on which tissue is found. It is the same for all routes, since the plan must not depend on the route.

    Stores with `otsu-1` have thumbnails of 8 µm. Other large slides have 16 µm, unless the patches are small: their side
    is `patch_um` in µm, None if it is unknown.
    """
    small = patch_um is not None and patch_um < _USUAL_PATCH_UM
    fine = small or "otsu-1" in (source.method, source.fallback)
    at = THUMBNAIL_MPP if fine else usual_mpp(slide, mpp)
    tiles = None
    with suppress(NotNative):
        tiles, _ = levels.get(thumbnail_level(slide.info.levels, mpp, at))
    return read_thumbnail(slide, mpp, tiles, at)


def find_tissue(
    slide: Slide, mpp: Mpp | None, thumbnail: Thumbnail, source: TissueSource
) -> tuple[TissueMask | None, str | None]:
    """Return the tissue mask of a slide, and the source of a mask that was read from a file.

    The mask is None if all cells are wanted. `mpp` is that of level 0. Outlines of the classes in `source.exclude` are
    cut out: those in the file of the mask, and those of `source.regions`.

    Raises:
        MaskUnfit: the slide has no mask, or it cannot be used.
        ScaleError: the slide is too coarse for the network.
    """
    grid, name = Grid.of(thumbnail, slide.info.size), source.slide
    mask, origin = None, None
    if source.method == "masks" and source.mask is not None:
        origin = identify_mask_file(source.mask)
        mask = TissueMask(read_mask(source.mask, name, grid, slide.info.bounds, source.exclude))
    elif source.method == "masks" and source.fallback is None:
        raise MaskUnfit(
            f"{name} has no mask", expected=f"a file {name}.geojson or {name}.png",
            todo="add it and run the same command again, or use --tissue-fallback otsu",
        )  # fmt: skip
    elif source.method == "model":
        assert source.network is not None  # noqa: S101 - `read_tissue` gives it
        mask = find_by_network(source.network, slide, name, mpp, thumbnail)
    elif source.method != "none":
        mask = find_on_thumbnail(thumbnail, source.fallback or source.method)
    if source.exclude and source.regions is not None:
        mask = mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_))
        cut = grid.covered(
            outline.area for outline in source.regions.outlines if outline.name in source.exclude
        )
        mask = replace(mask, pixels=mask.pixels & ~cut)
    return mask, origin


TABLE, PAGE = "masks.csv", "index.html"
_EDGE, _OUTSIDE = (0, 150, 80), 0.4
_PAGE_SIDE = 300
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


@dataclass(frozen=True, slots=True)
class SlideMask:
    """The mask of a slide, (H, W) bool, its place on the slide, and the (H, W, 3) uint8 thumbnail of the same grid."""

    slide: str
    pixels: Mask
    grid: Grid
    bounds: RegionL0
    thumbnail: NDArray[np.uint8]


def measure_mask(
    mask: SlideMask, mpp: Mpp | None, source: str, notes: Sequence[str]
) -> SlideTissue:
    """Return areas and pieces of a mask; `mpp` is that of level 0."""
    pixels, scale = mask.pixels, None if mpp is None else mpp * mask.grid.side
    pieces, _ = cv2.connectedComponents(pixels.view(np.uint8), connectivity=8)
    count = (int(pixels.sum()), pixels.size)
    tissue, scanned = (None if scale is None else n * scale**2 / 1e6 for n in count)
    share = float(pixels.mean()) if pixels.size else 0.0
    return SlideTissue(
        mask.slide, tissue, scanned, share, pieces - 1, None, scale, source, tuple(notes)
    )


def write_slide_mask(folder: Path, mask: SlideMask, *, outlines: bool = True) -> NDArray[np.uint8]:
    """Write the mask of a slide and a picture of it, and return the picture, reduced for the page.

    Without `outlines`, the GeoJSON file is kept.
    """
    write_mask(folder, mask.slide, mask.pixels, mask.grid, mask.bounds, outlines=outlines)
    picture = draw_overlay(mask.thumbnail, mask.pixels)
    write_atomically(folder / f"{mask.slide}-overlay.jpg", encode_thumbnail(picture))
    return resize_image(picture, _PAGE_SIDE)


def draw_overlay(thumbnail: NDArray[np.uint8], mask: Mask) -> NDArray[np.uint8]:
    """Return a thumbnail, (H, W, 3) uint8, with the edge of a mask; areas outside are paler."""
    pale = (255 - _OUTSIDE * (255 - thumbnail.astype(np.float32))).astype(np.uint8)
    picture = np.where(mask[..., None], thumbnail, pale)
    kernel = np.ones((3, 3), np.uint8)
    edge = cv2.morphologyEx(mask.view(np.uint8), cv2.MORPH_GRADIENT, kernel)
    picture[edge.view(np.bool_)] = _EDGE
    return picture


def write_mask_table(result: TissueReport) -> None:
    """Sort the slides of a result, and write `masks.csv`.

    Raises:
        NothingToDo: no slide has a mask.
    """
    if not result.slides:
        reasons = "; ".join(result.failed.values()) or None
        raise NothingToDo("no tissue mask was written", found=reasons)
    result.slides.sort(key=lambda slide: slide.slide)
    names = [column.name for column in dataclasses.fields(SlideTissue)]
    rows = []
    for slide in result.slides:
        values = dataclasses.asdict(slide) | {"notes": "; ".join(slide.notes)}
        cells = (values[name] for name in names)
        rows.append([round(cell, 4) if isinstance(cell, float) else cell for cell in cells])
    write_table(result.folder / TABLE, names, rows)


@dataclass(frozen=True, slots=True)
class MaskTask:
    """A slide whose mask is to be written; pickled for a worker process.

    `mpp` is its scale in a table, `method` the recorded name of the algorithm or network. `force` replaces a mask that
    exists.
    """

    file: SlideFile
    mpp: Mpp | None
    default_mpp: Mpp | None
    source: TissueSource
    method: str
    folder: Path
    force: bool


def write_one_mask(task: MaskTask) -> tuple[SlideTissue, NDArray[np.uint8]]:
    """Write the mask of a slide, and return its numbers and a small picture; a task for a worker process.

    Raises:
        SlideError: it failed.
    """
    try:
        return _write_mask_of(task)
    except Exception as error:  # `slide_failure` raises what concerns all slides
        raise SlideError(slide_failure(error)) from error


def _write_mask_of(task: MaskTask) -> tuple[SlideTissue, NDArray[np.uint8]]:
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
            thumbnail = read_tissue_thumbnail(slide, mpp, levels, task.source)
        notes += [*info.notes, *filter(None, [colour_note(thumbnail.pixels)])]
        mask, origin, kept = _mask_of(task, slide, mpp, thumbnail)
        grid = Grid.of(thumbnail, info.size)
    source = origin or task.method
    slide_mask = SlideMask(task.file.id, mask.pixels, grid, info.bounds, thumbnail.pixels)
    row = measure_mask(slide_mask, mpp, source, [*notes, *mask.notes])
    picture = write_slide_mask(task.folder, slide_mask, outlines=not kept)
    return dataclasses.replace(row, threshold=mask.threshold), picture


def _mask_of(
    task: MaskTask, slide: Slide, mpp: Mpp | None, thumbnail: Thumbnail
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
    mask, origin = find_tissue(slide, mpp, thumbnail, task.source)
    return mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_)), origin, False
