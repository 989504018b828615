"""Read PNG, JPEG, BMP and WebP images with Pillow: 8-bit RGB, grey or palette, as slides of one level."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.slides.slide import WHITE, Slide, SlideInfo
from histopipe.system.files import describe_file

_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_MOST_PIXELS = 80_000_000
"""Pixels of the largest image: decoded, it takes 240 MB in each process that reads it."""


class ImageReader(Slide):
    """An image that Pillow opens. It is decoded as a whole when it is first read, and no file stays open.

    An EXIF orientation is applied, and transparent pixels become white. A colour profile is not applied.

    Raises:
        SlideUnreadable: the file is no such image, is too large, has another kind of pixels, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as image:
            self.info, self._mtime_ns = _info(path, image), path.stat().st_mtime_ns

    def read_pixels(self) -> NDArray[np.uint8]:
        """Return the pixels of the image, (H, W, 3) uint8 RGB.

        Raises:
            SlideUnreadable: it cannot be decoded.
        """
        pixels = _decoded(self.path, self._mtime_ns, self.info.size)
        if isinstance(pixels, SlideUnreadable):
            raise pixels
        return pixels

    def fill(
        self, out: NDArray[np.uint8], origin: PointL0, level: int, left: int, top: int
    ) -> None:
        """Write the pixels of a region; see `Slide`."""
        out[:] = self.read_pixels()[top : top + out.shape[0], left : left + out.shape[1]]


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image without decoding it, and convert the errors of Pillow, which raises many types."""
    try:
        # It warns of large images, whose size is checked below.
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=_FORMATS) as image:
            yield image
    except (SlideUnreadable, MemoryError):
        raise
    except Exception as error:
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        raise SlideUnreadable(
            f"{path} cannot be read as an image",
            expected="a PNG, JPEG, BMP or WebP file",
            found=describe_file(path) if unknown else f"{type(error).__name__}: {error}"[:200],
            todo="check that the copy is complete",
        ) from error


def _info(path: Path, image: Image.Image) -> SlideInfo:
    """Return the header of an image; refuse those whose pixels would be wrong or do not fit into memory."""
    if image.width * image.height > _MOST_PIXELS:
        raise SlideUnreadable(
            f"{path} is too large to decode as a whole",
            found=f"{image.width}×{image.height} pixels",
            expected=f"at most {_MOST_PIXELS:,} pixels",
            todo="convert it to a tiled pyramid, for example with `vips tiffsave --tile --pyramid`",
        )
    _check_pixels(path, image)
    turned = _orientation(image)
    size = Size(*(image.size[::-1] if turned > 4 else image.size))
    mpps = [
        f"{25400 / float(dpi):.9g}" if dpi and dpi > 0 else None
        for dpi in image.info.get("dpi") or (None, None)
    ]
    mpp_x, mpp_y = mpps[::-1] if turned > 4 else mpps
    notes = {
        "its palette is converted to RGB": image.mode in ("P", "PA"),
        "transparent pixels, if any, are white": _has_alpha(image),
        f"its EXIF orientation {turned} is applied": turned > 1,
    }
    return SlideInfo(
        vendor=str(image.format).lower(),
        levels=(Level(0, size, 1.0),),
        bounds=RegionL0(PointL0(0, 0), size),
        mpp_x=mpp_x,
        mpp_y=mpp_y,
        objective_power=None,
        quickhash=None,
        has_icc_profile="icc_profile" in image.info,
        reader=f"pillow {PIL.__version__}",
        notes=tuple(text for text, used in notes.items() if used),
        orientation=turned,
    )


def _check_pixels(path: Path, image: Image.Image) -> None:
    """Refuse pixels that Pillow would convert with a loss, and files of several images."""
    frames = getattr(image, "n_frames", 1)
    # MPO: a photo and its previews. Of 16 bits, Pillow keeps the upper 8, which may all be equal.
    for fault, is_present, todo in (
        (
            f"an animation of {frames} images",
            frames > 1 and image.format != "MPO",
            "save one of them as a file",
        ),
        (
            "16 bits per sample",
            image.format == "PNG" and ";16" in str(getattr(image, "tile", "")),
            "scale its values to 0 to 255, and convert it to 8-bit RGB",
        ),
        (
            f"mode {image.mode}",
            image.mode not in ("RGB", "L", "P", "RGBA", "LA", "PA"),
            "convert it to 8-bit RGB",
        ),
    ):
        if is_present:
            raise SlideUnreadable(
                f"{path} has pixels that cannot be used",
                found=fault,
                expected="one image of 8-bit RGB, grey or palette",
                todo=todo,
            )


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8: from 5, it exchanges width and height; 1 if there is none.

    A PNG without EXIF in its header is not decoded for it.
    """
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys():
        return 1
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


@functools.lru_cache(maxsize=2)
def _decoded(path: Path, _mtime_ns: int, size: Size) -> NDArray[np.uint8] | SlideUnreadable:
    """Return the (H, W, 3) uint8 RGB pixels of an image, or the reason why none of them can be read.

    The last two are kept: a process plans a slide, then estimates its size, then stores its patches, and tasks of two
    slides may alternate. A damaged image is read in many small regions, to find those that are intact.
    """
    try:
        with _opened(path) as stored:
            image = ImageOps.exif_transpose(stored)
            if _has_alpha(image):
                image = image.convert("RGBA")
                if image.getchannel("A").getbbox() is None:  # usually a channel without a meaning
                    return SlideUnreadable(
                        f"{path} is transparent everywhere", todo="remove its alpha channel"
                    )
                image = Image.alpha_composite(Image.new("RGBA", image.size, (*WHITE, 255)), image)
            if image.size != (size.width, size.height):  # its orientation comes after its pixels
                return SlideUnreadable(
                    f"{path} is damaged",
                    expected=str(size),
                    found=f"{image.width}×{image.height} pixels when decoded",
                )
            return np.asarray(image.convert("RGB"))
    except SlideUnreadable as error:
        return error
