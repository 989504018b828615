"""Slides: their header, their pixels, and the interface of the readers of file formats.

Label and macro images, which may show a patient's name, are never read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.system.files import Closing

WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class SlideInfo:
    """Header of a slide: the name of the format, the levels, largest first, and properties; None if missing.

    `bounds` is the scanned part of level 0; all of level 0 if the file does not record it. `quickhash` is OpenSlide's
    `quickhash-1`, not a hash of the content. A colour profile is not applied. `reader` is the name and version of the
    library that reads the slide. `notes` are remarks for the user.
    """

    vendor: str
    levels: tuple[Level, ...]
    bounds: RegionL0
    mpp_x: str | None
    mpp_y: str | None
    objective_power: str | None
    quickhash: str | None
    has_icc_profile: bool
    reader: str = "openslide"
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> Size:
        """Size of level 0."""
        return self.levels[0].size


class Slide(Closing):
    """An open slide: the interface of all readers. `readers.open_slide` opens one.

    `natural_block` is the size of the blocks, in pixels of any level, in which reading all of the level is fastest.
    """

    path: Path
    info: SlideInfo
    natural_block = Size(2048, 2048)

    def read_region(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return (H, W, 3) uint8 RGB pixels of a level; transparent pixels get the slide's background colour.

        Raises:
            SlideUnreadable: the file is damaged in this region. Other regions can still be read.
        """
        return np.asarray(rgb_image(self.read_bgrx(origin, level, size)))

    @abstractmethod
    def read_bgrx(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return the same pixels as (H, W, 4) uint8: blue, green, red, and an unused byte."""


def rgb_image(bgrx: NDArray[np.uint8]) -> Image.Image:
    """Return an RGB image of the pixels that `Slide.read_bgrx` returns."""
    size = bgrx.shape[1], bgrx.shape[0]
    if bgrx.size == 0:
        return Image.new("RGB", size)
    return Image.frombuffer("RGB", size, np.ascontiguousarray(bgrx), "raw", "BGRX", 0, 1)
