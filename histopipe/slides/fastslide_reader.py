"""Read slides with fastslide, an optional library for iSyntax, CZI, VSI, QPTIFF and OME-Zarr. Experimental."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import MachineShort, SlideUnreadable, needs_extra
from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.slides.slide import Slide, SlideInfo, clip_region
from histopipe.system.files import run_on_error

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
        with run_on_error(self.close):
            try:
                self.info = _info(path, self.handle)
            except (SlideUnreadable, MachineShort):
                raise
            except Exception as error:  # fastslide returns empty properties for some damaged files
                raise SlideUnreadable(
                    f"{path} cannot be read by fastslide",
                    found=f"{type(error).__name__}: {error}"[:200],
                ) from error

    def fill(
        self, out: NDArray[np.uint8], origin: PointL0, level: int, left: int, top: int
    ) -> None:
        """Write the pixels of a region; see `Slide`."""
        height, width, _ = out.shape
        if not out.size:
            return
        handle = self.handle
        try:
            image = handle.read_region((left, top), level, (width, height))
            pixels = np.asarray(image.to_interleaved().numpy())
        except Exception as error:  # the library raises RuntimeError and others
            raise SlideUnreadable(
                f"{self.path}: level {level} cannot be read at ({origin.x}, {origin.y})",
                found=str(error)[:200],
            ) from error
        if pixels.dtype != np.uint8 or pixels.shape != out.shape:
            raise SlideUnreadable(
                f"{self.path}: level {level}",
                found=f"pixels of shape {pixels.shape}, {pixels.dtype}",
                expected=f"({height}, {width}, 3), uint8",
            )
        out[:] = pixels

    @cached_property
    def handle(self) -> Any:
        """The open file."""
        with needs_extra("fastslide", "fastslide is not installed"):
            import fastslide  # late: an extra
        try:
            return fastslide.FastSlide.from_file_path(self.path, cache=_CACHED_BYTES)
        except Exception as error:  # the library raises RuntimeError and others
            raise SlideUnreadable(
                f"{self.path} cannot be opened by fastslide", found=str(error)[:200]
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
    (x, y), (width, height) = handle.bounds
    whole = RegionL0(PointL0(0, 0), levels[0].size)
    bounds = clip_region(whole.size, int(x), int(y), int(width), int(height))
    mpp_x, mpp_y = (f"{value:.9g}" if value and value > 0 else None for value in handle.mpp)
    power = handle.properties.get("objective_magnification")
    return SlideInfo(
        vendor=str(handle.format).lower(),
        levels=levels,
        bounds=bounds if bounds.size.area else whole,
        mpp_x=mpp_x,
        mpp_y=mpp_y,
        objective_power=str(power) if power else None,
        quickhash=None,
        has_icc_profile=handle.icc_profile is not None,
        reader=f"fastslide {version('fastslide')}",
    )
