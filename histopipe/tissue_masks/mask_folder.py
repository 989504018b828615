"""A folder of tissue masks: files of each slide, and a table of the numbers of all slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import (
    ExitCode,
    NothingToDo,
    SlideError,
    SlideUnreadable,
)
from histopipe.geometry import Mpp, RegionL0
from histopipe.slides.readers import open_slide
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.thumbnail import (
    colour_note,
    encode_thumbnail,
    resize_image,
)
from histopipe.slides.tiles.check import NativeLevels
from histopipe.system.csv_files import write_table
from histopipe.system.files import write_atomically
from histopipe.system.output import Result, counted, exit_code_of, slide_failure
from histopipe.tissue_masks.finding import (
    TissueSource,
    find_tissue,
    read_tissue_thumbnail,
    resolve_scale,
)
from histopipe.tissue_masks.mask import Grid, TissueMask
from histopipe.tissue_masks.mask_files import read_mask, write_mask

TABLE, PAGE = "masks.csv", "index.html"
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
        without = f", {blank} without tissue" * bool(blank)
        lines = [f"masks of {counted(len(self.slides), 'slide')}{without}: {self.folder / PAGE}"]
        return "\n".join([*lines, *(f"failed {name}: {why}" for name, why in self.failed.items())])


def write_slide_mask(
    folder: Path,
    slide: str,
    mask: TissueMask,
    grid: Grid,
    *,
    bounds: RegionL0,
    thumbnail: NDArray[np.uint8],
    mpp: Mpp | None,
    source: str,
    notes: Sequence[str],
    outlines: bool = True,
) -> tuple[SlideTissue, NDArray[np.uint8]]:
    """Write the mask of a slide and a picture of it. Return its numbers, and the picture, reduced for the page.

    `bounds` is the scanned part of the slide, `thumbnail` has the (H, W, 3) uint8 pixels of the mask's grid, and `mpp` is
    that of level 0. Without `outlines`, the GeoJSON file is kept.
    """
    pixels, scale = mask.pixels, None if mpp is None else mpp * grid.side
    pieces, _ = cv2.connectedComponents(pixels.view(np.uint8), connectivity=8)
    tissue, scanned = (
        None if scale is None else count * scale**2 / 1e6
        for count in (int(pixels.sum()), pixels.size)
    )
    row = SlideTissue(
        slide,
        tissue,
        scanned,
        float(pixels.mean()) if pixels.size else 0.0,
        pieces - 1,
        mask.threshold,
        scale,
        source,
        (*notes, *mask.notes),
    )
    write_mask(folder, slide, pixels, grid, bounds, outlines=outlines)
    # The picture has the edge of the mask. Areas outside are paler.
    pale = (255 - 0.4 * (255 - thumbnail.astype(np.float32))).astype(np.uint8)
    picture = np.where(pixels[..., None], thumbnail, pale)
    edge = cv2.morphologyEx(pixels.view(np.uint8), cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8))
    picture[edge.view(np.bool_)] = (0, 150, 80)
    write_atomically(folder / f"{slide}-overlay.jpg", encode_thumbnail(picture))
    return row, resize_image(picture, _PAGE_SIDE)


def write_mask_table(result: TissueReport) -> None:
    """Sort the slides of a result, and write `masks.csv`.

    Raises:
        NothingToDo: no slide has a mask.
    """
    if not result.slides:
        raise NothingToDo(
            "no tissue mask was written", found="; ".join(result.failed.values()) or None
        )
    result.slides.sort(key=lambda slide: slide.slide)
    rows = [asdict(slide) | {"notes": "; ".join(slide.notes)} for slide in result.slides]
    cells = [[round(v, 4) if isinstance(v, float) else v for v in row.values()] for row in rows]
    write_table(result.folder / TABLE, list(rows[0]), cells)


def write_one_mask(
    task: tuple[SlideFile, Mpp | None, TissueSource],
    *,
    folder: Path,
    default_mpp: Mpp | None,
    method: str,
    force: bool,
) -> tuple[SlideTissue, NDArray[np.uint8]]:
    """Write the mask of a slide, and return its numbers and a small picture; a task for a worker process.

    Args:
        task: the slide, its scale in a table, and how its tissue is found.
        folder: folder of the masks.
        default_mpp: scale of slides without one.
        method: recorded name of the algorithm or network.
        force: replace a mask that exists.

    Raises:
        SlideError: it failed.
    """
    file, mpp, source = task
    try:
        if file.problem is not None:
            raise SlideUnreadable(f"{file.id}: {file.problem}")  # noqa: TRY301
        with open_slide(file.path) as slide:
            info = slide.info
            scale, notes = resolve_scale(file.id, info, mpp, default_mpp, required=False)
            mpp = scale.mpp if scale else None
            with NativeLevels(slide, file.files) as levels:
                thumbnail = read_tissue_thumbnail(slide, mpp, levels, source)
            grid, path = Grid.of(thumbnail, info.size), folder / f"{file.id}.geojson"
            kept = path.exists() and not force
            mask, origin = (
                (TissueMask(read_mask(path, file.id, grid, info.bounds)), path.name)
                if kept
                else find_tissue(slide, mpp, thumbnail, source)
            )
        mask = mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_))
        return write_slide_mask(
            folder,
            file.id,
            mask,
            grid,
            bounds=info.bounds,
            thumbnail=thumbnail.pixels,
            mpp=mpp,
            source=origin or method,
            outlines=not kept,
            notes=[*notes, *info.notes, *filter(None, [colour_note(thumbnail.pixels)])],
        )
    except Exception as error:  # `slide_failure` raises what concerns all slides
        raise SlideError(slide_failure(error)) from error
