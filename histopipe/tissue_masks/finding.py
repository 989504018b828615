"""Find the tissue of a slide: by an algorithm, from a file, or by a network; and write it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.regions import Regions
from histopipe.errors import (
    MaskUnfit,
    ScaleError,
    SlideError,
    SlideUnreadable,
)
from histopipe.geometry import Mpp
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import ResolvedMpp, resolve_mpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.thumbnail import (
    THUMBNAIL_MPP,
    Thumbnail,
    colour_note,
    read_thumbnail,
    usual_mpp,
)
from histopipe.slides.tiles.check import NativeLevels
from histopipe.system.output import slide_failure
from histopipe.tissue_masks import NEWEST, Tissue
from histopipe.tissue_masks.algorithms import find_on_thumbnail
from histopipe.tissue_masks.mask import Grid, TissueMask
from histopipe.tissue_masks.mask_files import (
    SlideTissue,
    identify_mask_file,
    read_mask,
    write_slide_mask,
)
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


def resolve_scale(
    name: str, info: SlideInfo, from_csv: Mpp | None, default: Mpp | None, *, required: bool
) -> tuple[ResolvedMpp | None, list[str]]:
    """Return the scale of a slide, and notes. If it is not required, an unknown scale is only a note.

    Raises:
        ScaleError: the scale is unknown, and required.
    """
    try:
        scale = resolve_mpp(name, info, from_csv=from_csv, default=default)
    except ScaleError as error:
        if required:
            raise
        return None, [f"scale unknown: {error.what}"]
    return scale, [scale.note] if scale.note else []


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
    return read_thumbnail(slide, mpp, levels, THUMBNAIL_MPP if fine else usual_mpp(slide, mpp))


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
    grid, name, mask, origin = Grid.of(thumbnail, slide.info.size), source.slide, None, None
    if source.method == "masks" and source.mask is not None:
        origin = identify_mask_file(source.mask)
        mask = TissueMask(read_mask(source.mask, name, grid, slide.info.bounds, source.exclude))
    elif source.method == "masks" and source.fallback is None:
        raise MaskUnfit(
            f"{name} has no mask",
            expected=f"a file {name}.geojson or {name}.png",
            todo="add it and run the same command again, or use --tissue-fallback otsu",
        )
    elif source.method == "model":
        assert source.network is not None  # noqa: S101 - `read_tissue` gives it
        mask = find_by_network(source.network, slide, name, mpp, thumbnail)
    elif source.method != "none":
        mask = find_on_thumbnail(thumbnail, source.fallback or source.method)
    if source.exclude and source.regions is not None:
        mask = mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_))
        cut = (o.area for o in source.regions.outlines if o.name in source.exclude)
        mask = replace(mask, pixels=mask.pixels & ~grid.covered(cut))
    return mask, origin


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
