"""Export the tissue masks of a store as files, to check, to correct in QuPath, and to ingest again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.read import GEOJSON
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.reports.tissue import write_table_and_page
from histopipe.runs import folder as run_folder
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.filesystems import roomy
from histopipe.system.progress import Progress
from histopipe.system.result import slide_failure
from histopipe.tiling.spec import recorded_tissue
from histopipe.tissue_masks.grid import Grid
from histopipe.tissue_masks.mask_files import read_png_grid
from histopipe.tissue_masks.mask_folder import (
    SlideMask,
    TissueReport,
    measure_mask,
    write_slide_mask,
)

_INEXACT = "outlines may be off by a pixel: an older version wrote the store"


def export_masks(store: Path, *, out: Path, progress: Progress) -> TissueReport:
    """Write the tissue masks of the complete slides of a store, with the same files as `tissue`; see `export`.

    Raises:
        UsageError: the folder has masks, which may have been corrected.
        NothingToDo: the store has no masks.
    """
    if any(out.rglob(f"*{GEOJSON[0]}")):
        raise UsageError(
            f"{out} has masks already",
            expected="a folder without masks",
            todo="choose another --out: they may have been corrected",
        )
    result = TissueReport(out)
    pictures: dict[str, NDArray[np.uint8]] = {}
    with Store(store) as opened, run_folder.held(out), roomy(out):
        total = len(opened.complete)
        if not total:
            raise NothingToDo(f"{store} has no complete slide", todo="see `histopipe info`")
        source = str(recorded_tissue(opened.spec))
        with progress.bar("exporting masks", unit="slides", total=total) as bar:
            for slide, record in opened.complete.items():
                where = f"{store}, slide {record.id}"
                thumbnail, mask = opened.thumbnail(slide), opened.thumbnail(slide, "mask")
                try:
                    if thumbnail is None or mask is None:
                        raise NothingToDo("the store has no tissue mask of it")  # noqa: TRY301
                    pixels = decode_picture(mask, f"{where}: tissue mask", mode="L") > 0
                    grid, exact = _grid(record, read_png_grid(bytes(mask)), pixels)
                    picture = decode_picture(thumbnail, where)
                    slide_mask = SlideMask(record.id, pixels, grid, _bounds(record), picture)
                    pictures[record.id] = write_slide_mask(out, slide_mask)
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    result.failed[record.id] = slide_failure(error)
                else:
                    mpp = None if record.mpp is None else Mpp(record.mpp)
                    notes = record.notes if exact else [*record.notes, _INEXACT]
                    result.slides.append(
                        measure_mask(slide_mask, mpp, record.mask or source, notes)
                    )
                bar.advance()
        write_table_and_page(result, pictures)
    return result


def _bounds(record: SlideRecord) -> RegionL0:
    left, top, width, height = record.bounds
    return RegionL0(PointL0(left, top), Size(width, height))


def _grid(record: SlideRecord, grid: Grid | None, mask: NDArray[np.bool_]) -> tuple[Grid, bool]:
    """Return the grid of a stored mask, and whether it is exact: older stores do not record it."""
    if grid is not None:
        return grid, True
    size, bounds = Size(mask.shape[1], mask.shape[0]), _bounds(record)
    origin = bounds.origin
    slide = Size(record.width, record.height)
    return Grid(origin.x, origin.y, _side(bounds, size), size, slide), False


def _side(bounds: RegionL0, size: Size) -> float:
    """Return the side of a pixel of a thumbnail, in level-0 pixels, of which only the sizes are known."""
    longer = max(bounds.size.width, bounds.size.height)
    count = max(size.width, size.height, 1)
    # Usually a whole number: the last pixel is only in part inside the slide.
    for side in range(max(1, longer // count), math.ceil(longer / max(1, count - 1)) + 1):
        shape = (-(-bounds.size.width // side), -(-bounds.size.height // side))
        if shape == (size.width, size.height):
            return float(side)
    return longer / count
