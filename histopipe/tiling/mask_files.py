"""Files of tissue masks: GeoJSON that QuPath can edit, PNG, and a picture for people; and the numbers of a mask.

`SLIDE.geojson` has the outlines of the tissue with the class `Tissue`. `SLIDE.png` has a white pixel where there is
tissue. Files of other tools can be read, too. If a slide has both, the GeoJSON is read: it can be corrected.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from shapely.affinity import translate
from shapely.geometry.base import BaseGeometry

from histopipe.annotations.annotation_files import (
    GEOJSON,
    annotation_files,
    file_bytes,
    match_files,
    read_annotations,
)
from histopipe.annotations.regions import Outline, turned
from histopipe.annotations.rules import Frame
from histopipe.errors import ExitCode, MaskUnfit, UsageError, reported_as
from histopipe.geometry import Mpp, RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.thumbnail import encode_thumbnail
from histopipe.system.files import path_within, write_atomically
from histopipe.system.output import Result, counted, exit_code_of
from histopipe.tiling.mask import Grid, Mask, TissueMask, find_tissue_values

TISSUE = "Tissue"
"""Class of the outlines of tissue."""
PNG = ".png"
_KEY = "histopipe"
"""Key of the grid in a PNG file and in GeoJSON."""
_FRAME = "histopipe-frame"
"""Key in GeoJSON of the frame of its outlines."""
_MADE = "histopipe-made"
"""Key in GeoJSON of how the mask was made, with a checksum of the outlines: nobody has changed them."""
PAGE = "index.html"
_MOST_PIXELS, _PART = 400_000_000, 8
"""Of PNG masks; and outlines inside the first eighth of the slide's sides are hardly ever in pixels of level 0."""


@dataclass(frozen=True, slots=True)
class SlideTissue:
    """The tissue of one slide.

    Attributes:
        slide: slide id.
        tissue_mm2, scanned_mm2, mask_mpp: areas, and µm per pixel of the mask; None if the scale is unknown.
        share: fraction of the scanned area, 0 to 1.
        pieces, threshold: number of connected parts, and threshold of the algorithm in its unit, None if there is none.
        source, notes: algorithm, or where the mask comes from; and remarks.
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
    """Result of `tissue`, or of exporting the masks of a store: folder, slides, and reasons of failures by slide.

    With cores: their number by slide and state, and in `uncertain` why all of a slide are uncertain.
    """

    folder: Path
    slides: list[SlideTissue] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cores: dict[str, dict[str, int]] = field(default_factory=dict)
    uncertain: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command."""
        return exit_code_of(len(self.failed), len(self.slides) + len(self.cores))

    def __str__(self) -> str:
        blank = sum(not slide.pieces for slide in self.slides)
        without = f", {blank} without tissue" * bool(blank)
        masks = f"masks of {counted(len(self.slides), 'slide')}{without}: {self.folder / PAGE}"
        return "\n".join(
            [
                *[masks] * (not self.cores),
                *(
                    f"{name}: {', '.join(f'{n} {state}'.replace('core', 'named') for state, n in states.items())}: {self.folder / name}.html"
                    for name, states in self.cores.items()
                ),
                *(f"uncertain {name}: {why}" for name, why in self.uncertain.items()),
                *(f"failed {name}: {why}" for name, why in self.failed.items()),
            ]
        )


def find_masks(folder: Path, names: SlideNames) -> dict[str, Path]:
    """Return the mask files of a folder by slide id: `SLIDE.geojson`, `SLIDE.json` or `SLIDE.png`.

    Raises:
        UsageError: there is no mask, no mask has the name of a slide, or two match the same slide.
    """
    files = annotation_files(folder, (*GEOJSON, PNG))
    if not files:
        raise UsageError(
            f"{folder} contains no masks", expected=f"files SLIDE{GEOJSON[0]} or SLIDE{PNG}"
        )
    masks: dict[str, Path] = {}
    for suffixes in ((PNG,), GEOJSON):  # GeoJSON last: it replaces the PNG file of the same slide
        exact, loose, _ = match_files(
            (path for path in files if path.suffix.lower() in suffixes), folder, names
        )
        masks |= loose | exact
    if not masks:
        raise UsageError(
            f"{folder}: no mask has the name of a slide",
            found=files[0].name,
            expected=f"a name such as {names.nearest(files[0].stem)}{GEOJSON[0]}",
        )
    return names.with_cores(masks)


def identify_mask_file(path: Path) -> str:
    """Return the source of a mask: the name and the CRC-32 of its file.

    Raises:
        MaskUnfit: the file cannot be read.
    """
    with reported_as(MaskUnfit, f"{path} cannot be read", (OSError, UsageError)):
        return f"{path.name}, crc32 {zlib.crc32(file_bytes(path)):08x}"


@dataclass(frozen=True, slots=True)
class MaskFile:
    """The mask of a slide in a file, (H, W) bool by the frame in which it is read; two if both fit.

    `is_ours` if histopipe wrote it, and nobody has edited its outlines.
    """

    by_frame: dict[str, Mask]
    is_ours: bool
    notes: tuple[str, ...] = ()


def read_mask_file(
    path: Path,
    slide: str,
    grid: Grid,
    bounds: RegionL0,
    *,
    exclude: Collection[str] = (),
    values: str | None = None,
    orientation: int = 1,
    frame: Frame = "auto",
) -> MaskFile:
    """Read the mask of a slide on a grid. `bounds` is the scanned part of the slide.

    Args:
        path, slide, grid, bounds: the file, the id of the slide, the grid of its thumbnail, and its scanned part.
        exclude: classes of outlines that are cut out.
        values: setting `tissue_values`.
        orientation, frame: that of `Turn`, and the setting `frame`.

    Raises:
        MaskUnfit: the mask is for a slide of another size, has no tissue, crosses itself, or is in another coordinate
            frame. Only files that histopipe wrote, and that were not edited, may have no tissue.
    """
    turn = Turn(orientation, grid.slide)
    if path.suffix.lower() == PNG:
        return _read_png(path, slide, grid, bounds, values=values, turn=turn, frame=frame)
    outlines = read_outlines(path, slide, bounds)
    collection = json.loads(path.read_bytes().decode("utf-8-sig"))  # was read before
    written = Grid.from_text(collection.get(_KEY) if isinstance(collection, dict) else None)
    _check_size(path, slide, written, grid.slide)
    # Earlier versions wrote the turned frame.
    frame = collection.get(_FRAME, "turned") if written is not None else frame
    if frame != "turned":
        outlines = turned(outlines, turn)
    frame = "turned" if frame == "turned" else "stored"
    if written is not None and not outlines:
        return MaskFile({frame: np.zeros((grid.size.height, grid.size.width), np.bool_)}, True)
    is_cut = [outline.excluded or outline.name in exclude for outline in outlines]
    drawn = [outline for outline, cut in zip(outlines, is_cut, strict=True) if not cut]
    named = [outline for outline in drawn if (outline.name or "").casefold() == TISSUE.casefold()]
    areas = [outline.area for outline in named or drawn]
    if not areas:
        raise _unfit(
            path,
            slide,
            "it has no outline",
            f"outlines of tissue, with the class {TISSUE}",
            "leave the slide out (--slide-list) if it has no tissue",
        )
    check_frame(path, slide, areas, grid)
    mask = grid.covered(areas)
    if not mask.any():
        raise _unfit(path, slide, "its outlines are smaller than a pixel of the thumbnail")
    mask &= ~grid.covered(o.area for o, cut in zip(outlines, is_cut, strict=True) if cut)
    ignored = len(drawn) - len(named) if named else 0
    note = f"{counted(ignored, 'outline')} without the class {TISSUE} not used"
    is_ours = written is not None and _made(collection) is not None
    return MaskFile({frame: mask}, is_ours, (note,) * bool(ignored))


def read_outlines(path: Path, slide: str, bounds: RegionL0) -> list[Outline]:
    """Return the outlines of a file in level-0 pixels; QuPath counts from the corner of the scanned area.

    Raises:
        MaskUnfit: the file cannot be read, or an outline crosses itself or has no area.
    """
    try:
        outlines = read_annotations(path)
    except UsageError as error:
        raise MaskUnfit(
            f"{slide}: {error.what}", found=error.found, expected=error.expected
        ) from error
    if outlines.invalid:
        raise _unfit(
            path, slide, outlines.invalid[0], todo="correct the outline, in QuPath for example"
        )
    moved = (bounds.origin.x, bounds.origin.y) if outlines.frame == "bounds" else (0, 0)
    return [replace(outline, area=translate(outline.area, *moved)) for outline in outlines.entries]


def write_mask(
    folder: Path,
    slide: str,
    mask: TissueMask,
    grid: Grid,
    bounds: RegionL0,
    *,
    source: str = "",
    outlines: bool = True,
    orientation: int = 1,
) -> None:
    """Write `SLIDE.png` and, with `outlines`, `SLIDE.geojson`, each by one rename. A slide id may have folders.

    Outlines are in the stored frame, as QuPath shows the image, of an `orientation` of `Turn`.
    """
    path = path_within(folder, f"{slide}{PNG}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode_png(mask.pixels, grid))
    if outlines:
        origin = (bounds.origin.x, bounds.origin.y)  # QuPath counts from the scanned area
        stored = Turn(orientation, grid.slide).stored
        areas = shapely.transform(
            grid.outlines(mask.pixels), lambda points: np.round(stored(points) - origin, 2)
        )
        features = tissue_features(areas, (0, 0))
        made = {"source": source, "threshold": mask.threshold, "notes": mask.notes}
        value = {
            "type": "FeatureCollection",
            "features": features,
            _KEY: grid.to_text(),
            _FRAME: "stored",
            _MADE: made | {"crc32": _crc_of(features)},
        }
        text = json.dumps(value, separators=(",", ":"))
        write_atomically(path_within(folder, f"{slide}{GEOJSON[0]}"), text)


def tissue_features(areas: Iterable[BaseGeometry], corner: tuple[int, int]) -> list[dict[str, Any]]:
    """Return areas as features of QuPath with the class of tissue. `corner` is the pixel from which it counts."""
    return [
        {
            "type": "Feature",
            "geometry": shapely.geometry.mapping(translate(area, -corner[0], -corner[1])),
            "properties": {
                "objectType": "annotation",
                "classification": {"name": TISSUE, "color": [0, 160, 90]},
            },
        }
        for area in areas
    ]


def _crc_of(features: Any) -> int:
    return zlib.crc32(json.dumps(features).encode())


def _made(content: Any) -> dict[str, Any] | None:
    """Return how the mask in a GeoJSON file was made; None if it was edited, or another tool wrote it."""
    made = content.get(_MADE) if isinstance(content, dict) else None
    is_same = isinstance(made, dict) and made.get("crc32") == _crc_of(content["features"])
    return made if is_same else None


def read_earlier_mask(
    path: Path, slide: str, grid: Grid, bounds: RegionL0, *, orientation: int, frame: Frame
) -> tuple[TissueMask, str]:
    """Return the mask of a GeoJSON file in the folder of masks, as `read_mask_file`, and its source.

    The source is the file, unless it is as `write_mask` has written it: then it is where that mask came from.
    """
    mask = read_mask_file(path, slide, grid, bounds, orientation=orientation, frame=frame)
    (pixels,) = mask.by_frame.values()
    made = _made(json.loads(path.read_bytes().decode("utf-8-sig")))
    if made is not None:
        return TissueMask(pixels, made["threshold"], tuple(made["notes"])), made["source"]
    return TissueMask(pixels, notes=mask.notes), path.name


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
    orientation: int = 1,
) -> SlideTissue:
    """Write the mask of a slide and a picture of it. Return its numbers.

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
    write_mask(
        folder,
        slide,
        mask,
        grid,
        bounds,
        source=source,
        outlines=outlines,
        orientation=orientation,
    )
    # The picture has the edge of the mask. Areas outside are paler.
    pale = (255 - 0.4 * (255 - thumbnail.astype(np.float32))).astype(np.uint8)
    picture = np.where(pixels[..., None], thumbnail, pale)
    edge = cv2.morphologyEx(pixels.view(np.uint8), cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8))
    picture[edge.view(np.bool_)] = (0, 150, 80)
    write_atomically(overlay_path(folder, slide), encode_thumbnail(picture))
    return row


def overlay_path(folder: Path, slide: str) -> Path:
    """Return the path of the picture of a slide."""
    return folder / f"{slide}-overlay.jpg"


def encode_png(mask: Mask, grid: Grid) -> bytes:
    """Return a mask as a PNG file of black and white pixels, with its grid as a text."""
    buffer, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_text(_KEY, grid.to_text())
    Image.fromarray(mask).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def read_png_grid(data: bytes) -> Grid | None:
    """Return the grid in a PNG file; None if there is none."""
    with Image.open(io.BytesIO(data)) as image:
        return Grid.from_text(image.info.get(_KEY))


def check_frame(path: Path, slide: str, areas: Sequence[BaseGeometry], grid: Grid) -> None:
    """Raise an error if areas are outside the slide, or seem to be in other units than pixels of level 0."""
    width, height = grid.slide.width, grid.slide.height
    left, top, right, bottom = shapely.total_bounds(np.array(areas, object)).tolist()
    place = f"outlines from ({left:.0f}, {top:.0f}) to ({right:.0f}, {bottom:.0f})"
    slack = max(grid.side, 1.0)  # the last pixel of a thumbnail may be partly outside
    if min(left, top) < -slack or right > width + slack or bottom > height + slack:
        raise _unfit(
            path,
            slide,
            place,
            f"inside the {grid.slide} pixels of level 0",
            "check that it is the mask of this slide, in pixels of level 0",
        )
    if right < width / _PART and bottom < height / _PART:
        raise _unfit(
            path,
            slide,
            place,
            f"pixels of level 0, which has {grid.slide}",
            "check the unit: µm and pixels of a smaller level are too small",
        )


def _read_png(
    path: Path,
    slide: str,
    grid: Grid,
    bounds: RegionL0,
    *,
    values: str | None,
    turn: Turn,
    frame: Frame,
) -> MaskFile:
    """Return the masks of a PNG file, in each frame in which its shape is that of the slide."""
    try:
        # Not Image.open, which refuses images of more than 179 megapixels.
        with PngImagePlugin.PngImageFile(path) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise _unfit(
                    path, slide, f"{image.width}×{image.height} pixels", f"at most {_MOST_PIXELS:,}"
                )
            written, size = Grid.from_text(image.info.get(_KEY)), Size(*image.size)
            image.load()
            if written is not None and written.size == size:
                _check_size(path, slide, written, grid.slide)
                return MaskFile({"turned": grid.resampled(np.asarray(image) != 0, written)}, True)
    except MaskUnfit:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise _unfit(path, slide, str(error) or type(error).__name__, "a PNG file") from error
    try:
        mask = find_tissue_values(image, values)
    except ValueError as error:
        raise _unfit(
            path,
            slide,
            str(error),
            "0 outside tissue, and one value for tissue",
            "name what is tissue: --tissue-values 255, 1,3 or 128-255",
        ) from error
    if not mask.any():
        raise _unfit(
            path,
            slide,
            "no pixel of tissue",
            "a value above 0 for tissue",
            "leave the slide out (--slide-list) if it has no tissue",
        )
    stored, masks = turn.pixels(mask), dict[str, Mask]()
    for name, pixels in {"stored": stored, "turned": mask}.items():
        size = Size(pixels.shape[1], pixels.shape[0])
        for x, y, whole in ((0, 0, grid.slide), (bounds.origin.x, bounds.origin.y, bounds.size)):
            side = whole.width / size.width
            # The tool that reduced the slide may have rounded both sides.
            fits = abs(whole.height / side - size.height) <= 1.5 + size.height / size.width
            if fits and name not in masks and frame in ("auto", name):
                masks[name] = grid.resampled(pixels, Grid(x, y, side, size, grid.slide))
    if masks:
        return MaskFile(masks if turn.orientation > 1 else {"stored": masks.popitem()[1]}, False)
    raise _unfit(
        path,
        slide,
        f"{size} pixels",
        f"the shape of the slide, which has {grid.slide}",
        "check that it is the mask of this slide, and covers all of it",
    )


def _check_size(path: Path, slide: str, written: Grid | None, size: Size) -> None:
    if written is not None and written.slide != size:
        raise _unfit(
            path,
            slide,
            f"the mask of a slide of {written.slide} pixels",
            f"one of {size} pixels",
            "check that the file has the name of its slide",
        )


def _unfit(
    path: Path, slide: str, actual: str, expected: str | None = None, todo: str | None = None
) -> MaskUnfit:
    return MaskUnfit(
        f"{slide}: its mask {path} cannot be used", found=actual, expected=expected, todo=todo
    )
