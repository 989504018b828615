"""Find tissue with a segmentation network of the user.

The network sees overlapping tiles of the slide, and the middle of each result is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ScaleError, SlideUnreadable
from histopipe.geometry import SCALE_TOLERANCE, Mpp, PointL0, Size
from histopipe.masks.grid import Grid
from histopipe.masks.network import Segmenter, read_segmenter, runner
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import Thumbnail, thumbnail_level
from histopipe.tiling.mask import TissueMask

_BATCH = 4
_LARGEST_MAP = 1_000_000_000
"""Most pixels of a slide at the scale of a network: a byte each."""


def segmented(
    path: Path, slide: Slide, name: str, mpp: Mpp | None, thumbnail: Thumbnail
) -> TissueMask:
    """Find the tissue of a slide by a network, on the grid of its thumbnail. `mpp` is that of level 0.

    Raises:
        ScaleError: the scale of the slide is unknown, or coarser than that of the network.
        UsageError: the network cannot be used.
        MachineShort: its library is not installed.
    """
    network = read_segmenter(path)
    if mpp is None or mpp > network.mpp * (1 + SCALE_TOLERANCE):
        raise ScaleError(
            f"{name} cannot be segmented by {path.name}",
            found=f"mpp {mpp}",
            expected=f"at most {network.mpp:g}",
        )
    grid, bounds = Grid.of(thumbnail, slide.info.size), slide.info.bounds
    scale = network.mpp / mpp  # level-0 pixels per pixel of the network
    size = Size(max(1, round(bounds.size.width / scale)), max(1, round(bounds.size.height / scale)))
    if size.area > _LARGEST_MAP:
        raise ScaleError(
            f"{name} is too large for {path.name}", found=f"{size} pixels at {network.mpp:g} mpp"
        )
    probabilities = np.zeros((size.height, size.width), np.uint8)
    run = runner(path, path.stat().st_mtime_ns)
    waiting: list[tuple[int, int, NDArray[np.uint8]]] = []
    places = list(_places(size, network))
    for number, (x, y) in enumerate(places):
        try:
            waiting.append((x, y, _tile(slide, network, mpp, x, y)))
        except SlideUnreadable:
            # It may be tissue: its patches are planned, and recorded as unreadable if reading fails again.
            _keep(probabilities, np.ones((network.size, network.size), np.float32), x, y, network)
        if waiting and (len(waiting) == _BATCH or number == len(places) - 1):
            maps = run(np.stack([pixels for _, _, pixels in waiting]))
            for (left, top, _), probability in zip(waiting, maps, strict=True):
                _keep(probabilities, probability, left, top, network)
            waiting = []
    source = Grid(bounds.origin.x, bounds.origin.y, scale, size, grid.slide)
    tissue = _at(probabilities, source, grid) >= network.threshold * 255
    if thumbnail.lost is not None:
        tissue |= thumbnail.lost
    return TissueMask(tissue, network.threshold)


def _places(size: Size, network: Segmenter) -> Iterator[tuple[int, int]]:
    """Yield the corners of tiles that cover an image; the first ones begin outside, so that each border is inside one."""
    margin = (network.size - network.step) // 2
    for y in range(-margin, size.height - margin, network.step):
        for x in range(-margin, size.width - margin, network.step):
            yield x, y


def _tile(slide: Slide, network: Segmenter, mpp: Mpp, x: int, y: int) -> NDArray[np.uint8]:
    """Read a tile; (x, y) are pixels of the network. Outside the scanned area, the border is repeated."""
    scale, bounds = network.mpp / mpp, slide.info.bounds
    level = thumbnail_level(slide.info.levels, mpp, network.mpp)
    left, top = max(0.0, x * scale), max(0.0, y * scale)
    right = min(float(bounds.size.width), (x + network.size) * scale)
    bottom = min(float(bounds.size.height), (y + network.size) * scale)
    size = Size(
        max(1, round((right - left) / level.downsample)),
        max(1, round((bottom - top) / level.downsample)),
    )
    origin = PointL0(bounds.origin.x + round(left), bounds.origin.y + round(top))
    pixels = slide.read_region(origin, level.number, size)
    inner = max(1, round((right - left) / scale)), max(1, round((bottom - top) / scale))
    small = cv2.resize(pixels, inner, interpolation=cv2.INTER_AREA)
    before, above = max(0, -x), max(0, -y)
    after = max(0, network.size - before - inner[0])
    below = max(0, network.size - above - inner[1])
    whole = cv2.copyMakeBorder(small, above, below, before, after, cv2.BORDER_REPLICATE)
    return np.asarray(whole[: network.size, : network.size], np.uint8)


def _keep(
    probabilities: NDArray[np.uint8],
    probability: NDArray[np.float32],
    x: int,
    y: int,
    network: Segmenter,
) -> None:
    """Keep the middle of a result, (S, S) from 0 to 1, as 0 to 255."""
    margin = (network.size - network.step) // 2
    left, top = x + margin, y + margin
    part = probabilities[top : top + network.step, left : left + network.step]
    middle = probability[margin : margin + part.shape[0], margin : margin + part.shape[1]]
    part[...] = np.round(middle * 255)


def _at(probabilities: NDArray[np.uint8], source: Grid, grid: Grid) -> NDArray[np.uint8]:
    """Return probabilities on the grid of the thumbnail: averaged if it is coarser, else interpolated."""
    columns, rows = (
        grid.size.width * grid.side / source.side,
        grid.size.height * grid.side / source.side,
    )
    width, height = max(1, round(columns)), max(1, round(rows))
    fitted = np.pad(
        probabilities[:height, :width],
        ((0, max(0, height - probabilities.shape[0])), (0, max(0, width - probabilities.shape[1]))), mode="edge",
    )  # fmt: skip
    filtering = cv2.INTER_AREA if grid.side > source.side else cv2.INTER_LINEAR
    size = (grid.size.width, grid.size.height)
    return np.asarray(cv2.resize(fitted, size, interpolation=filtering), np.uint8)
