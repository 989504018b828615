"""Read slides with fastslide, an optional library for iSyntax, CZI, VSI, QPTIFF and OME-Zarr. Experimental."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import MachineShort, SlideUnreadable
from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.slides.slide import Slide, SlideInfo

_CACHED_BYTES = 32 << 20
"""As OpenSlide's cache."""


class FastSlideReader(Slide):
    """A slide that fastslide opens.

    Raises:
        SlideUnreadable: the file is not a slide, has other pixels than 8-bit RGB, or is damaged.
        MachineShort: fastslide is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = _open(path)
        try:
            self.info = _info(path, self._handle)
        except SlideUnreadable:
            self.close()
            raise
        except Exception as error:  # fastslide returns empty properties for some damaged files
            self.close()
            raise SlideUnreadable(
                f"{path} cannot be read by fastslide",
                found=f"{type(error).__name__}: {error}"[:200],
            ) from error

    def read_bgrx(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return the pixels of a region; see `Slide`. A region between two pixels of the level takes the nearest."""
        if self._handle is None:
            self._handle = _open(self.path)
        level_info = self.info.levels[level]
        x, y = round(origin.x / level_info.downsample), round(origin.y / level_info.downsample)
        left, top = max(0, x), max(0, y)
        width = min(x + size.width, level_info.size.width) - left
        height = min(y + size.height, level_info.size.height) - top
        out = np.full((size.height, size.width, 4), 255, np.uint8)
        if min(width, height) <= 0:
            return out
        try:
            image = self._handle.read_region((left, top), level, (width, height))
            pixels = np.asarray(image.to_interleaved().numpy())
        except Exception as error:  # the library raises RuntimeError and others
            raise SlideUnreadable(
                f"{self.path}: level {level} cannot be read at ({origin.x}, {origin.y})",
                found=str(error)[:200],
            ) from error
        if pixels.dtype != np.uint8 or pixels.shape != (height, width, 3):
            raise SlideUnreadable(
                f"{self.path}: level {level}",
                found=f"pixels of shape {pixels.shape}, {pixels.dtype}",
                expected=f"({height}, {width}, 3), uint8",
            )
        out[top - y : top - y + height, left - x : left - x + width, :3] = pixels[..., ::-1]
        return out

    def close(self) -> None:
        """Close the file. The next read opens it again."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def _open(path: Path) -> Any:
    try:
        import fastslide  # late: an extra
    except ImportError as error:
        raise MachineShort(
            "fastslide is not installed",
            found=str(error),
            todo="pip install 'histopipe[fastslide]'",
        ) from error
    try:
        return fastslide.FastSlide.from_file_path(path, cache=_CACHED_BYTES)
    except Exception as error:
        raise SlideUnreadable(
            f"{path} cannot be opened by fastslide", found=str(error)[:200]
        ) from error


def _info(path: Path, handle: Any) -> SlideInfo:
    from importlib.metadata import version  # late: only this function needs it

    channels, kind = int(handle.num_channels), str(handle.dtype)
    if channels != 3 or kind != "uint8" or handle.z_count > 1 or handle.t_count > 1:
        names = [str(channel.get("name", "")) for channel in handle.channel_metadata]
        raise SlideUnreadable(
            f"{path} is a multi-channel image or a stack",
            found=f"{channels} channels ({', '.join(filter(None, names)) or 'without names'}), {kind}, "
            f"{handle.z_count} focal planes, {handle.t_count} time points",
            expected="one 8-bit RGB image",
            todo="export the stain to be analysed as an RGB image",
        )
    levels = tuple(
        Level(n, Size(*map(int, size)), float(scale))
        for n, (size, scale) in enumerate(
            zip(handle.level_dimensions, handle.level_downsamples, strict=True)
        )
    )
    mpp_x, mpp_y = (f"{value:.9g}" if value and value > 0 else None for value in handle.mpp)
    power = handle.properties.get("objective_magnification")
    return SlideInfo(
        vendor=str(handle.format).lower(),
        levels=levels,
        bounds=_bounds(handle, levels[0].size),
        mpp_x=mpp_x,
        mpp_y=mpp_y,
        objective_power=str(power) if power else None,
        quickhash=None,
        has_icc_profile=handle.icc_profile is not None,
        reader=f"fastslide {version('fastslide')}",
    )


def _bounds(handle: Any, size: Size) -> RegionL0:
    (x, y), (width, height) = handle.bounds
    x, y = max(0, int(x)), max(0, int(y))
    part = Size(min(int(width), size.width - x), min(int(height), size.height - y))
    is_empty = min(part.width, part.height) <= 0
    return RegionL0(PointL0(0, 0), size) if is_empty else RegionL0(PointL0(x, y), part)
