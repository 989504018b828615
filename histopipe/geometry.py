"""Points, sizes, regions and scales, each frame a type of its own.

Two frames exist: **level 0**, the slide's largest image, in which every stored coordinate is given, and **level**, the
pixels of the pyramid image that is read. Mixing them up does not type-check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

Mpp = NewType("Mpp", float)
"""Micrometres per pixel."""

Micrometres = NewType("Micrometres", float)
SquareMicrometres = NewType("SquareMicrometres", float)

SCALE_TOLERANCE = 0.02
"""Two scales within 2 % of one another count as the same."""


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


@dataclass(frozen=True, slots=True)
class RegionLevel:
    """A rectangle of one level's pixels, origin in that level's own frame."""

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
        """Level pixels to the nearest level-0 pixels, along either axis."""
        return np.asarray(np.rint(values * self.downsample), np.int64)

    def inside(self, region: RegionL0) -> RegionLevel:
        """The whole pixels of this level that lie in a level-0 region and in the level.

        Example:
            >>> level = Level(1, Size(50, 40), 2.0)
            >>> level.inside(RegionL0(PointL0(3, 0), Size(20, 100)))
            RegionLevel(x=2, y=0, size=Size(width=9, height=40))
        """
        left = _ceil(region.origin.x / self.downsample)
        top = _ceil(region.origin.y / self.downsample)
        right = _floor((region.origin.x + region.size.width) / self.downsample)
        bottom = _floor((region.origin.y + region.size.height) / self.downsample)
        right, bottom = min(right, self.size.width), min(bottom, self.size.height)
        return RegionLevel(left, top, Size(max(0, right - left), max(0, bottom - top)))


# A level's downsample is rounded in the file, so an edge that should be whole comes out a hair beside it.
_HAIR = 1e-2


def _ceil(value: float) -> int:
    return int(np.ceil(value - _HAIR))


def _floor(value: float) -> int:
    return int(np.floor(value + _HAIR))


def same_scale(a: Mpp, b: Mpp) -> bool:
    """Whether two scales are within 2 % of one another.

    Example:
        >>> same_scale(Mpp(0.499), Mpp(0.5))
        True
    """
    return abs(a - b) <= SCALE_TOLERANCE * max(a, b)


def frozen_array(values: Any, dtype: Any) -> NDArray[Any]:
    """A read-only copy, so that a frozen dataclass that holds it is frozen in fact."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
