"""Points, sizes, regions and scales. Each coordinate frame has its own types, so that mypy rejects mixed frames.

There are two frames. **Level 0** is the largest image of a slide; stored coordinates use it. **Level** means the pixels
of the pyramid image that is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Mpp = NewType("Mpp", float)
"""Micrometres per pixel."""

Micrometres = NewType("Micrometres", float)
SquareMicrometres = NewType("SquareMicrometres", float)

SCALE_TOLERANCE = 0.02
"""Scales that differ by no more than 2 % count as the same."""
_ROUNDING = 1e-2
"""The downsample in a file is rounded, so edges on whole pixels come out slightly off."""


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"


@dataclass(frozen=True, slots=True)
class PointL0:
    """A pixel of level 0."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class RegionL0:
    """A rectangle of level-0 pixels."""

    origin: PointL0
    size: Size

    def to_list(self) -> list[int]:
        """Return x, y, width and height."""
        return [self.origin.x, self.origin.y, self.size.width, self.size.height]


@dataclass(frozen=True, slots=True)
class RegionLevel:
    """A rectangle of pixels of a level, with its origin in the frame of that level."""

    x: int
    y: int
    size: Size


@dataclass(frozen=True, slots=True)
class Level:
    """One image of the pyramid: its number, size, and level-0 pixels per pixel."""

    number: int
    size: Size
    downsample: float

    def to_l0(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert coordinates to the nearest level-0 pixels, along either axis."""
        return (values * self.downsample).round().astype("int64")

    def inside(self, region: RegionL0) -> RegionLevel:
        """Return the region of this level whose pixels are completely inside a level-0 region.

        Example:
            >>> level = Level(1, Size(50, 40), 2.0)
            >>> level.inside(RegionL0(PointL0(3, 0), Size(20, 100)))
            RegionLevel(x=2, y=0, size=Size(width=9, height=40))
        """
        scale, origin, size = self.downsample, region.origin, region.size
        left, top = math.ceil(origin.x / scale - _ROUNDING), math.ceil(origin.y / scale - _ROUNDING)
        right = math.floor((origin.x + size.width) / scale + _ROUNDING)
        bottom = math.floor((origin.y + size.height) / scale + _ROUNDING)
        width, height = min(right, self.size.width) - left, min(bottom, self.size.height) - top
        return RegionLevel(left, top, Size(max(0, width), max(0, height)))


def same_scale(a: Mpp, b: Mpp) -> bool:
    """Return whether two scales differ by no more than 2 %."""
    return abs(a - b) <= SCALE_TOLERANCE * max(a, b)
