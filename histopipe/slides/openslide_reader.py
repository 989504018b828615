"""Read slides with OpenSlide.

Only this module calls OpenSlide, so that its errors are converted in one place.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import openslide
import openslide.lowlevel
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import SlideUnreadable, reported_as
from histopipe.geometry import Level, PointL0, Size
from histopipe.slides.slide import WHITE, Slide, SlideInfo, clip_region
from histopipe.system.files import describe_file


class OpenSlideReader(Slide):
    """A slide that OpenSlide opens.

    Raises:
        SlideUnreadable: the file is not a slide, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        colour = self.handle.properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "")
        self._background = tuple(bytes.fromhex(colour)) if len(colour) == 6 else WHITE
        self.info = _info(path, self.handle)

    def read_bgrx(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return the same pixels as (H, W, 4) uint8: blue, green, red, and an unused byte.

        This is OpenSlide's memory layout. The public function of openslide-python converts to RGB. This method calls
        its private function instead: without conversions, reading and encoding a patch takes 10 % less time.
        """
        pixels = np.empty((size.height, size.width, 4), np.uint8)
        words = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
        try:
            openslide.lowlevel._read_region(
                self.handle._osr, words, origin.x, origin.y, level, size.width, size.height
            )
        except openslide.OpenSlideError as error:
            self.close()  # after an error the handle fails on every read; the next read opens a new one
            raise SlideUnreadable(
                f"{self.path}: level {level} cannot be read at ({origin.x}, {origin.y})",
                found=str(error),
            ) from error
        return _on_background(pixels, self._background)

    @cached_property
    def handle(self) -> openslide.OpenSlide:
        """The open file."""
        try:
            return openslide.OpenSlide(self.path)
        except openslide.OpenSlideUnsupportedFormatError as error:
            raise SlideUnreadable(
                f"{self.path} has no slide format that OpenSlide supports",
                found=describe_file(self.path),
                todo="check that the copy is complete, and that OpenSlide supports its format",
            ) from error
        except openslide.OpenSlideError as error:
            raise SlideUnreadable(
                f"{self.path} cannot be opened",
                found=str(error),
                todo="check that the copy is complete; of DICOM, that each file has one image of RGB pixels",
            ) from error
        except OSError as error:
            raise SlideUnreadable(f"{self.path} cannot be read", found=str(error)) from error


def _info(path: Path, handle: openslide.OpenSlide) -> SlideInfo:
    with reported_as(SlideUnreadable, f"{path} cannot be read", openslide.OpenSlideError):
        images = zip(handle.level_dimensions, handle.level_downsamples, strict=True)
        levels = tuple(Level(n, Size(*size), scale) for n, (size, scale) in enumerate(images))
    properties, size = handle.properties, levels[0].size
    bounds = {
        openslide.PROPERTY_NAME_BOUNDS_X: 0,
        openslide.PROPERTY_NAME_BOUNDS_Y: 0,
        openslide.PROPERTY_NAME_BOUNDS_WIDTH: size.width,
        openslide.PROPERTY_NAME_BOUNDS_HEIGHT: size.height,
    }
    return SlideInfo(
        vendor=properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown"),
        levels=levels,
        bounds=clip_region(size, *(int(properties.get(*bound)) for bound in bounds.items())),
        mpp_x=properties.get(openslide.PROPERTY_NAME_MPP_X),
        mpp_y=properties.get(openslide.PROPERTY_NAME_MPP_Y),
        objective_power=properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER),
        quickhash=properties.get(openslide.PROPERTY_NAME_QUICKHASH1),
        has_icc_profile="openslide.icc-size" in properties,
        reader=f"openslide {openslide.__library_version__}",
    )


def _on_background(bgra: NDArray[np.uint8], colour: Sequence[int]) -> NDArray[np.uint8]:
    """Composite (H, W, 4) uint8 pixels with premultiplied alpha over a colour."""
    # Alpha is the highest byte of a little-endian word: all pixels are opaque if the smallest word is large enough.
    if bgra.view(np.dtype("<u4")).min() >= 0xFF000000:
        return bgra
    height, width = bgra.shape[:2]
    image = Image.frombuffer("RGBA", (width, height), bgra, "raw", "BGRa", 0, 1)
    ground = Image.new("RGBA", image.size, (*colour, 255))
    return np.asarray(Image.alpha_composite(ground, image))[..., [2, 1, 0, 3]]


_VENDORS = (
    "aperio",
    "argos",
    "dicom",
    "generic-tiff",
    "hamamatsu",
    "leica",
    "mirax",
    "philips",
    "sakura",
    "trestle",
    "ventana",
    "zeiss",
)


def openslide_formats() -> tuple[str, list[str]]:
    """Return OpenSlide's version, and the vendors whose formats it supports.

    OpenSlide has no function for this: names are searched in its library file. Without this file, the list is empty.
    """
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    library = re.search(r"(/\S*libopenslide\S*)$", maps, re.MULTILINE)
    content = Path(library[1]).read_bytes() if library else b""
    return openslide.__library_version__, [
        name for name in _VENDORS if b"\0" + name.encode() + b"\0" in content
    ]


def detected_format(path: Path) -> str | None:
    """Return OpenSlide's name of the format of a file; None if it knows none."""
    return openslide.OpenSlide.detect_format(path)
