"""A folder of tissue masks: files of each slide, a table, and a page with the pictures of all slides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ExitCode, NothingToDo
from histopipe.geometry import Mpp, RegionL0
from histopipe.ingestion.patch_source import encode_thumbnail
from histopipe.masks.grid import Grid, Mask
from histopipe.masks.mask_files import write_mask
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
from histopipe.system.csv_files import write_table
from histopipe.system.files import write_atomically
from histopipe.system.result import Result, counted, exit_code_of

TABLE, PAGE = "masks.csv", "index.html"
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
    write_atomically(folder / f"{mask.slide}-overlay.jpg", encode_thumbnail(picture))
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
    names = [column.name for column in dataclasses.fields(SlideTissue)]
    rows = []
    for slide in result.slides:
        values = dataclasses.asdict(slide) | {"notes": "; ".join(slide.notes)}
        cells = (values[name] for name in names)
        rows.append([round(cell, 4) if isinstance(cell, float) else cell for cell in cells])
    write_table(result.folder / TABLE, names, rows)
    _page(result, pictures).write(result.folder / PAGE)


def _page(result: TissueReport, pictures: dict[str, NDArray[np.uint8]]) -> Page:
    page = Page(f"Tissue: {result.folder.name}", f"masks of {counted(len(result.slides), 'slide')}")
    page.add(
        "Failed", Notes([f"{k}: {v}" for k, v in result.failed.items()]) if result.failed else None
    )
    gallery = [
        Picture.of(f"slide-{i}", _caption(slide), pictures[slide.slide])
        for i, slide in enumerate(result.slides)
        if slide.slide in pictures
    ]
    page.add("Slides", Gallery("", gallery))
    columns = [
        Column("slide"), Column("tissue, mm²", number=True), Column("share", number=True),
        Column("pieces", number=True), Column("threshold", number=True), Column("source"), Column("notes"),
    ]  # fmt: skip
    rows = [
        Row([
            Cell(slide.slide), number(slide.tissue_mm2, 2), number(100 * slide.share, 1, " %"), number(slide.pieces),
            number(slide.threshold, 3), Cell(slide.source), Cell("; ".join(slide.notes)),
        ])
        for slide in result.slides
    ]  # fmt: skip
    page.add("Numbers", Table("Tissue by slide", columns, rows))
    return page


def _caption(slide: SlideTissue) -> str:
    area = f"{slide.share:.0%}" if slide.tissue_mm2 is None else f"{slide.tissue_mm2:,.1f} mm²"
    facts = [slide.slide, area, counted(slide.pieces, "piece") if slide.pieces else "no tissue"]
    return " · ".join([*facts, *slide.notes])
