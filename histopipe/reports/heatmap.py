"""Draw heatmaps of predictions, or of attention, over slides."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
import shapely
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.annotations.regions import merged_squares
from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, UsageError
from histopipe.predictions.patch_values import (
    NamedPatchValues,
    SlideImages,
    open_columns,
    open_stores,
    open_values,
)
from histopipe.predictions.sources import PredictionsFolder, PredictionSource
from histopipe.reports.html_page import SIDE, Block, Picture
from histopipe.reports.options import HeatmapOptions, Objects
from histopipe.reports.top_patches import write_top_patches
from histopipe.runs import folder as run_folder
from histopipe.runs.run import open_source
from histopipe.slides.discovery import discover
from histopipe.slides.thumbnail import resize_image
from histopipe.store.format import STAIN_COLUMNS
from histopipe.store.store import Store
from histopipe.system.arrays import PixelArray
from histopipe.system.files import atomic_write, make_folder, path_within, roomy
from histopipe.system.output import (
    Progress,
    Result,
    counted,
    default_progress,
    message,
    slide_failure,
)
from histopipe.system.settings import declared_settings, make_settings, takes

COLOURS = "viridis"
"""Colour map: perceptually uniform, also for colour-blind readers, and different from the colours of tissue."""
ALPHA = 0.55
_MAX_HEATMAPS = 24
"""Most heatmaps of a report."""

_CONTRAST = 0.7
"""Contrast of the image under a heatmap: dark tissue would make high values look low."""

_DPI = 150
_LONGER_SIDE = 8.0
"""Longer side of the image in inches, without title and colour bar."""
_MAX_SIDE = 1200
"""Maximum longer side of the raster in pixels."""
_MARGIN, _MARGIN_OF_NUMBERS = 1.1, 1.35
"""Space for the colour bar in inches: probabilities are shorter than other numbers."""
_SIGNED = "coolwarm"
"""Colours of values with a sign."""
_TILE = 256
_PATCH_PIXELS = 16
"""Side of a patch in a TIFF file, in pixels."""
_MIN_TIFF_SIDE, _MAX_TIFF_SIDE = 1_024, 8_192


def write_heatmap_png(
    values: NamedPatchValues, background: NDArray[np.uint8] | None, path: Path
) -> None:
    """Write a PNG file with colour bar and scale bar over a (H, W, 3) uint8 image of the bounds in grey, or over plain grey."""
    with (
        atomic_write(path) as part,
        # matplotlib warns about characters of a slide id that are not in the font.
        warnings.catch_warnings(action="ignore", category=UserWarning),
        # Not the settings of a user's `matplotlibrc`.
        matplotlib.style.context({}, after_reset=True),
    ):
        figure = _figure(values, background)
        figure.savefig(part, dpi=_DPI, format="png", metadata={"Software": None})
        figure.clear()


def _figure(values: NamedPatchValues, background: NDArray[np.uint8] | None) -> Figure:
    _, _, width, height = values.slide.bounds
    inch = _LONGER_SIDE / max(width, height)
    # With space for the colour bar on the right and the title above.
    margin = _MARGIN_OF_NUMBERS if (values.low, values.high) != (0, 1) else _MARGIN
    figure = Figure(figsize=(max(3.2, width * inch) + margin, max(2.4, height * inch) + 0.7))
    across, down = figure.get_size_inches()
    axes = figure.add_axes((0.02, 0.02, 1 - (margin + 0.05) / across, 1 - 0.55 / down))
    extent = (0, width, height, 0)
    if background is not None:
        # A thumbnail that is smaller than the figure would have visible pixels.
        interpolation = "bicubic" if max(background.shape) < _LONGER_SIDE * _DPI else "antialiased"
        axes.imshow(pale_grey(background), extent=extent, interpolation=interpolation)
    pixel = max(values.slide.size_l0 / 8, max(width, height) / _MAX_SIDE)
    overlay = axes.imshow(
        np.ma.masked_invalid(values.raster(pixel)),
        extent=extent,
        cmap=_colours(values),
        vmin=0,
        vmax=1,
        interpolation="nearest",
        alpha=ALPHA if background is not None else 1.0,
    )
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], facecolor="#e8e8e8")
    axes.set_title(values.slide.slide, fontsize=10, loc="left", parse_math=False)
    area = axes.get_position()
    bar = figure.add_axes((area.x1 + 0.12 / across, area.y0, 0.16 / across, area.height))
    figure.colorbar(overlay, cax=bar).set_label(values.name, fontsize=9, parse_math=False)
    bar.tick_params(labelsize=8)
    if values.has_sign:
        bar.set_yticks([0, 0.5, 1], [f"−{values.high:.2g}", "0", f"+{values.high:.2g}"])
    elif (values.low, values.high) != (0, 1):
        ticks = np.linspace(values.low, values.high, 3).tolist()
        bar.set_yticks([0, 0.5, 1], [f"{tick:.3g}" for tick in ticks])
    if values.slide.mpp is not None:
        _scale_bar(axes, values.slide.mpp, width, height)
    return figure


def _scale_bar(axes: Axes, mpp: float, width: float, height: float) -> None:
    micrometres = scale_bar_um(width * mpp / 4)
    length, thick = micrometres / mpp, 0.012 * max(width, height)
    x, y = 0.03 * width, height - 0.04 * max(width, height)
    axes.add_patch(
        Rectangle((x, y), length, thick, facecolor="black", edgecolor="white", linewidth=1)
    )
    axes.text(
        x + length / 2,
        y - thick / 2,
        f"{micrometres:g} µm" if micrometres < 1000 else f"{micrometres / 1000:g} mm",
        ha="center",
        va="bottom",
        fontsize=9,
        color="black",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5},
    )


def scale_bar_um(most: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9))


def _colours(values: NamedPatchValues) -> str:
    return _SIGNED if values.has_sign else COLOURS


def write_heatmap_tiff(values: NamedPatchValues, path: Path) -> None:
    """Write a pyramidal TIFF file of the scanned area, white without patches, in the frame of the file's pixels."""
    values = values.in_stored_frame()
    _, _, width, height = values.slide.bounds
    longer = max(width, height)
    pixel = max(
        1.0,
        min(values.slide.size_l0 / _PATCH_PIXELS, longer / _MIN_TIFF_SIDE),
        longer / _MAX_TIFF_SIDE,
    )
    levels = [coloured(values.raster(pixel), _colours(values))]
    while max(levels[-1].shape[:2]) > _TILE:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))
    with atomic_write(path) as part, TiffWriter(part, bigtiff=True) as file:
        for number, level in enumerate(levels):
            per_centimetre = (
                None if values.slide.mpp is None else 1e4 / (values.slide.mpp * pixel * 2**number)
            )
            file.write(
                level,
                tile=(_TILE, _TILE),
                photometric="rgb",
                compression="zlib",
                metadata=None,
                subfiletype=1 if number else 0,
                resolution=None if per_centimetre is None else (per_centimetre, per_centimetre),
                resolutionunit=None if per_centimetre is None else "CENTIMETER",
            )


def pale_grey(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a (H, W, 3) uint8 image in pale grey: over the colours of a stain, those of values would look different."""
    grey = np.asarray(Image.fromarray(image).convert("L"), np.float32)
    pale = np.rint(255 - _CONTRAST * (255 - grey)).astype(np.uint8)
    return np.stack([pale] * 3, axis=2)


def coloured(raster: NDArray[np.float32], colours: str = COLOURS) -> NDArray[np.uint8]:
    """Return (H, W, 3) uint8 RGB of (H, W) values from 0 to 1; white for NaN."""
    table = (mpl.colormaps[colours](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8)
    missing = np.isnan(raster)
    image = table[np.where(missing, 0, np.rint(raster * 255)).astype(np.uint8)]
    image[missing] = 255
    return image


def write_heatmap_geojson(
    values: NamedPatchValues, path: Path, *, objects: Objects, threshold: float | None = None
) -> None:
    """Write a FeatureCollection, one object per line.

    "cells" are one tile per patch, with all that is known of it as measurements; "contours", one annotation per group of
    patches with values of at least `threshold`, or in the upper half of the colour bar if it is None. Coordinates are in
    the frame of the file's pixels.
    """
    values = values.in_stored_frame()
    if threshold is None:
        threshold = (values.low + values.high) / 2
    features = _cells(values) if objects == "cells" else _contours(values, threshold)
    with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"type":"FeatureCollection","features":[')
        for number, feature in enumerate(features):
            file.write((",\n" if number else "\n") + json.dumps(feature, separators=(",", ":")))
        file.write("\n]}\n")


def _colours_of(patches: NamedPatchValues, scaled: NDArray[np.floating]) -> Any:
    colours = mpl.colormaps[_colours(patches)]
    return (colours(scaled)[:, :3] * 255).round().astype(int).tolist()


def _cells(patches: NamedPatchValues) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.slide.scan or patches.slide.bounds
    side, colours = patches.slide.size_l0, _colours_of(patches, patches.scaled)
    measures = {patches.name: patches.values, **patches.measures}
    corners = np.stack([patches.x_l0 - left, patches.y_l0 - top], axis=1).tolist()
    for i, (x, y) in enumerate(corners):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        polygon = {"type": "Polygon", "coordinates": [ring]}
        name = patches.name if patches.predicted is None else str(patches.predicted[i])
        yield _feature(
            polygon,
            "tile",
            name,
            colours[i],
            {title: float(values[i]) for title, values in measures.items()},
        )


def _contours(patches: NamedPatchValues, threshold: float) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.slide.scan or patches.slide.bounds
    high = patches.values >= threshold
    x, y = patches.x_l0[high] - left, patches.y_l0[high] - top
    half = patches.slide.size_l0 / 2
    tree = shapely.STRtree(np.asarray(shapely.points(x + half, y + half), object))
    for group in merged_squares(x, y, patches.slide.size_l0):
        inside = patches.values[high][tree.query(group, predicate="contains")]
        mean = float(np.mean(inside))
        scaled = replace(patches, values=np.array([mean], np.float32)).scaled
        yield _feature(
            json.loads(shapely.to_geojson(group)),
            "annotation",
            f"{patches.name} ≥ {threshold:g}",
            _colours_of(patches, scaled)[0],
            {f"mean {patches.name}": mean, "patches": len(inside)},
        )


def _feature(
    geometry: dict[str, Any], kind: str, name: str, colour: list[int], measures: dict[str, float]
) -> dict[str, Any]:
    """Return an object of QuPath."""
    return {
        "type": "Feature",
        "geometry": geometry,
        "properties": {
            "objectType": kind,
            "classification": {"name": name, "color": colour},
            "measurements": measures,
        },
    }


def heatmap_image(patches: NamedPatchValues, background: PixelArray | None) -> PixelArray:
    """Draw a heatmap over an image of the slide's bounds in grey, without axes."""
    _, _, width, height = patches.slide.bounds
    if background is None:
        scale = SIDE / max(width, height)
        shape = max(1, round(height * scale)), max(1, round(width * scale)), 3
        background = np.full(shape, 235, np.uint8)
    image = pale_grey(resize_image(background, SIDE))
    size = image.shape[1], image.shape[0]
    raster = Image.fromarray(patches.raster(max(width / size[0], height / size[1])))
    values = np.asarray(raster.resize(size, Image.Resampling.NEAREST))
    mixed = (1 - ALPHA) * image + ALPHA * coloured(values, _colours(patches))
    return np.where(np.isnan(values)[..., None], image, mixed).astype(np.uint8)


def heatmap_gallery(
    source: PredictionSource, images: SlideImages, title: str, class_name: str | None = None
) -> Block | None:
    """Return heatmaps of some slides with values, or None if there are none."""
    made: list[Picture] = []
    try:
        slides, read_values = open_values(source, images.stores, class_name)
    except HistopipeError:
        return None  # a slide model without attention
    for slide in slides:
        with suppress(NothingToDo, DamagedStore, UsageError):
            if (values := read_values(slide)) is not None:
                image = heatmap_image(values, images.of(slide))
                made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {values.name}", image))
        if len(made) == _MAX_HEATMAPS:
            break
    return Block("gallery", made, title) if made else None


@dataclass(frozen=True, repr=False)
class HeatmapResult(Result):
    """Result of `heatmap`.

    Attributes:
        folder: folder of the files.
        files: files that were written, by slide id.
        failed: reason by slide id.
    """

    folder: Path
    files: Mapping[str, tuple[Path, ...]]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        count = counted(sum(map(len, self.files.values())), "file")
        return "\n".join(
            [
                f"{count} of {counted(len(self.files), 'slide')}: {self.folder}",
                *(f"failed: {name}: {reason}" for name, reason in sorted(self.failed.items())),
            ]
        )


@takes(declared_settings(HeatmapOptions))
def heatmap(
    predictions: str | Path,
    *,
    out: str | Path = "heatmaps",
    progress: Progress | None = None,
    **settings: Any,
) -> HeatmapResult:
    """Draw heatmaps of predictions, or of attention, over slides.

    Args:
        predictions: folder of `histopipe predict`, or of a finished run: its validation and test patches, or the
            attention of a slide model and the contributions of patches.
        out: folder for the files `SLIDE.heat.FORMAT`.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md. `class_name`, `formats` and `stores` are the flags
            `--class`, `--to` and `--store` of `histopipe heatmap`.

    Returns:
        The files, and the reasons why slides failed.

    Raises:
        UsageError: the folder holds no predictions, or an option does not match them.
        NothingToDo: there is no patch to draw.
        DamagedStore: predictions or a store cannot be read.
        MachineShort: the disk is full.

    Example:
        >>> heatmap("predictions", out="heatmaps", formats=["png", "tiff"])  # doctest: +SKIP
        16 files of 8 slides: heatmaps
    """
    options = make_settings(HeatmapOptions, settings)
    if not options.formats:
        raise UsageError("--to", found="no format", expected="png, tiff or geojson")
    folder, target, display = Path(predictions), Path(out), progress or default_progress()
    run_folder.check_one_run(folder)
    files: dict[str, tuple[Path, ...]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        if options.show in STAIN_COLUMNS:
            opened = [stack.enter_context(Store(folder))]
            names, read_values = open_columns(opened[0], options.show, options.slide)
        else:
            source = open_source(folder)
            opened, missing = open_stores(source, options.stores, stack)
            for reason in missing:
                display.message(f"warning: {reason}")
            names, read_values = open_values(
                source, opened, options.class_name, options.slide, show=options.show
            )
        slide_files = discover([Path(path) for path in options.slides]) if options.slides else ()
        paths = {file.id: file.path for file in slide_files}
        images = SlideImages(paths, opened, PredictionsFolder(folder))
        bar = stack.enter_context(display.bar("drawing", unit="slides", detail=True))
        make_folder(target)
        stack.enter_context(roomy(target))

        for name in names:
            try:
                values = read_values(name)
                if values is not None:
                    check_threshold(values, options.threshold)
                    files[name] = _write_slide(values, target, images, options)
                    if options.class_name is not None:
                        values = replace(values, measures={values.name: values.values})
                    if options.top:
                        files[name] += write_top_patches(values, images, target, options.top)
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                failed[name] = slide_failure(error)
                display.message(f"{name}: failed: {failed[name]}")
            bar.advance()
    if not files and not failed:
        raise NothingToDo(f"{folder} has no patches with places to draw")
    return HeatmapResult(target, files, failed)


def _write_slide(
    values: NamedPatchValues,
    folder: Path,
    images: SlideImages,
    options: HeatmapOptions,
) -> tuple[Path, ...]:
    """Write the heatmap of a slide in all formats, and return the files."""
    slide = values.slide.slide
    base = path_within(folder, slide)
    base.parent.mkdir(parents=True, exist_ok=True)
    # The suffix .heat avoids the names of slide files and of annotations.
    paths = {kind: base.with_name(f"{base.name}.heat.{kind}") for kind in options.formats}
    for kind, path in paths.items():
        if kind == "tiff":
            write_heatmap_tiff(values, path)
        elif kind == "geojson":
            write_heatmap_geojson(
                values, path, objects=options.objects, threshold=options.threshold
            )
        else:
            background = images.of(slide)
            if background is None:
                message(f"{slide}: no image of the slide found; use --slides or --store")
            write_heatmap_png(values, background, path)
    return tuple(paths.values())


def check_threshold(values: NamedPatchValues, threshold: float | None) -> None:
    """Raise a UsageError if a threshold of values from 0 to 1 is not."""
    if threshold is not None and (values.low, values.high) == (0, 1) and not 0 <= threshold <= 1:
        raise UsageError("--threshold", found=threshold, expected=f"0 to 1, for {values.name}")
