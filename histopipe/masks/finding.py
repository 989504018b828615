"""Find the tissue of a slide by the method of its tiling spec: an algorithm, a file, or a network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from histopipe.annotations.regions import Regions
from histopipe.errors import MaskUnfit
from histopipe.geometry import Mpp
from histopipe.masks.grid import Grid
from histopipe.masks.mask_files import read_mask, source_of
from histopipe.masks.segmenter import segmented
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import TilingSpec
from histopipe.tiling.tissue import tissue_mask


@dataclass(frozen=True, slots=True)
class TissueSource:
    """What else determines the tissue of a slide: its id, the files of its mask and of the network, and outlines."""

    slide: str
    mask: Path | None = None
    network: Path | None = None
    regions: Regions | None = None


def find_tissue(
    slide: Slide, mpp: Mpp | None, thumbnail: Thumbnail, spec: TilingSpec, source: TissueSource
) -> tuple[TissueMask | None, str | None]:
    """Return the tissue mask of a slide, and the source of a mask that was read from a file.

    The mask is None if all cells are wanted. `mpp` is that of level 0. Outlines of the classes in `spec.exclude` are cut
    out: those in the file of the mask, and those of `source.regions`.

    Raises:
        MaskUnfit: the slide has no mask, or it cannot be used.
        ScaleError: the slide is too coarse for the network.
    """
    grid, name = Grid.of(thumbnail, slide.info.size), source.slide
    mask, origin = None, None
    if spec.tissue == "masks" and source.mask is not None:
        origin = source_of(source.mask)
        mask = TissueMask(read_mask(source.mask, name, grid, slide.info.bounds, spec.exclude))
    elif spec.tissue == "masks" and spec.tissue_fallback is None:
        raise MaskUnfit(
            f"{name} has no mask", expected=f"a file {name}.geojson or {name}.png",
            todo="add it and run the same command again, or use --tissue-fallback otsu",
        )  # fmt: skip
    elif spec.tissue == "model":
        assert source.network is not None  # noqa: S101 - `read_request` gives it
        mask = segmented(source.network, slide, name, mpp, thumbnail)
    elif spec.tissue != "none":
        mask = tissue_mask(thumbnail, spec.tissue_fallback or spec.tissue)
    if spec.exclude and source.regions is not None:
        mask = mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_))
        cut = grid.covered(
            outline.area for outline in source.regions.outlines if outline.name in spec.exclude
        )
        mask = replace(mask, pixels=mask.pixels & ~cut)
    return mask, origin
