"""Export the tissue masks of a store, with the same files as `tissue`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import GEOJSON
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.reports.tissue import read_journals, write_table_and_page
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import path_within
from histopipe.system.filesystems import roomy
from histopipe.system.output import Progress, slide_failure
from histopipe.system.shared_folders import PARTS, Share
from histopipe.tiling.spec import recorded_tissue
from histopipe.tissue_masks.mask import Grid, TissueMask
from histopipe.tissue_masks.mask_files import TissueReport, read_png_grid, write_slide_mask


def export_masks(store: Path, *, out: Path, share: Share, progress: Progress) -> TissueReport:
    """Write the tissue masks of the complete slides of a store, with the same files as `tissue`; see `export`.

    Raises:
        UsageError: the folder has masks, which may have been corrected.
        NothingToDo: the store has no masks.
    """
    if any(out.rglob(f"*{GEOJSON[0]}")) and not (out / PARTS).is_dir():
        raise UsageError(
            f"{out} has masks already",
            expected="a folder without masks",
            todo="choose another --out: they may have been corrected",
        )
    result = TissueReport(out)
    with Store(store) as opened, share.held(out), roomy(out):
        complete = opened.complete
        if not complete:
            raise NothingToDo(f"{store} has no complete slide", todo="see `histopipe info`")
        chosen = share.chosen({record.id: record.planned for record in complete.values()})
        read_journals(result, share, chosen)
        mine = {n: r for n, r in complete.items() if r.id in chosen and not share.join}
        with progress.bar("exporting masks", unit="slides", total=len(mine)) as bar:
            for slide, record in mine.items():
                where, notes = f"{store}, slide {record.id}", list(record.notes)
                thumbnail, mask = opened.thumbnail(slide), opened.thumbnail(slide, "mask")
                try:
                    if thumbnail is None or mask is None:
                        raise NothingToDo("the store has no tissue mask of it")  # noqa: TRY301
                    pixels = decode_picture(mask, f"{where}: tissue mask", mode="L") > 0
                    grid = read_png_grid(bytes(mask))
                    if grid is None:
                        grid = _estimate_grid(record, pixels)
                        notes.append(
                            "outlines may be off by a pixel: an older version wrote the store"
                        )
                    left, top, width, height = record.bounds
                    row = write_slide_mask(
                        out,
                        record.id,
                        TissueMask(pixels),
                        grid,
                        bounds=RegionL0(PointL0(left, top), Size(width, height)),
                        thumbnail=decode_picture(thumbnail, where),
                        mpp=None if record.mpp is None else Mpp(record.mpp),
                        source=record.mask or str(recorded_tissue(opened.spec)),
                        notes=notes,
                        orientation=record.orientation or 1,
                        # Of a part that is done again: it may have been corrected.
                        outlines=not path_within(out, f"{record.id}{GEOJSON[0]}").exists(),
                    )
                    result.slides.append(row)
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    result.failed[record.id] = slide_failure(error)
                bar.advance()
        write_table_and_page(result, share)
    return result


def _estimate_grid(record: SlideRecord, mask: NDArray[np.bool_]) -> Grid:
    """Return the grid of a stored mask from its size: older stores do not record it."""
    left, top, width, height = record.bounds
    size, slide = Size(mask.shape[1], mask.shape[0]), Size(record.width, record.height)
    longer, count = max(width, height), max(*mask.shape, 1)
    # Usually a whole number: the last pixel is only in part inside the slide.
    sides = range(max(1, longer // count), math.ceil(longer / max(1, count - 1)) + 1)
    exact = (side for side in sides if Size(-(-width // side), -(-height // side)) == size)
    return Grid(left, top, next(exact, longer / count), size, slide)
