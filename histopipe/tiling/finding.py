"""Find the tissue of a slide: by an algorithm, from a file, or by a network; and write it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import shapely
from shapely.affinity import translate

from histopipe.annotations.regions import Regions
from histopipe.annotations.rules import Frame
from histopipe.errors import (
    MaskUnfit,
    ScaleError,
    SlideError,
    SlideUnreadable,
)
from histopipe.geometry import Mpp
from histopipe.slides.scale import ResolvedMpp, resolve_mpp
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.slide_files import SlideFile, open_slide
from histopipe.slides.thumbnail import (
    THUMBNAIL_MPP,
    Thumbnail,
    colour_note,
    encode_thumbnail,
    read_thumbnail,
    usual_mpp,
)
from histopipe.slides.tile_check import NativeLevels
from histopipe.system.output import slide_failure
from histopipe.tiling.algorithms import (
    densities,
    find_glass,
    find_on_thumbnail,
    mean_and_chroma,
)
from histopipe.tiling.core_files import (
    CoreNames,
    find_names,
    read_cores,
    write_cores,
)
from histopipe.tiling.core_grid import Core, find_spots, with_pale
from histopipe.tiling.mask import Grid, Mask, TissueMask
from histopipe.tiling.mask_files import (
    MaskFile,
    SlideTissue,
    identify_mask_file,
    read_earlier_mask,
    read_mask_file,
    write_slide_mask,
)
from histopipe.tiling.network import find_by_network
from histopipe.tiling.spec import MaskRules, Tissue, TissueCheck

_LEAST_OVERLAP, _LEAST_MORE = 0.4, 0.2
"""Least overlap of a mask with the tissue, and how much more than in the other frame, to choose the frame by it."""
_USUAL_PATCH_UM = 64.0
"""Side, in µm, of patches for which masks of 16 µm are fine enough: four pixels."""


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
    *methods: str | None,
    patch_um: float | None = None,
) -> Thumbnail:
    """Read the thumbnail on which tissue is found. It is the same for all routes, since the plan must not depend on the route.

    Stores with `otsu-1` among their methods have thumbnails of 8 µm. Other large slides have 16 µm, unless the patches
    are small: their side is `patch_um` in µm, None if it is unknown.
    """
    fine = "otsu-1" in methods or (patch_um is not None and patch_um < _USUAL_PATCH_UM)
    return read_thumbnail(slide, mpp, levels, THUMBNAIL_MPP if fine else usual_mpp(slide, mpp))


def find_disagreement(mask: Mask, tissue: Mask) -> str:
    """Return how a mask differs from the tissue that is found on the thumbnail, (H, W) bool each; "" if it may be right.

    It is of other tissue if most of it is glass, it leaves most of the tissue, and it takes less than a random one would,
    or less than twice as much if it is as large as masks of all tissue. A region of interest may be small, and its outline
    may be loose.
    """
    both, of_mask, of_tissue = (int(part.sum()) for part in (mask & tissue, mask, tissue))
    glass, left = (1 - both / max(1, count) for count in (of_mask, of_tissue))
    least = 2 if of_mask > of_tissue / 2 else 1
    if not of_tissue or min(glass, left) <= 0.5 or both * mask.size >= least * of_mask * of_tissue:
        return ""
    return f"takes glass and leaves tissue: {glass:.0%} of it is glass, and it leaves {left:.0%} of the tissue that otsu-3 finds"


def checked_mask(
    content: MaskFile, thumbnail: Thumbnail, check: TissueCheck, where: str
) -> TissueMask:
    """Return the mask of a file in the frame that fits, with a note on its comparison with the tissue on the thumbnail.

    `where` names it in messages.

    Raises:
        MaskUnfit: it takes glass and leaves tissue, or its frame is unknown.
    """
    (frame, mask), *turned = sorted(content.by_frame.items())
    if content.is_ours or (check == "off" and not turned):
        return TissueMask(mask, notes=("its mask is ours: not compared",) * content.is_ours)
    tissue = find_on_thumbnail(thumbnail)
    unknown = "; ".join(tissue.notes) or "otsu-3 finds no tissue" * (not tissue.pixels.any())
    if turned:
        overlaps = {
            name: (pixels & tissue.pixels).sum() / max(1, (pixels | tissue.pixels).sum())
            for name, pixels in content.by_frame.items()
        }
        frame, other = sorted(overlaps, key=overlaps.__getitem__, reverse=True)
        if unknown or overlaps[frame] < max(_LEAST_OVERLAP, overlaps[other] + _LEAST_MORE):
            shares = ", ".join(f"{share:.0%} {name}" for name, share in overlaps.items())
            raise MaskUnfit(
                f"{where} fits the stored and the turned image",
                found=unknown or f"overlap with the tissue {shares}",
                todo="name its frame: --frame stored or --frame turned",
            )
        mask = content.by_frame[frame]
    notes = [f"its mask is in the {frame} frame"] * bool(turned)
    if unknown:
        return TissueMask(mask, notes=(*notes, f"its mask was not compared: {unknown}"))
    problem = "" if check == "off" else find_disagreement(mask, tissue.pixels)
    if problem and check == "fail":
        raise MaskUnfit(
            f"{where} {problem}",
            todo="check whether it is inverted (--tissue-values of a PNG mask) or of another slide; --tissue-check warn uses it",
        )
    return TissueMask(mask, notes=(*notes, *[f"its mask {problem}"] * bool(problem)))


def find_tissue(
    slide: Slide,
    name: str,
    mpp: Mpp | None,
    thumbnail: Thumbnail,
    method: Tissue,
    *,
    fallback: str | None = None,
    exclude: tuple[str, ...] = (),
    mask_file: Path | None = None,
    network: Path | None = None,
    regions: Regions | None = None,
    rules: MaskRules = MaskRules(),  # noqa: B008 - it cannot be changed
    frame: Frame = "auto",
) -> tuple[TissueMask | None, str | None]:
    """Return the tissue mask of a slide, and the source of a mask that was read from a file.

    The mask is None if all cells are wanted.

    Args:
        slide: the slide; its id is `name`.
        mpp: scale of level 0.
        thumbnail: picture on whose grid the mask is.
        method, fallback, exclude: settings `tissue`, `tissue_fallback` and `exclude` of a spec.
        mask_file, network: files of the slide's mask and of the network.
        regions: outlines of the slide. Those of the classes in `exclude` are cut out, like those in the file of the mask.
        rules, frame: settings for the file of the mask.

    Raises:
        MaskUnfit: the slide has no mask, it cannot be used, or it takes glass and leaves tissue.
        ScaleError: the slide is too coarse for the network.
    """
    grid, mask, origin = Grid.of(thumbnail, slide.info.size), None, None
    if method == "masks" and mask_file is not None:
        origin = identify_mask_file(mask_file)
        content = read_mask_file(
            mask_file,
            name,
            grid,
            slide.info.frame,
            exclude=exclude,
            values=rules.tissue_values,
            orientation=slide.info.orientation,
            frame=frame,
        )
        where = f"{name}: its mask {mask_file}"
        mask = checked_mask(content, thumbnail, rules.tissue_check, where)
        mask = replace(mask, notes=(*mask.notes, *content.notes))
    elif method == "masks" and fallback is None:
        raise MaskUnfit(
            f"{name} has no mask",
            expected=f"a file {name}.geojson or {name}.png",
            todo="add it and run the same command again, or use --tissue-fallback otsu",
        )
    elif method == "model":
        assert network is not None  # noqa: S101 - `read_tissue` gives it
        mask = find_by_network(network, slide, name, mpp, thumbnail)
        where, frames = f"{name}: the tissue of {network.name}", {"turned": mask.pixels}
        of_network = checked_mask(MaskFile(frames, False), thumbnail, rules.tissue_check, where)
        mask = replace(mask, notes=(*mask.notes, *of_network.notes))
    elif method != "none":
        mask = find_on_thumbnail(thumbnail, fallback or method)
    if exclude and regions is not None:
        mask = mask or TissueMask(np.ones(thumbnail.pixels.shape[:2], np.bool_))
        cut = (outline.area for outline in regions.outlines if outline.name in exclude)
        mask = replace(mask, pixels=mask.pixels & ~grid.covered(cut))
    return mask, origin


def inside_core(
    mask: TissueMask | None, core: Core, slide: Slide, thumbnail: Thumbnail
) -> TissueMask:
    """Return the part of a mask of the thumbnail of a core that is inside of its outline: neighbours may reach into it.

    Raises:
        MaskUnfit: the image is turned for display, and the outline is not.
    """
    if slide.info.orientation > 1:
        raise MaskUnfit("cores of an image with an EXIF orientation", todo="save it turned")
    corner = slide.info.frame.origin
    grid = Grid.of(thumbnail, slide.info.size)
    inside = grid.covered([translate(core.area, corner.x, corner.y)])
    return TissueMask(inside) if mask is None else replace(mask, pixels=mask.pixels & inside)


@dataclass(frozen=True, slots=True)
class SlideCores:
    """The cores of a slide, and why all of them are uncertain, or "".

    `thumbnail` is the scanned area as JPEG, and `side` that of its pixels in level-0 pixels.
    """

    slide: str
    cores: list[Core]
    reason: str
    thumbnail: bytes
    side: float


def write_one_mask(
    task: tuple[SlideFile, Mpp | None, Path | CoreNames | None],
    *,
    folder: Path,
    default_mpp: Mpp | None,
    method: Tissue,
    network: Path | None,
    recorded_method: str,
    force: bool,
    rules: MaskRules,
    frame: Frame,
) -> SlideTissue | SlideCores:
    """Write the mask of a slide, or its cores, and return its numbers, or these; a task for a worker process.

    Args:
        task: the slide, its scale in a table, and the file of its mask, or the names of its cores.
        folder: folder of the masks.
        default_mpp: scale of slides without one.
        method, network: setting `tissue` of a spec, and file of the network.
        recorded_method: recorded name of the algorithm or network.
        force: replace a mask that exists.
        rules, frame: settings for the file of the mask.

    Raises:
        SlideError: it failed.
    """
    file, mpp, about = task
    try:
        if file.problem is not None:
            raise SlideUnreadable(f"{file.id}: {file.problem}")  # noqa: TRY301
        with open_slide(file.path) as slide:
            info = slide.info
            scale, notes = resolve_scale(file.id, info, mpp, default_mpp, required=False)
            mpp = scale.mpp if scale else None
            with NativeLevels(slide, file.files) as levels:
                thumbnail = read_tissue_thumbnail(slide, mpp, levels, method)
            grid, path = Grid.of(thumbnail, info.size), folder / f"{file.id}.geojson"
            kept = path.exists() and not force
            if isinstance(about, CoreNames):
                cores, reason = read_cores(path) if kept else [], ""
                if not kept:
                    mask, _ = find_tissue(slide, file.id, mpp, thumbnail, method, network=network)
                    cores, reason = find_cores(thumbnail, mask, about, grid, mpp)
                    write_cores(path, cores)
                picture = encode_thumbnail(thumbnail.pixels)
                return SlideCores(file.id, cores, reason, picture, grid.side)
            mask, origin = (
                read_earlier_mask(
                    path, file.id, grid, info.bounds, orientation=info.orientation, frame=frame
                )
                if kept
                else find_tissue(
                    slide,
                    file.id,
                    mpp,
                    thumbnail,
                    method,
                    mask_file=about,
                    network=network,
                    rules=rules,
                    frame=frame,
                )
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
            source=origin or recorded_method,
            outlines=not kept,
            orientation=info.orientation,
            notes=[*notes, *info.notes, *filter(None, [colour_note(thumbnail.pixels)])],
        )
    except Exception as error:  # `slide_failure` raises what concerns all slides
        raise SlideError(slide_failure(error)) from error


def find_cores(
    thumbnail: Thumbnail, mask: TissueMask | None, names: CoreNames, grid: Grid, mpp: Mpp | None
) -> tuple[list[Core], str]:
    """Return the cores in a tissue mask of a thumbnail, and why all of them are uncertain, or "".

    `grid` is that of the thumbnail, and `mpp` the scale of level 0; None if it is unknown.

    Raises:
        MaskUnfit: there is no grid, or its names are for another one; or the places need a scale.
    """
    if names.unit is not None and mpp is None:
        raise MaskUnfit("the places of cores are in µm, and the scale is unknown", todo="--mpp-csv")
    pixels = np.ones(thumbnail.pixels.shape[:2], np.bool_) if mask is None else mask.pixels
    to_pixels = (1.0 if names.unit is None else names.unit / (mpp or 1.0)) / grid.side
    cores, reason = find_names(find_spots(pixels), names, to_pixels)
    glass = find_glass(cv2.pyrDown(thumbnail.pixels).astype(np.uint8))
    if glass is not None:
        cores = with_pale(cores, mean_and_chroma(densities(thumbnail.pixels, glass))[0], reason)
    return [
        replace(
            core,
            area=shapely.transform(core.area, lambda points: points * grid.side),
            case=names.cases.get(core.name, ""),
        )
        for core in cores
    ], reason
